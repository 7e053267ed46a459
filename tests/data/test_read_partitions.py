"""What a partition reads, by the rule of data/files/part.py: all partitions together have each document once."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as checks
from hypothesis import strategies as st
from support.data_files import invalid_utf8, lines, write, write_parquet
from support.errors import refused
from support.readings import (
    FILES,
    LIMIT,
    Reading,
    Seen,
    found_source,
    nonzero,
    parsed_lines,
    put,
    read_in_small_batches,
    state_of_source,
)

from niels_gpt.cache import sha256_file
from niels_gpt.data.types import source_id
from niels_gpt.documents import Partition
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.settings import Settings

TOTALS = (2, 3, 8)


def readings(given, name, total):
    return [Reading(given, name, partition=(number, total)) for number in range(total)]


def check_parts(given, name, total):
    """Compare the partitions with the whole, and what is behind their middle documents with a killed build's rest."""
    whole, parts = Reading(given, name), readings(given, name, total)
    found = [each for part in parts for each in part.seen]
    texts, of_whole = (Counter((each.split, each.text) for each in seen) for seen in (found, whole.seen))
    if whole.error:  # of one file: the partitions that do not read it go on to others
        assert texts >= of_whole and (texts == of_whole or any(part.error for part in parts))
    else:
        assert texts == of_whole
        assert sum((Counter(part.counters) for part in parts), Counter()) == Counter(nonzero(whole.counters))
    for number, part in enumerate(parts):
        middle = len(part.seen) // 2
        if part.seen and part.seen[0].position:
            behind = part.seen[middle]
            rest = Reading(given, name, behind=behind, partition=(number, total))
            assert rest.seen == part.seen[middle + 1 :] and nonzero(rest.counters) == nonzero(part.counters)
    return parts


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    read_in_small_batches(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


def own(folder, **more):
    return Settings(pretrain=f"own={folder}", max_document_bytes=LIMIT, **more)


def test_rows_of_two_files_in_three_partitions_on_paper(folder):
    """Blank and unreadable lines are units too, so line u of file f, both from 0, is in partition (u + f) mod 3."""
    for name in "ab":
        content = [{"text": f"{name}{number}"} for number in range(1, 7)]
        write(folder / "paper" / f"{name}.jsonl", lines(*content[:2]) + b"\nno row\n" + lines(*content[4:]))
    parts = check_parts(own(folder / "paper"), "own", 3)
    texts = [[each.text for each in part.seen] for part in parts]
    assert texts == [["a1", "b6"], ["a2", "a5", "b1"], ["a6", "b2", "b5"]]
    assert [each.id for each in parts[0].seen] == ["a.jsonl#1", "b.jsonl#6"]
    assert [nonzero(part.counters) for part in parts] == [{"unreadable_row": 1}, {"unreadable_row": 1}, {}]


@pytest.mark.parametrize(
    ("group_size", "expected"), [(2, [[1, 2, 7, 8], [3, 4, 9], [5, 6]]), (5, [[1, 4, 7], [2, 5, 8], [3, 6, 9]])]
)
def test_row_groups_of_a_parquet_file_go_round_where_there_are_enough(folder, group_size, expected):
    shutil.rmtree(folder / "groups", ignore_errors=True)
    table = {"text": [f"row {number}" for number in range(1, 10)]}
    write_parquet(folder / "groups" / "a.parquet", table, row_group_size=group_size)
    parts = check_parts(own(folder / "groups"), "own", 3)
    assert [[int(each.text.removeprefix("row ")) for each in part.seen] for part in parts] == expected


def test_row_groups_of_other_partitions_are_not_read(folder):
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    texts = [f"{number:_>300}" for number in range(12)]
    path = write_parquet(folder / "damaged" / "a.parquet", {"text": texts}, row_group_size=4, compression="gzip")
    data = bytearray(path.read_bytes())
    offset = pa.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[offset + 20 : offset + 80] = bytes(60)
    path.write_bytes(data)
    errors = [bool(reading.error) for reading in readings(own(folder / "damaged"), "own", 3)]
    assert errors == [False, True, False]


ITEMS = [*({"text": f"item {number}"} for number in range(9)), [], "", {"text": "y" * LIMIT}]
POINTER = "version https://git-lfs.github.com/spec/v1\n"
LINES = lines({"text": "a", "id": "one"}, {"text": "x" * LIMIT}, {"content": 7}) + b"\n\xff\n"
LINES += lines({"text": POINTER}, {"text": "a", "content": "b c", "id": "two"})
MIXED = [
    (".jsonl", b"\xef\xbb\xbf" + LINES),
    (".jsonl.gz", lines(*({"text": f"packed {number}"} for number in range(20)))),
    (".json", json.dumps(ITEMS).encode()),
    (".parquet", (pa.table({"text": [f"group {n}" for n in range(11)]}), {"row_group_size": 11})),
    (".parquet", (pa.table({"text": [f"many {n}" for n in range(20)], "id": [*range(20)]}), {"row_group_size": 2})),
    (".parquet", (pa.table({"text": invalid_utf8(b"\xff", b"good", b"a\xffb", b"z" * 700)}), {"row_group_size": 4})),
    (".txt", b"a book\n\xff"),
    (".md", "a note".encode("utf-16")),
    (".jsonl", "".join(json.dumps({"text": f"wide {n}"}) + "\n" for n in range(7)).encode("utf-16")),
]


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("number", [1, 3, len(MIXED)])
def test_files_of_all_formats(folder, total, number):
    put(folder / "own", MIXED[:number])
    write(folder / "own" / "picture.png", b"no text")
    (folder / "own" / "link.txt").symlink_to("0.jsonl")
    write(folder / "own" / "empty.jsonl")
    write(folder / "own" / "._0.jsonl", b"fork")
    given = own(folder / "own")
    whole = Reading(given, "own")
    counted = ["links_not_followed", "other_files", "byte_order_mark", "unreadable_row", "too_large", "missing_field"]
    counted += ["empty_file", "resource_fork", "git_lfs_pointer", "other_text_field"]
    assert all(whole.counters[reason] for reason in counted)
    names = [each.id for part in check_parts(given, "own", total) for each in part.seen]
    assert sorted(names) == sorted(each.id for each in whole.seen) and len(set(names)) == len(names)


@pytest.fixture(scope="module")
def mirrored(folder):
    """A mirror of all sources of documents, with a fault of each kind."""
    root = folder / "mirror"
    home = root / "HuggingFaceFW/fineweb-edu"
    put(home, [file for file in MIXED if file[0] not in (".txt", ".md", ".json")])
    wiki = root / "Salesforce/wikitext"
    write(wiki / "train-0.txt", b" = A = \n\n one\n" + b"w" * LIMIT + b"\n \xff\n two\n three\n")
    write(wiki / "train-1.jsonl", lines(*({"text": f" line {number}\n"} for number in range(5)), {"text": " "}))
    write(wiki / "validation.txt", b" v1\n v2\n \n v3\n")
    for number in range(30):
        write(root / f"roam/{number % 4}/{number}.md", f"note {number % 20}")
    write(root / "roam/bad.md", b"\xff note")
    write(root / "roam/large.md", b"n" * LIMIT + b"!")
    for number in range(5):
        write(root / f"gutenberg/{number}.txt", f"book {number}")
    write(root / "gutenberg/large.txt", b"b" * LIMIT + b"!")
    write(root / "gutenberg/more.jsonl", lines(*({"text": f"row of books {number}"} for number in range(9)), {"no": 1}))
    for linked in ("roam/l.md", "gutenberg/l.txt", "Salesforce/wikitext/l.txt", "HuggingFaceFW/fineweb-edu/l.jsonl"):
        (root / linked).symlink_to("nowhere")
    for name in ("roam/._l.md", "gutenberg/._l.txt", "Salesforce/wikitext/._l.txt"):
        write(root / name, b"a fork")
    write(home / "._l.jsonl")
    for name in (home / "e.jsonl", wiki / "train-2.jsonl", root / "gutenberg/e.jsonl"):
        write(name)
    for name in ("roam/p.md", "gutenberg/p.txt"):
        write(root / name, POINTER)
    return Settings(source_root=str(root), max_document_bytes=LIMIT)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("name", ["fineweb_edu", "wikitext", "roam", "gutenberg"])
def test_built_in_sources_of_a_mirror(mirrored, name, total):
    found = [each for part in check_parts(mirrored, name, total) for each in part.seen]
    ids = [(each.split, each.id) for each in found]
    assert len(set(ids)) == len(ids)
    counted = {"fineweb_edu": ["empty_file", "git_lfs_pointer", "other_text_field"], "wikitext": ["empty_file"]}
    counted |= {"roam": ["git_lfs_pointer"], "gutenberg": ["empty_file", "git_lfs_pointer"]}
    counters = Reading(mirrored, name).counters
    assert {reason: counters[reason] for reason in counted[name]} == dict.fromkeys(counted[name], 1)
    assert counters["resource_fork"] == 1
    kept = {"fineweb_edu": {"one", "two", *map(str, range(20))}, "gutenberg": {f"{number}.txt" for number in range(5)}}
    kept["roam"] = {each.id for each in Reading(mirrored, "roam").seen}
    assert {each.id for each in found if "#" not in each.id} == kept.get(name, set())


def test_a_row_without_an_id_is_named_by_its_file_and_its_number_there(mirrored):
    root = Path(mirrored.source_root)
    for part in readings(mirrored, "wikitext", 2):
        for each in part.seen:
            name, _, number = each.id.rpartition("#")
            if name.endswith(".txt"):
                found = (root / "Salesforce/wikitext" / name).read_bytes().splitlines(keepends=True)[int(number) - 1]
                assert found.decode(errors="replace") == each.text
    books = [each for part in readings(mirrored, "gutenberg", 3) for each in part.seen]
    assert {each.id for each in books if each.text == "row of books 3"} == {"more.jsonl#4"}
    assert {each.id for each in books if each.text == "book 3"} == {"3.txt"}


def test_a_partition_of_bad_rows_alone_ends_without_an_error(folder):
    put(folder / "bad", [(".jsonl", b"no row\n" + lines({"text": "good"}))])
    bad, good = readings(own(folder / "bad"), "own", 2)
    assert not bad.error and not bad.seen and bad.counters == {"unreadable_row": 1}
    assert [each.text for each in good.seen] == ["good"]


def test_lines_of_other_partitions_are_not_parsed(folder):
    put(folder / "parsed", [(".jsonl", lines(*({"text": f"line {number}"} for number in range(10))))])
    with parsed_lines() as parsed:
        assert len(Reading(own(folder / "parsed"), "own", partition=(1, 5)).seen) == len(parsed) == 2


def test_a_list_of_excluded_documents_counts_in_their_partitions(folder):
    rows = [{"text": f"text {number}", **({"id": f"id-{number}"} if number % 2 else {})} for number in range(9)]
    put(folder / "own", [(".jsonl", lines(*rows)), (".txt", b"a book")])
    listed = write(folder / "exclude.txt", "id-3\n1.txt\n")
    parts = check_parts(own(folder / "own", exclude=str(listed)), "own", 3)
    assert sum(part.counters["excluded"] for part in parts) == 2


def test_a_snapshot_is_the_hubs_only_without_partitions_and_trains_the_same_tokenizer(folder):
    home = folder / "snapshot" / "HuggingFaceFW/fineweb-edu/CC-MAIN-2024-10"
    path = write(home / "train-00000.jsonl.gz", lines({"text": "a"}, {"text": "b"}))
    files = [{"name": path.name, "split": "train", "rows": 2, "sha256": sha256_file(path)}]
    about = {"dataset": "HuggingFaceFW/fineweb-edu", "config": "CC-MAIN-2024-10", "revision": "0" * 40}
    about |= {"shuffle": {"seed": 42, "buffer": 10_000}, "finished": True, "ended": True, "text_bytes": 2}
    about |= {"format_version": 1, "licence": "mine", "attribution": "me", "datasets_version": "5"}
    write(home / "snapshot.json", json.dumps({**about, "files": files}))
    given = [Settings(source_root=str(folder / "snapshot"), partitions=total) for total in (1, 2)]
    assert [found_source(each, "fineweb_edu").kind for each in given] == ["hub", "mirror"]
    assert {state_of_source(each, "fineweb_edu") for each in given} == {f"HuggingFaceFW/fineweb-edu@{'0' * 40}"}


# --- chats, trees and groups ------------------------------------------------------------------------------------------

FORMS = {"sft": sources.chats, "raw": sources.template_chats, "rollouts": sources.sequences}


def read_items(given, name, form, partition=None, behind=None):
    """Return what a partition reads, each with counters and position as of it, and the counters at the end."""
    counters, position = Counter[str](), dict[str, int]()
    stream = FORMS[form](given, resolve_source(given, name), None, counters, position, partition)
    if behind is not None:  # as a builder does, before the first one
        counters.clear()
        counters.update(behind.counters)
        position.update(behind.position)
    seen = []
    for item in stream:
        if form == "rollouts":
            ids, text = source_id(item), repr([(each.ids.tolist(), each.advantage) for each in item.samples])
        else:
            ids, text = (item[0], repr(item[1])) if form == "sft" else (item.name, repr((item.messages, item.tools)))
        seen.append(Seen(None, text, ids, nonzero(counters), dict(position)))
    return seen, nonzero(counters)


def check_items(given, name, form, total, *, has_ids=True):
    """Compare partitions with the whole, items and counters, and the rest behind each item with a killed build's."""
    whole, counted = read_items(given, name, form)
    parts = [read_items(given, name, form, Partition(number, total)) for number in range(total)]
    found = [each for seen, _ in parts for each in seen]
    assert Counter(each.text for each in found) == Counter(each.text for each in whole) and len(found) > 2
    assert not has_ids or sorted(each.id for each in found) == sorted(each.id for each in whole)
    assert sum((Counter(counters) for _, counters in parts), Counter()) == Counter(counted)
    for number, (seen, counters) in enumerate(parts):
        for at, behind in enumerate(seen):
            if behind.position:
                rest = read_items(given, name, form, Partition(number, total), behind)
                assert rest == (seen[at + 1 :], counters)
    return whole, parts


def _chat(number, role="user"):
    return {"messages": [{"role": role, "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]}


CHATS = [
    (".jsonl", lines(*map(_chat, range(7)), _chat(7, "critic"), {"none": 1}) + b"no row\n" + lines(_chat(8, "tool"))),
    (".jsonl.gz", lines(*map(_chat, range(10, 21)))),
    (".json", json.dumps([*map(_chat, range(30, 36)), 5]).encode()),
    (".parquet", (pa.Table.from_pylist([_chat(number) for number in range(40, 52)]), {"row_group_size": 2})),
]


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("form", ["sft", "raw"])
@pytest.mark.parametrize("number", [1, len(CHATS)])
def test_chats_of_all_formats(folder, number, form, total):
    put(folder / "chats", CHATS[:number])
    write(folder / "chats" / "picture.png", b"no row")
    (folder / "chats" / "link.jsonl").symlink_to("0.jsonl")
    write(folder / "chats" / "empty.jsonl")
    given = Settings(sft=f"own={folder}/chats", max_document_bytes=LIMIT)
    _, parts = check_items(given, "own", form, total)
    counted = sum((Counter(counters) for _, counters in parts), Counter())
    assert counted["links_not_followed"] == counted["other_files"] == counted["empty_file"] == 1
    assert counted["unreadable_row"] >= 1 and (form == "raw" or counted["unknown_role:critic"] == 1)


@pytest.fixture(scope="module")
def talks(folder):
    """A mirror of the sources of chats, with rows that are dropped."""
    rows = [{"instruction": f"do {n}", "context": "", "response": f"done {n}", "category": "x"} for n in range(23)]
    rows[5]["response"], rows[9]["instruction"] = " ", 7
    write(folder / "talks/databricks/databricks-dolly-15k/train.jsonl", lines(*rows) + b"no row\n")
    messages = [
        {"message_id": f"{tree}-{at}", "parent_id": f"{tree}-{at - 1}" if at else None, "message_tree_id": str(tree)}
        | {"text": f"text {tree} {at}", "role": ("prompter", "assistant")[at % 2], "lang": "en" if tree % 5 else "de"}
        for at in range(3)
        for tree in range(13)
    ]
    orphan = {**messages[-1], "message_id": "lost", "parent_id": "nobody"}
    write(folder / "talks/OpenAssistant/oasst1/train-0.jsonl", lines(*messages[:20], {"message_id": "no tree"}))
    write(folder / "talks/OpenAssistant/oasst1/validation-0.jsonl", b"no row\n" + lines(*messages[20:], orphan))
    return Settings(source_root=str(folder / "talks"), max_document_bytes=LIMIT)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("name", ["dolly15k", "oasst1"])
def test_built_in_chats_of_a_mirror(talks, name, total):
    whole, parts = check_items(talks, name, "sft", total, has_ids=name == "oasst1")
    counted = sum((Counter(counters) for _, counters in parts), Counter())
    expected = {"dolly15k": {"blank_field": 1, "missing_field": 1, "unreadable_row": 1}}
    expected["oasst1"] = {"missing_field": 1, "unreadable_row": 1, "orphan": 1, "not_english": 9}
    assert counted == expected[name]
    if name == "oasst1":  # whole trees
        trees = [{each.id.partition("/")[0] for each in seen} for seen, _ in parts]
        assert sum(map(len, trees)) == len(set().union(*trees)) == len({each.id.partition("/")[0] for each in whole})


def _groups(first, count):
    for number in range(first, first + count):
        for sample in range(number % 3 + 1):  # rows that follow each other are one group
            yield {
                "group": f"g{number}",
                "prompt_ids": [1, number],
                "completion_ids": [sample],
                "advantage": 0.5,
                "x": 1,
            }
        yield from [{"group": "bad", "prompt_ids": "lost", "completions": []}] * (number % 4 == 1)


ROLLOUTS = [
    (".jsonl", lines(*_groups(0, 9)) + b"no row\n" + lines(*_groups(9, 3), {"other": 1})),
    (".jsonl.gz", b"\xef\xbb\xbf" + lines(*_groups(20, 7))),
    (".jsonl", lines({"other": 2})),
    (".parquet", (pa.Table.from_pylist([*_groups(42, 3)]), {"row_group_size": 2})),
]


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("number", [1, 3, len(ROLLOUTS)])
def test_groups_of_rollouts_are_in_one_partition_whole(folder, number, total):
    put(folder / "rollouts", ROLLOUTS[:number])
    write(folder / "rollouts" / "._0.jsonl", b"fork")
    given = Settings(rollouts=f"own={folder}/rollouts", max_document_bytes=LIMIT)
    _, parts = check_items(given, "own", "rollouts", total)
    counted = sum((Counter(counters) for _, counters in parts), Counter())
    assert counted["resource_fork"] == 1 and counted["malformed"] == (3 if number == 1 else 5)
    if number < total:
        shared = [[each.id for each in seen] for seen, _ in parts]
        assert shared[0][:2] == ["g0", f"g{total}"] and shared[1][0] == "g1"


def test_a_source_of_bad_groups_alone_is_an_error_wherever_it_is_read(folder):
    put(folder / "lost", [(".jsonl", lines({"other": 1}))])
    for partition in (None, Partition(0, 2), Partition(1, 2)):
        with refused("E303", "missing_field"):
            read_items(Settings(rollouts=f"own={folder}/lost"), "own", "rollouts", partition)


@pytest.mark.slow
@checks(max_examples=100)
@given(files=st.lists(FILES, min_size=1, max_size=5), total=st.sampled_from(TOTALS))
def test_any_files(files: list[tuple[str, Any]], total: int, folder: Path) -> None:
    put(folder / "any", files)
    check_parts(own(folder / "any"), "own", total)
