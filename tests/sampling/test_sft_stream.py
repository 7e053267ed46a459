"""Epochs of an sft split: every example, or every piece of one, exactly once, with the targets that it has."""

import pickle
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits_caches import give_bits
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.byte_tokenizer import build as build_tokens
from support.small_builds import quick_folder
from torch.utils.data import DataLoader

from niels_gpt.builders.sft import build_sft
from niels_gpt.cache import CacheError, read_meta, sft_counts
from niels_gpt.cache.formats import token_dtype_of
from niels_gpt.sampling import Batch, EpochStream, MixtureStream, SFTStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*supervised tokens"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]
USR, ASST, EOT = 2, 3, 4
Turns = Sequence[tuple[int, int]]
"""Letters of the user and of the assistant, turn by turn."""
TURNS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=2)
CHATS = st.lists(TURNS, min_size=1, max_size=7)
WORLDS = st.sampled_from([1, 2, 3, 8])
THREE: list[Turns] = [[(1, 1)], [(3, 8), (1, 2)], [(2, 4)]]
"""Examples of 6, 22 and 10 tokens; with over_length="split" and T = 4 of 2, 6 and 3 rows."""


class Row(NamedTuple):
    piece: int
    document: int
    x: list[int]
    y: list[int]
    lengths: list[int]
    """Of the segments."""


def sft_cache(
    folder: Path, chats: Sequence[Turns], tokenizer: ByteTokenizer | None = None, name: str = "chats"
) -> Path:
    """Build a cache; chat i is of the i-th letter."""
    examples = [
        [
            {"role": role, "content": chr(97 + number) * letters}
            for turn in turns
            for role, letters in zip(("user", "assistant"), turn, strict=True)
        ]
        for number, turns in enumerate(chats)
    ]
    build_sft(examples, folder / "sft" / "chats", tokenizer=tokenizer or ByteTokenizer(), val_frac=0, seed=0)
    return folder / "sft" / "chats"


