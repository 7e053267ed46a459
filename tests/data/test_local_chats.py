"""User-defined sources of chats: what a row may look like, and what is counted."""

import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_files import lines, write, write_parquet
from support.errors import refused

from niels_gpt.data import ChatMessage, ChatSample, dolly, open_files

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
EXPECTED = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Yes?")]


def chats_of(folder, *rows, counters=None):
    """Stream the chats of the folder, with the rows, if any, written to rows.jsonl in it first."""
    if rows:
        write(folder / "rows.jsonl", lines(*rows))
    return list(open_files(str(folder), rows_only=True).chats(source="own", counters=counters))


def messages_of(row):
    with tempfile.TemporaryDirectory() as folder:
        (chat,) = chats_of(Path(folder), row)
    return chat.messages


def turns(row):
    return [(message.role, message.content) for message in messages_of(row)]


def reason(row):
    """Return the reason for which a row is dropped that stands before a good one; "" if it is a chat."""
    counters = Counter()
    with tempfile.TemporaryDirectory() as folder:
        kept = chats_of(Path(folder), row, {"messages": HELLO}, counters=counters)
    reasons = [name for name in counters if not name.startswith("unknown_role:")]
    assert len(kept) + sum(counters[name] for name in reasons) == 2
    return reasons[0] if reasons else ""


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HELLO},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]},
        {"conversation": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]},
        {"conversations": HELLO},
        {"prompt": "Hi", "response": "Yes?"},
        {"prompt": "Hi", "completion": "Yes?"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"instruction": "Hi", "response": "Yes?", "context": "", "category": "open_qa"},
        {"instruction": "Hi", "output": "Yes?", "input": None},
        {"question": "Hi", "answer": "Yes?"},
        {"system_prompt": "", "question": "Hi", "response": "Yes?"},
        {"messages": None, "conversations": HELLO, "system": None},  # parquet has every field in every row
        {"messages": 2, "prompt": "Hi", "completion": "Yes?"},
        {"prompt": "Hi", "response": None, "completion": "Yes?"},
    ],
)
def test_every_known_shape_is_the_same_chat(row):
    assert messages_of(row) == EXPECTED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": HELLO}, {"conversations": [{"from": "human", "value": "other"}]}),
        ({"conversations": HELLO}, {"conversation": [{"from": "human", "value": "other"}]}),
        ({"conversation": HELLO}, {"prompt": "other", "response": "other"}),
        ({"prompt": "Hi", "response": "Yes?"}, {"completion": "other"}),
        ({"prompt": "Hi", "completion": "Yes?"}, {"instruction": "other", "response": None, "output": "other"}),
        ({"instruction": "Hi", "response": "Yes?"}, {"output": "other"}),
        ({"instruction": "Hi", "output": "Yes?"}, {"question": "other", "answer": "other"}),
        ({"question": "Hi", "answer": "Yes?"}, {"response": "other"}),
    ],
)
def test_a_row_of_two_shapes_is_read_as_the_first(first, second):
    assert messages_of({**second, **first}) == EXPECTED


@pytest.mark.parametrize(
    ("expected", "row"),
    [
        *(("missing_field", row) for row in ({"text": "Hi"}, {}, {"prompt": "Hi"}, {"prompt": "Hi", "response": 5})),
        ("missing_field", {"messages": "[]"}),
        *(
            ("unknown_role", {"messages": [*HELLO, {"role": role, "content": None}]})
            for role in ("tool", "function", "observation", "", "developer", "User1")
        ),
        *(
            ("malformed", {"instruction": "Hi", "response": "Yes?", name: ["x"]})
            for name in ("context", "input", "system", "system_prompt")
        ),
    ],
)
def test_a_row_that_is_no_chat_is_refused_with_the_reason(expected, row):
    assert reason(row) == expected


