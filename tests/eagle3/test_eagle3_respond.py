"""eagle3 respond: the target's own replies, the same however they are batched, interrupted and resumed."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import chat_tokenizers as kinds
from support.commands import Done, niels_gpt
from support.disk import LEASES_DIR, lock_by_leases
from support.eagle3_inputs import input_facts
from support.eagle3_replies import (
    END,
    appending,
    finished,
    replies_of,
    reply_file,
    speaker_of,
    unanswered,
    without_target,
)
from support.eagle3_replies import answered as answered_by
from support.errors import refused
from support.tiny_hub_models import write_model

from niels_gpt.chat import Chat, open_tokenizer
from niels_gpt.recipes.eagle3.input import input_rows
from niels_gpt.settings import Settings

Prompt = tuple[str, list[int]]
"""A name and ids."""
SAID = ("Hello there.", "I am well.", "The river is long, and its water is cold.", "And why?", "")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Llama of 64 positions, untrained, that ends a turn now and then, and its tokenizer."""
    from safetensors.torch import load_file, save_file

    made = write_model(tmp_path_factory.mktemp("speaker"), seed=0)
    weights = load_file(made / "model.safetensors")
    weights["lm_head.weight"][END] *= 4
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="session")
def speaker(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return speaker_of(model, vocab_size=400, max_positions=64)


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """Chats of one to three turns; some end with a question, and two get no reply."""
    path = tmp_path_factory.mktemp("questions") / "chats.jsonl"
    chats = [kinds.turns(*[f"{number} {SAID[number % 4]}"] * (1 + number % 3)) for number in range(24)]
    chats += [kinds.turns("word " * 200), kinds.turns("I am the assistant.", first="assistant")]
    path.write_text("".join(json.dumps({"id": f"c{at}", "messages": chat}) + "\n" for at, chat in enumerate(chats)))
    return path


Run = Callable[..., tuple[Done, Path]]


@pytest.fixture
def run(folder, questions, tmp_path):
    """Runs the command in this process; returns how it ended and the file."""

    def done(*more, name="replies.jsonl"):
        path = tmp_path / name
        what = ["--target-model", str(folder), "--input-data", str(questions), "--output", str(path), "--threads", "1"]
        how = ["--device", "cpu", "--max-new-tokens", "8", "--batch-size", "4"]
        return niels_gpt(*what, *how, *more, module="niels_gpt.eagle3.respond"), path

    return done


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_of(*lengths):
    chance = torch.Generator().manual_seed(1)
    return [(f"p{n}", torch.randint(7, 400, (n,), generator=chance).tolist()) for n in lengths]


# --- generate ---------------------------------------------------------------------------------------------------------


def test_greedy_replies_of_a_batch_are_those_that_generate_gives_one_prompt_at_a_time(speaker):
    prompts = prompts_of(3, 20, 7, 11, 5, 60, 64, 61, 30, 13, 26)
    found = replies_of(speaker, prompts, max_new_tokens=5)
    for (_, asked), reply in zip(prompts, found, strict=True):
        room = min(5, 64 - len(asked))
        ids = []
        if room:
            given = torch.tensor([asked])
            made = speaker.model.generate(given, do_sample=False, max_new_tokens=room, eos_token_id=END, pad_token_id=0)
            ids = made[0, len(asked) :].tolist()
        ended = ids[-1:] == [END]
        finish = "stop" if ended else "length" if room == 5 else "context"
        assert reply == (ids[:-1] if ended else ids, END if ended else None, finish)
    assert {reply.finish for reply in found} == {"stop", "length", "context"}


def test_a_sampled_reply_depends_on_seed_and_name_and_not_on_its_batch(speaker):
    prompts = prompts_of(3, 20, 7, 11, 5, 30)
    how = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9}
    found = replies_of(speaker, prompts, **how, seed=4)
    assert [replies_of(speaker, [prompt], **how, seed=4)[0] for prompt in prompts] == found
    assert replies_of(speaker, prompts[::-1], **how, seed=4) == found[::-1]
    other_seed = replies_of(speaker, prompts, **how, seed=5)
    other_name = replies_of(speaker, [(name + "'", ids) for name, ids in prompts], **how, seed=4)
    for changed in (other_seed, other_name):
        assert sum(one == two for one, two in zip(changed, found, strict=True)) <= 1


