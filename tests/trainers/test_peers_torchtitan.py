"""StreamDataLoader in the hands of torchtitan 0.3.0: its Config, its checkpoints, and what its own loaders yield."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import support.torchtitan_peer  # makes torchtitan importable
import torch
import torch.distributed.checkpoint as dcp
import tyro
from datasets import Dataset
from support.byte_tokenizer import ByteTokenizer, build
from support.documents import lines_to_copy
from support.made_tokenizers import made_tokenizer
from support.trainer_runs import KILLED_AT, STEPS, run, steps
from torch import distributed
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataset, HuggingFaceTextDataset

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream
from niels_gpt.storage.errors import CacheError, StateError, StreamUseError, UsageError
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.trainers.torchtitan import CacheRows, SequenceSource, StreamDataLoader

T = 24


class Ids(BaseTokenizer):
    """A tokenizer whose text is the ids."""

    eos_id = ByteTokenizer().special_token_ids()["eot"]

    def __init__(self, vocab_size=ByteTokenizer.vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text, add_bos=True, add_eos=True):
        return [int(number) for number in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def get_vocab_size(self):
        return self.vocab_size

    def apply_chat_template(self, messages, **options):
        return " ".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A pretrain cache of 200 documents and an sft cache of 60 chats."""
    root = tmp_path_factory.mktemp("caches")
    texts = ["".join(chr(97 + (i * 7 + j) % 26) for j in range(i * 5 % 41 + 1)) for i in range(200)]
    build(root / "pretrain", texts, 4000, shard_bytes=1600)
    chats = [
        [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "ab" * (n % 8 + 1)}] for n in range(60)
    ]
    build_sft(chats, root / "sft", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    return root


def sources_of(caches, kind):
    """Return the sources of a kind of rows; `mixture` is of all of them."""
    pretrain, sft = str(caches / "pretrain" / "train"), str(caches / "sft")
    if kind == "mixture":
        return [
            CacheRows(cache=pretrain, rows="packed", weight=0.5),
            CacheRows(cache=sft, rows="chats", weight=0.3),
            CacheRows(cache=pretrain, weight=0.2, epochs=2),
        ]
    return [CacheRows(cache=sft if kind == "chats" else pretrain, rows=kind)]


def loader_of(sources, *, rank=0, world=1, size=4, seq_len=T, tokenizer=None, **options):
    """Build a loader as torchtitan's Trainer does."""
    return StreamDataLoader.Config(sources=sources, **{"seed": 5, **options}).build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=tokenizer or Ids(),
        seq_len=seq_len,
        local_batch_size=size,
        snapshot_every_n_steps=None,
    )


def stream_of(caches, kind, **shape):
    """Open the stream that a loader of this kind should serve."""
    pretrain, sft = caches / "pretrain" / "train", caches / "sft"
    common = {"T": T, "global_batch_size": 4, "seed": 5} | shape
    opened = {
        "windows": lambda: EpochStream(pretrain, **common),
        "documents": lambda: EpochStream(pretrain, documents=True, **common),
        "packed": lambda: PackedStream(pretrain, **common),
        "chats": lambda: SFTStream(sft, **common),
    }
    if kind == "mixture":
        streams = [opened[each]() for each in ("packed", "chats", "windows")]
        return MixtureStream(streams, [0.5, 0.3, 0.2], seed=5, when_exhausted=["repeat", "repeat", 2])
    return opened[kind]()


def listed(batch):
    """Return input, positions and labels of a batch as lists."""
    inputs, labels = batch
    assert all(each.dtype == torch.int64 for each in (*inputs.values(), labels))
    return inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()


KINDS = ("windows", "documents", "packed", "chats", "mixture")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_get_the_rows_of_the_stream_and_positions_of_its_segments(caches, kind):
    ranks = [iter(loader_of(sources_of(caches, kind), rank=rank, world=2, size=2)) for rank in (0, 1)]
    for batch in islice(stream_of(caches, kind), 50):
        halves = [listed(next(rank)) for rank in ranks]
        found = [first + second for first, second in zip(*halves, strict=True)]
        positions = batch.position_ids
        if positions is None:
            assert kind == "windows"
            positions = torch.arange(T).repeat(4, 1)
        assert found == [batch.x.tolist(), positions.tolist(), batch.y.tolist()]