def read_examples(cache: Path) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of each example and which of them carry loss, token by token from the sentinels."""
    meta = read_meta(str(cache / "meta.json"))
    ids = np.fromfile(cache / "train_tokens.bin", token_dtype_of(meta, "meta.json")).tolist()
    starts = [*np.load(cache / "train_idx.npy").tolist(), len(ids)]
    sentinels, examples = meta["special_token_ids"], []
    for begin, end in pairwise(starts):
        has_loss, inside = [], False
        for id in ids[begin:end]:
            has_loss.append(inside and id != sentinels["asst"])
            inside = id == sentinels["asst"] or (inside and id != sentinels["eot"])
        examples.append((ids[begin:end], has_loss))
    return examples


def plain_rows(
    examples: Sequence[tuple[list[int], list[bool]]], T: int, over_length: str, require_targets: bool, pad_id: int
) -> tuple[dict[int, Row], dict[str, int]]:
    """Return the rows of an epoch by their pieces, and the counts: the slow and obvious rule."""
    rows, counts, piece = {}, Counter(examples=len(examples)), -1
    for document, (ids, has_loss) in enumerate(examples):
        is_long = len(ids) > T + 1
        windows = range(0, max(len(ids) - 1, 1), T) if over_length == "split" else [0]
        counts["supervised_tokens"] += sum(has_loss)
        counts["supervised_tokens_lost"] += sum(has_loss)
        counts["examples_split"] += len(windows) > 1
        for begin in windows:
            piece += 1
            if is_long and over_length == "drop":
                counts["rows_dropped"] += 1
                continue
            part, loss = ids[begin : begin + T + 1], has_loss[begin : begin + T + 1]
            y = [id if carries else -100 for id, carries in zip(part[1:], loss[1:], strict=True)]
            targets = sum(loss[1:])
            if require_targets and not targets:
                counts["rows_left_out_without_target"] += 1
                continue
            counts["rows"] += 1
            counts["rows_without_target"] += not targets
            counts["supervised_tokens_lost"] -= targets
            if is_long and over_length == "truncate":
                counts["rows_cut"] += 1
                counts["rows_without_last_eot"] += 1  # with which a built example ends
            lengths = [len(part), T - len(part)] if len(part) < T else [T]
            x = part[:T] + [pad_id] * (T - len(part))
            rows[piece] = Row(piece, document, x, y + [-100] * (T - len(y)), lengths)
    return rows, dict(counts)


def rows_of(batch: Batch) -> list[Row]:
    """Return the rows of a batch with their segments, of which the second may only be padding."""
    T, found = batch.x.shape[1], []
    assert batch.cu_seqlens is not None and batch.piece_ids is not None and batch.documents is not None
    edges = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32 and edges[-1] == batch.x.numel()
    segments = [
        (begin, end - begin, piece, document)
        for begin, end, piece, document in zip(
            edges[:-1], edges[1:], batch.piece_ids.tolist(), batch.documents.tolist(), strict=True
        )
    ]
    for row, (x, y) in enumerate(zip(batch.x.tolist(), batch.y.tolist(), strict=True)):
        own = [segment for segment in segments if segment[0] // T == row]
        assert own[0][0] == row * T and all(segment[2:] == (-1, -1) for segment in own[1:])
        found.append(Row(*own[0][2:], x, y, [segment[1] for segment in own]))
    assert batch.max_seqlen == max((length for row in found for length in row.lengths), default=0)
    return found


def run(cache: Path, steps: int | None = None, *, G: int = 4, world: int = 1, state: Any = None, **changed: Any) -> Any:
    """Take some steps of a stream with all its ranks: the rows of each batch, and the state after it."""
    ranks = []
    for rank in range(world):
        common = {"T": 4, "seed": 0, "global_batch_size": G, "rank": rank, "world_size": world}
        stream = SFTStream(str(cache), **{**common, **changed})
        if state is not None:
            stream.load_state_dict(state)
        ranks.append(list(islice(stream, steps)))
    assert len({len(batches) for batches in ranks}) == 1, "ranks yield unequally many batches"
    found = []
    for batches in zip(*ranks, strict=True):
        assert all(batch.state == batches[0].state for batch in batches), "ranks differ in their state"
        found.append(([row for batch in batches for row in rows_of(batch)], batches[0].state))
    return found


def flat(batches: Any) -> list[Row]:
    return [row for rows, _ in batches for row in rows]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_cache(tmp_path_factory.mktemp("caches"), THREE)


def letters(folder: Path) -> Path:
    """Build a pretrain cache of 30 tokens in shards of 10: six windows of T = 4; returns its train folder."""
    build_tokens(folder / "letters", ["abcdefghijklmnopqrstuvwxyz0123"])
    return folder / "letters" / "train"


@settings(derandomize=True, max_examples=25)
@given(
    chats=CHATS,
    T=st.integers(1, 24),
    over_length=st.sampled_from(["truncate", "drop", "split"]),
    require_targets=st.booleans(),
    parts=st.lists(st.tuples(WORLDS, st.integers(1, 3), st.integers(0, 4)), max_size=2),
    last=st.tuples(WORLDS, st.integers(1, 3)),
    tokenizer=st.sampled_from([ByteTokenizer(), WideByteTokenizer()]),
    has_bits=st.booleans(),
    block=st.sampled_from([7, 1 << 20]),
)
def test_every_row_comes_exactly_once_an_epoch_as_the_plain_rule_makes_it(
    chats: list[list[tuple[int, int]]],
    T: int,
    over_length: str,
    require_targets: bool,
    parts: list[tuple[int, int, int]],
    last: tuple[int, int],
    tokenizer: ByteTokenizer,
    has_bits: bool,
    block: int,
) -> None:
    """Parts of a run of two epochs: world size, rows of a rank, steps until the next part begins.

    block: tokens that are counted at once.
    """
    with quick_folder() as folder, mock.patch.object(sft_counts, "_BLOCK_TOKENS", block):
        cache = sft_cache(folder, chats, tokenizer)
        examples, pad_id = read_examples(cache), tokenizer.special_token_ids()["eot"]
        if has_bits:
            give_bits(cache, pad_id=(pad_id := 7))
        rows, counts = plain_rows(examples, T, over_length, require_targets, pad_id)
        changed: dict[str, Any] = {"T": T, "epochs": 2, "over_length": over_length, "require_targets": require_targets}
        if not rows:
            with pytest.raises(CacheError, match="no row is left"):
                run(cache, **changed)
            return
        batches: list[Any] = []
        for world, per_rank, steps in [*parts, (*last, None)]:
            state = batches[-1][1] if batches else None
            batches += run(cache, steps, G=world * per_rank, world=world, state=state, **changed)
        undivided = flat(run(cache, G=1, io="pread", seed=0, **changed))
        found = SFTStream(cache, global_batch_size=1, seed=0, **changed).counts
    assert flat(batches) == undivided
    assert len(undivided) == 2 * len(rows)
    for epoch in (undivided[: len(rows)], undivided[len(rows) :]):
        assert sorted(epoch) == [rows[piece] for piece in sorted(rows)]
    assert {name: value for name, value in vars(found).items() if value} == {k: v for k, v in counts.items() if v}
    if over_length == "split" and not require_targets:
        targets = sum(id != -100 for row in rows.values() for id in row.y)
        assert targets == sum(sum(has_loss) for _, has_loss in examples) and counts["supervised_tokens_lost"] == 0


def test_rows_are_those_written_out_by_hand(tmp_path: Path) -> None:
    """A chat of 8 tokens: usr a eot asst b b b eot, of which the last four carry loss."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bbb"}]
    build_sft([messages], tmp_path / "sft" / "one", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    a, b = 107, 108

    def only_batch(**arguments: Any) -> Batch:
        stream = SFTStream(tmp_path / "sft" / "one", global_batch_size=4, seed=0, epochs=1, **arguments)
        (batch,) = stream
        return batch

    padded = only_batch(T=10)
    assert padded.x.tolist() == [[USR, a, EOT, ASST, b, b, b, EOT, EOT, EOT]]
    assert padded.y.tolist() == [[-100, -100, -100, b, b, b, EOT, -100, -100, -100]]
    assert padded.cu_seqlens is not None and padded.cu_seqlens.tolist() == [0, 8, 10] and padded.max_seqlen == 8
    assert padded.position_ids is not None and padded.position_ids.tolist() == [[*range(8), 0, 1]]
    assert padded.piece_ids is not None and padded.piece_ids.tolist() == [0, -1]
    whole = only_batch(T=8)
    assert whole.x.tolist() == [[USR, a, EOT, ASST, b, b, b, EOT]] and whole.cu_seqlens is not None
    assert whole.y.tolist() == [[-100, -100, -100, b, b, b, EOT, -100]] and whole.cu_seqlens.tolist() == [0, 8]
    exact = only_batch(T=7)
    assert exact.x.tolist() == [[USR, a, EOT, ASST, b, b, b]] and exact.cu_seqlens is not None
    assert exact.y.tolist() == [[-100, -100, -100, b, b, b, EOT]] and exact.cu_seqlens.tolist() == [0, 7]
    truncated = only_batch(T=5)
    assert truncated.x.tolist() == [[USR, a, EOT, ASST, b]] and truncated.y.tolist() == [[-100, -100, -100, b, b]]
    split = only_batch(T=5, over_length="split")
    assert sorted(rows_of(split)) == [
        Row(0, 0, [USR, a, EOT, ASST, b], [-100, -100, -100, b, b], [5]),
        Row(1, 0, [b, b, EOT, EOT, EOT], [b, EOT, -100, -100, -100], [3, 2]),
    ]
    assert split.x.dtype == split.y.dtype == torch.int64 and split.x.is_contiguous() and split.y.is_contiguous()


def test_two_epochs_and_two_seeds_have_different_orders(tmp_path: Path) -> None:
    cache = sft_cache(tmp_path, [[(1 + number % 5, 3)] for number in range(23)])
    orders = []
    for seed in (0, 1):
        pieces = [row.piece for row in flat(run(cache, 46, G=1, seed=seed))]
        orders += [tuple(pieces[:23]), tuple(pieces[23:])]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(23)) for order in orders)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 3]), (True, [4, 4])])
