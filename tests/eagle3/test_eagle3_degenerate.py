"""Degenerate replies: the rule on paper; respond counts, shows and drops them, precompute counts them."""

import json
from pathlib import Path

import pytest
from support import chat_tokenizers as kinds
from support.chat_servers import ChatServer
from support.commands import niels_gpt
from support.eagle3_replies import appending
from support.tiny_hub_models import write_model

from niels_gpt.chat import open_tokenizer
from niels_gpt.eagle3.degenerate import kind_of, repeats

BLOCK = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([5] * 32, True),
        ([5] * 31, False),
        ([9, 9, 9, 7] + [5] * 32, True),
        ([5, 6] * 16, True),
        (BLOCK * 4, True),
        ([*BLOCK, 19] * 9, False),
        (list(range(100)) + BLOCK * 4, True),
        ([*BLOCK * 4, 1], True),
        ([*BLOCK * 4, 1, 2], True),
        ([*BLOCK * 4, 1, 2, 3], False),
        (BLOCK[3:] + BLOCK * 3 + BLOCK[:3], True),
        (list(range(64)), False),
        ([], False),
    ],
)
def test_the_last_32_tokens_are_one_block_of_at_most_8_over_and_over(ids, found):
    assert repeats(ids) is found


def test_a_reply_has_the_first_kind_that_applies():
    assert kind_of([5] * 40, " \n ", is_cut=True) == "empty"
    assert kind_of([5] * 40, "no no", is_cut=True) == kind_of([5] * 40, "no no", is_cut=False) == "repeated"
    assert kind_of([5, 6], "so", is_cut=True) == "cut" and kind_of([5, 6], "so", is_cut=False) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_model(tmp_path_factory.mktemp("looping") / "tiny", seed=0)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return made


@pytest.fixture
def chats(tmp_path):
    """Ten chats of two questions."""
    path = tmp_path / "chats.jsonl"
    asked = [kinds.turns(f"Page {page}?", "a", "And why?") for page in range(10)]
    path.write_text("".join(json.dumps({"id": f"c{at}", "messages": chat}) + "\n" for at, chat in enumerate(asked)))
    return path


def says(asked):
    """The second replies of pages 0 to 3 are degenerate."""
    page, is_second = asked["messages"][0]["content"].split()[1], len(asked["messages"]) > 1
    odd = {"0?": "no" * 20, "1?": {"text": "and so", "finish": "length"}, "2?": " ", "3?": "no" * 20}
    return odd.get(page, "It rained.") if is_second else "I am well."


def respond(folder, chats, output, server, *more, status=0):
    what = ["--target-model", folder, "--input-data", chats, "--output", output, "--max-new-tokens", 64]
    ask = ["--server", server.url, "--model", "tiny", "--concurrency", 1]
    done = niels_gpt("eagle3", "respond", *what, *ask, *more)
    assert done.status == status, done.err
    return done, json.loads(Path(f"{output}.record").read_text())


def test_degenerate_replies_are_counted_shown_and_dropped_if_asked(folder, chats, tmp_path):
    with ChatServer(open_tokenizer(str(folder)), says) as server:
        done, record = respond(folder, chats, tmp_path / "kept.jsonl", server)
        counts = record["counts"]
        assert [counts[f"degenerate_{kind}"] for kind in ("repeated", "cut", "empty")] == [2, 1, 1]
        assert (counts["generated"], counts["replies"], counts["empty_reply"]) == (20, 19, 1)
        assert "degenerate replies: 4 of 20 (20.0%): empty 1, repeated 2, cut 1" in done.out
        assert "warning[W705]" in done.err and "--drop-degenerate" in done.err
        assert [each.split(":")[0] for each in record["degenerate"]] == ["repeated, c0#3", "cut, c1#3", "empty, c2#3"]
        assert record["degenerate"][0].endswith(f"'{'no' * 20}'") and record["degenerate"][0] in done.out
        _, record = respond(folder, chats, tmp_path / "dropped.jsonl", server, "--drop-degenerate")
    counts = record["counts"]
    assert (counts["dropped_repeated"], counts["dropped_cut"], counts["replies"]) == (2, 1, 16)
    assert "cut_at_max_new_tokens" not in counts and record["settings"]["drop_degenerate"] is True
    rows = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [len(row["replies"]) for row in rows] == [1] * 4 + [2] * 6
    assert [row.get("ended_by") for row in rows[:3]] == ["dropped_repeated", "dropped_cut", "empty_reply"]


def test_a_resumed_run_shows_the_same_examples(folder, chats, tmp_path):
    def killed(append, file, chats):
        append(file, chats)
        if len(file.done) == 3:
            raise KeyboardInterrupt

    with ChatServer(open_tokenizer(str(folder)), says) as server:
        _, whole = respond(folder, chats, tmp_path / "whole.jsonl", server)
        with appending(killed):
            respond(folder, chats, tmp_path / "r.jsonl", server, status=130)
        _, resumed = respond(folder, chats, tmp_path / "r.jsonl", server)
    assert resumed["degenerate"] == whole["degenerate"] and resumed["counts"] == whole["counts"]


def test_few_degenerate_replies_are_no_reason_to_warn(folder, chats, tmp_path):
    with ChatServer(open_tokenizer(str(folder)), lambda _: "It rained.") as server:
        done, record = respond(folder, chats, tmp_path / "r.jsonl", server)
    assert "degenerate replies: 0 of 20 (0.0%)" in done.out and "W705" not in done.err and "degenerate" not in record


def test_precompute_counts_samples_with_a_reply_that_ends_in_repetition(folder, tmp_path):
    answers = ["no" * 20, "It rained.", "no" * 20, "It rained. " + "so" * 20]
    rows = [kinds.turns("A?", answers[at % 4]) if at < 8 else kinds.turns("A?", "Yes.") for at in range(20)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"id": f"c{at}", "messages": chat}) + "\n" for at, chat in enumerate(rows)))
    what = ["--target-model", folder, "--output-dir", tmp_path / "cache", "--device", "cpu", "--threads", 1]
    how = ["--seq-length", 64, "--dry-run"]
    done = niels_gpt("eagle3", "precompute", *what, "--input-data", path, *how)
    assert "samples with a reply that ends in repetition: 6 (30.0%), such as c0, c2, c3" in done.out
    assert "warning[W705]" in done.err and "6 of 20 samples" in done.err
    tokenizer = open_tokenizer(str(folder))
    ids, mask = tokenizer.encode_chat(rows[0])
    given = tmp_path / "rows.jsonl"
    given.write_text(json.dumps({"id": "r", "input_ids": ids, "loss_mask": mask}) + "\n")
    done = niels_gpt("eagle3", "precompute", *what, "--input-data", given, *how)
    assert "ends in repetition: 1 (100.0%), such as r" in done.out and "W705" not in done.err
