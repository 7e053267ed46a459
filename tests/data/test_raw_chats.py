"""Chats for another chat template: roles, calls of tools and further fields as their rows have them."""

import json
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_files import lines, raw_chat_of_row, write, write_parquet

from niels_gpt.data import RawChat, open_files

CALL = {"id": "a1", "type": "function", "function": {"name": "rain", "arguments": {"of": "Spree", "unit": None}}}
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Does "}, {"type": "text", "text": "it rain?"}], "name": "x"},
    {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1", "name": "rain", "content": "4"},
    {"role": "assistant", "content": "It does.", "weight": 1, "tool_calls": []},
]
READ = [
    *CHAT[:2],
    {"role": "assistant", "reasoning_content": "Look.", "tool_calls": [CALL]},
    CHAT[3],
    {"role": "assistant", "content": "It does.", "weight": 1},
]


def read(folder, counters=None):
    chats = open_files(str(folder), rows_only=True).chats(source="own", counters=counters, raw=True)
    return [chat for chat in chats if isinstance(chat, RawChat)]


def read_row(folder, row):
    write(folder / "row.jsonl", lines(row))
    (chat,) = read(folder)
    return chat.messages, chat.tools


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_a_row_is_read_as_it_is(tmp_path, tools):
    write(tmp_path / "a.jsonl", lines({"messages": CHAT, "tools": tools, "id": "one"}))
    (chat,) = read(tmp_path)
    assert (chat.messages, chat.tools, chat.meta["id"]) == (READ, [TOOL], "one")
    assert chat.texts == ["Be brief.", "Does it rain?", "4", "It does."]


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", []])
def test_no_tools_are_none(tmp_path, tools):
    assert read_row(tmp_path, {"messages": CHAT, "tools": tools}) == (READ, None)


def test_the_null_fields_of_parquet_are_absent_at_every_depth(tmp_path):
    rows = [{"messages": READ[2:], "tools": [TOOL]}, {"messages": [{"role": "user", "content": "Hi"}], "tools": None}]
    write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    one, two = read(tmp_path)
    called = {**CALL, "function": {"name": "rain", "arguments": {"of": "Spree"}}}
    assert one.messages == [{**READ[2], "tool_calls": [called]}, *READ[3:]] and one.tools == [TOOL]
    assert (two.messages, two.tools) == ([{"role": "user", "content": "Hi"}], None)


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT},
        {"prompt": "Hi", "completion": "Yes?"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"instruction": "Hi", "output": "Yes?", "input": ""},
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "Model", "content": "Yes?"}]},
        {"messages": None, "conversation": TURNS, "system": " "},
    ],
)
def test_other_shapes_are_roles_and_contents(tmp_path, row):
    assert read_row(tmp_path, row) == (TURNS, None)
    with_system = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert read_row(tmp_path, {**row, "system": "Be brief."}) == (with_system, None)


def test_calls_of_sharegpt_and_of_openais_earlier_form_are_calls(tmp_path):
    function = {"name": "rain", "arguments": {"of": "Spree"}}
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": "4"}
    given = [{"from": "function_call", "value": json.dumps(function)}, {"from": "observation", "value": "4"}]
    assert read_row(tmp_path, {"conversations": [*SHAREGPT, *given]})[0] == [*TURNS, calls, result]
    twice = {"conversations": [{"from": "function_call", "value": json.dumps([function] * 2)}]}
    assert read_row(tmp_path, twice)[0] == [{"role": "assistant", "tool_calls": calls["tool_calls"] * 2}]
    earlier = {"role": "assistant", "content": "", "function_call": function}
    row = {"messages": [earlier], "functions": [TOOL["function"]]}
    assert read_row(tmp_path, row) == ([{"content": "", **calls}], [TOOL])


def wrong(*turns, **fields):
    return {"messages": list(turns), **fields}


REFUSED = {
    "not_text": [
        wrong({"role": "user", "content": [{"type": "image", "url": "a"}]}),
        wrong({"role": "user", "content": ["Hi"]}),
        wrong({"role": "user", "content": [{"type": "text", "text": None}]}),
    ],
    "malformed": [
        wrong(),
        wrong("Hi"),
        wrong({"role": 4, "content": "Hi"}),
        wrong({"role": "user", "content": None}),
        wrong({"role": "assistant", "content": 4}),
        wrong({"role": "assistant", "content": None, "tool_calls": []}),
        wrong(*TURNS, tools=4),
        wrong(*TURNS, tools="[{]"),
        wrong(*TURNS, tools=[4]),
        wrong(*TURNS, tools="[" * 100_000),
        wrong(*TURNS, tools=["4"]),
        {"conversations": [{"from": "function_call", "value": "rain()"}]},
        {"conversations": [{"from": "function_call", "value": "[]"}]},
        {"conversations": [{"from": "function_call", "value": 4}]},
    ],
    "unknown_role": [{"conversations": [{"from": "alien", "value": "Hi"}]}],
    "missing_field": [{"text": "Hi"}, {"messages": "Hi"}],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_chat_is_counted(tmp_path, reason):
    counters = Counter()
    write(tmp_path / "a.jsonl", lines(*REFUSED[reason], {"messages": TURNS}))
    assert [chat.messages for chat in read(tmp_path, counters)] == [TURNS]
    assert counters[reason] == len(REFUSED[reason])


ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("role", "from", "content", "value", "tool_calls", "function_call")
TURN = st.dictionaries(st.sampled_from(NAMES), ANY | st.sampled_from(["user", "gpt", "tool", "function_call"])) | ANY


@given(st.fixed_dictionaries({"messages": st.lists(TURN, max_size=3) | ANY, "tools": ANY}), st.booleans())
def test_any_row_is_a_chat_of_roles_or_is_refused(row, sparse):
    found = raw_chat_of_row(row, sparse=sparse)
    if found is None:
        return
    messages, tools = found
    assert messages and all(isinstance(each["role"], str) and None not in each.values() for each in messages)
    assert tools is None or all(isinstance(tool, dict) for tool in tools)
