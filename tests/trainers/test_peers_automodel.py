"""Streams in NeMo Automodel's own loader and scheduler, by its YAML: it lies below what NIELS_GPT_PEERS names."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from support import automodel_run, trainer_runs
from support.documents import lines_to_copy
from support.mixed_caches import build_three

from niels_gpt.sampling import EpochStream
from niels_gpt.storage.errors import StateError, StreamUseError, UsageError
from niels_gpt.trainers.automodel import StreamDataset

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital.:UserWarning")  # of torchdata's, in its loader


@pytest.fixture
def automodel(monkeypatch):
    """Put Automodel on the path; return its folder. Its loader makes all later processes spawned ones."""
    peers = os.environ.get("NIELS_GPT_PEERS")
    if peers is None:
        pytest.skip("set NIELS_GPT_PEERS to a folder with 0.7.0, of nemo-automodel, see .ci/run")
    monkeypatch.syspath_prepend(str(Path(peers) / "0.7.0"))
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    yield Path(peers) / "0.7.0"
    multiprocessing.set_start_method(before, force=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_automodel"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_three(tmp_path_factory.mktemp("caches"))


@pytest.mark.slow
def test_killed_run_goes_on_with_another_data_parallel_degree(automodel, caches, tmp_path):
    """2 ranks, then 1, on which Automodel accumulates the gradients of two batches."""
    (tmp_path / "whole").mkdir()
    automodel_run.main(tmp_path / "whole", caches, 0)
    arguments = automodel_run.__file__, tmp_path / "killed", automodel, caches, 0
    trainer_runs.run(*arguments, ranks=2, kill_at=trainer_runs.KILLED_AT)
    trainer_runs.run(*arguments)
    whole, killed = (trainer_runs.steps(tmp_path / name) for name in ("whole", "killed"))
    assert list(killed) == list(whole) == list(range(1, trainer_runs.STEPS + 1))
    assert [rows for rows, _ in killed.values()] == [rows for rows, _ in whole.values()]
    assert [loss for _, loss in killed.values()] == pytest.approx([loss for _, loss in whole.values()], abs=1e-6)


def taken(loader, count):
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def test_one_rank_goes_on_as_two(automodel, caches, tmp_path):
    """Both get the state of the first: its file is copied under the other's name."""
    loader, _ = automodel_run.built(tmp_path, caches)
    taken(loader, 3)
    state = loader.state_dict()
    ranks = [automodel_run.built(tmp_path, caches, rank=rank, ranks=2)[0] for rank in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    steps = zip(*(taken(each, 4) for each in ranks), strict=True)
    found = [each["input_ids"].tolist() for step in steps for each in step]
    assert found == [batch["input_ids"].tolist() for batch in taken(loader, 8)]
    assert ranks[0].state_dict() == ranks[1].state_dict()


@pytest.mark.parametrize("form", ["thd", "neat"])
def test_rows_of_a_stream(automodel, caches, tmp_path, form):
    """Ids, shifted labels, positions and the borders of documents, as Automodel's own collate functions give them."""
    loader, _ = automodel_run.built(tmp_path, caches, form=form)
    stream = automodel_run.open_mixture(caches, global_batch_size=2)
    for made, batch in zip(taken(loader, 9), stream, strict=False):
        assert torch.equal(made["input_ids"], batch.x)
        assert torch.equal(made["labels"], batch.y)
        assert torch.equal(made["position_ids"], batch.position_ids)
        if form == "thd":
            lengths = made["seq_lens"][made["seq_lens"] >= 0]
            assert lengths.tolist() == batch.cu_seqlens.diff().tolist()
        else:
            from niels_gpt.sampling import block_causal_mask

            allowed = block_causal_mask(batch.cu_seqlens, tuple(batch.x.shape)) == 0
            assert torch.equal(made["attention_mask"], allowed)


def test_tokens_of_id_0_are_no_padding(automodel, caches, tmp_path):
    folder = caches / "pretrain" / "plain" / "train"
    data = StreamDataset(EpochStream, local_batch_size=2, shards_dir=folder, T=12, seed=0, epochs=1).shard(1, 0)
    from nemo_automodel.components.datasets.utils import default_collater

    made = default_collater([{**row, "input_ids": row["input_ids"] * 0} for row in data])
    assert len(made["input_ids"]) == len(made["padding_mask"]) > 9
    assert not made["padding_mask"].any()


@pytest.mark.slow
def test_workers_keep_the_order_and_resume(automodel, caches, tmp_path):
    whole = [batch["input_ids"].tolist() for batch in taken(automodel_run.built(tmp_path, caches)[0], 9)]
    loader, _ = automodel_run.built(tmp_path, caches, workers=2)
    first = [batch["input_ids"].tolist() for batch in taken(loader, 5)]
    state = loader.state_dict()
    again, _ = automodel_run.built(tmp_path, caches, workers=2)
    again.load_state_dict(state)
    assert first + [batch["input_ids"].tolist() for batch in taken(again, 9 - len(first))] == whole


def test_states_of_other_data_and_wrong_sizes_are_refused(automodel, caches, tmp_path):
    loader, _ = automodel_run.built(tmp_path, caches)
    taken(loader, 3)
    other, _ = automodel_run.built(tmp_path, caches, kinds="[chats, packed]")
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError):
        next(iter(other))
    wrong, _ = automodel_run.built(tmp_path, caches)
    wrong.batch_sampler.batch_size = 3
    taken(wrong, 1)
    with pytest.raises(StreamUseError):
        wrong.state_dict()


def test_forms_are_checked(caches):
    folder = caches / "pretrain" / "plain" / "train"
    plain = {"shards_dir": folder, "T": 12, "seed": 0, "epochs": 1}
    with pytest.raises(UsageError):
        StreamDataset(EpochStream, local_batch_size=2, form="packed", **plain)
    with pytest.raises(UsageError):
        next(iter(StreamDataset(EpochStream, local_batch_size=2, form="thd", **plain).shard(1, 0)))
    with pytest.raises(UsageError):
        next(iter(StreamDataset(EpochStream, local_batch_size=2, documents=True, **plain).shard(1, 0)))
    with pytest.raises(StreamUseError):
        next(iter(StreamDataset(EpochStream, local_batch_size=2, **plain)))
    rows = StreamDataset(EpochStream, local_batch_size=2, **plain).shard(1, 0)
    next(iter(rows))
    for refused in (rows.state_dict, lambda: next(iter(rows))):  # the second row would be lost
        with pytest.raises(StreamUseError):
            refused()


def test_the_yaml_of_the_page(automodel, caches, tmp_path):
    """It makes batches of packed rows, of a cache at another place."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    text = lines_to_copy("niels_gpt.trainers.automodel")
    (tmp_path / "recipe.yaml").write_text(
        text.replace("cache/wiki", str(caches / "pretrain" / "packed")) + "step_scheduler: {local_batch_size: 2}\n"
    )
    recipe = RecipeConfig(load_yaml_config(tmp_path / "recipe.yaml"))
    batch = next(iter(recipe.dataloader.build(dp_rank=1, dp_world_size=2)))
    assert batch["qkv_format"] == "thd" and batch["input_ids"].shape == (2, 12)
