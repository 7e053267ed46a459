"""What is fetched before the first batch and in an epoch; what was compared is compared again once it has changed."""

import os

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.small_builds import pretrain

from niels_gpt.cache.mounts import mounted
from niels_gpt.exchange.transfer.push import push
from niels_gpt.sampling import EpochStream
from niels_gpt.storage.mounted import MOUNTED

pytestmark = pytest.mark.slow
MIB = 1 << 20
SHARD_BYTES = 12 * MIB


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Three shards of twelve pieces, the last one shorter."""
    texts = [(None, chr(97 + number % 26) * 200_000 + str(number), None) for number in range(75)]
    whole = {"max_train_tokens": None, "max_val_tokens": None, "partial": True, "val_frac": 0.01}
    how = {"shard_bytes": SHARD_BYTES, "tokenizer": ByteTokenizer(), "shuffle_buffer": None}
    path = tmp_path_factory.mktemp("made") / "text"
    pretrain(path, items=texts, **whole, **how)
    return path


@pytest.fixture
def at(tmp_path):
    """Open windows of a cache at a URL, in a folder of this test; nothing stays in the process."""
    before = dict(MOUNTED)

    def opened(url, **how):
        options = {"T": 1024, "global_batch_size": 1, "seed": 3, "epochs": 1, "local": tmp_path / "local"}
        return EpochStream(f"{url}/train", **(options | how))

    yield opened
    for folder in MOUNTED.keys() - before.keys():
        del MOUNTED[folder]


def test_the_first_batch_takes_four_requests_and_not_a_shard(cache, at, s3_server):
    push(cache, "s3://team/first")
    before, sent = s3_server.requests, s3_server.sent_bytes
    stream = at("s3://team/first", max_ahead=1)
    assert s3_server.requests - before == 2, "meta.json and the checksums of blocks"
    batch = next(iter(stream))
    assert batch.x.equal(next(iter(EpochStream(cache / "train", T=1024, global_batch_size=1, seed=3))).x)
    assert s3_server.requests - before <= 4
    assert s3_server.sent_bytes - sent < 3 * MIB < SHARD_BYTES


def test_an_epoch_by_shards_fetches_each_byte_once_though_the_folder_holds_less_than_two_shards_more(cache, at):
    url = f"file://{cache}"
    stream = at(url, order="shards", open_shards=1, max_bytes=2 * SHARD_BYTES, global_batch_size=16)
    (mount,) = [each for folder, each in MOUNTED.items() if stream.folder.is_relative_to(folder)]
    rows = sum(len(batch.x) for batch in stream)
    size = sum(each.stat().st_size for each in (cache / "train").glob("*.bin"))
    assert rows == stream.samples_per_epoch
    assert mount.fetched_bytes <= 1.1 * size


def test_a_piece_that_changes_after_it_was_compared_is_fetched_again(cache, at, caplog, tmp_path):
    folder = mounted(f"file://{cache}", local=tmp_path / "local")
    mount, name, content = MOUNTED[str(folder)], "train/shard_00000.bin", memoryview(bytearray(3000))
    expected = (cache / name).read_bytes()[MIB + 70_000 :][: len(content)]

    def read():
        content[:] = bytes(len(content))
        mount.read_into(content, name, MIB + 70_000)
        return bytes(content)

    assert read() == expected
    (piece,) = (folder / ".pieces").iterdir()
    os.utime(piece, ns=(10**18, 10**18))  # settled: what is compared from now on counts
    assert read() == expected == read()
    with piece.open("r+b") as file:
        file.seek(70_100)
        file.write(b"\0")
    assert not caplog.records
    assert read() == expected == read()
    assert [record.code for record in caplog.records] == ["W611"]