def test_a_short_last_batch_and_the_length(three: Path, drop_last: bool, sizes: list[int]) -> None:
    """11 rows of T = 4."""
    arguments: dict[str, Any] = {"T": 4, "seed": 0, "epochs": 1, "over_length": "split", "drop_last": drop_last}
    stream = SFTStream(three, global_batch_size=4, **arguments)
    assert [len(batch.x) for batch in stream] == sizes and len(stream) == len(sizes)
    eight = list(SFTStream(three, global_batch_size=8, rank=7, world_size=8, **arguments))
    assert [len(batch.x) for batch in eight] == ([1] if drop_last else [1, 1])


def test_a_rank_without_rows_has_an_empty_batch(three: Path) -> None:
    last = list(SFTStream(three, T=4, global_batch_size=8, seed=0, epochs=1, rank=0, world_size=8))[-1]
    assert last.x.shape == last.y.shape == (0, 4) and last.position_ids is not None
    assert last.cu_seqlens is not None and last.cu_seqlens.tolist() == [0] and last.max_seqlen == 0


def test_a_state_of_another_stream_is_refused(three: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"T": 4, "global_batch_size": 2, "seed": 0}
    stream, windows = SFTStream(three, **arguments), EpochStream(letters(tmp_path), **arguments)
    for one, another in ((stream, windows), (windows, stream)):
        with pytest.raises(ValueError, match="another kind of stream"):
            one.load_state_dict(another.state_dict())
    changes = {"over_length": "split", "T": 5, "seed": 1, "require_targets": True}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=name):
            stream.load_state_dict(SFTStream(three, **{**arguments, name: value}).state_dict())
    other = SFTStream(sft_cache(tmp_path, THREE[:2]), **arguments)
    with pytest.raises(CacheError, match="tokens is"):
        stream.load_state_dict(other.state_dict())
    assert set(stream.state_dict()) >= {"kind", "epoch", "consumed_samples", "content_sha256", "key_check"}