def test_a_models_own_generation_config_changes_nothing(speaker):
    import transformers

    prompts = prompts_of(9, 4)
    found, before = replies_of(speaker, prompts, max_new_tokens=12), speaker.model.generation_config
    own = transformers.GenerationConfig(
        repetition_penalty=50.0, suppress_tokens=[token for reply in found for token in reply.ids]
    )
    speaker.model.generation_config = own
    try:
        assert replies_of(speaker, prompts, max_new_tokens=12) == found and speaker.model.generation_config is own
    finally:
        speaker.model.generation_config = before


# --- chats ------------------------------------------------------------------------------------------------------------


def answered(folder, chat, *texts, **how):
    """Reply to a chat with these texts in turn, each ended unless it ends with "..."; returns it and the prompts."""
    return answered_by(open_tokenizer(str(folder)), Chat("c", chat), *texts, **how)


def chatml(*contents):
    """The text of a prompt: user and assistant in turn, and the assistant's header."""
    roles = ["user", "assistant"] * len(contents)
    parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in zip(roles, contents, strict=False)]
    return "".join(parts) + "<|im_start|>assistant\n"


def contents_of(found):
    return [message["content"] for message in found.messages]


def test_each_turn_is_replaced_in_turn_and_a_last_question_gets_a_reply(folder):
    found, prompts = answered(folder, kinds.turns("A?", "a", "B?", "b", "C?"), "one", "two", "three")
    assert prompts == [chatml("A?"), chatml("A?", "one", "B?"), chatml("A?", "one", "B?", "two", "C?")]
    assert contents_of(found) == ["A?", "one", "B?", "two", "C?", "three"] and found.ended_by is None
    assert [each["message"] for each in found.replies] == [1, 3, 5] and found.counts["replies"] == 3
    found, prompts = answered(folder, kinds.turns("A?", "a", "B?", "b"), "two", turns="last")
    assert prompts == [chatml("A?", "a", "B?")] and contents_of(found) == ["A?", "a", "B?", "two"]


def test_a_chat_ends_with_a_cut_reply_and_before_one_that_no_template_can_hold(folder):
    chat = kinds.turns("A?", "a", "B?", "b", "C?", "c")
    for text, reason, contents in [
        ("and so on...", "cut_at_max_new_tokens", ["A?", "one", "B?", "and so on..."]),
        ("", "empty_reply", ["A?", "one"]),
        (" \n", "empty_reply", ["A?", "one"]),
        ("so <|eot|> it is", "special_text", ["A?", "one"]),
    ]:
        found, _ = answered(folder, chat, "one", text)
        assert (contents_of(found), found.ended_by, found.counts[reason]) == (contents, reason, 1)
        assert found.counts["replies_left_out"] == 3 - len(found.replies)