def test_any_stream_that_a_function_opens(caches):
    def opened(**shape):
        return stream_of(caches, "packed", **shape)

    config = StreamDataLoader.Config(open=opened)
    loader = config.build(dp_world_size=2, dp_rank=1, tokenizer=Ids(), seq_len=T, local_batch_size=3)
    first = next(iter(stream_of(caches, "packed", global_batch_size=6, rank=1, world_size=2)))
    assert listed(next(iter(loader)))[0] == first.x.tolist()
    alone = StreamDataLoader.Config(open=lambda **shape: stream_of(caches, "packed", **{**shape, "rank": 0}))
    elsewhere = StreamDataLoader.Config(open=lambda **shape: stream_of(caches, "packed", device="meta", **shape))
    for wrong in (alone, elsewhere, dataclasses.replace(config, infinite=False)):
        with pytest.raises(UsageError):
            wrong.build(dp_world_size=2, dp_rank=1, tokenizer=Ids(), seq_len=T, local_batch_size=3)


# --- their own loaders on the same tokens -----------------------------------------------------------------------------


def documents_of(x, y, starts):
    """Return the tokens of each segment of a row, with the target of its last token where it has one."""
    segments = zip(starts, [*starts[1:], len(x)], strict=True)
    return [x[begin:end] + [y[end - 1]] * (y[end - 1] != IGNORE_INDEX) for begin, end in segments]


def without_last_tokens(row, starts):
    """Return a row without the last tokens of documents, which have no target, and which their loaders leave out."""
    x, positions, y = row
    ends = {end - 1 for end in [*starts[1:], len(x)] if y[end - 1] == IGNORE_INDEX}
    return [[value for at, value in enumerate(column) if at not in ends] for column in (x, positions, y)]


def rows_with_starts(loader, batches):
    """Yield rows of a loader, as lists, and where their segments begin."""
    for batch in islice(loader, batches):
        for row in zip(*listed(batch), strict=True):
            yield row, [at for at, position in enumerate(row[1]) if position == 0]


@pytest.mark.parametrize("kind", ["documents", "packed"])
def test_positions_and_labels_as_of_their_text_dataset(caches, kind):
    """Their dataset gets the documents of one row of ours, and makes one row of them."""
    compared = 0
    for row, starts in rows_with_starts(loader_of(sources_of(caches, kind)), 15):
        x, _, y = row
        while starts and y[starts[-1] :] == [IGNORE_INDEX] * (len(x) - starts[-1]) and set(x[starts[-1] :]) == {0}:
            x, y, starts = x[: starts[-1]], y[: starts[-1]], starts[:-1]  # padding
        documents = documents_of(x, y, starts)
        length = sum(len(document) - 1 for document in documents)
        rows = Dataset.from_list([{"text": Ids().decode(document)} for document in documents])
        DATASETS["rows"] = DatasetConfig(
            path="", loader=lambda path, rows=rows: rows, sample_processor=lambda s: s["text"]
        )
        theirs = HuggingFaceTextDataset("rows", None, Ids(), seq_len=length)
        inputs, labels = next(iter(theirs))
        ours = without_last_tokens((x, row[1][: len(x)], y), starts)
        assert ours == [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()]
        compared += len(documents)
    assert compared > 60


@pytest.mark.parametrize("rows", ["chats", "packed"])
def test_positions_and_labels_as_of_their_chat_dataset(caches, rows):
    """Their dataset gets the chats of one row of ours, and packs, masks and pads them by its own rules."""
    loader = loader_of([CacheRows(cache=str(caches / "sft"), rows=rows)], size=2)
    compared = 0
    for row, starts in rows_with_starts(loader, 20):
        x, positions, y = row
        last = next(at for at in reversed(range(T)) if y[at] != IGNORE_INDEX)
        chats = [start for start in starts if start <= last]
        documents = [x[begin:end] for begin, end in zip(chats, [*chats[1:], last + 2], strict=True)]
        prompts = [document.index(ByteTokenizer().special_token_ids()["asst"]) + 1 for document in documents]
        messages = [
            [
                {"role": "user", "content": Ids().decode(ids[:prompt])},
                {"role": "assistant", "content": Ids().decode(ids[prompt:])},
            ]
            for ids, prompt in zip(documents, prompts, strict=True)
        ]
        order = Dataset.from_dict({"place": range(len(chats))}).shuffle(seed=42)["place"]  # their first shuffle
        data = Dataset.from_list([{"messages": json.dumps(messages[order[:].index(at)])} for at in range(len(chats))])
        theirs = ChatDataset(data, Ids(), lambda sample: json.loads(sample["messages"]), seq_len=T - len(chats))
        inputs, labels = next(iter(theirs))
        ends = [*chats[1:], last + 2]
        kept = [at for at in range(T) if at + 1 not in ends]
        assert [y[at] for at in kept] == labels.tolist()
        assert [positions[at] for at in kept] == inputs["positions"].tolist()
        assert [x[at] for at in kept if at <= last] == inputs["input"].tolist()[: last + 1 - len(chats) + 1]
        compared += len(chats)
    assert compared >= 40


