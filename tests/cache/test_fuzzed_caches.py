"""Readers and parsers under random damage: a batch of good ids or a documented error, and never anything else.

And `verify` passes a cache if and only if every reader opens it, but for what docs/formats.md lists as its own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits_caches import give_bits
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.disk import META_NAME, canonical_json, content_sha256, meta_bytes
from support.fuzzed import JSON, Files, counted_for_a_plot, damaged, fuzz, named_files, written
from support.small_builds import rollouts

from niels_gpt.cache import (
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    checksums,
)
from niels_gpt.cache.build_pretrain import build_pretrain, build_stub
from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.mmap import IO, load_idx, mmap_tokens
from niels_gpt.commands.report import difference_lines
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.diff import diff, is_equal
from niels_gpt.kinds.look import locate, show, stats
from niels_gpt.kinds.verify import find_damage, refusal
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.sampling import EpochStream, bits_per_byte, iter_eval
from niels_gpt.storage.errors import CacheError, PositionError
from niels_gpt.tokenizer import load_tokenizer

KINDS = ("pretrain", "sft", "wide pretrain", "wide sft", "bits sft")
"""Of the caches that have both splits."""
EXAMPLES = {
    "pretrain": 80,
    "sft": 60,
    "wide pretrain": 40,
    "wide sft": 30,
    "bits sft": 25,
    "partial": 40,
    "tokenizer": 40,
    "stub": 20,
} | {"rollouts": 40}
"""Of each kind; wide: of ids of 32 bits; bits: of another chat template."""


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_tokenizer):
    """The files of a small cache of each kind, by name."""
    root, tokenizer = tmp_path_factory.mktemp("good"), ByteTokenizer()
    fixed = {"tokenizer": tokenizer, "shard_bytes": 20, "seed": 0, "shuffle_buffer": None}
    budget = {"max_train_tokens": 30, "max_val_tokens": 10}
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": "a"}] for question in "qrst"]
    for each, wide in ((tokenizer, ""), (WideByteTokenizer(), "wide ")):
        each.model_path = tiny_tokenizer.model_path
        changed = {**fixed, "tokenizer": each, "shard_bytes": 40 if wide else 20}
        build_pretrain_cache(["b" * 10, "a" * 30], str(root / f"{wide}pretrain"), **changed, **budget)
        build_sft_cache(chats, str(root / f"{wide}sft"), tokenizer=each, val_frac=0.5, seed=0)
    build_sft_cache(chats, str(root / "bits sft"), tokenizer=tokenizer, val_frac=0.5, seed=0)
    give_bits(root / "bits sft", 0, {})
    budget = {"max_train_tokens": 30, "max_val_tokens": 0}
    build_pretrain([("train", "a" * 30)], root / "partial", **fixed, **budget, partial=True)
    build_stub(root / "stub", tokenizer=tokenizer, source=Source(name="stub"), seed=0, shard_bytes=20)
    rollouts(root / "rollouts")
    found = {}
    for kind in EXAMPLES.keys() - {"tokenizer"}:
        folder = (root / kind).resolve()
        files = (path for path in folder.rglob("*") if path.is_file())
        found[kind] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return found | {"tokenizer": tokenizer_files(tiny_tokenizer)}


def tokenizer_files(tokenizer):
    model = Path(tokenizer.model_path).read_bytes()
    record = {"name": "spm.model", "bytes": len(model), "sha256": tokenizer.sha256}
    about = {"kind": "tokenizer", "built": True, "format_version": 1, "vocab_size": tokenizer.vocab_size}
    about |= {"tokenizer_sha256": tokenizer.sha256, "special_token_ids": tokenizer.special_token_ids()}
    meta = {**about, "files": [record], "content_sha256": content_sha256([record])}
    return {"spm.model": model, META_NAME: meta_bytes(meta)}


def readers(kind, folder):
    """Yield every way to open what a cache of this kind holds."""
    eot, kind = 100_004 if kind.startswith("wide") else 4, kind.removeprefix("wide ").removeprefix("bits ")
    if kind == "tokenizer":
        yield lambda: load_tokenizer(folder / "spm.model")
    for split in ("train", "val") if kind == "rollouts" else ():
        yield partial(RolloutDataset, folder, split)
    for split in {"pretrain": ("train", "val"), "partial": ("train",), "sft": ("train", "val")}.get(kind, ()):
        for way in get_args(IO):
            if kind == "sft":
                files = [folder / f"{split}_{name}" for name in ("tokens.bin", "idx.npy")]
                yield partial(SFTExampleDataset, *files, T=4, device="cpu", eot_id=eot, io=way)
                yield partial(SFTExampleDataset.open, folder, split, T=4, io=way)
            else:
                yield partial(PretrainTokenStreamDataset, folder / split, T=1, device="cpu", io=way)
        if kind != "sft":
            yield partial(EpochStream, folder / split, T=1, global_batch_size=1, seed=0)
            yield partial(iter_eval, folder / split, B=1, T=1)
            yield partial(bits_per_byte, 1.0, folder / split)


def draw(reader):
    """Read of a token cache: no id is one outside the vocabulary."""
    if isinstance(reader, RolloutDataset):
        assert all(sample.ids.max() < (reader.vocab_size or 1 << 31) for group in reader for sample in group.samples)
    if not isinstance(reader, PretrainTokenStreamDataset | SFTExampleDataset):
        return
    generator, end = torch.Generator().manual_seed(0), reader.vocab_size or 1 << 31
    for B in (1, 1, 1, 8):
        assert max(int(part.max()) for part in reader.get_batch(B=B, generator=generator)) < end
    for row in range(len(reader)) if isinstance(reader, SFTExampleDataset) else ():
        assert int(reader.example(row).max()) < end


def refused(kind, folder):
    """Open a cache in every way, and read of it; returns the messages of the readers that do not open."""
    found = []
    for opening in readers(kind, folder):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # shards that are too short for a row, and the like
                reader = opening()
        except (CacheError, FileNotFoundError) as error:
            assert str(folder.parent) in str(error)
            found.append(str(error))
            continue
        except ValueError as error:  # the eot_id given is none of the vocabulary that a damaged meta.json tells of
            assert "expected an id of the vocabulary" in str(error)
            continue
        try:
            draw(reader)
        except CacheError as error:
            assert str(folder.parent) in str(error)
    return found


SUMS = ("tokens_after", "pairs", "pairs_after", "loss_tokens", "scores", "samples_without_target", "groups_read")
SUMS += ("samples_read", "not")  # not as docs/formats.md describes it
READ_BY_READERS = re.compile("(built|token_dtype|format_version|tokenizer_sha256|kind|utf8_bytes|the readers refuse) ")


def is_verifys_own(kind, damage):
    """Whether docs/formats.md lists a damage among those that readers do not look at."""
    if kind in ("tokenizer", "stub"):  # load_tokenizer opens the model alone, and a stub is never read
        return True
    if kind == "partial" and damage.file == "val":  # no reader opens it here
        return True
    if not damage.file:  # of rollouts: a sum that meta.json has and no reader takes
        return damage.problem.partition(META_NAME)[2].split(".")[0].removeprefix(": ").split(" ")[0] in SUMS
    if damage.file == META_NAME:
        return READ_BY_READERS.match(damage.problem) is None
    is_read = damage.file.startswith(("train", "val"))  # source ids and checksums may have any name
    return not is_read or "does not name" in damage.problem or "not the header" in damage.problem


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_caches_are_good_before_they_are_damaged(good, kind):
    with written(good[kind], good["tokenizer"]) as folder:
        assert refused(kind, folder) == find_damage(folder, deep=True) == [] and refusal(folder) is None
        for opening in readers(kind, folder) if kind == "pretrain" else ():
            draw(opening())


def places(value):
    """Yield (container, key) of every value inside a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


