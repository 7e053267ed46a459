"""A path where no cache is: the names that are there, the command that fetches a URL, and no question to the hub."""

import pytest
from support.commands import niels_gpt
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache import PretrainTokenStreamDataset, build_pretrain_cache
from niels_gpt.hub.models import is_local
from niels_gpt.kinds.folders import caches_below
from niels_gpt.kinds.look import stats
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.sampling import EpochStream
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import TokenizerNotFound, UsageError

OPENERS = {
    "a reader": lambda path: PretrainTokenStreamDataset(path, T=4, device="cpu"),
    "a stream": lambda path: EpochStream(path, T=4, global_batch_size=1, seed=0),
    "stats": stats,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_tokenizer):
    """A folder of two caches."""
    folder = tmp_path_factory.mktemp("paths") / "cache"
    how = {"shard_bytes": 1 << 20, "seed": 0, "shuffle_buffer": None, "max_train_tokens": 900, "max_val_tokens": 0}
    for name in ("birds", "beasts"):
        build_pretrain_cache(TINY_TEXTS, folder / "pretrain" / name, tokenizer=tiny_tokenizer, **how)
    return folder


@pytest.mark.parametrize("opener", OPENERS)
def test_a_mistyped_cache_is_told_the_names_that_are_there(root, opener):
    below = "" if opener == "stats" else "/train"
    with pytest.raises(FileNotFoundError) as caught:
        OPENERS[opener](f"{root}/pretrain/birsd{below}")
    assert f"In {root}/pretrain there is birds, beasts" in str(caught.value)


@pytest.mark.parametrize("opener", ["a reader", "a stream"])
def test_a_reader_of_a_url_is_told_that_it_needs_a_folder_here(opener):
    with pytest.raises(UsageError, match="local=DIR"):
        OPENERS[opener]("s3://bucket/caches/birds/train")


def test_commands_over_several_caches_answer_so_too(root):
    with pytest.raises(FileNotFoundError, match="there is pretrain"):
        caches_below(root / "pertrain")
    done = niels_gpt("verify", str(root / "pretrain" / "birsd"))
    assert done.status and "birds" in done.err


def test_a_name_like_a_folder_here_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    assert is_local("models/gpt-2") and is_local("models/") and not is_local("gpt2") and not is_local("Qwen/Qwen3-8B")
    with pytest.raises(TokenizerNotFound, match="In models there is gpt2"):
        ensure_tokenizer(Settings(source_root="sample", cache_dir="c", tokenizer="models/gpt-2"))
