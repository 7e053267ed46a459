"""Eagle3Stream: each sample of a cache exactly once an epoch, over any ranks and workers; its state; mixtures."""

import copy
import json
import pickle
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from support.eagle3_native import write_native
from support.errors import refused
from support.number_caches import numbered
from support.small_eagle3 import write_cache
from torch.utils.data import DataLoader

from niels_gpt.eagle3 import Eagle3Batch, Eagle3Stream
from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader, write_manifest
from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset, build_native_dataloader
from niels_gpt.sampling import EpochStream, MixtureStream, prefetch

pytestmark = pytest.mark.filterwarnings("ignore:the last batch has")
FORMS = ["version 1", "top k", "native", "native fields", "native as six keys"]
SAMPLES = 7
MASKS = [[0, 1] + [0] * number + [1, 0] for number in range(SAMPLES)]


def written(form, folder, seed=0, samples=SAMPLES):
    """Write a cache of seven samples in shards of three, and open it."""
    if form.startswith("native"):
        targets = {"targets": "reply"} if form == "native fields" else {}
        write_native(folder, MASKS[:samples], cuts=[3], target_model=f"t{seed}", **targets)
        if form == "native fields":
            return NativeEagle3Dataset(folder, fields=FIELDS)
        if form == "native":
            return NativeEagle3Dataset(folder)
        return CachedEagle3Dataset(folder, target_probs=False)
    write_cache(folder, samples=samples, shard_size=3, topk=3 * (form == "top k"), seed=seed)
    return CachedEagle3Dataset(folder)


@pytest.fixture(params=FORMS)
def dataset(request, tmp_path):
    return written(request.param, tmp_path / "c")


def alone(dataset):
    """Return each sample as a batch of one."""
    return [next(iter(loader_of(dataset, [number]))) for number in range(len(dataset))]


def loader_of(dataset, numbers):
    """Return what gives these samples as a batch today."""
    if isinstance(dataset, NativeEagle3Dataset):
        loader = build_native_dataloader(dataset.cache_dir, 2, False, fields=dataset.fields)
        dataset, collate = loader.dataset, loader.collate_fn
    elif dataset.view is not None:
        return [dataset.view.with_probs(dataset.view.collate([dataset.view.dataset[number] for number in numbers]))]
    else:
        collate = build_cached_eagle3_dataloader(dataset.cache_dir, 2, False).collate_fn
    return DataLoader(torch.utils.data.Subset(dataset, numbers), batch_size=len(numbers), collate_fn=collate)


def row_of(batch, row):
    """Return what tells a sample: the ids up to the attention's end."""
    return tuple(batch["input_ids"][row, : int(batch["attention_mask"][row].sum())].tolist())


def numbers_of(dataset, batches):
    """Return the numbers of the samples of some batches, in order."""
    known = {row_of(batch, 0): number for number, batch in enumerate(alone(dataset))}
    return [known[row_of(batch, row)] for batch in batches for row in range(len(batch["input_ids"]))]


def stream(dataset, **changed):
    return Eagle3Stream(dataset, **{"global_batch_size": 6, "seed": 0, "epochs": 2, **changed})


def in_order(ranks):
    """Put the batches of all ranks in their order, and check that their states are equal."""
    joined = []
    for batches in zip(*ranks, strict=True):
        assert all(batch.state == batches[0].state for batch in batches)
        joined += batches
    return joined


ORDER = [3, 4, 6, 0, 5, 2, 1, 1, 3, 0, 2, 4, 5, 6]
"""Samples of two epochs of seven with seed 0, `permute(k % 7)` with the epoch k // 7. A change breaks every state."""


def test_the_order_and_the_state_of_a_seed_are_these(dataset):
    batches = list(stream(dataset))
    assert [len(batch["input_ids"]) for batch in batches] == [6, 6, 2] and len(stream(dataset)) == 3
    assert numbers_of(dataset, batches) == ORDER
    found = dataset.fingerprint()
    assert found["samples"] == SAMPLES and len(found["manifest_sha256"]) == 64
    state = dict(batches[1].state)
    assert len(state.pop("checksum")) == 8
    assert state == {
        "kind": "eagle3",
        "stream": 1,
        "seed": 0,
        "key_check": "7f155d83",
        **found,
        "epoch": 1,
        "consumed_samples": 12,
    }
    assert json.loads(json.dumps(batches[1].state)) == batches[1].state