def test_arguments_that_cannot_be_are_refused(three: Path) -> None:
    arguments: dict[str, Any] = {"T": 4, "global_batch_size": 2, "seed": 0}
    wrong = {"over_length": "cut", "require_targets": 1, "split": "test", "T": 0, "io": "mmapp"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}="):
            SFTStream(three, **{**arguments, name: value})
    with pytest.raises(CacheError, match=r"3 of 3 examples are longer than T \+ 1 = 5.*T=21"):
        SFTStream(three, **arguments, over_length="error")
    with pytest.raises(CacheError, match="tokens"):
        SFTStream(three, **arguments, expect={**SFTStream(three, **arguments).split.fingerprint(), "tokens": 1})


@pytest.mark.filterwarnings("error")
def test_warnings_are_of_the_line_that_opens_the_stream(three: Path) -> None:
    arguments: dict[str, Any] = {"T": 3, "global_batch_size": 2, "seed": 0}
    with pytest.warns(UserWarning, match=r"3 of 3 rows have no target.*supervised tokens") as caught:
        SFTStream(three, **arguments)
    assert [each.filename for each in caught] == [__file__]
    with pytest.warns(UserWarning, match="the last batch has 1 of 2 rows") as caught:
        SFTStream(three, **{**arguments, "T": 30}, epochs=1, world_size=2)
    assert [each.filename for each in caught] == [__file__]
    SFTStream(three, **arguments, over_length="split", require_targets=True)