def test_what_nobody_asks_and_what_calls_a_tool_gets_no_reply(folder):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with_call = [
        *kinds.turns("A?"),
        call,
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    for chat, turns, reason in [
        (kinds.turns("Hi.", first="assistant"), "all", "no_prompt"),
        ([{"role": "system", "content": "Be brief."}], "all", "no_prompt"),
        (with_call, "all", "calls_tools"),
    ]:
        found, prompts = answered(folder, chat, turns=turns)
        assert (found.ended_by, prompts, found.replies) == (reason, [], [])
    assert unanswered(Chat("c", with_call), "last").ended_by is None, "the calls before it stay"


def test_white_space_that_the_template_writes_itself_is_left_out_of_the_content(tmp_path):
    folder = kinds.write_tokenizer(tmp_path, template=kinds.INST)
    found, _ = answered(folder, kinds.turns("A?"), " I am well.")
    assert contents_of(found) == ["A?", "I am well."]
    found, _ = answered(folder, kinds.turns("A?"), "I am well.")
    assert contents_of(found) == ["A?", "I am well."], "the template adds a space"


def test_messages_end_where_the_template_writes_an_earlier_reply_otherwise_and_ids_hold_each(tmp_path):
    chat, said = kinds.turns("A?", "a", "B?", "b"), ("<think>hm</think> one", "<think>so</think> two")
    cut = kinds.write_tokenizer(tmp_path / "cut", template=kinds.EARLIER_REPLIES_CUT)
    found, _ = answered(cut, chat, said[0])
    assert (contents_of(found), found.ended_by) == (["A?", said[0]], "not_prefix_stable")
    tokenizer = open_tokenizer(str(cut))
    ids, mask = tokenizer.encode_chat(found.messages)  # it is not refused
    assert len(ids) == len(mask) and any(mask)
    plain, _ = answered(cut, chat, "one", "two")
    assert contents_of(plain) == ["A?", "one", "B?", "two"], "without reasoning no turn is cut"
    found, prompts = answered(cut, chat, *said, form="ids")
    assert [tokenizer.decode(row["input_ids"]) for row in found.rows] == [
        f"{chatml('A?')}{said[0]}<|im_end|>",
        f"{prompts[1]}{said[1]}<|im_end|>",
    ]
    assert prompts[1] == chatml("A?", " one", "B?")

    thinks = kinds.write_tokenizer(tmp_path / "thinks", template=kinds.LAST_REPLY_THINKS)
    found, _ = answered(thinks, chat, turns="last")
    assert (found.ended_by, found.replies) == ("not_prefix_stable", [])

    marked = kinds.EARLIER_REPLIES_CUT.replace("{{ message.content if", "{% generation %}{{ message.content if")
    marked = marked.replace("[-1] }}", "[-1] }}{% endgeneration %}")
    found, _ = answered(kinds.write_tokenizer(tmp_path / "marked", template=marked), chat, *said)
    assert contents_of(found) == ["A?", said[0], "B?", said[1]], "marks keep it in the file"


# --- the command ------------------------------------------------------------------------------------------------------


def test_rows_are_in_the_order_of_the_chats_and_all_that_was_left_out_is_counted(run, questions):
    done, path = run()
    assert done.status == 0
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.record"]
    rows, record, asked = rows_of(path), json.loads(Path(f"{path}.record").read_text()), rows_of(questions)
    order = [row["id"] for row in rows]
    assert order == [row["id"] for row in asked if row["id"] in order] and 10 < len(rows) <= 24
    counts = Counter(record["counts"])
    for row in rows:
        given = next(chat["messages"] for chat in asked if chat["id"] == row["id"])
        users = [message for message in row["messages"] if message["role"] == "user"]
        assert users == [message for message in given if message["role"] == "user"][: len(users)]
        assert [reply["message"] for reply in row["replies"]] == list(range(1, len(row["messages"]), 2))
        cut = [reply["finish"] != "stop" for reply in row["replies"]]
        assert not any(cut[:-1]) and cut[-1] == row.get("ended_by", "").startswith("cut_")
    assert counts["replies"] == sum(len(row["replies"]) for row in rows)
    assert counts["reply_tokens"] == sum(reply["tokens"] for row in rows for reply in row["replies"])
    assert counts["cut_at_max_new_tokens"] > 0 and counts["over_context"] > 0 and counts["no_prompt"] == 1
    assert len(asked) - len(rows) == sum(1 for chat in asked if chat["id"] not in order), (
        "a chat without a reply has no row"
    )


def test_precompute_reads_both_forms(run, folder):
    tokenizer, read = open_tokenizer(str(folder)), dict[str, list[Any]]()
    for form in ("messages", "ids"):
        done, path = run("--form", form, name=f"{form}.jsonl")
        assert done.status == 0, done.err
        facts = input_facts(Settings(), str(path))
        read[form] = list(input_rows(Settings(), str(path), tokenizer, seq_length=256, counters=Counter(), facts=facts))
        rows = rows_of(path)
        if form == "ids":
            pairs = [(row["id"], row["input_ids"], row["loss_mask"]) for row in rows]
            assert [(row.id, row.input_ids.tolist(), row.loss_mask.tolist()) for row in read[form]] == pairs
        else:
            whole = {row["id"] for row in rows if "ended_by" not in row}
    of_ids = {row.id.partition("#")[0]: row.input_ids.tolist() for row in read["ids"]}  # that of the last reply
    texts = [
        (tokenizer.decode(row.input_ids), tokenizer.decode(of_ids[row.id]))
        for row in read["messages"]
        if row.id in whole
    ]
    assert texts and all(text.startswith(of_reply) for text, of_reply in texts)


def killed_after_three_appends(run, *how):
    """Interrupt a run; returns the path of its file, and of the one that has what was done."""
    runs = []

    def killed(append, file, chats):
        append(file, chats)
        runs.append(len(chats))
        if len(runs) == 3:
            raise KeyboardInterrupt

    with appending(killed):
        done, path = run(*how)
    part = Path(f"{path}.part")
    assert done.status == 130 and not path.exists() and len(part.read_bytes().splitlines()) == 1 + sum(runs[:3])
    return path, part


def test_a_killed_run_resumes_to_the_same_bytes_and_other_settings_are_refused(run):
    how = ("--temperature", "0.9")
    _, whole = run(*how, name="whole.jsonl")
    path, part = killed_after_three_appends(run, *how)
    part.write_bytes(part.read_bytes()[:-30])  # a torn line
    done, _ = run(*how, "--seed", "1")
    assert done.status == 1 and "error[E703]" in done.err and "sampling" in done.err
    left, record = part.read_bytes(), Path(f"{path}.record")
    record.unlink()
    done, _ = run(*how, "--seed", "1")
    assert done.status == 1 and "error[E703]" in done.err and ".part" in done.err
    assert not record.exists() and part.read_bytes() == left
    assert run(*how)[0].status == 0 and path.read_bytes() == whole.read_bytes() and not part.exists()
    assert json.loads(Path(f"{path}.record").read_text()) == json.loads(Path(f"{whole}.record").read_text())

    with without_target():
        part.write_bytes(left)
        assert run(*how)[0].status == 0 and not part.exists(), "it is done"
        path.write_bytes(b"")
        done, _ = run(*how)
        assert done.status == 1 and "error[E701]" in done.err
        part.with_name("other.jsonl").write_bytes(b"{}")
        done, _ = run(*how, name="other.jsonl")
        assert done.status == 1 and "error[E704]" in done.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.9", "--top-p", "0.95")], ids=["greedy", "sampled"])
def test_replies_of_a_gpu_are_the_same_in_each_run_and_after_a_kill(run, sampled):
    how = ("--device", "cuda", *sampled)
    first, second = (run(*how, name=name) for name in ("first.jsonl", "second.jsonl"))
    assert first[0].status == second[0].status == 0, first[0].err
    rows = first[1].read_bytes()
    assert second[1].read_bytes() == rows and len(rows.splitlines()) > 10
    record = json.loads(Path(f"{first[1]}.record").read_text())
    assert '"cuda"' in json.dumps(record) and '"bf16"' in json.dumps(record)
    path, _ = killed_after_three_appends(run, *how)
    assert run(*how)[0].status == 0 and path.read_bytes() == rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_greedy_replies_of_a_gpu_in_fp32_are_those_of_the_cpu(run):
    (_, found), (_, expected) = (
        run("--device", device, "--compute-dtype", "fp32", name=f"{device}.jsonl") for device in ("cuda", "cpu")
    )
    same = [one == other for one, other in zip(rows_of(found), rows_of(expected), strict=True)]
    assert sum(same) >= 0.9 * len(same), "tokens that are nearly as likely may change places"


@pytest.mark.parametrize("name", ["r.jsonl.part", "r.jsonl.lock", ".r.jsonl.tmp"])
def test_a_link_or_a_pipe_in_the_place_of_an_own_file_is_named_with_what_removes_it(name, tmp_path):
    path = tmp_path / name
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere")):
        make(path)
        with refused("E205", f"rm -r {path}"), reply_file(tmp_path / "r.jsonl"):
            pass
        path.unlink()


def test_a_run_that_lost_its_lease_appends_nothing(tmp_path):
    lock_by_leases(tmp_path)
    with refused("E512", "r.jsonl"), reply_file(tmp_path / "r.jsonl") as file:
        file.append([finished(0)])
        for lease in (tmp_path / LEASES_DIR).iterdir():  # as another machine does that takes over
            lease.unlink()
        for act in (lambda: file.append([finished(1)]), lambda: file.finish({})):
            with refused("E512", "r.jsonl"):
                act()
    assert not (tmp_path / "r.jsonl").exists()
    assert len((tmp_path / "r.jsonl.part").read_bytes().splitlines()) == 2


def test_chats_of_one_id_and_prompt_get_replies_of_their_own(run, tmp_path):
    chat, asked = {"id": "x", "messages": kinds.turns("A?", "a", "B?")}, tmp_path / "same.jsonl"
    asked.write_text(3 * (json.dumps(chat) + "\n"))
    how = ("--temperature", "1", "--turns", "last", "--input-data", str(asked))
    rows = rows_of(run(*how)[1])
    assert len({json.dumps(row) for row in rows}) == len(rows) == 3
    assert rows_of(run(*how, "--limit", "1", name="one.jsonl")[1]) == rows[:1]


def test_a_trial_says_what_would_run_and_loads_no_weights(run):
    with without_target():
        done, path = run("--dry-run", "--limit", "26")
        assert done.status == 0 and list(path.parent.iterdir()) == []
        assert "26 chats, 25 with a prompt" in done.out and "without a prompt: no_prompt 1" in done.out
        done, _ = run("--temperature", "0", "--top-p", "0.5")
        assert done.status == 2 and "leave one of them out" in done.err