# --- config -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Job:
    """A part of their Trainer.Config."""

    dataloader: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)


def test_the_command_line_changes_fields_of_a_config_function(caches):
    job = Job(dataloader=StreamDataLoader.Config(sources=sources_of(caches, "mixture")))
    args = ["--dataloader.seed", "7", "--dataloader.sources.1.weight", "4", "--dataloader.sources.2.epochs", "None"]
    parsed = tyro.cli(Job, args=args, default=job).dataloader
    assert parsed.seed == 7
    assert [source.weight for source in parsed.sources] == [0.5, 4, 0.2]
    assert [source.epochs for source in parsed.sources] == [None] * 3
    assert json.loads(json.dumps(parsed.to_dict()))["sources"][1]["weight"] == 4


def test_fields_that_say_nothing_or_nothing_that_rows_have_are_refused(caches):
    pretrain = str(caches / "pretrain" / "train")
    for config in (
        StreamDataLoader.Config(),
        StreamDataLoader.Config(sources=[CacheRows(cache=pretrain)], open=stream_of),
        StreamDataLoader.Config(sources=[CacheRows(cache=pretrain)], dataset="c4"),
        StreamDataLoader.Config(sources=[CacheRows(cache=pretrain, rows="tokens")]),
        StreamDataLoader.Config(sources=[CacheRows(cache=pretrain, over_length="drop")]),
        StreamDataLoader.Config(sources=[CacheRows(cache=pretrain, rows="packed", random_offset=True)]),
    ):
        with pytest.raises(UsageError):
            config.build(dp_world_size=1, dp_rank=0, tokenizer=Ids(), seq_len=T, local_batch_size=2)
    for sources in ([CacheRows(cache=pretrain, epochs=0)], [CacheRows(cache=pretrain, epochs=0)] * 2):
        with pytest.raises(ValueError):
            loader_of(sources)


def test_a_cache_of_another_tokenizer_is_refused(caches, tmp_path):
    with pytest.raises(CacheError) as refused:
        loader_of(sources_of(caches, "mixture"), tokenizer=Ids(vocab_size=299))
    assert refused.value.code == "E402"
    first, second = (made_tokenizer(name) for name in ("small llama3", "small qwen2"))
    build_pretrain(
        ((None, f"the words of document {number}") for number in range(30)),
        tmp_path / "words",
        tokenizer=load_tokenizer(first),
        max_train_tokens=150,
        max_val_tokens=0,
        shard_bytes=1 << 20,
        seed=0,
        shuffle_buffer=None,
    )
    words = [CacheRows(cache=str(tmp_path / "words" / "train"))]
    assert next(iter(loader_of(words, tokenizer=HuggingFaceTokenizer(tokenizer_path=str(first)))))
    other = HuggingFaceTokenizer(tokenizer_path=str(second))
    with pytest.raises(CacheError) as refused:
        loader_of(words, tokenizer=other)
    assert refused.value.code == "E402"
    assert next(iter(loader_of(words, tokenizer=other, check_tokenizer=False)))


def test_the_lines_of_the_page_run(tmp_path):
    """With small caches at the places of the sample's."""
    build(Path("cache/sample/pretrain/roam"), ["a text of some words"] * 90, 1500, shard_bytes=1600)
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    build_sft([chat] * 5, Path("cache/sample/sft/oasst1"), tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    names = {}
    exec(lines_to_copy("niels_gpt.trainers.torchtitan"), names)
    loader = names["dataloader"].build(
        dp_world_size=2, dp_rank=1, tokenizer=Ids(), seq_len=T, local_batch_size=3, snapshot_every_n_steps=1
    )
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, T)


