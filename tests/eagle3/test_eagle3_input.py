"""What a target is run over: the project's chats, one's own, files of chats, or files of ids and masks."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import chat_tokenizers as kinds
from support.eagle3_inputs import asked_revisions, chats_of, fingerprint_of, input_facts
from support.errors import refused
from support.made_tokenizers import made_tokenizer
from support.tool_templates import QWEN, plain
from tokenizers import Tokenizer

from niels_gpt.chat import Chat, open_tokenizer
from niels_gpt.recipes.eagle3.input import input_rows
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.sentinels import add_sentinels

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello."}], "id": "s1"}
PAIR = {"instruction": "Hello", "output": "Hello."}
TRANSFORMERS = "PreTrainedTokenizerFast"
GIVEN = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(str(kinds.write_tokenizer(tmp_path_factory.mktemp("chatml"))))


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def read(settings, name, tokenizer, **more):
    counters = Counter()
    return list(input_rows(settings, name, tokenizer, seq_length=256, counters=counters, **more)), counters


@pytest.mark.parametrize("source", ["dolly15k", "oasst1"])
def test_the_projects_chats_are_input_by_their_name(settings, tokenizer, source):
    rows, counters = read(settings, source, tokenizer)
    chats = chats_of(settings, source)
    assert len(rows) == counters["rows"] > 20
    for row in rows:
        ids, mask = tokenizer.encode_chat(chats[row.id])
        assert (row.input_ids.tolist(), row.loss_mask.tolist()) == (ids[:256], mask[:256])


@pytest.mark.slow
def test_a_tokenizer_json_with_the_sentinels_gives_the_ids_and_the_mask_of_an_sft_cache(settings, tmp_path):
    made = tmp_path / "made"
    add_sentinels(made_tokenizer("qwen2"), made)
    opened, ids = open_tokenizer(str(made)), load_tokenizer(made)
    assert (opened.sha256, opened.mask_by) == (ids.sha256, "sentinels")
    special = ids.special_token_ids()
    whole = [
        special["usr"],
        *ids.encode("Hello"),
        special["eot"],
        special["asst"],
        *ids.encode("Hello."),
        special["eot"],
    ]
    encoded = opened.encode_chat(MESSAGES["messages"])
    assert encoded == (whole, [0] * (whole.index(special["asst"]) + 1) + [1] * (len(ids.encode("Hello.")) + 1))
    assert opened.decode(whole) == "<|usr|>Hello<|eot|><|asst|>Hello.<|eot|>"
    rows, _ = read(settings, "dolly15k", opened)
    assert len(rows) > 20

    config = json.loads((made / "tokenizer_config.json").read_text())
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (made / "tokenizer_config.json").write_text(json.dumps(config | template | {"tokenizer_class": TRANSFORMERS}))
    assert open_tokenizer(str(made)).mask_by != "sentinels"  # a template of its own counts


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_folder_without_a_model_gives_the_ids_of_its_tokenizer_json(tmp_path, name):
    folder = kinds.write_tokenizer(tmp_path)
    made = json.loads((folder / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": True}
    each = {"type": "Split", "pattern": {"Regex": r"\s?\S"}, "behavior": "Isolated", "invert": False}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, each, made["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nName the 12 otters of 1987, don't stop.<|im_end|>\n"
    opened = open_tokenizer(str(folder))
    (ids,) = opened.plain_ids([Chat("a", [{"role": "user", "content": text[17:-11]}])], prompt=False)
    assert ids == expected.encode(text, add_special_tokens=False).ids


def test_facts_tell_what_was_read_and_have_no_path(settings):
    facts = input_facts(settings, "oasst1")
    assert facts.items() >= {"input_data": "oasst1", "form": "chats", "kind": "mirror", "revision": None}.items()
    oasst1 = {"dataset": "OpenAssistant/oasst1", "english_only": True, "max_messages": 32}
    named = {f"oasst1_{name}": value for name, value in oasst1.items()}
    assert facts["settings"] == {"max_document_bytes": 1 << 26, **named}
    assert facts["fingerprint"] == fingerprint_of(settings, "oasst1")
    assert settings.source_root not in repr(facts)
    recorded = {"fingerprint": "databricks/databricks-dolly-15k@abc", "revision": "abc", "licence": "x"}
    facts = input_facts(Settings(), "dolly15k", recorded=recorded)  # is kept: nothing answers at HF_ENDPOINT
    assert (facts["kind"], facts["revision"], facts["fingerprint"]) == ("hub", "abc", recorded["fingerprint"])
    settings = replace(settings, sft="mine=a.jsonl", pretrain="notes=b.txt")
    with refused("E709", "--input-data nothing", "dolly15k, oasst1, mine", kind=FileNotFoundError):
        input_facts(settings, "nothing")
    with refused("E709", "--input-data notes"):
        input_facts(settings, "notes")


def test_rows_are_of_the_recorded_revision(settings, tokenizer):
    facts = {**input_facts(settings, "dolly15k"), "revision": "abc"}
    with asked_revisions() as asked:
        read(settings, "dolly15k", tokenizer, facts=facts)
    assert asked == ["abc"]


def test_chats_of_ones_own_have_a_name_or_a_path(settings, tokenizer, tmp_path):
    path = write_lines(tmp_path / "chats" / "a.jsonl", MESSAGES, SHAREGPT, PAIR)
    named = replace(settings, sft="mine=chats/*.jsonl")
    by_name, counters = read(named, "mine", tokenizer)
    assert [row.id for row in by_name] == ["a.jsonl#1", "s1", "a.jsonl#3"]
    assert counters == {"rows": 3}
    for pattern in (path, "chats", "chats/*.jsonl", str(tmp_path / "**" / "a.jsonl")):
        by_path, _ = read(settings, pattern, tokenizer)
        assert len(by_path) == 3
        for row, other in zip(by_name, by_path, strict=True):
            np.testing.assert_array_equal(row.input_ids, by_name[0].input_ids)  # one chat in three shapes
            np.testing.assert_array_equal(row.input_ids, other.input_ids)
            np.testing.assert_array_equal(row.loss_mask, other.loss_mask)


def test_the_fingerprint_goes_with_the_files_and_not_their_place(settings, tmp_path):
    here, there = (write_lines(tmp_path / folder / "a.jsonl", MESSAGES) for folder in ("here", "there"))
    prints = [input_facts(settings, path)["fingerprint"] for path in (here, there)]
    write_lines(Path(there), MESSAGES, PAIR)
    assert prints[0] == prints[1] != input_facts(settings, there)["fingerprint"]


def test_rows_with_ids_are_taken_as_they_are(settings, tokenizer, tmp_path):
    write_lines(tmp_path / "rows" / "a.jsonl", GIVEN, {**GIVEN, "id": 7}, {**GIVEN, "loss_mask": [0, 0, 0]})
    table = pa.table({"id": ["p"], "input_ids": [[4, 5]], "loss_mask": [[False, True]], "text": ["x"]})
    pq.write_table(table, tmp_path / "rows" / "b.parquet")
    facts = input_facts(settings, "rows")
    rows, counters = read(settings, "rows", tokenizer, facts=facts)
    assert facts["form"] == "rows"
    assert [row.id for row in rows] == ["a.jsonl#1", "7", "p"]
    assert rows[2].input_ids.tolist() == [4, 5] and rows[2].loss_mask.tolist() == [0, 1]
    assert counters == {"rows": 3, "no_supervised": 1}
    bare = open_tokenizer(str(kinds.write_tokenizer(tmp_path / "base", template=None)))  # they need no template
    assert len(read(settings, "rows", bare)[0]) == 3
    with refused("E407", tmp_path / "base", "chat template"):
        read(settings, write_lines(tmp_path / "d.jsonl", MESSAGES), bare)
    with refused("E709", "'7'", "token 2 of input_ids", "id 3, expected 0 <= id < 3"):
        read(settings, write_lines(tmp_path / "c.jsonl", {**GIVEN, "id": "7"}), tokenizer, vocab_size=3)


def test_chats_and_rows_do_not_mix(settings, tokenizer, tmp_path):
    for name, row in (("a", MESSAGES), ("b", GIVEN)):
        write_lines(tmp_path / "both" / f"{name}.jsonl", row)
    with refused("E709", "b.jsonl", "input_ids", "a.jsonl"):
        input_facts(settings, "both")
    within = write_lines(tmp_path / "c.jsonl", GIVEN, MESSAGES)
    with refused("E709", "c.jsonl#2", "input_ids"):
        read(settings, within, tokenizer)


def test_calls_of_tools_reach_a_targets_template_and_not_the_projects_own(settings, tmp_path):
    call = {"type": "function", "function": {"name": "rain", "arguments": {"of": "Spree"}}}
    talk = [
        {"role": "user", "content": "Does it rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It does."},
    ]
    path = write_lines(tmp_path / "a.jsonl", {"messages": talk, "tools": json.dumps([call])}, MESSAGES)
    folder = str(kinds.write_tokenizer(tmp_path / "t", template=plain(QWEN)))
    tokenizer = open_tokenizer(folder)
    (called, _), counters = read(settings, path, tokenizer)
    assert counters == {"rows": 2, "turns_without_loss": 1}
    assert kinds.supervised(tokenizer, called) == ["It does.<|im_end|>"]
    assert '{"name": "rain", "arguments": {"of": "Spree"}}' in tokenizer.decode(called.input_ids.tolist())
    add_sentinels(made_tokenizer("t5"), tmp_path / "own")
    rows, counters = read(settings, path, open_tokenizer(str(tmp_path / "own")))
    assert [row.id for row in rows] == ["a.jsonl#2"] and counters == {
        "rows": 1,
        "unknown_role": 1,
        "unknown_role:tool": 1,
    }


def test_rows_that_cannot_be_used_are_counted(settings, tokenizer, tmp_path):
    tool = {"conversations": [{"from": "alien", "value": "4"}]}
    path = write_lines(tmp_path / "a.jsonl", "{broken", {"other": 1}, tool, {"messages": []}, MESSAGES)
    rows, counters = read(settings, path, tokenizer)
    assert [row.id for row in rows] == ["a.jsonl#5"]
    lost = {"unreadable_row": 1, "missing_field": 1, "unknown_role": 1, "unknown_role:alien": 1, "malformed": 1}
    assert counters == {"rows": 1, **lost}
    given, counters = read(settings, write_lines(tmp_path / "b.jsonl", "{broken", GIVEN, "[]"), tokenizer)
    assert [row.id for row in given] == ["b.jsonl#2"]
    assert counters == {"rows": 1, "unreadable_row": 2}
    path = write_lines(tmp_path / "c.jsonl", {**PAIR, "output": "Yes<|im_end|>"}, PAIR)
    assert read(settings, path, tokenizer)[1] == {"rows": 1, "special_text": 1}
    assert read(replace(settings, on_special="text"), path, tokenizer)[1] == {"rows": 1, "special_text": 1}
    with refused("E305", "<|im_end|>"):
        read(replace(settings, on_special="raise"), path, tokenizer)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["{broken"], ["E303", "a.jsonl", "1 rows"]),
        ([], ["E709", "not one chat", "256"]),
        ([{"messages": MESSAGES["messages"][:1]}], ["E709", "not one chat", "1 no_supervised"]),
        ([{**GIVEN, "loss_mask": [0, 0, 0]}], ["E709", "not one row", "1 no_supervised"]),
    ],
)
def test_input_of_which_nothing_is_left_is_an_error(settings, tokenizer, tmp_path, lines, found):
    with refused(*found):
        read(settings, write_lines(tmp_path / "a.jsonl", *lines), tokenizer)


def test_what_is_excluded_stays_out(settings, tokenizer, tmp_path):
    listed = replace(settings, exclude=write_lines(tmp_path / "exclude.txt", "s1", "r2"))
    chats, counters = read(listed, write_lines(tmp_path / "a.jsonl", SHAREGPT, MESSAGES), tokenizer)
    assert ([row.id for row in chats], counters["excluded"]) == (["a.jsonl#2"], 1)
    given = write_lines(tmp_path / "b.jsonl", *({**GIVEN, "id": f"r{number}"} for number in (1, 2, 3)))
    rows, counters = read(listed, given, tokenizer)
    assert ([row.id for row in rows], counters["excluded"]) == (["r1", "r3"], 1)
    assert input_facts(listed, given)["exclude"]["entries"] == 2
    assert "exclude" not in input_facts(settings, given)
