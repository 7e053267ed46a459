"""Readers and parsers under random damage: a batch of good ids or a documented error, and never anything else.

Run: pytest tests/test_fuzzed_readers.py
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niels_gpt.cache import (
    CacheError,
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    read_meta,
)
from niels_gpt.cache.mmap import load_idx, mmap_tokens
from niels_gpt.data import json_stream
from niels_gpt.fileio import META_NAME, canonical_json
from niels_gpt.inspection import plot as plot_module
from niels_gpt.inspection.damage import find_damage
from niels_gpt.inspection.diff import diff, is_equal
from niels_gpt.inspection.locate import locate
from niels_gpt.inspection.show import show
from niels_gpt.inspection.stats import PlaceError, summary
from niels_gpt.recipes.report import difference_lines
from niels_gpt.records import file_records, meta_bytes, meta_crc32, parse_object, path_inside

Files = dict[str, bytes]
KINDS = ("pretrain", "sft")


def fuzz(max_examples: int) -> Any:
    """The same examples at every run; FUZZ_TIMES=100 for a hundred times as many, others at each run."""
    times = int(os.environ.get("FUZZ_TIMES", "1"))
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=max_examples * times, deadline=None, derandomize=times == 1, suppress_health_check=quiet
    )


# --- good caches ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a small cache of each kind, by name."""
    root = tmp_path_factory.mktemp("good")
    build_pretrain_cache(
        ["b" * 10, "a" * 30],
        str(root / "pretrain"),
        tokenizer=ByteTokenizer(),
        max_train_tokens=30,
        max_val_tokens=10,
        shard_bytes=20,
        seed=0,
        shuffle_buffer=None,
    )
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 4
    build_sft_cache(chats, str(root / "sft"), tokenizer=ByteTokenizer(), val_frac=0.5, seed=0)
    found: dict[str, Files] = {}
    for kind in KINDS:
        folder = (root / kind).resolve()
        files = (path for path in folder.rglob("*") if path.is_file())
        found[kind] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return found


@contextlib.contextmanager
def written(files: Files) -> Iterator[Path]:
    """Write the files of a cache to a folder that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as name:
        folder = Path(os.path.realpath(name)) / "cache"
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        yield folder


def opened(kind: str, folder: Path) -> PretrainTokenStreamDataset | SFTExampleDataset:
    if kind == "pretrain":
        return PretrainTokenStreamDataset(str(folder / "train"), T=4, device="cpu")
    files = [str(folder / f"train_{name}") for name in ("tokens.bin", "idx.npy")]
    return SFTExampleDataset(*files, T=5, device="cpu", eot_id=4)


def read(kind: str, folder: Path) -> int | None:
    """Open a cache and read of it; returns the largest id of the last batch, None if the cache was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shards that are too short for a row
            dataset = opened(kind, folder)
        generator, end = torch.Generator().manual_seed(0), dataset.vocab_size or 1 << 16
        for B in (1, 1, 1, 8):
            largest = max(int(part.max()) for part in dataset.get_batch(B=B, generator=generator))
            assert largest < end
        for row in range(len(dataset)) if isinstance(dataset, SFTExampleDataset) else ():
            assert int(dataset.example(row).max()) < end
    except (CacheError, FileNotFoundError) as error:
        assert str(folder.parent) in str(error)
        return None
    except ValueError as error:  # the eot_id given is none of the vocabulary that a damaged meta.json tells of
        assert "expected an id of the vocabulary" in str(error)
        return None
    return largest


@pytest.mark.parametrize("kind", KINDS)
def test_the_caches_are_good_before_they_are_damaged(good: dict[str, Files], kind: str) -> None:
    with written(good[kind]) as folder:
        assert read(kind, folder) is not None


# --- a meta.json with another value somewhere -------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 4, 20, 300, 65535, 65536, 65537, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**99]
)
TEXTS = st.sampled_from(
    ["", "..", "../x", "/etc/passwd", "train", "train/", "val/shard_00000.bin", META_NAME, "\0", "f" * 64]
)
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.text(max_size=9)
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.text(max_size=5), inner, max_size=3)
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


READ_KEYS = ("shards", "index", "ids", "checksums", "vocab_size", "special_token_ids", "tokenizer_sha256", "built")

INSPECTED_KEYS = (
    *READ_KEYS,
    *("totals", "source", "dropped", "supervised_tokens", "utf8_bytes", "docs", "kind", "content_sha256", "cut"),
    *("documents_read", "examples_read", "shard_bytes", "append_eot", "dataset_name", "train_tokens"),
)


