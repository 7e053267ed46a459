"""`build --sft NAME=FILES --chat-template`: from rows to a reader's targets, what is built again, what is refused."""

import dataclasses
import json
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.chat_tokenizers import CHAT, CHATML, CHATML_MARKED, LAST_REPLY_THINKS, write_tokenizer
from support.errors import refused

from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.commands.main import main
from niels_gpt.recipes.plan import plan
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

WITH_CALLS = CHATML.replace("message.content + ", "(message.content or '') + (message.tool_calls | tojson "
    "if message.tool_calls else '') + ")  # fmt: skip
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"day": "today"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a Hugging Face tokenizer without sentinels, with ChatML as its own template."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rows(folder):
    """Write chats.jsonl, of which two are dropped; return the messages of the others."""
    chats = [
        [
            *([{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []),
            {"role": "user", "content": f"Name a river. {number}"},
            {"role": "assistant", "content": f"The river is long, {number} miles.\n\nIt is cold."},
            {"role": "user", "content": "And why?"},
            {"role": "assistant", "content": "It rained.", "note": "not written"},
        ]
        for number in range(20)
    ]
    odd = [[{"role": "user", "content": "<|im_end|>"}, chats[1][1]], chats[1][:1]]
    lines = [json.dumps({"id": f"chat {number}", "messages": each}) for number, each in enumerate([*chats, *odd])]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return chats


def settings_of(folder, tokenizer, **more):
    given = {"cache_dir": str(folder / "cache"), "tokenizer": str(tokenizer), "sft": f"own={folder}/chats.jsonl"}
    return Settings(**{**given, "chat_template": "tokenizer", **more})


def by_turns(tokenizer, messages, wanted):
    """Return ids and targets of a chat in ChatML, tokenized turn by turn: header, words, and what follows them."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids, targets = list[int](), list[bool]()
    for number, message in enumerate(messages):
        words = message["content"] or ""
        words += json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
        for text, is_reply in (
            (f"<|im_start|>{message['role']}\n", False),
            (f"{words}<|im_end|>", True),
            ("\n", False),
        ):
            found = backend.encode(text, add_special_tokens=False).ids
            ids += found
            targets += [is_reply and number in wanted] * len(found)
    return ids, targets


def read(cache):
    """Return ids and targets of each example by its source id, as the reader has them."""
    found = {}
    for name in ("train", "val"):
        split = SFTSplit(cache, name)
        names = (cache / "index" / f"{name}_ids.txt").read_text().splitlines()
        begins, ends = split.starts[:-1], split.starts[1:]
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            at = (np.array([begin]), np.array([end]))
            ids = split.read(*at)
            y = split.masked(split.padded(*at, end - begin + 3), *at)[0]
            targets = split.is_target(ids, *at).tolist()
            padding = [split.pad_id] * 3
            assert split.padded(*at, end - begin + 3)[0].tolist() == [*ids.tolist(), *padding]
            expected = [id if target else -100 for id, target in zip(ids.tolist(), targets, strict=True)]
            assert y.tolist() == [*expected[1:], *[-100] * 3]
            found[names[row]] = (ids.tolist(), targets)
    return found


@pytest.mark.parametrize("choice", ["tokenizer", "a file with marks"])
def test_the_targets_of_a_reader_are_those_of_an_oracle_that_tokenizes_turn_by_turn(
    tmp_path, tokenizer, choice, capsys
):
    chats = rows(tmp_path)
    if choice != "tokenizer":
        choice = str(tmp_path / "marked.jinja")
        Path(choice).write_text(CHATML_MARKED)
    cache = tmp_path / "cache" / "sft" / "own"
    words = ["build", "--sft", f"own={tmp_path}/chats.jsonl", "--tokenizer", str(tokenizer), "--chat-template", choice]
    for loss_on in ("assistant", "last"):
        assert main([*words, "--cache-dir", str(tmp_path / "cache"), "--loss-on", loss_on]) == 0
        assert f"loss on {loss_on}; dropped: no_supervised 1, special_text 1" in capsys.readouterr().out
        expected = {}
        for number, messages in enumerate(chats):
            turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            expected[f"chat {number}"] = by_turns(
                tokenizer, messages, {*turns} if loss_on == "assistant" else {turns[-1]}
            )
        assert read(cache) == expected
        meta = read_meta(str(cache / "meta.json"))
        sums = {split: 0 for split in ("train", "val")}
        for split in sums:
            bits = np.frombuffer((cache / f"{split}_loss.bits").read_bytes(), dtype=np.uint8)
            sums[split] = int(np.unpackbits(bits, bitorder="little").sum())
        assert meta["supervised_tokens"] == sums and sum(sums.values()) == sum(
            sum(mask) for _, mask in expected.values()
        )
        assert meta["noticed"].pop("repeated_replies") == 19  # all say the same
        assert meta["noticed"] == ({} if loss_on == "assistant" else {"turns_without_loss": 20})
    assert main(["verify", "--deep", str(cache)]) == 0


@pytest.mark.parametrize("template", [CHATML_MARKED, pytest.param(CHATML, marks=pytest.mark.slow)])
def test_a_template_that_writes_much_fills_no_memory(tmp_path, tokenizer, template):
    """Each of its 200,000 characters is a token, before each of 24 chats: a gigabyte if they were encoded together."""
    (tmp_path / "long.jinja").write_text("{{ '<' * 200000 }}" + template)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in [CHAT] * 24))
    words = [f"own={tmp_path}/chats.jsonl", "--tokenizer", tokenizer, "--chat-template", tmp_path / "long.jinja"]
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build", "--sft", *words, "--cache-dir", tmp_path / "cache"]
    limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    done = subprocess.run(list(map(str, command)), preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "24 examples" in done.stdout, done.stderr[-2000:]


def test_calls_of_tools_reach_the_template_and_loss_is_by_turn(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Is it raining?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": "It is."},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "a", "messages": messages, "tools": [CALL]}))
    (tmp_path / "calls.jinja").write_text(WITH_CALLS)
    for loss_on, turns in {"assistant": {3}, "assistant,tool_calls": {1, 3}, "tool_calls": {1}, "last": {3}}.items():
        settings = settings_of(tmp_path, tokenizer, chat_template=str(tmp_path / "calls.jinja"), loss_on=loss_on)
        outcome = build_token_cache(dataclasses.replace(settings, sft_val_frac=0.0), "own")
        split = SFTSplit(outcome.path, "train")
        ids = split.read(split.starts[:1], split.starts[1:])
        found = (ids.tolist(), split.is_target(ids, split.starts[:1], split.starts[1:]).tolist())
        assert found == by_turns(tokenizer, messages, turns), loss_on
        assert outcome.meta["noticed"].get("turns_without_loss", 0) == (loss_on != "assistant,tool_calls")


def test_only_another_template_or_choice_of_turns_builds_the_chats_again(tmp_path, tokenizer):
    rows(tmp_path)
    (tmp_path / "notes.txt").write_text("one note")
    settings = settings_of(tmp_path, tokenizer, pretrain=f"notes={tmp_path}/notes.txt", own_val_frac=0.0)

    def built(**changed):
        now = dataclasses.replace(settings, **changed)
        planned = {item.key for item in plan(now, ["pretrain/notes", "sft/own"]) if item.action == "build"}
        found = {name for name in ("notes", "own") if not build_token_cache(now, name).reused}
        assert planned == {key for key in ("pretrain/notes", "sft/own") if key.split("/")[1] in found}
        return found

    assert built() == {"notes", "own"} and built() == set()
    same, other = tmp_path / "same.jinja", tmp_path / "other.jinja"
    same.write_text(CHATML)
    other.write_text(CHATML_MARKED)
    assert built(chat_template=str(same)) == set()  # the text counts, and not where it stands
    assert built(chat_template=str(other)) == {"own"} and built(chat_template=str(other)) == set()
    assert built(chat_template=str(other), loss_on="last") == {"own"}
    assert built() == {"own"}
    # A named token that is no token, and one that is special from now on: no id of bos, eos, pad or unk changes.
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    for name, value in {"sep_token": "SEP", "additional_special_tokens": ["brief"]}.items():
        named = tmp_path / name
        shutil.copytree(tokenizer, named)
        (named / "tokenizer_config.json").write_text(json.dumps({**config, name: value}))
        changed = dataclasses.replace(settings, tokenizer=str(named))
        assert [build_token_cache(changed, key).reused for key in ("own", "own", "notes")] == [False, True, True]


def test_the_projects_chats_are_built_by_a_template_where_there_are_no_sentinels(tmp_path, tokenizer):
    settings = Settings(
        source_root="sample", cache_dir=str(tmp_path), tokenizer=str(tokenizer), chat_template="tokenizer"
    )
    for name in ("dolly15k", "oasst1"):
        need = plan(settings, [f"sft/{name}"])[-1]
        outcome = build_token_cache(settings, name)
        meta = outcome.meta
        assert 0 < need.disk_bytes < outcome.disk_bytes
        assert meta["special_token_ids"] == {} and sum(meta["supervised_tokens"].values()) > 100
    of_trees = plan(settings, ["trees/oasst1"])[-1]
    assert of_trees.action.startswith("left out") and "has no sentinels" in of_trees.action


def test_a_chat_that_the_template_changes_once_others_follow_is_left_out_and_counted(tmp_path, caplog, capsys):
    folder = write_tokenizer(tmp_path / "thinks", template=LAST_REPLY_THINKS)
    words = [
        "build",
        "--sft",
        f"own={tmp_path}/chats.jsonl",
        "--tokenizer",
        str(folder),
        "--chat-template",
        "tokenizer",
    ]
    words += ["--cache-dir", str(tmp_path / "cache")]

    def build(*chats, flags=()):
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
        status, printed = main([*words, *flags]), capsys.readouterr()
        return status, printed.out + " ".join(printed.err.split())

    status, printed = build(*[CHAT[:2]] * 4, *[CHAT] * 3)
    assert status == 0 and "own: 4 examples" in printed and "dropped: not_prefix_stable 3" in printed
    assert "left out, since the chat template writes their earlier turns otherwise once others follow: 3" in caplog.text
    assert main(["stats", str(tmp_path / "cache/sft/own")]) == 0 and "not_prefix_stable" in capsys.readouterr().out
    status, printed = build(CHAT)
    assert status == 1 and re.search("error.E407.*not_prefix_stable.*--loss-on last", printed)
    assert build(CHAT, flags=["--loss-on", "last"])[0] == 0


def test_what_a_template_makes_is_shown_in_part_and_never_blamed_on_the_chats(tmp_path, tokenizer):
    rows(tmp_path)
    path = tmp_path / "odd.jinja"
    for template, code, said in (
        (r"{{ '\ud800' }}", "E303", r"the template writes '\ud800', half of a surrogate pair"),
        ("{{ raise_exception('x' * 1000000) }}", "E303", "xxx..."),
        ("{{ messages | length }}{{ 'x' * 100000 }}", "E407", "continues at token 0 with '2x"),
    ):
        path.write_text(template + CHATML)
        with refused(code, said, "--chat-template FILE") as error:
            build_token_cache(settings_of(tmp_path, tokenizer, chat_template=str(path)), "own")
        assert len(str(error.value)) < 1500


def test_marks_that_are_no_tokens_are_named(tmp_path, tokenizer, caplog):
    rows(tmp_path)
    (tmp_path / "other.jinja").write_text("{# <tools> [0] #}" + CHATML.replace("<|im_end|>", "<｜end▁of▁it｜>[/INST]"))
    build_token_cache(settings_of(tmp_path, tokenizer, chat_template=str(tmp_path / "other.jinja")), "own")
    (found,) = (record for record in caplog.records if getattr(record, "code", "") == "W412")
    assert "writes <｜end▁of▁it｜>, [/INST], which are no token" in found.getMessage()
    caplog.clear()  # the tokenizer's own template is looked at as well
    folder = write_tokenizer(tmp_path / "own", template=CHATML.replace("<|im_end|>", "<|eot_id|>"))
    build_token_cache(settings_of(tmp_path, folder, chat_template="tokenizer"), "own")
    (found,) = (record for record in caplog.records if getattr(record, "code", "") == "W412")
    assert "writes <|eot_id|>, which is no token" in found.getMessage()


def test_another_template_for_chats_with_tools_is_known_after_the_tokenizer_was_copied(tmp_path):
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "named")
    (folder / "additional_chat_templates").mkdir()
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_text(CHATML_MARKED)
    chats = rows(tmp_path)
    build_token_cache(settings_of(tmp_path, folder), "own")
    assert read_meta(str(tmp_path / "cache/tokenizer/meta.json"))["tool_template"] is True
    tools = [{"type": "function", "function": {"name": "rain"}}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chats[0], "tools": tools}))
    with refused("E407", f"--chat-template {file}"):
        build_token_cache(settings_of(tmp_path, folder), "own")
    build_token_cache(settings_of(tmp_path, folder, chat_template=str(file)), "own")
    opened = AutoTokenizer.from_pretrained(folder)
    assert opened.get_chat_template(tools=tools) == file.read_text() != opened.get_chat_template()


def test_what_no_template_can_be_used_with_is_refused_before_anything_is_made(
    tmp_path, tokenizer, tiny_model_path, capsys
):
    rows(tmp_path)
    bare = write_tokenizer(tmp_path / "bare", template=None)
    own = ["--chat-template", "tokenizer"]
    (tmp_path / "syntax.jinja").write_text("{% if messages %}")
    (tmp_path / "date.jinja").write_text("{{ strftime_now('%Y') }}" + CHATML)
    cases = {
        "a SentencePiece model.*--tokenizer-kind bpe, or leave --chat-template out": [
            *own,
            "--tokenizer",
            tiny_model_path,
        ],
        "has no chat template.*--chat-template FILE": [*own, "--tokenizer", bare],
        "none.jinja: no such file, expected tokenizer or a file": [
            "--chat-template",
            "none.jinja",
            "--tokenizer",
            bare,
        ],
        "--chat-template '': is not a regular file, expected tokenizer or a file": ["--chat-template", ""],
        "syntax.jinja: the chat template is no jinja, line 1: .*'endif'": [
            "--chat-template",
            tmp_path / "syntax.jinja",
        ],
        "date.jinja: the chat template asks for the date": ["--chat-template", tmp_path / "date.jinja"],
        "kind sentencepiece: .* Name the folder of one with --tokenizer": own,  # one would be trained
    }
    for message, flags in cases.items():
        words = ["build", "--sft", f"own={tmp_path}/chats.jsonl", "--cache-dir", tmp_path / "cache", *flags]
        for more, stream in ((["--dry-run"], "out"), ([], "err")):
            assert main([*map(str, words), *more]) != 0
            assert re.search(message, " ".join(getattr(capsys.readouterr(), stream).split()))
        assert not (tmp_path / "cache" / "sft").exists()
    with refused("E102", "chat_template"):
        Settings(loss_on="last")
    with refused("E407", "assistant"):
        build_token_cache(settings_of(tmp_path, tokenizer, loss_on="user"), "own")
