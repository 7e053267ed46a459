"""What user-defined sources leave out of what they keep, and out of their folders: counted, resumed or not."""

from collections import Counter

import pyarrow as pa
import pytest
from support.data_files import lines, write, write_parquet
from support.errors import refused

from niels_gpt.data import open_files
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.local import iter_documents
from niels_gpt.data.upstream_rows import UpstreamRows

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
CHAT, OTHER = [USER, REPLY], [USER, {**REPLY, "content": "No."}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


def counted(folder, read):
    """Return what is counted by reading the folder, from the beginning and resumed behind each sample alike.

    read: takes the files, counters and a position.
    """
    found = open_files(str(folder), rows_only=read not in (texts, blocks))
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
    write(tmp_path / "a.jsonl", lines(*({**SAMPLE, name: 1} for name in names), {**SAMPLE, **dict.fromkeys(names, 1)}))
    assert counted(tmp_path, rollouts) == {**first, "unread_field:others": 8}


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


def blocks(found, counters, position):
    """Stream documents; the position of a block is moved to each of its documents, as a builder does."""
    options = {"field": None, "max_document_bytes": MAX_DOCUMENT_BYTES, "blocks": True}
    for item in iter_documents(found, source="own", counters=counters, position=position, **options):
        ends = dict(position)
        for at in range(len(getattr(item, "texts", [""]))):
            position.update({name: values[at] for name, values in getattr(item, "position", {}).items()})
            yield item
        position.update(ends)


def upstream(found, counters, position):
    rows = UpstreamRows("own", counters, position=position)
    return rows.documents(rows.of_files(found.files, folder=found.root))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"


@pytest.mark.parametrize("read", [texts, blocks, upstream])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "content": "b", "document": "c d"}, {"other_text_field": 1}),
        ({"content": "a", "document": "b c"}, {"other_text_field": 1}),
        ({"text": "", "content": "b\nc"}, {"other_text_field": 1}),
        *(({"text": "a", "content": other, "body": "b"}, {}) for other in ("a", " ", None, ["b"], "b.md")),
        ({"text": POINTER, "content": "b"}, {"git_lfs_pointer": 1}),
        ({"text": POINTER + "x" * 1000}, {}),
    ],
)
def test_what_is_left_out_of_a_row_of_text_is_counted(tmp_path, read, kind, row, expected):
    usual = [{**dict.fromkeys(row), "text": "usual"}] * 2
    write_rows(tmp_path, kind, [*usual, row, *usual], usual)
    write(tmp_path / "z.jsonl", lines({"text": "a"}))
    assert counted(tmp_path, read) == expected


def test_a_field_that_is_named_is_no_other_one(tmp_path):
    write(tmp_path / "a.jsonl", lines({"text": "a", "content": "b"}))
    counters = Counter()
    list(open_files(str(tmp_path)).texts(source="own", field="text", counters=counters))
    assert counters == {}


EMPTY = ["a.txt.gz", "a.md.zst", "b.jsonl", "b.jsonl.gz", "b.json", "b.json.zst"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(({name: b""}, {"empty_file": 1}) for name in EMPTY),
        ({"a.md": b""}, {}),  # a document without a word
        ({name: POINTER.encode() for name in ("a.md", "a.txt.gz")}, {"git_lfs_pointer": 2}),
    ],
)
def test_files_that_hold_no_document_are_counted(tmp_path, files, expected):
    for name, content in files.items():
        write(tmp_path / name).write_bytes(content)
    write(tmp_path / "0.txt", "one")
    write(tmp_path / "z.jsonl", lines({"text": "two"}, {"text": "three"}))
    for read in (texts, blocks):
        assert counted(tmp_path, read) == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.parquet"])
def test_rows_that_git_lfs_has_not_fetched_are_an_error_with_the_remedy(tmp_path, name):
    write(tmp_path / name).write_bytes(POINTER.encode())
    with refused("E302", tmp_path / name, "git lfs pull"):
        counted(tmp_path, texts)


@pytest.mark.parametrize(
    ("pattern", "number"),
    [(".", 4), ("**", 4), ("**/*", 4), ("*", 2), ("*.md", 1), ("**/*.jsonl", 2), ("0.txt", 0), ("0*", 0), ("in/*", 2)],
)
def test_resource_forks_of_macos_that_would_match_are_counted(tmp_path, pattern, number):
    for folder in ("", "in/", ".in/", "._in/"):
        for name in ("._x.md", "._x.jsonl", "._x.png", ".x.md", "0.txt", "x.md", "x.jsonl"):
            write(tmp_path / f"{folder}{name}", lines({"text": "a"}))
    found = open_files(pattern, base=tmp_path)
    assert not any(path.name.startswith(".") for path in found.files)
    counters, position = Counter(), {}
    for _ in range(2):  # the second time from the end
        list(texts(found, counters, position))
    assert counters["resource_fork"] == number