@st.composite
def metas(draw: st.DrawFn, good_meta: dict[str, Any], read_keys: Sequence[str] = READ_KEYS) -> bytes:
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


@pytest.mark.parametrize("kind", KINDS)
@fuzz(150)
@given(data=st.data())
def test_any_change_of_meta_json_gives_good_ids_or_a_cache_error(
    good: dict[str, Files], kind: str, data: st.DataObject
) -> None:
    raw = data.draw(metas(json.loads(good[kind][META_NAME])))
    with written({**good[kind], META_NAME: raw}) as folder:
        read(kind, folder)
        with contextlib.suppress(CacheError):
            for record in file_records(read_meta(str(folder / META_NAME))):
                path = path_inside(folder, record["name"])
                assert Path(os.path.realpath(path)).is_relative_to(folder) and path != folder


# --- any file with other bytes ----------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes with bits flipped, pieces inserted, taken out, cut off, swapped or repeated."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        first, second = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        piece = raw[first:second]
        match draw(st.sampled_from(("flip", "flip", "insert", "delete", "truncate", "swap", "repeat", "fill"))):
            case "flip" if raw:
                raw[min(first, len(raw) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                raw[first:first] = draw(st.binary(max_size=9))
            case "delete":
                del raw[first:second]
            case "truncate":
                del raw[first:]
            case "swap":
                raw[first:second] = piece[len(piece) // 2 :] + piece[: len(piece) // 2]
            case "repeat":
                raw[first:first] = piece
            case "fill":
                raw[first:second] = bytes([draw(st.sampled_from((0, 255)))]) * len(piece)
    return bytes(raw)


@pytest.mark.filterwarnings("ignore:.*supervised tokens")  # that a damaged file no longer has in its rows
@pytest.mark.parametrize("kind", KINDS)
@fuzz(150)
@given(data=st.data())
def test_any_damage_to_any_file_gives_good_ids_or_a_cache_error(
    good: dict[str, Files], kind: str, data: st.DataObject
) -> None:
    files = dict(good[kind])
    how = data.draw(st.sampled_from(("as built", "no CRC-32", "no sizes", "no meta.json")))
    if how == "no meta.json":
        del files[META_NAME]
    elif how != "as built":
        left_out = ("meta_crc32", "shards", "index") if how == "no sizes" else ("meta_crc32",)
        meta = {key: value for key, value in json.loads(files[META_NAME]).items() if key not in left_out}
        files[META_NAME] = canonical_json(meta)
    read_by_us = [name for name in files if name.startswith("train") or name == META_NAME]
    for name in data.draw(st.lists(st.sampled_from(read_by_us), min_size=1, max_size=2)):
        files[name] = data.draw(damaged(files[name]))
    with written(files) as folder:
        if how == "no meta.json" and kind == "sft":
            with contextlib.suppress(CacheError, FileNotFoundError):
                SFTExampleDataset(
                    folder / "train_tokens.bin", folder / "train_idx.npy", T=4, device="cpu", eot_id=4, asst_id=3
                )
        read(kind, folder)


# --- what looks into a cache ----------------------------------------------------------------------------------------


class AnyDecoder:
    """Says that it is the tokenizer of any ids."""

    sha256 = "0" * 64

    def decode(self, ids: Any, /) -> str:
        return ByteTokenizer().decode(ids)


def inspected(files: Files, whole: Files, deep: bool) -> None:
    """Look into a damaged cache in every way: a CacheError or FileNotFoundError that names its file, or no error."""
    with written(files) as folder, written(whole) as other:
        damages = find_damage(folder, deep=deep)
        assert all(damage.problem and 0 <= damage.offset <= damage.end for damage in damages)
        if files == whole:
            assert not damages
        looks: list[Callable[[], Any]] = [
            lambda: summary(folder),
            lambda: locate(folder, AnyDecoder(), split="train", position=3, num_tokens=9),
            lambda: show(folder, AnyDecoder(), split="val", position=1, num_tokens=9, color=False),
            lambda: diff(folder, other, tokenizers=(None, AnyDecoder()), limit=3),
            lambda: diff(other, folder, tokenizers=(None, AnyDecoder()), limit=3),
        ]
        for look in looks:
            try:
                found = look()
            except (CacheError, FileNotFoundError) as error:
                assert str(folder) in str(error), error
            except PlaceError as error:  # the damaged meta.json tells of fewer tokens
                assert "position" in str(error)
            else:
                if isinstance(found, dict):
                    assert is_equal(found) or files != whole
                    assert difference_lines(found)
        with contextlib.suppress(CacheError, FileNotFoundError):
            figures(folder)


def figures(folder: Path) -> None:
    """Count what `plot` draws; drawing itself takes too long to be done so often."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plot_module, "_png", lambda figure: b"")
        for name in ("_examples_figure", "_documents_figure", "_notice"):
            patched.setattr(plot_module, name, lambda *_: None)
        plot_module.plot(folder)


@pytest.mark.parametrize("kind", KINDS)
@fuzz(60)
@given(data=st.data())
def test_any_change_of_meta_json_is_a_cache_error_to_who_looks_into_it(
    good: dict[str, Files], kind: str, data: st.DataObject
) -> None:
    raw = data.draw(metas(json.loads(good[kind][META_NAME]), INSPECTED_KEYS))
    inspected({**good[kind], META_NAME: raw}, good[kind], data.draw(st.booleans()))


@pytest.mark.parametrize("kind", KINDS)
@fuzz(60)
@given(data=st.data())
def test_any_damage_to_any_file_is_a_cache_error_to_who_looks_into_it(
    good: dict[str, Files], kind: str, data: st.DataObject
) -> None:
    files = dict(good[kind])
    if data.draw(st.booleans()):
        meta = {key: value for key, value in json.loads(files[META_NAME]).items() if key != "meta_crc32"}
        files[META_NAME] = canonical_json(meta)
    for name in data.draw(st.lists(st.sampled_from(sorted(files)), max_size=2)):
        files[name] = data.draw(damaged(files[name]))
    inspected(files, good[kind], deep=True)


# --- the parsers by themselves ----------------------------------------------------------------------------------------


@fuzz(150)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()).flatmap(damaged))
def test_what_is_parsed_is_what_json_says_or_a_value_error(raw: bytes) -> None:
    try:
        found = parse_object(raw)
    except ValueError:
        return
    assert found == json.loads(raw) and canonical_json(found)


@fuzz(100)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps({"a": value}).encode()).flatmap(damaged))
def test_read_meta_gives_an_object_or_a_cache_error(raw: bytes) -> None:
    with written({META_NAME: raw}) as folder, contextlib.suppress(CacheError):
        assert isinstance(read_meta(str(folder / META_NAME)), dict)


@fuzz(150)
@given(value=JSON, around=st.sampled_from([None, "shards", "index", "ids", "checksums", "files"]), deep=st.booleans())
def test_records_of_any_json_are_good_or_a_cache_error(value: Any, around: str | None, deep: bool) -> None:
    meta = value if around is None else {around: {"train": [value]} if deep else value}
    with contextlib.suppress(CacheError):
        for record in file_records(meta):
            assert isinstance(record["bytes"], int) and len(record["sha256"]) == 64
            assert ".." not in record["name"].split("/") and not record["name"].startswith("/")


@fuzz(150)
@given(meta=st.dictionaries(st.text(max_size=9), JSON, max_size=4), data=st.data())
def test_one_changed_byte_of_any_meta_is_seen(meta: dict[str, Any], data: st.DataObject) -> None:
    try:
        raw = bytearray(meta_bytes(meta))
    except UnicodeEncodeError:
        return
    stored, found = meta_crc32(bytes(raw))
    assert stored == found and json.loads(raw)["meta_crc32"] == f"{found:08x}"
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    stored, found = meta_crc32(bytes(raw))
    assert stored is None or stored != found


def npy(offsets: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(offsets, dtype="<i8"))
    return file.getvalue()


OFFSETS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=6)
NPY = OFFSETS.map(npy) | st.lists(st.integers(1, 40), max_size=6, unique=True).map(
    lambda found: npy([0, *sorted(found)])
)


@fuzz(200)
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


# --- JSON of anybody's text --------------------------------------------------------------------------------------

VALUES = st.lists(JSON, max_size=4)


def spelled(values: list[Any], how: str) -> bytes:
    if how == "lines":
        return b"".join(json.dumps(value).encode() + b"\n" for value in values)
    return json.dumps(values, indent=2 if how == "indented" else None).encode()


@fuzz(100)
@given(
    raw=st.builds(spelled, VALUES, st.sampled_from(("lines", "array", "indented"))).flatmap(damaged), block=st.data()
)
def test_damaged_json_files_give_values_or_a_value_error(raw: bytes, block: st.DataObject) -> None:
    with contextlib.suppress(ValueError), pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_stream, "BLOCK_BYTES", block.draw(st.sampled_from((1, 7, 1 << 16))))
        for number, _, _ in json_stream.iter_values(io.BytesIO(raw), "x"):
            assert number >= 0
