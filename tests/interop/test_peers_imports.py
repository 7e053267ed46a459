"""Files that other libraries write: read with the documents that were given, and masks where the format has them.

Each library lies in a folder below the one that NIELS_GPT_PEERS names: .ci/run makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.interop_peers import library
from support.peer_exchange import Tool

from niels_gpt.interop.formats import FORMATS

END = 1
VOCABULARY = {"uint16": 1_100, "uint32": 128_256}
WIDTH = {"uint16": 2, "uint32": 4}
Documents = list[list[int]]
Tools = Callable[[str], Tool]


def made(seed: int, count: int, dtype: str) -> Documents:
    """Make documents with the end id behind each."""
    draw = random.Random(seed)
    return [[*(draw.randrange(3, VOCABULARY[dtype]) for _ in range(draw.randint(1, 90))), END] for _ in range(count)]


@dataclass
class Written:
    """The documents of each file of each split, and of chats the mask of each document."""

    files: dict[str, list[Documents]]
    loss: dict[str, list[list[list[bool]]]] | None = None


def given(dtype: str, with_loss: bool = False) -> Written:
    """Make documents for two files of train and one of val."""
    files = {"train": [made(0, 20, dtype), made(1, 7, dtype)], "val": [made(2, 5, dtype)]}
    draw = random.Random(3)
    loss = {
        split: [[[at > 0 and draw.random() < 0.5 for at in range(len(ids))] for ids in file] for file in documents]
        for split, documents in files.items()
    }
    return Written(files, loss if with_loss else None)


def by_megatron(tool: Tool, folder: Path, dtype: str, written: Written) -> None:
    for split, files in written.files.items():
        for number, documents in enumerate(files):
            prefix = str(folder / f"{split}_{number:05d}")
            tool.call("write_megatron", prefix, documents, "int32" if dtype == "uint32" else dtype)


def by_datatrove(tool: Tool, folder: Path, dtype: str, written: Written) -> None:
    for split, files in written.files.items():
        (folder / split).mkdir(parents=True)
        for number, documents in enumerate(files):
            loss = None if written.loss is None else written.loss[split][number]
            tool.call(
                "write_datatrove", str(folder / split), f"{number:05d}.ds", documents, WIDTH[dtype], loss, "some/name"
            )


def by_olmo(tool: Tool, folder: Path, dtype: str, written: Written) -> None:
    for split, files in written.files.items():
        for number, documents in enumerate(files):
            mask = None if written.loss is None else [bit for bits in written.loss[split][number] for bit in bits]
            tool.call("write_olmo", str(folder / f"{split}_{number:05d}.npy"), documents, dtype, END, mask)


WRITERS: dict[str, Callable[[Tool, Path, str, Written], None]] = {
    "megatron": by_megatron,
    "datatrove": by_datatrove,
    "olmo": by_olmo,
}
CASES = [
    (name, dtype, has_loss)
    for name in WRITERS
    for dtype in VOCABULARY
    for has_loss in ((False, True) if FORMATS[name].has_loss else (False,))
]


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    """Each library in one process, from its first use on."""
    running: dict[str, Tool] = {}
    with ExitStack() as stack:

        def tool(name: str) -> Tool:
            if name not in running:
                running[name] = stack.enter_context(library(name))
            return running[name]

        yield tool


@pytest.mark.parametrize(("name", "dtype", "has_loss"), CASES)
def test_what_a_library_wrote_is_read_as_it_was_given(
    name: str, dtype: str, has_loss: bool, tools: Tools, tmp_path: Path
) -> None:
    written, folder = given(dtype, has_loss), tmp_path / "written"
    folder.mkdir()
    WRITERS[name](tools(name), folder, dtype, written)
    found = FORMATS[name].read(folder, vocab_size=VOCABULARY[dtype])
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
