"""The tables of docs/drafters.md are computed: rows by need, kinds, bytes a token; small caches are measured."""

import re

import numpy as np
import pytest
from support import ROOT
from support.commands import niels_gpt

from niels_gpt.eagle3.exchange.automodel import shard_tensors
from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS
from niels_gpt.eagle3.format.layout import row_bytes_of
from niels_gpt.eagle3.format.native import NativeLayout, row_counts, target_positions
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.eagle3.target import parse_aux_layers, write_small_target
from niels_gpt.tokenizer import load_tokenizer

PAGE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
PROMPT, REPLY, CHATS = 215, 323, 1000


def rows_of(title):
    """Return the rows of the table whose first cell has this title: lists of cells."""
    lines = PAGE[PAGE.index(f"| {title} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def figures(cell):
    """Return the numbers of a cell, without what stands in brackets."""
    return [int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", re.sub(r"\(.*\)", "", cell))]


def test_the_table_of_kinds_is_the_one_of_the_code():
    rows = {row[0].split("`")[1]: row for row in rows_of("`--for`")}
    assert rows.keys() == DRAFTERS.keys()
    for name, kind in DRAFTERS.items():
        assert name == "peagle" or f"`{kind.layers}`" in rows[name][1]
        assert rows[name][2] == f"`{kind.targets}`"
    assert DRAFTERS["peagle"] == DRAFTERS["eagle3"]
    assert parse_aux_layers("dspark:5", 36) == [1, 10, 18, 26] and parse_aux_layers("eagle3", 36) == [1, 17, 32]


def test_the_rows_of_the_chat_are_those_that_are_stored():
    lines = re.search(r"^loss mask .*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL).group().splitlines()
    shown = {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line, maxsplit=1)[1].split() for line in lines}
    mask = np.array([int(each == "1") for each in shown["loss mask"]])
    starts = np.array([0, len(mask)])
    for targets in TARGETS:
        marks = [
            np.flatnonzero(np.array(shown[f"{what}, {targets}"]) == "#").tolist()
            for what in ("target rows", "outputs of blocks")
        ]
        assert marks[0] == target_positions(mask, targets).tolist()
        assert marks[1] == list(range(row_counts(starts, mask, targets)[0, 1]))


def layout(hidden, blocks, aux, targets):
    return NativeLayout(hidden, blocks, "bf16", aux, targets)


def test_the_bytes_for_a_large_target_are_computed():
    mask, starts = np.tile([0] * PROMPT + [1] * REPLY, CHATS), np.arange(CHATS + 1) * (PROMPT + REPLY)
    assert f"Chats have {PROMPT + REPLY} tokens, the last {REPLY} of them with loss" in PAGE
    cells = 0
    for number, *row in rows_of("8B target, computed"):
        blocks = 0 if number == "no block" else int(number[0])
        for targets, cell in zip(TARGETS, row, strict=True):
            found = [
                layout(4096, blocks, aux, targets).shard_bytes(row_counts(starts, mask, targets)) / len(mask)
                for aux in ("bf16", "fp8")[: 1 + (blocks > 0)]
            ]
            assert not cell or figures(cell) == [round(each, -2) for each in found]
            cells += bool(cell)
    assert cells == 10
    slot = slot_bytes(4096, 5)
    assert figures(rows_of("NeMo Automodel's DSpark cache")[0][1]) == [slot]
    assert figures(rows_of("NeMo Automodel's DSpark cache")[0][2]) == [round(slot * 2048 / (PROMPT + REPLY), -2)]


def slot_bytes(hidden, features):
    """The bytes of a slot of Automodel's cache in bf16, by the page: features and last state, id and mask in int64."""
    manifest = {
        "seq_length": 1,
        "dtype": "bf16",
        "target_hidden_dim": features * hidden,
        "target_last_hidden_dim": hidden,
    }
    assert sum(map(row_bytes_of, shard_tensors(manifest, 1).values())) == (features + 1) * hidden * 2 + 16
    return (features + 1) * hidden * 2 + 16


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that makes a cache of the sample's chats with the page's small target."""
    base = tmp_path_factory.mktemp("small")
    assert niels_gpt("build", "oasst1", "--source-root", "sample", "--cache-dir", base).status == 0
    write_small_target(base / "target", load_tokenizer(base / "sample" / "tokenizer"))

    def made(name, *flags):
        given = ["--input-data", "oasst1", "--source-root", "sample", "--seq-length", "128", "--format", "native"]
        given += ["--target-model", base / "target", "--output-dir", base / name, *flags]
        done = niels_gpt("eagle3", "precompute", *given)
        assert done.status == 0, done.err
        return base / name

    return made


MEASURED = [("none", "all"), ("eagle3", "loss"), ("eagle3", "reply"), ("eagle3", "all"), ("dflash:5", "reply")]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "targets"), [*MEASURED, ("dspark:5", "all")])
def test_the_bytes_for_the_small_target_are_those_of_files(make, tmp_path, layers, targets):
    number = len(parse_aux_layers(layers, 8))
    (row,) = (
        row for row in rows_of("small target, measured") if row[0] == f"{number or 'no'} block{'s' * (number > 0)}"
    )
    numbers = figures(row[1 + TARGETS.index(targets)])
    assert numbers
    for aux, shown in zip(("bf16", "fp8"), numbers, strict=False):
        cache = make(f"{number}-{targets}-{aux}", "--aux-layers", layers, "--targets", targets, "--aux-dtype", aux)
        data = NativeEagle3Dataset(cache)
        masks = [data[index].loss_mask for index in range(len(data))]
        counts = row_counts(np.cumsum([0, *map(len, masks)]), np.concatenate(masks), targets)
        size = sum(path.stat().st_size for path in cache.glob("shard-*"))
        assert size == layout(64, number, aux, targets).shard_bytes(counts)
        assert shown == round(size / counts[:, 0].sum())
    if layers == "dspark:5":
        assert (
            niels_gpt("eagle3", "export", cache, tmp_path / "a", "--to", "automodel", "--layers", "1,2,4,6,7").status
            == 0
        )
        (file,) = (tmp_path / "a").glob("shard-*")
        states = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
        assert states == len(masks) * 128 * slot_bytes(64, 5)
        row = rows_of("NeMo Automodel's DSpark cache")[1]
        assert figures(row[1]) == [slot_bytes(64, 5)] and figures(row[2]) == [round(states / counts[:, 0].sum())]