@pytest.mark.parametrize("name", ["context", "input"])
def test_a_context_follows_the_instruction_as_in_dolly(tmp_path, name):
    row = {"instruction": "Sum up.", name: " A text.\n", "output": "One."}
    assert turns(row) == [("user", "Sum up.\n\ncontext:\n A text.\n"), ("assistant", "One.")]
    upstream = {"instruction": "Sum up.", "context": " A text.\n", "response": "One."}
    write(tmp_path / dolly.DATASET_ID / "train.jsonl", lines(upstream))
    (sample,) = dolly.iter_dolly_sft(source_root=str(tmp_path))
    assert messages_of(row) == sample.messages


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize("row", [{"conversations": HELLO}, {"messages": HELLO}, {"prompt": "Hi", "response": "Yes?"}])
def test_a_system_field_is_the_first_turn(row, name):
    assert messages_of({**row, name: "Be brief."}) == [ChatMessage("system", "Be brief."), *EXPECTED]
    assert messages_of({**row, name: " "}) == EXPECTED


def test_a_system_turn_that_repeats_the_field_comes_once_and_parts_of_text_are_joined():
    row = {"system": "Be brief.", "messages": [{"role": "system", "content": "Be brief."}, *HELLO]}
    assert turns(row) == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?")]
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you", "image_url": None}]
    assert turns({"messages": [{"role": "user", "content": parts, "tool_calls": None}]}) == [("user", "Hi you")]


ROLES = {
    "system": ["system"],
    "user": ["human", "user", "prompter"],
    "assistant": ["gpt", "assistant", "model", "bot", "chatgpt", "ai"],
}


@pytest.mark.parametrize(("name", "role"), [(name, role) for role in ROLES for name in ROLES[role]])
def test_roles_are_known_by_many_names_whatever_their_case(name, role):
    for spelling in (name, name.upper(), f" {name.title()}\n"):
        assert turns({"messages": [{"role": spelling, "content": "x"}]}) == [(role, "x")]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["Hi", "Yes?"],
        [*HELLO, None],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "text": None}]}],
        [{"role": "user", "content": ["Hi"]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}],
    ],
)
def test_turns_that_are_no_texts_make_a_chat_malformed(messages):
    assert reason({"messages": messages}) == "malformed"
    assert reason({"prompt": messages, "completion": []}) == "malformed"


def test_blank_turns_and_chats_without_an_answer_are_kept_as_they_are(tmp_path):
    rows = [{"prompt": " \n", "response": ""}, {"messages": [{"role": "user", "content": "Hi"}]}]
    assert [sample.messages for sample in chats_of(tmp_path, *rows)] == [
        [ChatMessage("user", " \n"), ChatMessage("assistant", "")],
        [ChatMessage("user", "Hi")],
    ]


@given(
    st.dictionaries(
        st.sampled_from(["messages", "conversations", "prompt", "completion", "response", "system", "input"]),
        st.recursive(
            st.none() | st.integers() | st.sampled_from(["user", "gpt", "text", "tool"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["role", "from", "content", "value", "type", "text"]), inner, max_size=4
                )
            ),
        ),
    )
)
def test_any_row_is_a_chat_or_refused_with_a_reason(row):
    if why := reason(row):
        assert why in ("missing_field", "malformed", "unknown_role")
    else:
        messages = messages_of(row)
        assert messages and all(message.role in ("system", "user", "assistant") for message in messages)


def test_a_chat_has_its_place_and_id(tmp_path):
    write(tmp_path / "a.json", json.dumps([{"conversations": HELLO, "id": "identity_0"}, {"messages": HELLO}]))
    write(tmp_path / "b/é.jsonl", b"\n" + lines({"prompt": "Hi", "response": "Yes?", "id": 12}))
    assert chats_of(tmp_path) == [
        ChatSample(EXPECTED, "own", {"index": 0, "path": "a.json", "row": 1, "id": "identity_0"}),
        ChatSample(EXPECTED, "own", {"index": 1, "path": "a.json", "row": 2}),
        ChatSample(EXPECTED, "own", {"index": 2, "path": "b/é.jsonl", "row": 2, "id": "12"}),
    ]


