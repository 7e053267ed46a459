"""A cache that is damaged, foreign or incomplete is an error that names the file; it is never read as if it were good.

Run: pytest tests/test_damaged_caches.py
"""

import json
import re
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
from niels_gpt.fileio import sha256_file

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
    return SFTExampleDataset(*files, **{"T": 4, "device": "cpu", "eot_id": 4, **arguments})


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
    ("meta.json", change(shards={"train": 3}), CacheError, "meta.json: no list of shards for split train"),
    ("meta.json", change(shards={"train": [{}]}), CacheError, "meta.json: no list of shards for split train"),
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
    ("train_idx.npy", put(b""), CacheError, "train_idx.npy: not a .npy file"),
    ("train_idx.npy", put(b"not an array"), CacheError, "train_idx.npy: not a .npy file"),
    ("train_idx.npy", cut(100), CacheError, "train_idx.npy: not a .npy file"),
    ("train_idx.npy", cut(-8), CacheError, "train_idx.npy: not a .npy file"),
    ("train_idx.npy", save([0, 6, 12], "<i4"), CacheError, "train_idx.npy: int32 [3], expected int64 [examples]"),
    ("train_idx.npy", save([0, 6, 12], "<f8"), CacheError, "train_idx.npy: float64 [3], expected int64 [examples]"),
    ("train_idx.npy", save([[0, 6, 12]]), CacheError, "train_idx.npy: int64 [1, 3], expected int64 [examples]"),
    ("train_idx.npy", save(0), CacheError, "train_idx.npy: int64 [], expected int64 [examples]"),
    ("train_idx.npy", save([]), CacheError, "train_idx.npy: no example in this split"),
    ("train_idx.npy", save([6, 12]), CacheError, "train_idx.npy: begins at 6, expected 0"),
    ("train_idx.npy", save([0, 12, 6]), CacheError, "train_idx.npy: offsets do not ascend at entry 2"),
    ("train_idx.npy", save([0, 6, 6]), CacheError, "train_idx.npy: offsets do not ascend at entry 2"),
    ("train_idx.npy", save([0, 6, 18]), CacheError, "offset 18 lies beyond the 18 tokens of train_tokens.bin"),
    ("meta.json", put(b"{"), CacheError, "meta.json: not JSON"),
    ("meta.json", put(b"[1]"), CacheError, "meta.json: a JSON list, expected an object"),
    ("meta.json", change(shards={"train": 3}), CacheError, "meta.json: no list of token files"),
    ("meta.json", change(shards={"train": [{}]}), CacheError, "meta.json: no list of token files"),
]


@pytest.mark.parametrize(("name", "damage", "error", "message"), SFT_DAMAGE)
def test_a_damaged_sft_cache_is_refused(
    cache_dir: Path, name: str, damage: Damage, error: type[Exception], message: str
) -> None:
    damage(cache_dir / "sft" / "chats" / name)
    with pytest.raises(error, match=re.escape(message)):
        open_sft(cache_dir)


def test_pickled_objects_in_an_offsets_file_are_not_loaded(cache_dir: Path) -> None:
    np.save(cache_dir / "sft" / "chats" / "train_idx.npy", np.array([0, None], dtype=object), allow_pickle=True)
    with pytest.raises(CacheError, match=r"train_idx\.npy: not a \.npy file"):
        open_sft(cache_dir)


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
