"""A cache that leaves and enters: the import has the same documents, and is exported to the same bytes."""

import numpy as np
import pytest
import torch
from support.foreign import MANIFEST_NAME, NAMES, WITH_LOSS, tokens_of
from support.made_tokenizers import made_tokenizer

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.exchange.imports import import_cache
from niels_gpt.tokenizer import load_tokenizer

OTHER_FILES = ("nanogpt", "hf")  # whose files are not the shards of the cache
TEXTS = [f"number {number} of " + "the words " * (number % 9) for number in range(24)]
CHATS = [
    [{"role": "user", "content": "say " * number}, {"role": "assistant", "content": f"{number}"}]
    for number in range(1, 9)
]


def built(path, tokenizer, shard_tokens):
    """Build a cache whose shards do not end where documents do."""
    loaded = load_tokenizer(tokenizer)
    width = 2 if loaded.vocab_size <= 1 << 16 else 4
    build_pretrain(
        [("val" if number % 4 == 3 else "train", text) for number, text in enumerate(TEXTS)],
        path,
        tokenizer=loaded,
        max_train_tokens=None,
        max_val_tokens=None,
        shard_bytes=shard_tokens * width,
        seed=0,
        shuffle_buffer=None,
        val_frac=0.25,
        document_end="auto",
        num_threads=0,
    )
    assert tokens_of(path).dtype.itemsize == width
    return path


def brought_back(cache, tokenizer, name, tmp_path):
    """Export a cache, import it, and export that again; returns the import's folder."""
    export_cache(cache, name, tmp_path / "out")
    where = {"cache_dir": tmp_path / "other", "tokenizer": str(tokenizer)}
    imported = import_cache(tmp_path / "out", "back", format=name, **where).path
    assert not find_damage(imported, deep=True)
    export_cache(imported, name, tmp_path / "again")
    first, again = files_of(tmp_path / "out"), files_of(tmp_path / "again")
    assert [*first] == [*again]
    assert [path for path in first if first[path] != again[path]] == []
    return imported


def files_of(folder):
    """The bytes of all files but the manifest, which names the cache."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_NAME)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def same_documents(cache, imported):
    """Compare ids and borders of both splits."""
    ours, theirs = tokens_of(cache), tokens_of(imported)
    assert ours.dtype == theirs.dtype
    for split in ("train", "val"):
        ids = [[id for file in each.files(split) for id in file.ids.tolist()] for each in (ours, theirs)]
        assert ids[0] == ids[1]
        assert np.array_equal(ours.bounds(split), theirs.bounds(split))


def batches(cache, split):
    """A few batches of one seed."""
    data = PretrainTokenStreamDataset(str(cache / split), T=4, device="cpu")
    generator = torch.Generator().manual_seed(3)
    return [part for _ in range(4) for part in data.get_batch(B=5, generator=generator)]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_FILES])
@pytest.mark.parametrize("dtype", ["uint16", pytest.param("uint32", marks=pytest.mark.slow)])
def test_an_import_of_an_export_gives_the_same_batches(tiny_model_path, dtype, name, tmp_path):
    tokenizer = tiny_model_path if dtype == "uint16" else made_tokenizer("llama3")
    cache = built(tmp_path / "cache" / "pretrain" / "texts", tokenizer, 40)
    imported = brought_back(cache, tokenizer, name, tmp_path)
    same_documents(cache, imported)
    for split in ("train", "val"):
        assert len(tokens_of(cache).files(split)) > 1
        for ours, theirs in zip(batches(cache, split), batches(imported, split), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OTHER_FILES)
def test_documents_come_back_from_files_that_are_no_shards(tiny_model_path, name, tmp_path):
    cache = built(tmp_path / "cache" / "pretrain" / "texts", tiny_model_path, 7)
    imported = brought_back(cache, tiny_model_path, name, tmp_path)
    same_documents(cache, imported)
    lengths = [[file.tokens for file in tokens_of(each).checked_files()] for each in (cache, imported)]
    assert sum(lengths[0]) == sum(lengths[1]) and len(lengths[0]) > len(lengths[1])


@pytest.mark.parametrize("name", WITH_LOSS)
def test_chats_come_back_with_their_loss(tiny_model_path, name, tmp_path):
    cache, tokenizer = tmp_path / "cache" / "sft" / "chats", load_tokenizer(tiny_model_path)
    build_sft(CHATS, cache, tokenizer=tokenizer, val_frac=0.3, seed=0, num_threads=0)
    imported, special = brought_back(cache, tiny_model_path, name, tmp_path), tokenizer.special_token_ids()
    same_documents(cache, imported)
    for split in ("train", "val"):
        drawn = []
        for folder, more in ((cache, {"asst_id": special["asst"]}), (imported, {})):
            paths = (str(folder / f"{split}_tokens.bin"), str(folder / f"{split}_idx.npy"))
            data = SFTExampleDataset(*paths, T=48, device="cpu", eot_id=special["eot"], **more)
            generator = torch.Generator().manual_seed(3)
            drawn.append([part for _ in range(3) for part in data.get_batch(B=4, generator=generator)])
        assert len(drawn[0]) > 3 and all(map(torch.equal, *drawn))