def test_what_is_dropped_is_counted_and_the_first_of_each_kind_is_told(tmp_path, caplog, counters):
    tool = {"messages": [*HELLO, {"role": "tool", "content": "4"}]}
    other = {"conversations": [{"from": "function_call", "value": "{}"}]}
    swapped = [{"messages": [{"role": f"{word} you", "content": "user"}]} for word in ("Thank", "See", "Hear")]
    rows = [tool, {"messages": HELLO}, tool, other, {"messages": []}, {"text": "x"}, {"text": "y"}, HELLO, *swapped]
    with caplog.at_level(logging.WARNING):
        samples = chats_of(tmp_path, *rows, counters=counters)
    assert [sample.meta["row"] for sample in samples] == [2]
    roles = {"unknown_role": 6, "unknown_role:tool": 2, "unknown_role:function_call": 1, "unknown_role:others": 3}
    assert counters == {**roles, "malformed": 1, "missing_field": 2, "unreadable_row": 1}
    where = f"{tmp_path}/rows.jsonl"
    logged = [message.removesuffix("; more like it are counted only") for message in caplog.messages]
    assert logged[:4] == [
        f"{where}, row 1: found a turn of role 'tool'. Counted as unknown_role",
        f"{where}, row 4: found a turn of role 'function_call'. Counted as unknown_role",
        f"{where}, row 5: found a list without turns. Counted as malformed",
        f"{where}, row 6: found the fields text. Counted as missing_field",
    ]
    assert logged[4].startswith(f"{where}, line 8: expected a JSON object, found")
    assert logged[5:] == [
        f"{where}, row 9: found a turn of role 'Thank you'. Counted as unknown_role",
        f"{tmp_path}: and 3 more, counted as unknown_role",
        f"{tmp_path}: and 1 more, counted as missing_field",
    ]


def test_rows_without_one_chat_are_an_error_that_names_fields_and_shapes(tmp_path):
    with refused("E303", "own: ", "2 rows", "(1 malformed, 1 missing_field)", "row 1", "title, body", "messages, "):
        chats_of(tmp_path, {"title": "x", "body": "y"}, {"messages": []})
    (tmp_path / "rows.jsonl").write_text("")
    assert chats_of(tmp_path) == []  # no rows are no error


def test_chats_in_parquet_are_read(tmp_path, counters):
    write_parquet(tmp_path / "a.parquet", {"messages": [HELLO, [], HELLO], "id": ["x", "y", "z"]})
    shares = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}], None]
    two_shapes = {"conversations": shares, "prompt": [None, "Hi"], "response": [None, "Yes?"]}
    write_parquet(tmp_path / "b.parquet", two_shapes)
    samples = chats_of(tmp_path, counters=counters)
    assert [sample.messages for sample in samples] == [EXPECTED] * 4
    places = [("a.parquet", 1, "x"), ("a.parquet", 3, "z"), ("b.parquet", 1, None), ("b.parquet", 2, None)]
    assert [(s.meta["path"], s.meta["row"], s.meta.get("id")) for s in samples] == places
    assert counters == {"malformed": 1}


def test_a_column_beside_a_chat_in_parquet_does_no_harm(tmp_path):
    import pyarrow as pa

    no_date = pa.array([10**7], pa.date32())
    write_parquet(tmp_path / "a.parquet", {"when": no_date, "messages": [HELLO], "system": ["Be brief."], "id": [5]})
    (sample,) = chats_of(tmp_path)
    assert sample.messages == [ChatMessage("system", "Be brief."), *EXPECTED] and sample.meta["id"] == "5"
    write_parquet(tmp_path / "a.parquet", {"when": no_date, "title": ["x"]})
    with refused("E303", "row 1", "when, title"):
        chats_of(tmp_path)


def test_a_chat_written_as_a_string_is_told(tmp_path, caplog):
    assert len(chats_of(tmp_path, {"messages": json.dumps(HELLO)}, {"messages": HELLO})) == 1
    assert "row 1: found a value of type str in the field messages. Counted as missing_field" in caplog.text