READ_KEYS = (
    "shards",
    "index",
    "ids",
    "checksums",
    "vocab_size",
    "token_dtype",
    "special_token_ids",
    "tokenizer_sha256",
    "built",
    "loss_bits",
    "chat_template",
    "pad_id",
)

INSPECTED_KEYS = (
    *READ_KEYS,
    *("totals", "source", "dropped", "supervised_tokens", "utf8_bytes", "docs", "kind", "content_sha256", "cut"),
    *("documents_read", "examples_read", "shard_bytes", "document_end", "dataset_name", "train_tokens"),
)


@st.composite
def metas(draw, good_meta, read_keys):
    """A good meta.json with one to three values replaced, taken away or moved; with a good CRC-32 or with none."""
    meta = copy.deepcopy(good_meta)
    meta.pop("meta_crc32", None)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(meta))
        if draw(st.booleans()):  # most keys mean nothing to a reader
            found = [place for key in read_keys if key in meta for place in [(meta, key), *places(meta[key])]] or found
        container, key = draw(st.sampled_from(found)) if found else (meta, "shards")
        what = draw(st.sampled_from(("replace", "replace", "take away", "copy")))
        if what == "take away":
            del container[key]
        elif what == "copy" and found:
            other, place = draw(st.sampled_from(found))
            container[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
        else:
            container[key] = draw(JSON)
    try:
        return meta_bytes(meta) if draw(st.booleans()) else canonical_json(meta)
    except UnicodeEncodeError:  # halves of surrogate pairs
        return json.dumps(meta).encode()


@st.composite
def edited(draw, files, read_keys=READ_KEYS):
    """A cache with another meta.json, with or without a CRC-32, or without one, or with damage to one or two files."""
    found, how = dict(files), draw(st.sampled_from(("meta.json", "meta.json", "a file", "no CRC-32", "no meta.json")))
    if how == "meta.json":
        found[META_NAME] = draw(metas(json.loads(files[META_NAME]), read_keys))
        return found
    if how == "no meta.json":
        del found[META_NAME]
    elif how == "no CRC-32":
        left_out = draw(st.sampled_from([("meta_crc32",), ("meta_crc32", "shards", "index")]))
        meta = {key: value for key, value in json.loads(files[META_NAME]).items() if key not in left_out}
        found[META_NAME] = canonical_json(meta)
    for name in draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=2)) if found else ():
        found[name] = draw(damaged(found[name]))
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("wide sft", "bits sft"))) for kind in EXAMPLES]
)
def test_verify_passes_what_the_readers_open_and_these_give_good_ids(good, kind):
    whole = good[kind]

    @fuzz(EXAMPLES[kind])
    @given(data=st.data())
    def every_edit(data: st.DataObject) -> None:
        beside = kind != "tokenizer" and data.draw(st.integers(0, 9)) == 0
        files, tokenizer = (
            (whole, data.draw(edited(good["tokenizer"])))
            if beside
            else (data.draw(edited(whole)), good["tokenizer"] if data.draw(st.booleans()) else None)
        )
        with written(files, tokenizer) as folder:
            checksums._compared.clear()  # an inode may come back within a tick of the clock
            found, messages = find_damage(folder, deep=False), refused(kind, folder)
            assert found or not messages
            assert messages or all(is_verifys_own(kind, damage) for damage in found)
            nothing_there = all("this split has no shard" in message for message in messages)
            is_seen = META_NAME in files and kind not in ("tokenizer", "rollouts")  # of rollouts: the sizes of files
            assert refusal(folder) or nothing_there or not is_seen, messages
            with contextlib.suppress(CacheError, FileNotFoundError):
                for path in named_files(folder):
                    assert Path(os.path.realpath(path)).is_relative_to(folder) and path != folder

    every_edit()