def test_batches_are_those_of_a_data_loader_over_the_dataset(dataset):
    for batch, numbers in zip(stream(dataset), (ORDER[:6], ORDER[6:12], ORDER[12:]), strict=True):
        (expected,) = loader_of(dataset, numbers)
        assert isinstance(batch, Eagle3Batch) and batch.keys() == expected.keys() and batch.source is None
        for name, tensor in expected.items():
            assert batch[name].dtype == tensor.dtype and batch[name].equal(tensor), name


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_sample_is_served_exactly_once_an_epoch_by_any_ranks_and_workers(dataset, world, workers):
    ranks = []
    for rank in range(world):
        one = stream(dataset, rank=rank, world_size=world)
        ranks.append(list(DataLoader(one, batch_size=None, num_workers=workers)))
        assert all(type(batch) is Eagle3Batch for batch in ranks[-1])
    assert numbers_of(dataset, in_order(ranks)) == ORDER


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_resumes_in_mid_epoch_with_other_ranks_and_batches(dataset, world):
    before = list(islice(stream(dataset, global_batch_size=4, rank=0, world_size=2), 2))
    ranks = []
    for rank in range(world):
        one = pickle.loads(pickle.dumps(stream(dataset, rank=rank, world_size=world, global_batch_size=3 * world)))
        one.load_state_dict(json.loads(json.dumps(before[1].state)))
        ranks.append(list(one))
    assert numbers_of(dataset, in_order(ranks)) == ORDER[8:]


def test_a_rank_without_rows_has_tensors_of_none(dataset):
    whole, last = list(stream(dataset, rank=0, world_size=3, global_batch_size=12))
    assert last.state["consumed_samples"] == 14 and last.keys() == whole.keys()
    for name, tensor in last.items():
        assert len(tensor) == 0 and tensor.dtype == whole[name].dtype and tensor.dim() == whole[name].dim(), name
    assert len(stream(dataset, drop_last=True, global_batch_size=12)) == 1


def test_target_probs_of_a_native_cache_are_those_of_the_dataset(eagle3_caches):
    native = next(path for form, path in eagle3_caches.items() if form.startswith("native"))
    dataset = CachedEagle3Dataset(native)
    one = Eagle3Stream(dataset, global_batch_size=2, seed=3, epochs=1)
    batch = next(iter(one))
    for row, number in enumerate(numbers_of(dataset, [batch])):
        item = dataset[number]
        assert batch.keys() == item.keys() and all(batch[name][row].equal(item[name]) for name in item)


