"""Files that other libraries write: read with the documents that were given, and masks where the format has them.

Each library lies in a folder below the one that NIELS_GPT_PEERS names: .ci/run makes them.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.exchange_peers import library
from support.foreign import MANIFEST_NAME, WITH_LOSS, read_folder, tokens_of
from support.made_tokenizers import made_tokenizer
from support.peer_exchange import Tool

from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.exchange.imports import import_cache

END = 1
VOCABULARY = {"uint16": 1_100, "uint32": 128_256}
WIDTH = {"uint16": 2, "uint32": 4}
Documents = list[list[int]]
Tools = Callable[[str], Tool]


def made(seed, count, dtype):
    """Make documents with the end id behind each."""
    draw = random.Random(seed)
    return [[*(draw.randrange(3, VOCABULARY[dtype]) for _ in range(draw.randint(1, 90))), END] for _ in range(count)]


@dataclass
class Written:
    """The documents of each file of each split, and of chats the mask of each document."""

    files: dict[str, list[Documents]]
    loss: dict[str, list[list[list[bool]]]] | None = None


def given(dtype, with_loss=False):
    """Make documents for two files of train and one of val."""
    files = {"train": [made(0, 20, dtype), made(1, 7, dtype)], "val": [made(2, 5, dtype)]}
    draw = random.Random(3)
    loss = {
        split: [[[at > 0 and draw.random() < 0.5 for at in range(len(ids))] for ids in file] for file in documents]
        for split, documents in files.items()
    }
    return Written(files, loss if with_loss else None)


def by_megatron(tool, folder, dtype, written):
    for split, files in written.files.items():
        for number, documents in enumerate(files):
            prefix = str(folder / f"{split}_{number:05d}")
            tool.call("write_megatron", prefix, documents, "int32" if dtype == "uint32" else dtype)


def by_datatrove(tool, folder, dtype, written):
    for split, files in written.files.items():
        (folder / split).mkdir(parents=True)
        for number, documents in enumerate(files):
            loss = None if written.loss is None else written.loss[split][number]
            tool.call(
                "write_datatrove", str(folder / split), f"{number:05d}.ds", documents, WIDTH[dtype], loss, "some/name"
            )


def by_olmo(tool, folder, dtype, written):
    for split, files in written.files.items():
        for number, documents in enumerate(files):
            mask = None if written.loss is None else [bit for bits in written.loss[split][number] for bit in bits]
            tool.call("write_olmo", str(folder / f"{split}_{number:05d}.npy"), documents, dtype, END, mask)


def by_litdata(tool, folder, dtype, written):
    for split, files in written.files.items():
        documents = [ids for file in files for ids in file]
        tool.call("write_litdata", str(folder / split), documents, "int32" if dtype == "uint32" else dtype, 1 << 20)
        written.files[split] = [documents]  # one chunk


def by_datasets(tool, folder, dtype, written):
    for split, files in written.files.items():
        for number, documents in enumerate(files):
            labels = None
            if written.loss is not None:
                pairs = zip(documents, written.loss[split][number], strict=True)
                labels = [[id if bit else -100 for id, bit in zip(ids, bits, strict=True)] for ids, bits in pairs]
            name = f"{split}-{number:05d}.parquet"
            tool.call("write_hf", str(folder), name, documents, labels, "int32" if dtype == "uint32" else dtype)


WRITERS = {
    "megatron": by_megatron,
    "datatrove": by_datatrove,
    "olmo": by_olmo,
    "litdata": by_litdata,
    "hf": by_datasets,
}
CASES = [
    (name, dtype, has_loss)
    for name in WRITERS
    for dtype in VOCABULARY
    for has_loss in ((False, True) if name in WITH_LOSS else (False,))
]


@pytest.fixture(scope="module")
def tools():
    """Each library in one process, from its first use on."""
    running = {}
    with ExitStack() as stack:

        def tool(name):
            if name not in running:
                running[name] = stack.enter_context(library(name))
            return running[name]

        yield tool


@pytest.mark.parametrize(("name", "dtype", "has_loss"), CASES)
def test_what_a_library_wrote_is_read_as_it_was_given(name, dtype, has_loss, tools, tmp_path):
    written, folder = given(dtype, has_loss), tmp_path / "written"
    folder.mkdir()
    WRITERS[name](tools(name), folder, dtype, written)
    found = read_folder(folder, name, vocab_size=VOCABULARY[dtype])
    expected = [(split, file) for split, files in written.files.items() for file in files]
    assert [file.split for file in found.files] == [split for split, _ in expected]
    for file, (_, documents) in zip(found.files, expected, strict=True):
        ids = [id for document in documents for id in document]
        assert np.concatenate([np.asarray(part, dtype=np.int64) for part in file.pieces()]).tolist() == ids
        assert file.ends is not None
        assert file.ends().tolist() == np.cumsum([len(document) for document in documents]).tolist()
        assert not file.continues and file.tokens == len(ids)
    if written.loss is not None:
        masks = [bit for files in written.loss.values() for file in files for bits in file for bit in bits]
        assert [bit for file in found.files if file.loss for part in file.loss() for bit in part.tolist()] == masks


@pytest.mark.parametrize(("name", "dtype", "has_loss"), CASES)
def test_what_a_library_wrote_is_imported_and_exported_to_the_same_bytes(name, dtype, has_loss, tools, tmp_path):
    written, folder, again = given(dtype, has_loss), tmp_path / "written", tmp_path / "again"
    folder.mkdir()
    WRITERS[name](tools(name), folder, dtype, written)
    tokenizer = str(made_tokenizer("t5" if dtype == "uint16" else "llama3"))
    end = {"document_end": "none", "pad_id": END if has_loss else None}
    path = import_cache(folder, "theirs", format=name, cache_dir=tmp_path / "cache", tokenizer=tokenizer, **end).path
    assert not find_damage(path, deep=True)
    cache = tokens_of(path)
    for split, files in written.files.items():
        documents = [ids for file in files for ids in file]
        assert [id for file in cache.files(split) for id in file.ids.tolist()] == [
            id for ids in documents for id in ids
        ]
        assert cache.bounds(split).tolist() == [0, *np.cumsum([len(ids) for ids in documents]).tolist()]
        if written.loss is not None:
            masks = [bit for file in written.loss[split] for bits in file for bit in bits]
            assert [bit for file in cache.files(split) for part in file.loss() for bit in part.tolist()] == masks
    export_cache(path, name, again)
    if has_loss:  # an sft cache is one file a split, so their files are joined
        assert joined(again, name) == joined(folder, name)
    else:
        assert comparable(again, name) == comparable(folder, name)


def comparable(folder, name):
    """All files by name: their bytes, but for what depends on the clock or on a setting of the writer.

    olmo: gzip files have the time and their name in them. litdata: index.json has the time and the asked chunk size.
    hf: parquet files have other names, row groups and columns, so the rows of a split are compared.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet":
            split = "val" if "val" in path.name else "train"
            columns = ["input_ids", *(["labels"] if "labels" in pq.read_schema(path).names else [])]
            found.setdefault(split, []).extend(pq.read_table(path, columns=columns).to_pylist())
        elif path.is_file() and path.name != MANIFEST_NAME:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            elif path.name == "index.json":
                index = json.loads(content)
                content = [index["chunks"], {**index["config"], "chunk_bytes": None}]
            found[path.relative_to(folder).as_posix()] = content
    return found


def joined(folder, name):
    """Tokens and masks, those of all files of a split end to end."""
    found = {}
    for path, content in comparable(folder, name).items():
        if name == "hf":
            found[path] = content
        elif path.endswith((".ds", ".loss", ".npy")):
            key = f"{'val' if 'val' in path else 'train'} {Path(path).suffix} {'label_mask' in path}"
            found[key] = found.get(key, b"") + content
    return found
