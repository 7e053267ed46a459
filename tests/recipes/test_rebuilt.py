"""What a build says of the version that it replaces: documents that moved to val, an exclusion that ended."""

import dataclasses
import json

import pytest
from support.commands import niels_gpt
from support.data_files import lines, write
from support.splits import chat_key
from support.tiny_texts import TINY_TEXTS

from niels_gpt.recipes.plan import plan
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

CHATS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": text}] for n, text in enumerate(TINY_TEXTS)
]


@pytest.fixture
def own(tmp_path, tiny_model_path):
    """Settings of a file of chats and one of texts, built with a small tokenizer."""
    write(tmp_path / "chats.jsonl", lines(*[{"id": f"c{n}", "messages": chat} for n, chat in enumerate(CHATS)]))
    write(tmp_path / "texts.jsonl", lines(*[{"id": f"t{n}", "text": text} for n, text in enumerate(TINY_TEXTS)]))
    given = {"sft": f"chats={tmp_path}/chats.jsonl", "pretrain": f"texts={tmp_path}/texts.jsonl", "seed": 0}
    return Settings(cache_dir=str(tmp_path / "c"), tokenizer=str(tiny_model_path), sft_val_frac=0.3, **given)


def said(caplog, code):
    return [record.getMessage() for record in caplog.records if getattr(record, "code", "") == code]


def moved(share, seeds):
    """Return how many chats are in train with the first seed and in val with the second, by the rule on paper."""
    in_val = [{n for n, chat in enumerate(CHATS) if chat_key(chat, seed) < share * 2**64} for seed in seeds]
    return len(in_val[1] - in_val[0])


def test_a_rebuild_says_how_many_documents_moved_from_train_to_val(own, caplog, tmp_path):
    build_token_cache(own, "chats")
    assert not said(caplog, "W311")
    for seed, last in ((1, 0), (0, 1)):
        caplog.clear()
        build_token_cache(dataclasses.replace(own, seed=seed), "chats")
        (line,) = said(caplog, "W311")
        assert f"{moved(0.3, (last, seed))} documents of train" in line
    caplog.clear()  # more of the same source moves nothing
    more = [[{"role": "user", "content": "more?"}, {"role": "assistant", "content": "more"}], *CHATS[::-1]]
    write(tmp_path / "chats.jsonl", lines(*[{"id": f"c{n}", "messages": chat} for n, chat in enumerate(more)]))
    assert not build_token_cache(own, "chats").reused and not said(caplog, "W311")


def test_an_exclusion_that_ended_is_said_with_the_command_that_keeps_it(own, caplog, tmp_path):
    listed = write(tmp_path / "left out.txt", "t3\nt5\n")
    build_token_cache(dataclasses.replace(own, exclude=str(listed)), "texts")
    assert not said(caplog, "W312")
    build_token_cache(own, "texts")
    (line,) = said(caplog, "W312")
    assert "2 documents" in line and f"--exclude '{listed}'" in line and "niels-gpt build texts" in line
    record = json.loads((tmp_path / "c" / "pretrain" / ".versions" / "texts" / "recipe.json").read_text())
    assert record["version"] == (tmp_path / "c" / "pretrain" / "texts").resolve().name


def test_a_list_counts_by_what_it_takes_from_the_source_of_a_cache(own, tmp_path):
    listed = tmp_path / "list.txt"
    by_list = dataclasses.replace(own, exclude=str(listed))
    for name in ("chats", "texts"):
        build_token_cache(own, name)
    for entries, built in (
        ("t3", "texts"),
        ("t3\nt99", None),
        ("t3\nc1", "chats"),
        ("c1", "texts"),
        ("c1\nt3", "texts"),
    ):
        listed.write_text(entries)
        planned = {item.key: item.action for item in plan(by_list, ["sft/chats", "pretrain/texts"])}
        assert [key.split("/")[1] for key, action in planned.items() if action == "build"] == [built] * bool(built)
        outcomes = [build_token_cache(by_list, name) for name in ("chats", "texts")]
        assert [outcome.key.split("/")[1] for outcome in outcomes if not outcome.reused] == [built] * bool(built)
    assert not build_token_cache(own, "texts").reused


def test_entries_that_name_nothing_are_warned_of_unless_not_all_was_read(own, tmp_path):
    listed = write(tmp_path / "list.txt", "t3\nt99\nno such id\n")
    command = ["build", "--pretrain", own.pretrain, "--cache-dir", own.cache_dir, "--tokenizer", own.tokenizer]
    done = niels_gpt(*command, "--exclude", str(listed), "--json")
    assert "warning[W313]" in done.err and "2 of its 3 entries" in done.err and "'no such id', 't99'" in done.err
    assert done.json["unmatched_exclude"] == ["no such id", "t99"] and done.status == 0
    assert niels_gpt(*command, "--exclude", str(listed), "--restart", "--strict").status == 1
    again = niels_gpt(*command, "--exclude", str(listed), "--json")  # up to date: nothing is read
    assert "W313" not in again.err and "unmatched_exclude" not in again.json
    write(listed, "t3\nt99\nno such id\nmisspelt\n")
    again = niels_gpt(*command, "--exclude", str(listed), "--json")
    assert again.json["caches"][1]["state"] == "up to date" and again.json["unmatched_exclude"] == ["misspelt"]