def test_a_batch_keeps_its_state_where_it_is_copied_moved_or_prefetched(dataset):
    batch = next(iter(stream(dataset)))
    for other in (copy.copy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu"), batch.to("meta")):
        assert type(other) is Eagle3Batch and other.state == batch.state and other.keys() == batch.keys()
    assert "consumed_samples=6" in repr(batch) and "input_ids: int64 [6, " in repr(batch)
    one = stream(dataset)
    with prefetch(one, device="cpu") as ahead:
        first = next(ahead)
    assert first.state == batch.state == one.state_dict()


def test_a_run_may_ask_for_other_fields_when_it_resumes(tmp_path):
    whole = written("native fields", tmp_path)
    state = next(iter(stream(whole.as_stored()))).state
    resumed = stream(NativeEagle3Dataset(tmp_path, fields=["input_ids"]))
    resumed.load_state_dict(state)
    assert numbers_of(whole, resumed) == ORDER[6:]


@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_of_streams_takes_turns_by_weight_and_resumes(tmp_path, form):
    datasets = [written(form, tmp_path / str(seed), seed) for seed in (1, 2)]
    if form.startswith("native"):  # equal samples: one cache twice
        datasets = datasets[:1] * 2

    def mixture(size=4, **own):
        return MixtureStream(
            [Eagle3Stream(each, global_batch_size=size, seed=seed, **own) for seed, each in enumerate(datasets)],
            [2, 1],
            seed=0,
            block_size=6,
        )

    batches = list(islice(mixture(), 6))
    for source, each in enumerate(datasets):
        numbers = []
        for batch in batches:
            part = [{name: batch[name][row][None] for name in ("input_ids", "attention_mask")} for row in range(4)]
            numbers += numbers_of(
                each, [one for one, of in zip(part, batch.source.tolist(), strict=True) if of == source]
            )
        plain = numbers_of(each, islice(stream(each, seed=source, epochs=None, global_batch_size=1), len(numbers)))
        assert numbers == plain and len(numbers) == (16, 8)[source]
    state = batches[2].state
    assert state["positions"] == [8, 4] and [one["kind"] for one in state["sources"]] == ["eagle3"] * 2
    again = mixture(rank=1, world_size=2)
    again.load_state_dict(json.loads(json.dumps(state)))
    for ours, theirs in zip(islice(again, 3), batches[3:], strict=True):
        assert ours.source.tolist() == theirs.source.tolist()[2:] and ours.state == theirs.state
        assert [row_of(ours, row) for row in (0, 1)] == [row_of(theirs, row) for row in (2, 3)]
    assert "samples, rank 0 of 1" in repr(mixture())


def test_a_mixture_of_fields_takes_caches_of_several_draft_vocabularies(tmp_path):
    for name, size in {"a": 20, "b": 8}.items():
        write_native(tmp_path / name, MASKS, draft_vocab_size=size, selected_token_ids=[*range(size)], targets="all")
    for fields, known in (("input_ids", "last_hidden"), True), (None, False):
        datasets = [NativeEagle3Dataset(tmp_path / name, fields=fields) for name in ("a", "b")]
        streams = [stream(each, epochs=None) for each in datasets]
        if not known:
            with refused("E102", "draft vocabulary="):
                MixtureStream(streams, [1, 1], seed=0)
        else:
            batch = next(iter(MixtureStream(streams, [1, 1], seed=0)))
            assert [*batch] == [*fields, "attention_mask"] and batch.source.tolist().count(1) == 3


def test_a_mixture_takes_over_a_run_of_one_of_its_streams(tmp_path):
    one, two = (written("version 1", tmp_path / str(count), samples=count) for count in (7, 6))
    state = next(iter(stream(one, epochs=None))).state
    mixture = MixtureStream([stream(each, epochs=None) for each in (two, one)], [1, 1], seed=0)
    with pytest.warns(UserWarning, match="resumed: .*/7; new: .*/6"):
        mixture.load_state_dict(state, changed=True)
    assert mixture.state_dict()["positions"] == [0, 6]
    with pytest.warns(UserWarning, match=f"removed, after 6 samples: '{state['manifest_sha256'][:8]}.*7 samples"):
        only = MixtureStream([stream(two, epochs=None)], [1], seed=0)
        only.load_state_dict(state, changed=True)
    assert only.consumed_samples == 6


def test_a_stream_changes_its_seed_in_a_run_and_begins_a_new_epoch(tmp_path):
    dataset = written("version 1", tmp_path, samples=7)
    state = next(iter(stream(dataset))).state
    other = stream(dataset, seed=1)
    with refused("E108", "changed=True"):
        other.load_state_dict(state)
    with pytest.warns(UserWarning, match="a new epoch of .*which had 6 samples: seed 0 -> 1"):
        other.load_state_dict(state, changed=True)
    assert numbers_of(dataset, other) == numbers_of(dataset, stream(dataset, seed=1))
    assert other.consumed_samples == 6 + 14


def test_what_does_not_fit_together_is_refused(tmp_path):
    dense, native = (written(form, tmp_path / form, 1) for form in ("version 1", "native"))
    other, more = written("version 1", tmp_path / "other", 2), written("version 1", tmp_path / "more", 1, samples=6)
    state = next(iter(stream(dense))).state
    with refused("E108", "samples is 7, expected 6"):
        stream(more).load_state_dict(state)
    with refused("E108", "seed is 0, expected 1"):
        stream(dense, seed=1).load_state_dict(state)
    with refused("E108", "kind is 'eagle3', expected None"):
        EpochStream(str(numbered(tmp_path, [40])), T=4, global_batch_size=2, seed=0).load_state_dict(state)
    with refused("E102", "dataset is a str"):
        Eagle3Stream(str(tmp_path / "native"), global_batch_size=2, seed=0)
    with refused("E102", "pad_to=6: expected 10 or more"):
        stream(native, pad_to=6)
    with refused("E102", "pad_to=6: expected None"):
        stream(dense, pad_to=6)
    assert next(iter(stream(native, pad_to=32)))["input_ids"].shape == (6, 32)
    for streams in ((dense, native), (native, dense)):
        with refused("E102", "streams[1] has rows="):
            MixtureStream([stream(each, epochs=None) for each in streams], [1, 1], seed=0)
    write_native(tmp_path / "layers", MASKS, aux_layer_ids=[1, 2])
    layers, fields = NativeEagle3Dataset(tmp_path / "layers"), written("native fields", tmp_path / "fields")
    for found, one in {"rows=": fields, "aux_layer_ids=": layers}.items():
        with refused("E102", f"streams[1] has {found}"):
            MixtureStream([stream(each, epochs=None) for each in (native, one)], [1, 1], seed=0)
    six_keys = [CachedEagle3Dataset(each.cache_dir, target_probs=False) for each in (native, layers)]
    with refused("E102", "streams[1] has aux_layer_ids=[1, 2], expected [3, 1]"):
        MixtureStream([stream(each, epochs=None) for each in six_keys], [1, 1], seed=0)
    others: list = []
    for layers in ([1, 2, 5], None):  # None: an earlier one may not say them
        write_manifest(tmp_path / "other", other.manifest | {"aux_layer_ids": layers})
        said = CachedEagle3Dataset(tmp_path / "other")
        pair = [stream(each, epochs=None) for each in (dense, said)]
        for streams in (pair, pair[::-1]):
            with nullcontext() if layers is None else refused("E102", "streams[1] has aux_layer_ids="):
                MixtureStream(streams, [1, 1], seed=0)
        others = [said, *others]
    with refused("E102", "streams[2] has aux_layer_ids=[1, 2, 5]", "streams[1]"):
        MixtureStream([stream(each, epochs=None) for each in (others[0], dense, others[1])], [1, 1, 1], seed=0)
    windows = EpochStream(str(numbered(tmp_path, [40])), T=4, global_batch_size=6, seed=0)
    with refused("E102", "streams[1] has rows="):
        MixtureStream([windows, stream(other, epochs=None)], [1, 1], seed=0)


def test_a_state_is_refused_by_a_cache_of_other_content(tmp_path, eagle3_caches):
    paths = [path for form, path in eagle3_caches.items() if not form.startswith("native")][:2]
    one, two = (Eagle3Stream(CachedEagle3Dataset(path), global_batch_size=2, seed=0) for path in paths)
    state = next(iter(one)).state
    assert state["content_sha256"] != two.state_dict()["content_sha256"] and len(state["content_sha256"]) == 64
    with refused("E108", "_sha256 is"):
        two.load_state_dict(state)
    two.load_state_dict(state, allow_other_content=True)
    assert two.consumed_samples == 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_native_samples_come_out_of_workers_alone(tmp_path, method):
    """They are views of a map whose file is closed: torch could not send it."""
    dataset = written("native", tmp_path)
    dataset[0]
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    for ours, theirs in zip(loader, dataset, strict=True):
        for name, value in vars(theirs).items():
            found = getattr(ours, name)
            assert (found is None) == (value is None) and (
                value is None or bool(torch.as_tensor(found == value).all())
            ), name
    assert len(pickle.dumps(dataset[0])) < 4000