# --- position ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def saved(loader, path):
    """Store a loader's state as their checkpoint manager does."""
    dcp.save({"dataloader": loader}, checkpoint_id=path)


def loaded(loader, path):
    """Load a loader's state as their checkpoint manager does."""
    dcp.load({"dataloader": loader}, checkpoint_id=path)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_that_of_the_batch_given_out_last(caches, tmp_path, one_process, workers):
    sources = sources_of(caches, "mixture")
    whole = [listed(batch) for batch in islice(loader_of(sources), 12)]
    loader = loader_of(sources, num_workers=workers)
    given = [listed(batch) for batch in islice(loader, 5)]
    saved(loader, tmp_path / "state")
    resumed = loaded(loader_of(sources), tmp_path / "state")
    assert resumed.state_dict() == loader.state_dict()
    given += [listed(batch) for batch in islice(resumed, 7)]
    assert given == whole


def test_one_rank_goes_on_where_two_stopped_and_two_where_one_did(caches, tmp_path, one_process):
    sources = sources_of(caches, "mixture")
    whole = [listed(batch) for batch in islice(loader_of(sources, size=4), 9)]
    ranks = [loader_of(sources, rank=rank, world=2, size=2) for rank in (0, 1)]
    for rank in ranks:
        _ = list(islice(rank, 3))
    assert ranks[0].state_dict() == ranks[1].state_dict()
    saved(ranks[1], tmp_path / "two")
    one = loaded(loader_of(sources, size=4), tmp_path / "two")
    assert [listed(batch) for batch in islice(one, 3)] == whole[3:6]
    saved(one, tmp_path / "one")
    halves = [
        [listed(batch) for batch in islice(loaded(loader_of(sources, rank=rank, world=2, size=2), tmp_path / "one"), 3)]
        for rank in (0, 1)
    ]
    joined = [tuple(a + b for a, b in zip(*both, strict=True)) for both in zip(*halves, strict=True)]
    assert joined == whole[6:]


def test_a_state_of_another_run_is_refused(caches, tmp_path):
    sources = sources_of(caches, "documents")
    loader = loader_of(sources)
    _ = list(islice(loader, 3))
    state = loader.state_dict()
    for other in (
        loader_of(sources, seed=6),
        loader_of(sources, seq_len=T + 1),
        loader_of(sources_of(caches, "chats")),
    ):
        with pytest.raises(StateError):
            other.load_state_dict(state)
    build(tmp_path / "pretrain", ["another text"] * 200, 4000, shard_bytes=1600)
    with pytest.raises(CacheError) as refused:
        loader_of(sources_of(tmp_path, "documents")).load_state_dict(state)
    assert refused.value.code == "E108"
    for damaged in ({}, {"state": state["state"][:-1]}, {"dp_rank_0": b"", "world_size": 2}, {"state": "3"}):
        with pytest.raises(StateError):
            loader.load_state_dict(damaged)


def test_a_run_goes_on_with_another_sequence_length_where_that_is_said(caches):
    loader = loader_of(sources_of(caches, "packed"))
    _ = list(islice(loader, 3))
    longer = loader_of(sources_of(caches, "packed"), seq_len=2 * T, changed=True)
    with pytest.warns(UserWarning, match=r"\[W103\]"):
        longer.load_state_dict(loader.state_dict())
    again = loader_of(sources_of(caches, "packed"), seq_len=2 * T, changed=True)
    again.load_state_dict(longer.state_dict())
    assert next(iter(again))[1].shape == (4, 2 * T)


@pytest.mark.parametrize("kind", ["chats", "mixture"])
def test_a_finite_run_ends_after_every_row_once(caches, kind):
    """The Validator sets `infinite` by dataclasses.replace, and takes all there is."""
    given = StreamDataLoader.Config(sources=sources_of(caches, kind), drop_last=False)
    config = dataclasses.replace(given, infinite=False)
    loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=Ids(), seq_len=T, local_batch_size=4)
    rows = [tuple(row) for batch in loader for row in listed(batch)[0]]
    assert len(rows) == loader.stream.num_samples
    if kind == "chats":
        assert len(rows) == 60 and len({tuple(sorted(row)) for row in rows}) > 8
    with pytest.raises(StreamUseError):
        next(iter(loader))


