"""A staged part of a cache: whole shards, with the borders and names of their documents, as a whole cache."""

import json

import pytest
from support import small_builds
from support.errors import refused
from support.foreign import tokens_of

from niels_gpt.exchange.transfer.fetch import stage
from niels_gpt.kinds.verify import find_damage
from niels_gpt.sampling import EpochStream


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Train has shards of 120, 120, 120 and 20 tokens of 2 bytes, val one of 100; documents lie in two shards."""
    path = tmp_path_factory.mktemp("whole") / "cache"
    small_builds.pretrain(path)
    return path


def meta_of(path):
    meta = json.loads((path / "meta.json").read_bytes())
    return meta


@pytest.mark.parametrize(
    ("split", "max_bytes", "shards"),
    [(None, 500, (2, 0)), (None, 760, (4, 0)), (None, 959, (4, 0)), ("val", None, (0, 1)), ("train", 240, (1, 0))],
)
def test_the_shards_that_fit_with_their_documents(cache, tmp_path, split, max_bytes, shards):
    done = stage(str(cache), tmp_path / "part", split=split, max_bytes=max_bytes)
    whole, part = tokens_of(cache), tokens_of(tmp_path / "part")
    assert (len(part.files("train")), len(part.files("val"))) == shards
    assert part.meta["staged"] == {
        "of": whole.meta["content_sha256"],
        "train_shards": shards[0],
        "val_shards": shards[1],
    }
    for name in ("train", "val"):
        files = part.files(name)
        assert [file.ids.tolist() for file in files] == [file.ids.tolist() for file in whole.files(name)[: len(files)]]
        tokens = sum(file.tokens for file in files)
        bounds = whole.bounds(name)
        assert part.bounds(name).tolist() == [*bounds[bounds < tokens].tolist(), tokens]
        ids = [(each.folder / f"index/{name}_ids.txt").read_bytes().split(b"\n")[:-1] for each in (whole, part)]
        assert ids[1] == ids[0][: len(part.bounds(name)) - 1]
    assert find_damage(tmp_path / "part", deep=True) == []
    assert done.fetched_bytes and all(file.stat().st_nlink == 1 for file in done.version.rglob("*.bin"))
    again = stage(str(cache), tmp_path / "part", split=split, max_bytes=max_bytes)
    assert (again.fetched_bytes, again.version) == (0, done.version)


def test_a_stream_reads_each_window_of_a_part_once(cache, tmp_path):
    stage(str(cache), tmp_path / "part", max_bytes=480)
    stream = EpochStream(tmp_path / "part/train", T=9, global_batch_size=4, seed=3, epochs=1)
    assert sum(len(x) for x, _ in stream) == 2 * (119 // 9)


def test_all_of_it_is_a_cache_of_the_same_content_and_nothing_is_refused(cache, tmp_path):
    stage(str(cache), tmp_path / "all")
    assert meta_of(tmp_path / "all") == meta_of(cache)
    with refused("E102", "has 240"):
        stage(str(cache), tmp_path / "none", max_bytes=239)
    small_builds.sft(tmp_path / "chats")
    with refused("E102", "kind sft", "--split", "--max-bytes"):
        stage(str(tmp_path / "chats"), tmp_path / "part", split="train")
