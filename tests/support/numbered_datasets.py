"""Datasets of numbered documents with the upstream columns, as files for `LoopbackHub.add`.

Every document says its number, counted over all files in order, so that a test sees what is lost, doubled or moved.
"""

import gzip
import io
import json
import random
import re
from typing import Any

Row = dict[str, Any]
WORDS = ("river", "mill", "orchard", "heron", "otter", "badger", "lynx", "apple", "pebble", "letter", "windy", "quiet")


def number_of(text):
    """Return the number that a document of these datasets carries."""
    found = re.search(r"number (\d+)\b", text)
    assert found is not None, f"no number in {text[:80]!r}"
    return int(found[1])


def fineweb_edu(*, documents=60, shards=3, form="parquet", chars=2_000, start=0):
    """fineweb-edu's columns and config CC-MAIN-2024-10, numbered from `start`; form: parquet, jsonl or jsonl.gz."""
    rows = [_web_page(number, chars) for number in range(start, start + documents)]
    folder = "data/CC-MAIN-2024-10"
    card = {
        "license": "odc-by",
        "pretty_name": "FineWeb-Edu",
        "configs": [
            {"config_name": "CC-MAIN-2024-10", "data_files": [{"split": "train", "path": f"{folder}/*"}]},
            {"config_name": "CC-MAIN-2024-18", "data_files": [{"split": "train", "path": "data/CC-MAIN-2024-18/*"}]},
        ],
    }
    other = {f"data/CC-MAIN-2024-18/train-00000-of-00001.{form}": table([_web_page(10**6, chars)], form)}
    return {"README.md": readme(card), **_shards(rows, f"{folder}/train", shards, form), **other}


def wikitext(*, lines=90, shards=2, start=0):
    """wikitext's single column and config wikitext-103-raw-v1: train in shards, validation and test in one file."""
    folder = "wikitext-103-raw-v1"
    splits = ("test", "train", "validation")
    card = {
        "license": ["cc-by-sa-3.0", "gfdl"],
        "pretty_name": "WikiText",
        "configs": [
            {"config_name": folder, "data_files": [{"split": split, "path": f"{folder}/{split}-*"} for split in splits]}
        ],
    }

    def rows(first, number):
        return [{"text": f" Line number {first + index} . {_filler(first + index, 300)} \n"} for index in range(number)]

    return {
        "README.md": readme(card),
        **_shards(rows(start, lines), f"{folder}/train", shards, "parquet"),
        **_shards(rows(start + lines, 10), f"{folder}/validation", 1, "parquet"),
        **_shards(rows(start + lines + 10, 10), f"{folder}/test", 1, "parquet"),
    }


def dolly(*, rows=60, shards=2, start=0):
    """dolly's columns, as jsonl files."""
    found = [
        {
            "instruction": f"What is question number {number}?",
            "context": f"Context {number}." if number % 3 == 0 else "",
            "response": f"Answer number {number}. {_filler(number, 700)}",
            "category": "closed_qa" if number % 3 == 0 else "open_qa",
        }
        for number in range(start, start + rows)
    ]
    card = {"license": "cc-by-sa-3.0", "pretty_name": "databricks-dolly-15k"}
    return {"README.md": readme(card), **_shards(found, "databricks-dolly-15k", shards, "jsonl")}


def oasst1(*, trees=20, shards=2, start=0):
    """oasst1's columns: each tree a question, two answers and a reply to the first; train in shards, validation."""
    card = {"license": "apache-2.0", "pretty_name": "OpenAssistant Conversations"}

    def rows(first, number):
        return [row for tree in range(first, first + number) for row in _tree(tree)]

    return {
        "README.md": readme(card),
        **_shards(rows(start, trees), "data/train", shards, "parquet"),
        **_shards(rows(start + trees, 4), "data/validation", 1, "parquet"),
    }


def readme(card):
    """Write a dataset card."""
    import yaml

    front = f"---\n{yaml.safe_dump(card, sort_keys=False)}---\n" if card else ""
    return f"{front}# A dataset of numbered documents\n".encode()


def table(rows, form):
    """Write rows as parquet (row groups of 8, so that a file takes several reads), jsonl or jsonl.gz."""
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(list(rows)), sink, row_group_size=8, compression="NONE")
        return sink.getvalue()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return gzip.compress(lines, mtime=0) if form == "jsonl.gz" else lines


def _shards(rows, stem, shards, form):
    size = -(-len(rows) // shards)
    parts = (rows[index * size : (index + 1) * size] for index in range(shards))
    return {f"{stem}-{index:05d}-of-{shards:05d}.{form}": table(part, form) for index, part in enumerate(parts)}


def _web_page(number, chars):
    return {
        "text": f"Page number {number}. {_filler(number, chars)}",
        "id": f"<urn:uuid:{number}>",
        "dump": "CC-MAIN-2024-10",
        "url": f"https://example.org/{number}",
        "file_path": "s3://commoncrawl/example.warc.gz",
        "language": "en",
        "language_score": 0.9,
        "token_count": chars // 5,
        "score": 3.0 + number % 10 / 10,
        "int_score": 3,
    }


def _tree(tree):
    def message(key, parent, role, text):
        return {
            "message_id": f"{tree}-{key}",
            "parent_id": None if parent is None else f"{tree}-{parent}",
            "text": text,
            "role": role,
            "lang": "en",
            "deleted": False,
            "message_tree_id": f"{tree}-q",
            "tree_state": "ready_for_export",
        }

    return [
        message("q", None, "prompter", f"Question number {tree}?"),
        message("a", "q", "assistant", f"Answer number {tree}. {_filler(tree, 500)}"),
        message("b", "q", "assistant", f"Other answer number {tree}. {_filler(tree, 200)}"),
        message("c", "a", "prompter", f"Reply number {tree}."),
    ]


def _filler(number, chars):
    """Give words that compress badly, the same for the same number."""
    draw = random.Random(number)
    text = ""
    while len(text) < chars:
        text += f"{draw.choice(WORDS)} {draw.getrandbits(64):x} "
    return text