class OfAnyIds(ByteTokenizer):
    """A decoder that says that it is the tokenizer of a cache."""

    def __init__(self, files):
        self.sha256 = json.loads(files[META_NAME])["tokenizer_sha256"]

    def decode(self, ids):
        return super().decode([id % 100_000 for id in ids])


def inspected(files, whole, deep):
    """Look into a damaged cache in every way: a CacheError or FileNotFoundError that names its file, or no error."""
    with written(files) as folder, written(whole) as other:
        damages = find_damage(folder, deep=deep)
        assert all(damage.problem and 0 <= damage.offset <= damage.end for damage in damages)
        if files == whole:
            assert not damages
        decoder = OfAnyIds(whole)
        looks = [
            lambda: stats(folder),
            lambda: locate(folder, decoder, split="train", position=3, num_tokens=9),
            lambda: show(folder, decoder, split="val", position=1, num_tokens=9, color=False),
            lambda: diff(folder, other, tokenizers=(None, decoder), limit=3),
            lambda: diff(other, folder, tokenizers=(None, decoder), limit=3),
        ]
        for look in looks:
            try:
                found = look()
            except (CacheError, FileNotFoundError) as error:
                assert str(folder) in str(error), error
            except PositionError as error:  # the damaged meta.json tells of fewer tokens
                assert "position" in str(error)
            else:
                if isinstance(found, dict):
                    assert is_equal(found) or files != whole
                    assert difference_lines(found)
        with contextlib.suppress(CacheError, FileNotFoundError):
            counted_for_a_plot(folder)