def test_an_iterator_that_was_left_behind_is_refused(caches):
    loader = loader_of(sources_of(caches, "packed"), num_workers=1)
    batches = iter(loader)
    _ = next(batches)
    with pytest.raises(StreamUseError):
        next(iter(loader))
    batches = iter(loader)
    loader.load_state_dict(loader.state_dict())
    second = next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StreamUseError):
        next(batches)
    whole = iter(loader_of(sources_of(caches, "packed")))
    assert [listed(next(whole)) for _ in range(2)][1] == listed(second)


# --- rows by number, for the Grain loader of its main branch ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Has the fields of their TextSequence."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Has what a source needs of their DatasetIterationPolicy."""

    shuffle: bool = False
    dp_world_size: int = 1


def source_of(sources, *, world=1, shuffle=False, **options):
    """Build a source as their SingleDatasetConfig does."""
    config = SequenceSource.Config(T=T, sources=sources, **{"seed": 5, "sequence": Sequence, **options})
    return config.build(dataset_iteration_policy=Policy(shuffle=shuffle, dp_world_size=world))


def runs_of(source, world):
    """Return the consecutive rows that each rank gets by their rule."""
    size, larger = divmod(len(source), world)
    begins = [rank * size + min(rank, larger) for rank in range(world + 1)]
    return [[source[index] for index in range(begin, end)] for begin, end in pairwise(begins)]


def unpadded(x, positions, y):
    """Return the columns of a row, as lists, until the last target."""
    end = 1 + max(at for at, label in enumerate(y) if label != IGNORE_INDEX)
    return x[:end], positions[:end], y[:end]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_runs_of_consecutive_rows_are_the_global_batches_of_the_stream(caches, kind, world):
    ranks = runs_of(source_of(sources_of(caches, kind), world=world, length=100), world)
    loader = loader_of(sources_of(caches, kind), size=2 * world)
    for number, batch in enumerate(islice(loader, 100 // (2 * world))):
        given = [row for rank in ranks for row in rank[2 * number : 2 * number + 2]]
        columns = [(row.input_ids.tolist(), row.positions.tolist(), row.labels.tolist()) for row in given]
        expected = [unpadded(*row) for row in zip(*listed(batch), strict=True)]
        assert sorted(unpadded(*row) for row in columns) == sorted(expected)


def test_rows_of_a_source_have_no_padding_and_may_be_sent_to_another_process(caches):
    source = pickle.loads(pickle.dumps(source_of(sources_of(caches, "chats"))))
    rows = [source[index] for index in range(len(source))]
    assert len(rows) == 60
    assert all(row.input_ids.dtype == np.int64 and row.input_ids[-1] == Ids.eos_id for row in rows)
    assert {len(row.input_ids) for row in rows} == {len(row.labels) for row in rows} != {T}
    for index in (-61, 60):
        with pytest.raises(IndexError):
            source[index]


def test_a_grain_loader_that_shuffles_is_refused(caches):
    with pytest.raises(UsageError):
        source_of(sources_of(caches, "packed"), shuffle=True)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_ranks_and_workers_as_if_it_had_not_been(caches, tmp_path):
    """Their CheckpointManager and optimizers: two ranks, killed; one rank with two workers, killed; two ranks."""
    script = Path(support.torchtitan_peer.__file__).with_name("torchtitan_run.py")
    folders = [tmp_path / name for name in ("whole", "first", "second", "third")]

    def go_on(number, *arguments, **how):
        if number > 1:
            shutil.copytree(folders[number - 1] / "checkpoint", folders[number] / "checkpoint")
        run(script, folders[number], caches, *arguments, **how)

    go_on(0, 4, 0, ranks=2)
    go_on(1, 4, 0, ranks=2, kill_at=KILLED_AT)
    go_on(2, 8, 2, ranks=1, kill_at=29)
    go_on(3, 4, 1, ranks=2)
    whole, first, second, third = (steps(folder) for folder in folders)
    assert [*whole] == [*range(1, STEPS + 1)]
    assert (min(second), min(third), max(third)) == (16, 26, STEPS)
    for part in (first, second, third):
        for step, (sha256, loss) in part.items():
            assert sha256 == whole[step][0]
            assert loss == pytest.approx(whole[step][1], rel=1e-6)
