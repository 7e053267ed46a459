"""What an export by link takes of the disk, by du: 1,000 shards of a MiB, with documents of 4,096 tokens."""

import subprocess

import pytest

from niels_gpt.exchange.exporting import export_cache
from tools import scale_caches

SHARDS, SHARD_BYTES, DOCUMENT_TOKENS = 1_000, 1 << 20, 4_096


def bytes_used(*folders):
    """The bytes that folders take, blocks of files with several names counted once: du."""
    run = subprocess.run(["du", "-c", "-s", "-B1", *map(str, folders)], capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1].split()[0])


@pytest.mark.slow
def test_a_thousand_shards_take_less_than_a_hundredth_more(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_caches, "MAX_LINKS", 1)  # each shard a file of its own
    documents = SHARDS * SHARD_BYTES // 2 // DOCUMENT_TOKENS
    cache = scale_caches.make_cache(tmp_path, shards=SHARDS, shard_bytes=SHARD_BYTES, documents=documents)
    before, out = bytes_used(tmp_path), tmp_path / "out"
    assert before > SHARDS * SHARD_BYTES
    for name in ("megatron", "datatrove", "olmo"):
        exported = export_cache(cache, name, out / name)
        assert exported.linked_bytes == SHARDS * SHARD_BYTES
        assert 0 < bytes_used(tmp_path) - before < before / 100, name
        before = bytes_used(tmp_path)