@pytest.mark.parametrize("kind", KINDS)
@fuzz(64)
@given(data=st.data())
def test_any_damage_is_a_cache_error_to_who_inspects(good: dict[str, Files], kind: str, data: st.DataObject) -> None:
    inspected(data.draw(edited(good[kind], INSPECTED_KEYS)), good[kind], data.draw(st.booleans()))


@fuzz(100)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()).flatmap(damaged))
def test_what_is_read_is_what_json_says_or_a_cache_error(raw: bytes) -> None:
    with written({META_NAME: raw}) as folder:
        try:
            found = read_meta(str(folder / META_NAME))
        except CacheError:
            return
        assert found == json.loads(raw) and canonical_json(found)


@fuzz(100)
@given(meta=st.dictionaries(st.text(max_size=9), JSON, max_size=4), data=st.data())
def test_one_changed_byte_of_any_meta_is_seen(meta: dict[str, Any], data: st.DataObject) -> None:
    try:
        raw = bytearray(meta_bytes(meta))
    except UnicodeEncodeError:
        return
    with written({META_NAME: bytes(raw)}) as folder:
        whole = read_meta(str(folder / META_NAME))
        assert whole == json.loads(raw) and whole.keys() == {*meta, "meta_crc32"}
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= data.draw(st.integers(1, 255))
        (folder / META_NAME).write_bytes(raw)
        with contextlib.suppress(CacheError):
            assert "meta_crc32" not in read_meta(str(folder / META_NAME))  # its own key was changed


def npy(offsets):
    file = io.BytesIO()
    np.save(file, np.array(offsets, dtype="<i8"))
    return file.getvalue()


OFFSETS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=6)
NPY = OFFSETS.map(npy) | st.lists(st.integers(1, 40), max_size=6, unique=True).map(
    lambda found: npy([0, *sorted(found)])
)


@fuzz(150)
@given(content=NPY | NPY.flatmap(damaged) | st.binary(max_size=200), num_tokens=st.integers(0, 50))
def test_offsets_are_those_that_numpy_reads_and_good_or_a_cache_error(content: bytes, num_tokens: int) -> None:
    with written({"train_idx.npy": content}) as folder:
        try:
            found = load_idx(folder / "train_idx.npy", num_tokens=num_tokens)
        except CacheError:
            return
        assert found[0] == 0 and np.all(found[1:] > found[:-1]) and found[-1] < num_tokens
        assert np.array_equal(found, np.load(folder / "train_idx.npy", allow_pickle=False))


@fuzz(100)
@given(content=st.binary(max_size=40), expected=st.none() | st.integers(0, 40))
def test_a_token_file_is_its_ids_or_a_cache_error(content: bytes, expected: int | None) -> None:
    with written({"train_tokens.bin": content}) as folder:
        try:
            found = mmap_tokens(folder / "train_tokens.bin", expected_bytes=expected)
        except CacheError:
            assert len(content) % 2 or not content or expected not in (None, len(content))
            return
        assert found.tobytes() == content
