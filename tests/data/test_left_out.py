"""What user-defined sources leave out of what they keep, and out of their folders: counted, resumed or not."""

from collections import Counter

import pyarrow as pa
import pytest
from support.data_files import lines, write, write_parquet

from niels_gpt.data import open_files

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
CHAT, OTHER = [USER, REPLY], [USER, {**REPLY, "content": "No."}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


def counted(folder, read):
    """Return what is counted by reading the folder, from the beginning and resumed behind each sample alike.

    read: takes the files, counters and a position.
    """
    found = open_files(str(folder), rows_only=read is not texts)
    counters, position, states = Counter(), {}, []
    for _ in read(found, counters, position):
        states.append((Counter(counters), dict(position)))
    for before, place in states:
        list(read(found, before, place))
        assert before == counters
    return dict(counters)


def texts(found, counters, position):
    return found.texts(source="own", counters=counters, position=position)


def chats(found, counters, position):
    return found.chats(source="own", counters=counters, position=position)


def raw_chats(found, counters, position):
    return found.chats(source="own", counters=counters, position=position, raw=True)


def replied(**fields):
    return {"messages": [USER, {**REPLY, **fields}]}


def unread(*names):
    return {f"unread_field:{name}": 1 for name in names}


CONTRADICTS = {"contradicting_shape": 1}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "expected", "of_templates"),
    [
        *(
            (replied(**{name: "Think."}), unread(name), {})
            for name in ("reasoning_content", "reasoning", "thinking", "name", "tool_call_id", "x")
        ),
        (replied(function_call={"name": "rain"}), unread("function_call"), {}),
        ({"messages": [{**USER, "x": 1}, {**REPLY, "x": 2, "y": [0]}]}, unread("x", "y"), {}),  # once a chat
        (replied(x=" ", y=[], z=[{"of": None}], tool_calls=[], name=None), {}, {}),
        *(({"messages": CHAT, name: ["x"]}, unread(name), unread(name)) for name in ("system_message", "history")),
        *(({"messages": CHAT, name: [{"name": "rain"}]}, unread(name), {}) for name in ("tools", "functions")),
        ({"messages": CHAT, "tools": "[]", "history": [], "system_message": None, "score": 1, "source": "x"}, {}, {}),
        ({"messages": CHAT, "conversations": SHAREGPT, "prompt": "Hi", "response": "Yes?"}, {}, {}),
        ({"messages": CHAT, "conversations": SHAREGPT, "system": "Brief."}, {}, {}),
        ({"messages": CHAT, "conversation": [{"role": "user"}], "prompt": "Hi", "input": 5}, {}, {}),  # no chats
        ({"messages": CHAT, "prompt": "Hi", "response": "Yes?", "input": 5}, {}, {}),
        *(
            (row, CONTRADICTS, CONTRADICTS)
            for row in (
                {"messages": CHAT, "conversations": OTHER},
                {"messages": CHAT, "prompt": "Hi", "response": "No."},
                {"instruction": "Hi", "response": "Yes?", "output": "No."},
                {"question": "Hi", "answer": "Yes?", "response": "Yes.", "instruction": "Hi", "output": "No."},
                {"messages": CHAT, "prompt": CHAT[:1], "completion": OTHER[1:]},
            )
        ),
        *((replied(weight=weight), {}, {}) for weight in (None, 1, 1.0)),
        ({"messages": [{**USER, "weight": 0}, REPLY]}, {}, {}),
        *((replied(weight=weight, x=1), {"weight_0": 1}, {}) for weight in (0, 0.0)),
        *((replied(weight=weight), {"malformed": 1}, {"malformed": 1}) for weight in (0.5, 2, "1", True, [1])),
    ],
)
def test_what_is_left_out_of_a_chat_is_counted(tmp_path, kind, row, expected, of_templates):
    for name, fields in (("a", row), ("b", {"messages": CHAT})):
        if kind == "jsonl":
            write(tmp_path / f"{name}.jsonl", lines(fields))
        else:
            write_parquet(tmp_path / f"{name}.parquet", pa.Table.from_pylist([fields]))
    assert counted(tmp_path, chats) == expected
    assert counted(tmp_path, raw_chats) == of_templates


def test_the_first_names_of_fields_are_counted_each_and_the_others_together(tmp_path):
    names = [*(f"f{number:02}" for number in range(25)), "no name\n", "x" * 41]
    write(tmp_path / "a.jsonl", lines(*(replied(**{name: 1}) for name in names), replied(**dict.fromkeys(names, 1))))
    first = {f"unread_field:f{number:02}": 2 for number in range(20)}
    assert counted(tmp_path, chats) == {**first, "unread_field:others": 8}
