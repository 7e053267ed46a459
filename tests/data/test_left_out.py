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


def write_rows(folder, kind, *files):
    """Write files of rows: in one file of parquet all rows have the same fields."""
    for number, rows in enumerate(files):
        if kind == "jsonl":
            write(folder / f"{number}.jsonl", lines(*rows))
        else:
            write_parquet(folder / f"{number}.parquet", pa.Table.from_pylist(rows))


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
    write_rows(tmp_path, kind, [row], [{"messages": CHAT}])
    assert counted(tmp_path, chats) == expected
    assert counted(tmp_path, raw_chats) == of_templates


def test_the_first_names_of_fields_are_counted_each_and_the_others_together(tmp_path):
    names = [*(f"f{number:02}" for number in range(25)), "no name\n", "x" * 41]
    write(tmp_path / "a.jsonl", lines(*(replied(**{name: 1}) for name in names), replied(**dict.fromkeys(names, 1))))
    first = {f"unread_field:f{number:02}": 2 for number in range(20)}
    assert counted(tmp_path, chats) == {**first, "unread_field:others": 8}


def rollouts(found, counters, position):
    return found.rollouts(source="own", counters=counters, position=position)


SAMPLE, GROUP = {"prompt_ids": [1], "completion_ids": [2]}, {"prompt_ids": [1], "completions": [{"ids": [2]}]}
DESCRIBED = ["prompt", "completion", "text", "messages", "question", "answer", "solution", "source", "dataset"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**SAMPLE, "routed_experts": [[1]], "weight_version": 3}, unread("routed_experts", "weight_version")),
        ({**SAMPLE, "id": "a", "data_source": "b", **dict.fromkeys(DESCRIBED, "x")}, {}),
        ({"prompt_tokens": [1], "response_tokens": [2], "finish_reason": "stop"}, unread("finish_reason")),
        ({"ids": [1], "logprob": [0.5]}, unread("logprob")),  # a slip of the pen
        (
            {**GROUP, "completions": [{"ids": [2], "score": 1.0, "text": "x", "stop": None}] * 2, "score": [1.0, 2.0]},
            unread("score"),  # once a row
        ),
        ({**GROUP, "completions": [{"ids": [2], "group": "a", "prompt_ids": [1]}]}, unread("group", "prompt_ids")),
        ({"ids": [1], "mask": [2], "x": 1}, {"malformed": 1}),
        ({**SAMPLE, "response_tokens": [2], "x": 1}, {"malformed": 1}),
        ({"prompt_tokens": [1], **SAMPLE}, {"malformed": 1}),
    ],
)
def test_what_is_left_out_of_a_row_of_rollouts_is_counted(tmp_path, kind, row, expected):
    group = [{"group": "q", **SAMPLE, "x": number or None} for number in range(2)]
    write_rows(tmp_path, kind, [row], group, [{"ids": [5]}])
    of_x = 1 if kind == "jsonl" else 2  # a column of parquet that is not read counts in each row
    assert counted(tmp_path, rollouts) == {**expected, "unread_field:x": of_x}
