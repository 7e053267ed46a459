"""Epochs of an sft split: every example, or every piece of one, exactly once, with the targets that it has."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits_caches import give_bits
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.byte_tokenizer import build as build_tokens
from support.small_builds import quick_folder

from niels_gpt.cache import CacheError, read_meta
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.sampling import EpochStream, MixtureStream, SFTStream

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
THREE = [[(1, 1)], [(3, 8), (1, 2)], [(2, 4)]]
"""Examples of 6, 22 and 10 tokens; with over_length="split" and T = 4 of 2, 6 and 3 rows."""


class Row(NamedTuple):
    piece: int
    document: int
    x: list[int]
    y: list[int]
    lengths: list[int]
    """Of the segments."""


def sft_cache(folder, chats, tokenizer=None, name="chats"):
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


def read_examples(cache):
    """Return the ids of each example and which of them carry loss, token by token from the sentinels."""
    meta = read_meta(str(cache / "meta.json"))
    ids = np.fromfile(cache / "train_tokens.bin", f"<u{int(meta['token_dtype'][4:6]) // 8}").tolist()
    starts = [*np.load(cache / "train_idx.npy").tolist(), len(ids)]
    sentinels, examples = meta["special_token_ids"], []
    for begin, end in pairwise(starts):
        has_loss, inside = [], False
        for id in ids[begin:end]:
            has_loss.append(inside and id != sentinels["asst"])
            inside = id == sentinels["asst"] or (inside and id != sentinels["eot"])
        examples.append((ids[begin:end], has_loss))
    return examples


def plain_rows(examples, T, over_length, require_targets, pad_id):
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


def rows_of(batch):
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


def run(cache, *, G, **changed):
    """Return the rows of a stream."""
    stream = SFTStream(cache, global_batch_size=G, seed=0, **changed)
    return [row for batch in stream for row in rows_of(batch)]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return sft_cache(tmp_path_factory.mktemp("caches"), THREE)


def letters(folder):
    """Build a pretrain cache of 30 tokens in shards of 10: six windows of T = 4; returns its train folder."""
    build_tokens(folder / "letters", ["abcdefghijklmnopqrstuvwxyz0123"])
    return folder / "letters" / "train"


@settings(derandomize=True, max_examples=25)
@given(
    chats=CHATS,
    T=st.integers(1, 24),
    G=st.integers(1, 9),
    over_length=st.sampled_from(["truncate", "drop", "split"]),
    require_targets=st.booleans(),
    tokenizer=st.sampled_from([ByteTokenizer(), WideByteTokenizer()]),
    has_bits=st.booleans(),
)
def test_every_row_comes_exactly_once_an_epoch_as_the_plain_rule_makes_it(
    chats, T, G, over_length, require_targets, tokenizer, has_bits
):
    with quick_folder() as folder:
        cache = sft_cache(folder, chats, tokenizer)
        examples, pad_id = read_examples(cache), tokenizer.special_token_ids()["eot"]
        if has_bits:
            give_bits(cache, pad_id=(pad_id := 7))
        rows, counts = plain_rows(examples, T, over_length, require_targets, pad_id)
        changed = {"T": T, "epochs": 2, "over_length": over_length, "require_targets": require_targets}
        if not rows:
            with pytest.raises(CacheError, match="no row is left"):
                run(cache, G=1, **changed)
            return
        served = run(cache, G=G, **changed)
        undivided = run(cache, G=1, io="pread", **changed)
        found = SFTStream(cache, global_batch_size=1, seed=0, **changed).counts
    assert served == undivided
    assert len(undivided) == 2 * len(rows)
    for epoch in (undivided[: len(rows)], undivided[len(rows) :]):
        assert sorted(epoch) == [rows[piece] for piece in sorted(rows)]
    assert {name: value for name, value in vars(found).items() if value} == {k: v for k, v in counts.items() if v}
    if over_length == "split" and not require_targets:
        targets = sum(id != -100 for row in rows.values() for id in row.y)
        assert targets == sum(sum(has_loss) for _, has_loss in examples) and counts["supervised_tokens_lost"] == 0


def test_rows_are_those_written_out_by_hand(tmp_path):
    """A chat of 8 tokens: usr a eot asst b b b eot, of which the last four carry loss."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bbb"}]
    build_sft([messages], tmp_path / "sft" / "one", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    a, b = 107, 108

    def only_batch(**arguments):
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


def test_a_stream_says_in_a_line_what_it_is_and_what_it_refuses(three):
    arguments = {"T": 4, "global_batch_size": 2, "seed": 0}
    stream = SFTStream(three, **arguments)
    assert all(part in repr(stream) for part in ("chats", "3 rows", "int64 [2, 4]"))
    assert "truncate" in stream._repr_html_()
    assert set(stream.state_dict()) >= {"kind", "epoch", "consumed_samples", "content_sha256", "key_check"}
    with pytest.raises(CacheError, match=r"3 of 3 examples are longer than T \+ 1 = 5.*T=21"):
        SFTStream(three, **arguments, over_length="error")
    with pytest.raises(CacheError, match="tokens"):
        SFTStream(three, **arguments, expect={**stream.split.fingerprint(), "tokens": 1})


@pytest.mark.filterwarnings("error")
def test_warnings_are_of_the_line_that_opens_the_stream(three):
    arguments = {"T": 3, "global_batch_size": 2, "seed": 0}
    with pytest.warns(UserWarning, match=r"3 of 3 rows have no target.*supervised tokens") as caught:
        SFTStream(three, **arguments)
    assert [each.filename for each in caught] == [__file__]
    with pytest.warns(UserWarning, match="the last batch has 1 of 2 rows") as caught:
        SFTStream(three, **{**arguments, "T": 30}, epochs=1, world_size=2)
    assert [each.filename for each in caught] == [__file__]
    SFTStream(three, **arguments, over_length="split", require_targets=True)


def mixed(three, numbers, **changed):
    common = {"T": 4, "global_batch_size": 4, "seed": 0, **changed}

    def sources():
        return [EpochStream(numbers, **common), SFTStream(three, over_length="split", **common)]

    return MixtureStream(sources(), [1, 2], seed=3, block_size=9), sources()


def test_in_a_mixture_a_source_gives_the_rows_that_it_gives_alone(three, tmp_path):
    mixture, alone = mixed(three, letters(tmp_path))
    batches = list(islice(mixture, 20))
    found = [[], []]
    for batch in batches:
        assert batch.source is not None
        for source, row in zip(batch.source.tolist(), rows_of(batch), strict=True):
            found[source].append(row)
    expected = [[], []]
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
