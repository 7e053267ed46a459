"""Every reader and stream takes a cache with `split=` and CACHE/SPLIT alike."""

import pytest
import torch
from support import small_builds
from support.errors import refused

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.stream import RolloutStream
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream, bits_per_byte, iter_eval

STEP = {"T": 8, "global_batch_size": 2, "seed": 0}


def evaluated(path, **how):
    """As a reader with a fingerprint: the batches of a whole split."""
    batches = [x.tolist() for x, _ in iter_eval(path, B=4, T=8, **how)]
    return type("Evaluated", (), {"fingerprint": lambda self: batches})()


def mixed(path, **how):
    mixture = MixtureStream([EpochStream(path, **STEP, **how)], [1], seed=0)
    return type("Mixed", (), {"fingerprint": lambda self: mixture.state_dict()})()


OPENERS = {
    "windows": ("pretrain", lambda path, **how: PretrainTokenStreamDataset(path, T=8, device="cpu", **how)),
    "epochs": ("pretrain", lambda path, **how: EpochStream(path, **STEP, **how).split),
    "packed": ("pretrain", lambda path, **how: PackedStream(path, **STEP, **how).split),
    "evaluation": ("pretrain", evaluated),
    "mixture": ("pretrain", mixed),
    "random chats": ("sft", lambda path, **how: SFTExampleDataset.open(path, T=99, **how)),
    "chats": ("sft", lambda path, **how: SFTStream(path, **{**STEP, "T": 99}, **how).split),
    "packed chats": ("sft", lambda path, **how: PackedStream(path, **{**STEP, "T": 99}, **how).split),
    "rollouts": ("rollouts", lambda path, **how: RolloutDataset(path, **how)),
    "bins": ("rollouts", lambda path, **how: RolloutStream(path, 64, seed=0, **how).dataset),
}
NAMES_NONE = {"windows", "epochs", "evaluation", "mixture"}  # of a whole pretrain cache


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    for name in ("pretrain", "sft", "rollouts"):
        small_builds.BUILDERS[name](folder / name)
    return folder


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_cache_with_split_and_the_folder_of_a_split_are_the_same(caches, name, split):
    kind, opened = OPENERS[name]
    by_keyword = opened(caches / kind, split=split).fingerprint()
    assert opened(caches / kind / split).fingerprint() == by_keyword
    assert opened(f"{caches}/{kind}/{split}/", split=split).fingerprint() == by_keyword
    if name not in ("evaluation", "mixture"):
        assert by_keyword["split"] == split


@pytest.mark.parametrize("name", OPENERS)
def test_a_split_that_contradicts_the_path_and_another_one_are_errors_of_use(caches, name):
    kind, opened = OPENERS[name]
    with refused("E102", "split='val'", "train", kind=ValueError):
        opened(caches / kind / "train", split="val")
    with refused("E102", "split='test'", "train, val", kind=ValueError):
        opened(caches / kind, split="test")


@pytest.mark.parametrize("name", OPENERS)
def test_without_a_split_a_cache_is_read_as_train_or_refused_with_what_to_pass(caches, name):
    kind, opened = OPENERS[name]
    if name in NAMES_NONE:
        with refused("E209", caches / kind / "train", 'split="train"'):
            opened(caches / kind)
    else:
        assert opened(caches / kind).fingerprint()["split"] == "train"


def test_bits_per_byte_takes_both(caches):
    assert bits_per_byte(99.0, caches / "pretrain", split="val") == bits_per_byte(99.0, caches / "pretrain" / "val")


def test_a_cache_that_is_called_train_is_a_cache(caches, tmp_path):
    small_builds.sft(tmp_path / "train")
    assert SFTExampleDataset.open(tmp_path / "train", "val", T=99).fingerprint()["split"] == "val"
    small_builds.pretrain(tmp_path / "val")
    data = PretrainTokenStreamDataset(tmp_path / "val", T=8, device="cpu", split="train")
    assert data.fingerprint()["split"] == "train"
    assert PretrainTokenStreamDataset(tmp_path / "val" / "val", T=8, device="cpu").fingerprint()["split"] == "val"


def test_files_of_other_tools_are_named_in_both_ways_too(tmp_path):
    (tmp_path / "own" / "train").mkdir(parents=True)
    (tmp_path / "own" / "train" / "shard_00000.bin").write_bytes(bytes(range(60)))
    by_keyword = PretrainTokenStreamDataset(tmp_path / "own", T=8, device="cpu", split="train")
    assert by_keyword.fingerprint() == PretrainTokenStreamDataset(tmp_path / "own/train", T=8).fingerprint()
    (tmp_path / "own" / "train").rename(tmp_path / "own" / "mine")
    assert len(PretrainTokenStreamDataset(tmp_path / "own/mine", T=8).get_batch(B=1, generator=torch.Generator())) == 2
