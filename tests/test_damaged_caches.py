"""A cache that is damaged, foreign or incomplete is an error that names the file; it is never read as if it were good.

Run: pytest tests/test_damaged_caches.py
"""

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from niels_gpt.build.describe import Source
from niels_gpt.build.pretrain import build_stub
from niels_gpt.cache import (
    CacheError,
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    write_meta,
)
from niels_gpt.cache.mmap import load_idx
from niels_gpt.fileio import sha256_file
from niels_gpt.inspection.damage import find_damage

SPECIAL = {"sys": 1, "usr": 2, "asst": 3, "eot": 4}
Damage = Callable[[Path], Any]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A cache folder with tokenizer/, pretrain/notes (train: 3 shards of 10 tokens, no val) and sft/chats."""
    root = tmp_path / "cache"
    (root / "tokenizer").mkdir(parents=True)
    (root / "tokenizer" / "spm.model").write_bytes(b"a model")
    tokenizer = ByteTokenizer()
    tokenizer.model_path = str(root / "tokenizer" / "spm.model")
    sha256 = sha256_file(tokenizer.model_path)
    write_meta(str(root / "tokenizer" / "meta.json"), {"tokenizer_sha256": sha256, "special_token_ids": SPECIAL})
    build_pretrain_cache(
        ["a" * 30],
        str(root / "pretrain" / "notes"),
        tokenizer=tokenizer,
        max_train_tokens=30,
        max_val_tokens=0,
        shard_bytes=20,
        seed=0,
        shuffle_buffer=None,
    )
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3  # 3 x 6 tokens
    build_sft_cache(chats, str(root / "sft" / "chats"), tokenizer=tokenizer, val_frac=0, seed=0)
    return root


def open_pretrain(cache_dir: Path, split: str = "train", **arguments: Any) -> PretrainTokenStreamDataset:
    shards = str(cache_dir / "pretrain" / "notes" / split)
    return PretrainTokenStreamDataset(shards, **{"T": 4, "device": "cpu", **arguments})


def open_sft(cache_dir: Path, split: str = "train", **arguments: Any) -> SFTExampleDataset:
    files = [str(cache_dir / "sft" / "chats" / f"{split}_{name}") for name in ("tokens.bin", "idx.npy")]
    return SFTExampleDataset(*files, **{"T": 5, "device": "cpu", "eot_id": 4, **arguments})


def cut(num_bytes: int) -> Damage:
    """Keep the first bytes of a file; a negative number: all but the last ones."""
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def put(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)


def save(values: Any, dtype: str = "<i8") -> Damage:
    return lambda path: np.save(path, np.array(values, dtype=dtype))


def change(**keys: Any) -> Damage:
    """Change keys of a meta.json."""
    return lambda path: write_meta(str(path), {**json.loads(path.read_bytes()), **keys})


def remove(path: Path) -> None:
    path.unlink()


def test_the_undamaged_caches_open(cache_dir: Path) -> None:
    assert open_pretrain(cache_dir).num_windows == 3 * 6 and len(open_sft(cache_dir)) == 3


PRETRAIN_DAMAGE = [
    # file, damage, class of the error, what its message says
    ("train/shard_00001.bin", put(b""), CacheError, "train/shard_00001.bin: 0 bytes, expected 20 by its meta.json"),
    ("train/shard_00001.bin", cut(-1), CacheError, "train/shard_00001.bin: 19 bytes, expected 20"),
    ("train/shard_00001.bin", cut(-2), CacheError, "train/shard_00001.bin: 18 bytes, expected 20"),
    ("train/shard_00001.bin", remove, FileNotFoundError, "train/shard_00001.bin: no such token file"),
    ("meta.json", put(b"{"), CacheError, "meta.json: not JSON"),
    ("meta.json", put(b"\xff\xfe"), CacheError, "meta.json: not JSON"),
    ("meta.json", put(b"[" * 100_000), CacheError, "meta.json: not JSON"),
    ("meta.json", put(b"[1]"), CacheError, "meta.json: a JSON list, expected an object"),
    ("meta.json", change(built=False), CacheError, "meta.json: built is false"),
    ("meta.json", change(shards={}), CacheError, "meta.json: no list of shards for split train"),
    ("meta.json", change(shards={"train": 3}), CacheError, "meta.json: shards.train is 3, expected a list"),
    ("meta.json", change(shards={"train": [{}]}), CacheError, "meta.json: shards.train[0] is {}, expected a record"),
    ("meta.json", change(shards={"train": []}), CacheError, "train: this split has no shard"),
]


@pytest.mark.parametrize(("name", "damage", "error", "message"), PRETRAIN_DAMAGE)
def test_a_damaged_pretrain_cache_is_refused(
    cache_dir: Path, name: str, damage: Damage, error: type[Exception], message: str
) -> None:
    damage(cache_dir / "pretrain" / "notes" / name)
    with pytest.raises(error, match=re.escape(message)):
        open_pretrain(cache_dir)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "an empty file"), (b"\0" * 19, "19 bytes, expected a multiple of 2")]
)
def test_a_damaged_shard_without_meta_json_is_refused(cache_dir: Path, content: bytes, message: str) -> None:
    cache = cache_dir / "pretrain" / "notes"
    (cache / "meta.json").unlink()
    (cache / "train" / "shard_00001.bin").write_bytes(content)
    with pytest.raises(CacheError, match=f"train/shard_00001.bin: {message}"):
        open_pretrain(cache_dir)


def test_an_empty_pretrain_split_is_refused(cache_dir: Path) -> None:
    with pytest.raises(CacheError, match="val: this split has no shard"):
        open_pretrain(cache_dir, "val")
    (cache_dir / "pretrain" / "notes" / "meta.json").unlink()
    with pytest.raises(CacheError, match="val: this split has no shard"):
        open_pretrain(cache_dir, "val")


def test_a_split_whose_shards_are_all_too_short_is_refused(cache_dir: Path) -> None:
    with pytest.raises(CacheError, match=r"train: the longest shard has 10 tokens, expected T \+ 1 = 11"):
        open_pretrain(cache_dir, T=10)


def test_an_absent_split_or_cache_is_a_file_not_found_error_with_a_remedy(cache_dir: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"notes/test: no such folder\. Build it: python -m"):
        open_pretrain(cache_dir, "test")


def test_a_stub_is_refused_with_its_reason(cache_dir: Path) -> None:
    build_stub(
        cache_dir / "pretrain" / "stub", tokenizer=ByteTokenizer(), source=Source(name="g"), seed=0, shard_bytes=20
    )
    with pytest.raises(CacheError, match=r"meta.json: built is false"):
        PretrainTokenStreamDataset(str(cache_dir / "pretrain" / "stub" / "train"), T=4, device="cpu")


SFT_DAMAGE = [
    ("train_tokens.bin", put(b""), CacheError, "train_tokens.bin: 0 bytes, expected 36 by its meta.json"),
    ("train_tokens.bin", cut(-1), CacheError, "train_tokens.bin: 35 bytes, expected 36"),
    ("train_tokens.bin", cut(-2), CacheError, "train_tokens.bin: 34 bytes, expected 36"),
    ("train_tokens.bin", remove, FileNotFoundError, "train_tokens.bin: no such token file"),
    ("train_idx.npy", remove, FileNotFoundError, "train_idx.npy: no such offsets file"),
    ("train_idx.npy", put(b""), CacheError, "train_idx.npy: 0 bytes, expected 152 by its meta.json"),
    ("train_idx.npy", cut(-8), CacheError, "train_idx.npy: 144 bytes, expected 152 by its meta.json"),
    ("train_idx.npy", save([0, 6, 6]), CacheError, "train_idx.npy: offsets do not ascend at entry 2"),
    ("train_idx.npy", save([0, 6, 18]), CacheError, "offset 18 lies beyond the 18 tokens of train_tokens.bin"),
    ("meta.json", put(b"{"), CacheError, "meta.json: not JSON"),
    ("meta.json", put(b"[1]"), CacheError, "meta.json: a JSON list, expected an object"),
    ("meta.json", change(shards={"train": 3}), CacheError, "meta.json: shards.train is 3, expected a list"),
    ("meta.json", change(shards={"train": [{}]}), CacheError, "meta.json: shards.train[0] is {}, expected a record"),
    ("meta.json", change(shards={}), CacheError, "meta.json: does not name train_tokens.bin, which lies beside it"),
]


@pytest.mark.parametrize(("name", "damage", "error", "message"), SFT_DAMAGE)
def test_a_damaged_sft_cache_is_refused(
    cache_dir: Path, name: str, damage: Damage, error: type[Exception], message: str
) -> None:
    damage(cache_dir / "sft" / "chats" / name)
    with pytest.raises(error, match=re.escape(message)):
        open_sft(cache_dir)


OFFSETS_DAMAGE = [
    # damage to a file whose size no meta.json tells, what the message says
    (put(b""), "not a .npy file of plain numbers: it begins b''"),
    (put(b"not an array"), "not a .npy file"),
    (put(b"PK\x03\x04" + bytes(200)), "not a .npy file"),
    (put(b"\x80\x04]q\x00."), "not a .npy file"),  # a pickle
    (cut(100), "not a .npy file"),
    (cut(-8), "144 bytes, expected 152 by its own header, which has 3 entries"),
    (lambda path: path.write_bytes(path.read_bytes() + b"12345678"), "160 bytes, expected 152 by its own header"),
    (save([0, 6, 12], "<i4"), "<i4 of shape (3,), expected int64 [examples]"),
    (save([0, 6, 12], ">i8"), ">i8 of shape (3,), expected int64 [examples]"),
    (save([0, 6, 12], "<f8"), "<f8 of shape (3,), expected int64 [examples]"),
    (save([[0, 6, 12]]), "<i8 of shape (1, 3), expected int64 [examples]"),
    (save(0), "<i8 of shape (), expected int64 [examples]"),
    (save([]), "no example in this split"),
    (save([6, 12]), "begins at 6, expected 0"),
    (save([0, 12, 6]), "offsets do not ascend at entry 2"),
    (save([0, 6, 6]), "offsets do not ascend at entry 2"),
    (save([0, 2**63 - 1, -(2**63)]), "offsets do not ascend at entry 2"),
    (save([0, 6, 18]), "offset 18 lies beyond the 18 tokens of train_tokens.bin"),
    (save([0, None], "O"), "|O of shape (2,), expected int64 [examples]"),
]


@pytest.mark.parametrize(("damage", "message"), OFFSETS_DAMAGE)
def test_a_damaged_offsets_file_is_refused_without_a_meta_json_too(
    cache_dir: Path, damage: Damage, message: str
) -> None:
    (cache_dir / "sft" / "chats" / "meta.json").unlink()
    damage(cache_dir / "sft" / "chats" / "train_idx.npy")
    with pytest.raises(CacheError, match=re.escape(f"train_idx.npy: {message}")):
        open_sft(cache_dir)


def npy(shape: str, *, descr: str = "'<i8'", version: bytes = b"\x01\x00", fortran: str = "False") -> bytes:
    """Return a .npy file of three offsets whose header says something else."""
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    width = 2 if version == b"\x01\x00" else 4
    header = header.ljust(128 - 9 - width) + b"\n"
    start = b"\x93NUMPY" + version + len(header).to_bytes(width, "little")
    return start + header + np.array([0, 6, 12], dtype="<i8").tobytes()


HOSTILE_NPY = [
    (npy("(3,)", version=b"\x03\x00"), "not a .npy file"),
    (npy("(3,)", version=b"\x00\x00"), "not a .npy file"),
    (npy("(-3,)"), "not a .npy file"),
    (npy("(3, -1)"), "not a .npy file"),
    (npy("(1152921504606846976,)"), "152 bytes, expected 9223372036854775936 by its own header"),
    (npy("(18446744073709551619,)"), "<i8 of shape (18446744073709551619,), expected"),
    (npy("(3000000000000000,)"), "152 bytes, expected 24000000000000128 by its own header"),
    (npy("(4294967296, 4294967296)"), "<i8 of shape (4294967296, 4294967296), expected"),
    (npy("(1, 3)", fortran="True"), "<i8 of shape (1, 3), expected"),
    (npy("(3,)", descr="[('a', '<i8')]"), "not a .npy file"),
    (npy("(3,)", descr="__import__('os')"), "not a .npy file"),
    (npy("(3.5,)"), "not a .npy file"),
    (npy("(" * 50), "not a .npy file"),
    (b"\x93NUMPY\x01\x00\xff\xff{'descr': '<i8', ", "not a .npy file"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr': '<i8', ", "not a .npy file"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE_NPY)
def test_a_hostile_npy_header_is_refused_and_nothing_is_allocated_for_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "train_idx.npy").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CacheError, match=re.escape(f"train_idx.npy: {message}")):
        load_idx(tmp_path / "train_idx.npy", num_tokens=18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize("content", [npy("(3,)"), npy("(3,)", version=b"\x02\x00"), npy("(3,)", fortran="True")])
def test_other_headers_that_fit_their_file_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train_idx.npy").write_bytes(content)
    assert load_idx(tmp_path / "train_idx.npy", num_tokens=18).tolist() == [0, 6, 12]


def test_an_empty_sft_split_is_refused(cache_dir: Path) -> None:
    with pytest.raises(CacheError, match=r"val_tokens\.bin: an empty file"):
        open_sft(cache_dir, "val")


@pytest.mark.parametrize("opener", [open_pretrain, open_sft])
def test_ids_of_another_tokenizer_than_the_one_beside_the_cache_are_refused(cache_dir: Path, opener: Any) -> None:
    change(tokenizer_sha256="f" * 64)(cache_dir / "tokenizer" / "meta.json")
    with pytest.raises(CacheError, match=f"meta.json: ids of tokenizer [0-9a-f]{{12}}, expected tokenizer {'f' * 12}"):
        opener(cache_dir)


@pytest.mark.parametrize("opener", [open_pretrain, open_sft])
def test_ids_of_another_tokenizer_than_the_callers_are_refused(cache_dir: Path, opener: Any) -> None:
    opener(cache_dir, tokenizer_sha256=sha256_file(cache_dir / "tokenizer" / "spm.model"))
    with pytest.raises(CacheError, match=f"meta.json: ids of tokenizer [0-9a-f]{{12}}, expected tokenizer {'e' * 12}"):
        opener(cache_dir, tokenizer_sha256="e" * 64)


def test_an_eot_id_other_than_the_caches_is_refused(cache_dir: Path) -> None:
    with pytest.raises(CacheError, match=r"meta\.json: the eot sentinel has id 4, but eot_id=5 was given"):
        open_sft(cache_dir, eot_id=5)


def test_an_asst_id_other_than_the_caches_is_refused(cache_dir: Path) -> None:
    with pytest.raises(CacheError, match=r"meta\.json: the asst sentinel has id 3, but asst_id=2 was given"):
        open_sft(cache_dir, asst_id=2)


def test_the_asst_id_comes_from_the_meta_json_beside_the_tokens(cache_dir: Path) -> None:
    (cache_dir / "tokenizer" / "meta.json").unlink()
    assert open_sft(cache_dir).asst_id == 3


def test_the_asst_id_comes_from_the_keyword_where_there_is_no_meta(cache_dir: Path) -> None:
    (cache_dir / "tokenizer" / "meta.json").unlink()
    (cache_dir / "sft" / "chats" / "meta.json").unlink()
    assert open_sft(cache_dir, asst_id=3).asst_id == 3


def test_the_asst_id_comes_from_the_tokenizer_of_the_cache_where_the_meta_has_none(cache_dir: Path) -> None:
    change(special_token_ids=None)(cache_dir / "sft" / "chats" / "meta.json")
    assert open_sft(cache_dir).asst_id == 3
    (cache_dir / "sft" / "chats" / "meta.json").unlink()
    assert open_sft(cache_dir).asst_id == 3


def test_an_asst_id_known_nowhere_is_an_error_that_names_the_three_places(cache_dir: Path) -> None:
    (cache_dir / "tokenizer" / "meta.json").unlink()
    change(special_token_ids={})(cache_dir / "sft" / "chats" / "meta.json")
    folder = (cache_dir / "sft" / "chats").resolve()
    with pytest.raises(CacheError) as caught:
        open_sft(cache_dir)
    message = str(caught.value)
    assert "asst_id=" in message and str(folder / "meta.json") in message and "tokenizer/meta.json" in message


# --- tokens and offsets that do not belong together --------------------------------------------------------------


def pair_of(tokens: Path, idx: Path, **arguments: Any) -> SFTExampleDataset:
    return SFTExampleDataset(tokens, idx, **{"T": 30, "device": "cpu", "eot_id": 4, **arguments})


def chats_of(cache_dir: Path, name: str, lengths: list[int]) -> Path:
    """Build sft/NAME: half of the chats in each split, whose messages have these lengths."""
    chats = [[{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}] for n in lengths]
    build_sft_cache(chats, str(cache_dir / "sft" / name), tokenizer=ByteTokenizer(), val_frac=0.5, seed=0)
    return (cache_dir / "sft" / name).resolve()


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("splits", [("train", "val"), ("val", "train")])
def test_tokens_and_offsets_of_two_splits_are_refused(
    cache_dir: Path, splits: tuple[str, str], described: bool
) -> None:
    folder = chats_of(cache_dir, "both", [3, 3, 3, 3])
    if not described:
        (folder / "meta.json").unlink()
    with pytest.raises(CacheError, match=rf"{splits[1]}_idx\.npy: the offsets of other tokens.*of {splits[1]}, not"):
        pair_of(folder / f"{splits[0]}_tokens.bin", folder / f"{splits[1]}_idx.npy")


def test_tokens_of_one_cache_and_offsets_of_another_are_refused(cache_dir: Path) -> None:
    one, other = chats_of(cache_dir, "one", [3, 4]), chats_of(cache_dir, "other", [3, 4])
    for folder in (one, other):
        with pytest.raises(CacheError, match=r"the offsets of other tokens.*another cache"):
            pair_of(one / "train_tokens.bin", other / "train_idx.npy", asst_id=3)
        (folder / "meta.json").unlink()
    assert len(pair_of(one / "train_tokens.bin", other / "train_idx.npy", asst_id=3)) == 1  # files of other tools


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("known_by", ["meta.json", "tokenizer/meta.json"])
def test_offsets_of_another_version_of_equal_size_are_refused_by_the_first_example(
    cache_dir: Path, io: Any, known_by: str
) -> None:
    folder = chats_of(cache_dir, "one", [9, 2, 5, 4, 7, 3])
    (folder / "train_idx.npy").write_bytes(
        (chats_of(cache_dir, "other", [3, 4, 5, 9, 2, 7]) / "train_idx.npy").read_bytes()
    )
    if known_by != "meta.json":
        (folder / "meta.json").unlink()
    said = (
        r"train_tokens\.bin: token \d+, with which example 1 begins by train_idx\.npy, is id \d+, expected the sentinel"
    )
    with pytest.raises(CacheError, match=said):
        pair_of(folder / "train_tokens.bin", folder / "train_idx.npy", io=io)
    (damage,) = find_damage(folder, deep=False) if known_by == "meta.json" else [None]
    assert damage is None or (damage.file == "train_tokens.bin" and "example 1 begins" in damage.problem)
    (cache_dir / "tokenizer" / "meta.json").unlink()
    if known_by != "meta.json":  # nobody knows the ids of the roles: what is wrong shows in the targets
        with pytest.warns(UserWarning, match="1 of 3 rows have no target"):
            pair_of(folder / "train_tokens.bin", folder / "train_idx.npy", io=io, asst_id=3)