def mixed(three: Path, numbers: Path, **changed: Any) -> tuple[MixtureStream, list[Any]]:
    common: dict[str, Any] = {"T": 4, "global_batch_size": 4, "seed": 0, **changed}

    def sources() -> list[Any]:
        return [EpochStream(numbers, **common), SFTStream(three, over_length="split", **common)]

    return MixtureStream(sources(), [1, 2], seed=3, block_size=9), sources()


def test_in_a_mixture_a_source_gives_the_rows_that_it_gives_alone(three: Path, tmp_path: Path) -> None:
    mixture, alone = mixed(three, letters(tmp_path))
    batches = list(islice(mixture, 20))
    found: list[list[Any]] = [[], []]
    for batch in batches:
        assert batch.source is not None
        for source, row in zip(batch.source.tolist(), rows_of(batch), strict=True):
            found[source].append(row)
    expected: list[list[Any]] = [[], []]
    for batch in islice(alone[0], 20):
        expected[0] += [Row(-1, -1, x, y, [4]) for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True)]
    for batch in islice(alone[1], 20):
        expected[1] += rows_of(batch)
    assert min(len(rows) for rows in found) > 20
    assert all(rows == more[: len(rows)] for rows, more in zip(found, expected, strict=True))
    resumed, _ = mixed(three, tmp_path / "letters" / "train", global_batch_size=8)
    resumed.load_state_dict(batches[9].state)
    rows = [row for batch in islice(resumed, 5) for row in rows_of(batch)]
    assert rows == [row for batch in batches[10:] for row in rows_of(batch)]


def told(batches: Iterator[Batch]) -> list[Any]:
    return [(rows_of(batch), batch.state) for batch in batches]


def test_a_run_may_change_its_workers_its_world_and_its_batch(three: Path) -> None:
    """Parts of a run: workers, world size, global batch, steps."""
    rows, state = [], None
    for workers, world, G, steps in [(2, 2, 4, 3), (0, 3, 6, 2), (3, 1, 5, 3), (1, 2, 8, None)]:
        ranks = []
        for rank in range(world):
            common: dict[str, Any] = {"T": 4, "seed": 0, "epochs": 6, "over_length": "split"}
            stream = SFTStream(three, global_batch_size=G, rank=rank, world_size=world, **common)
            if state is not None:
                stream.load_state_dict(state)
            ranks.append(told(islice(DataLoader(stream, batch_size=None, num_workers=workers), steps)))
        rows += [row for batches in zip(*ranks, strict=True) for found, _ in batches for row in found]
        state = ranks[0][-1][1]
    assert rows == flat(run(three, epochs=6, over_length="split", G=1)) and len(rows) == 66


def test_a_pickled_stream_continues_and_holds_no_tokens(tmp_path: Path) -> None:
    cache = sft_cache(tmp_path, [[(3, 90)] for _ in range(200)])
    stream = SFTStream(cache, T=40, global_batch_size=8, seed=1)
    list(islice(stream, 3))
    pickled = pickle.dumps(stream)
    assert len(pickled) < 6_000 < (cache / "train_tokens.bin").stat().st_size
    copy = pickle.loads(pickled)
    assert told(islice(copy, 30)) == told(islice(stream, 30))
    assert "20,000" not in repr(stream) and all(part in repr(stream) for part in ("chats", "200 rows", "int64 [8, 40]"))
    assert "truncate" in stream._repr_html_()


def test_an_id_outside_the_vocabulary_is_an_error_and_no_batch(tmp_path: Path) -> None:
    cache = sft_cache(tmp_path, THREE)
    tokens = np.fromfile(cache / "train_tokens.bin", "<u2")
    tokens[1] = 299
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = SFTStream(cache, T=4, global_batch_size=3, seed=0)
    path = cache.resolve() / "train_tokens.bin"
    with open(path, "r+b") as file:  # the same file: another one would be refused
        file.write(np.array([USR, 300], "<u2").tobytes())
    with pytest.raises(CacheError, match=r"train_tokens\.bin.*300"):
        next(iter(stream))
