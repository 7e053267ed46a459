"""Where an import goes, which tokenizer it has there, and what the other commands make of it."""

import numpy as np
import pytest
from support.commands import rebuild_command
from support.errors import refused
from support.foreign import foreign_file, import_files

from niels_gpt.cache.meta import read_meta, tokenizer_above, tokenizer_of
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.folders import caches_below
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import locate, stats
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.recipes.exchange.imports import import_cache
from niels_gpt.recipes.gc import collect
from niels_gpt.recipes.records import recorded_outcomes
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tokenizers."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for folder, size in zip(folders, (300, 310), strict=True):
        texts = [f"a quick fox and {at} lazy dogs of size {size}" for at in range(40)]
        write_tokenizer(train_tokenizer(texts, vocab_size=size, trained_on="a test"), folder)
    return folders


@pytest.fixture
def source(models, tmp_path):
    """train.bin and val.bin of the second tokenizer."""
    (tmp_path / "bins").mkdir()
    tokenizer = load_tokenizer(models[1])
    for split, texts in {"train": ["a fox", "dogs"], "val": ["lazy"]}.items():
        ids = [id for text in texts for id in (*tokenizer.encode(text), tokenizer.special_token_ids()["eot"])]
        np.array(ids, dtype="<u2").tofile(tmp_path / "bins" / f"{split}.bin")
    return tmp_path / "bins"


def test_an_import_of_another_tokenizer_has_its_own(models, source, tmp_path):
    root = tmp_path / "cache"
    ensure_tokenizer(Settings(cache_dir=str(root), tokenizer=str(models[0])))
    shared = read_meta(str(root / "tokenizer" / "meta.json"))
    with refused("E223", "imported/web") as error:
        import_cache(source, "pretrain/web", format="nanogpt", cache_dir=root, tokenizer=str(models[1]))
    assert error.value.code == "E223"
    done = import_cache(source, "web", format="nanogpt", cache_dir=root, tokenizer=str(models[1]), licence="CC0-1.0")
    assert read_meta(str(root / "tokenizer" / "meta.json")) == shared
    version = done.path.resolve()
    assert tokenizer_above(version) == root / "imported" / ".versions" / "web" / "tokenizer"
    assert tokenizer_of(version, done.meta["tokenizer_sha256"]).sha256 == load_tokenizer(models[1]).sha256
    verdicts = verify(done.path, Limits(deep=True))
    assert [name for name, verdict in verdicts.items() if verdict.problems] == []
    assert find_damage(done.path, deep=True) == []
    assert caches_below(root) == [root / "imported" / "web", root / "tokenizer"]
    assert [outcome.key for outcome in recorded_outcomes(root)[0]] == ["tokenizer", "imported/web"]
    assert dict(stats(done.path))["licence"] == "CC0-1.0"
    text = locate(done.path, tokenizer_of(version, None), split="train", position=0, num_tokens=20)
    assert "train.bin#0" in text and "fox" in text
    command = f"niels-gpt import {source} imported/web --from nanogpt --cache-dir {root} "
    assert rebuild_command(done.path).startswith(command)
    again = import_cache(source, "web", format="nanogpt", cache_dir=root, tokenizer=str(models[1]), document_end="none")
    assert again.meta["docs"] == {"train": 1, "val": 1} and again.meta["imported"]["borders"] == "files"
    for _ in range(2):
        assert not any("tokenizer" in line for line in collect(root, dry_run=False))
    assert find_damage(done.path, deep=True) == [] and tokenizer_of(done.path.resolve(), None)


def test_an_import_into_an_empty_folder_gives_it_its_tokenizer(models, source, tmp_path):
    root = tmp_path / "cache"
    done = import_cache(source, "pretrain/web", format="nanogpt", cache_dir=root, tokenizer=str(models[1]))
    assert load_tokenizer(root / "tokenizer").sha256 == done.meta["tokenizer_sha256"]
    export_cache(done.path, "nanogpt", tmp_path / "out")
    again = import_cache(tmp_path / "out", "again", format="nanogpt", cache_dir=root)  # by its manifest
    assert again.meta["shards"] == done.meta["shards"] and again.meta["imported"]["borders"] == "manifest"
    with refused("E223") as error:
        import_cache(tmp_path / "out", "other", format="nanogpt", cache_dir=root, tokenizer=str(models[0]))
    assert error.value.code == "E223"


def test_a_folder_without_a_tokenizer_is_refused(source, tmp_path):
    with refused("E223", "--tokenizer") as error:
        import_cache(source, "web", format="nanogpt", cache_dir=tmp_path / "cache")
    assert error.value.code == "E223" and not (tmp_path / "cache" / "imported").exists()


def loss_file(name, ids, ends, loss):
    return foreign_file(
        name,
        lambda: iter([np.array(ids[:3]), np.array(ids[3:])]),
        len(ids),
        ends=lambda: np.array(ends),
        loss=lambda: iter([np.array(loss[:2], dtype=bool), np.array(loss[2:], dtype=bool)]),
    )


def test_files_with_loss_become_an_sft_cache(models, tmp_path):
    root = tmp_path / "cache"
    ensure_tokenizer(Settings(cache_dir=str(root), tokenizer=str(models[0])))
    files = [loss_file("a", [20, 21, 22, 23, 24], [3, 5], [1, 0, 1, 0, 1]), loss_file("b", [25, 26], [2], [0, 0])]
    tokenizer = load_tokenizer(models[0])
    done = import_files(files, root / "sft" / "chats", tokenizer=tokenizer, end="none", pad_id=7)
    assert done.meta["noticed"] == {"examples_without_loss": 1, "first_tokens_with_loss": 1}
    assert (done.path / "train_tokens.bin").read_bytes() == np.arange(20, 27, dtype="<u2").tobytes()
    assert (done.path / "train_loss.bits").read_bytes() == bytes([0b0010100])
    assert (done.path / "index/train_ids.txt").read_text() == "a#0\na#1\nb#0\n" and done.meta["pad_id"] == 7
    assert find_damage(done.path, deep=True) == []
    assert not any(
        check.problems for name, check in verify(done.path, Limits(deep=True)).items() if name != "budget_reached"
    )
    some = [*files, foreign_file("c", lambda: iter([np.array([20, 21])]), 2, ends=lambda: np.array([2]))]
    with refused("E221", "c does not", "loss"):
        import_files(some, root / "sft" / "some", tokenizer=tokenizer, end="none")
