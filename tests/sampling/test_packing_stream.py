"""Packed rows: every document or example in them exactly once an epoch, whole, with the targets that it has."""

import warnings
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits_caches import give_bits
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.number_caches import BEYOND, number_cache, write_shards
from support.small_builds import quick_folder

from niels_gpt.cache import CacheError, read_meta, write_meta
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream
from niels_gpt.storage.codes import CodedWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*are in no row"),
    pytest.mark.filterwarnings("ignore:.*supervised tokens"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]
Document = tuple[list[int], list[bool]]
"""Its ids, and which of them carry loss."""
Segment = tuple[int, int, list[int], list[int]]
"""Piece, document, x and y; of padding the first two are -1."""


def write_documents(folder, lengths, *, shard=7, dtype="uint16"):
    """Write a pretrain cache without a meta.json: documents of these lengths, whose ids count through the split."""
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    write_shards(folder / "train", [range(at, min(at + shard, total)) for at in range(0, total, shard)], dtype)
    (folder / "index").mkdir()
    np.save(folder / "index" / "train_docs.npy", starts)
    first = BEYOND * (dtype == "uint32")
    return [(list(range(first + at, first + end)), [True] * (end - at)) for at, end in pairwise(starts.tolist())]


def build_chats(folder, chats):
    """Build an sft cache: chat i is of the i-th letter, so many of the user and the assistant in each turn."""
    examples = [
        [
            {"role": role, "content": chr(97 + number) * letters}
            for turn in turns
            for role, letters in zip(("user", "assistant"), turn, strict=True)
        ]
        for number, turns in enumerate(chats)
    ]
    build_sft(examples, folder, tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    return read_chats(folder)


def read_chats(folder):
    """Return the examples of a cache, with loss by the sentinels, token by token."""
    ids = np.fromfile(folder / "train_tokens.bin", np.uint16).tolist()
    documents, sentinels = [], ByteTokenizer().special_token_ids()
    for begin, end in pairwise([*np.load(folder / "train_idx.npy").tolist(), len(ids)]):
        has_loss, inside = [], False
        for id in ids[begin:end]:
            has_loss.append(inside)
            inside = id == sentinels["asst"] or (inside and id != sentinels["eot"])
        documents.append((ids[begin:end], has_loss))
    return documents


CHATS = [[(1, 1)], [(3, 8), (1, 2)], [(2, 4)], [(9, 1), (2, 2), (1, 1)], [(1, 3)], [(1, 1)]]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Return a cache of each kind, and its documents: pretrain, sft, and sft with loss in bits, on other tokens."""
    root = tmp_path_factory.mktemp("packed")
    pretrain = write_documents(root / "pretrain", [9, 1, 4, 2, 16, 3, 8, 5])
    chats = build_chats(root / "chats", CHATS)
    build_chats(root / "bits", CHATS)
    return {
        "pretrain": (root / "pretrain", pretrain),
        "sft": (root / "chats", chats),
        "bits": (give_bits(root / "bits"), chats),
    }


def plain_pieces(documents, T, over_length="split"):
    """Return the pieces of a split: the slow and obvious rule."""
    pieces = []
    for number, (ids, has_loss) in enumerate(documents):
        if over_length == "drop" and len(ids) > T:
            continue
        y = [id if loss else -100 for id, loss in zip(ids[1:], has_loss[1:], strict=True)] + [-100]
        for begin in range(0, len(ids), T) if over_length == "split" else [0]:
            pieces.append((len(pieces), number, ids[begin : begin + T], y[begin : begin + T]))
    return pieces


def segments_of(batch):
    """Return the segments of each row of a batch, padding too."""
    assert batch.cu_seqlens is not None and batch.piece_ids is not None and batch.documents is not None
    assert batch.x.shape == batch.y.shape and batch.x.dtype == batch.y.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    starts, x, y = batch.cu_seqlens.tolist(), batch.x.view(-1).tolist(), batch.y.view(-1).tolist()
    assert starts[0] == 0 and starts[-1] == len(x)
    rows = [[] for _ in batch.x]
    numbers = zip(batch.piece_ids.tolist(), batch.documents.tolist(), strict=True)
    for number, (begin, end) in zip(numbers, pairwise(starts), strict=True):
        row = begin // batch.x.shape[1]
        assert row == (end - 1) // batch.x.shape[1], "a segment crosses two rows"
        rows[row].append((*number, x[begin:end], y[begin:end]))
    return rows


def rows_of(batches, pad_id=0):
    """Return the pieces of each row of some batches. Padding is checked, and left out."""
    rows = [row for batch in batches for row in segments_of(batch)]
    for row in rows:
        for piece, document, x, y in row[:-1]:
            assert piece >= 0 and document >= 0 and len(x) == len(y)
        if row[-1][0] == -1:
            _, document, x, y = row.pop()
            assert document == -1 and set(x) == {pad_id} and set(y) == {-100}
    return rows


def test_a_batch_on_paper(tmp_path):
    """T = 6, documents of 4, 8 and 1 tokens over shards of 7: pieces of 4, 6, 2 and 1 tokens.

    Rows by best fit: the 6; the 4 and the 2; the 1 and padding. With seed 10 they come in this order.
    """
    write_documents(tmp_path / "c", [4, 8, 1])
    (batch,) = PackedStream(tmp_path / "c", T=6, global_batch_size=3, seed=10, epochs=1)
    assert batch.x.tolist() == [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 10, 11], [12, 0, 0, 0, 0, 0]]
    assert batch.y.tolist() == [[5, 6, 7, 8, 9, 10], [1, 2, 3, -100, 11, -100], [-100] * 6]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 6, 10, 12, 13, 18]
    assert batch.piece_ids is not None and batch.piece_ids.tolist() == [1, 0, 2, 3, -1]
    assert batch.documents is not None and batch.documents.tolist() == [1, 0, 1, 2, -1]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert batch.max_seqlen == 6
    assert batch.state["epoch"] == 1 and batch.state["consumed_samples"] == 3


@settings(derandomize=True, max_examples=40)
@given(
    kind=st.sampled_from(["pretrain", "sft", "bits"]),
    T=st.integers(1, 20),
    G=st.integers(1, 9),
    seed=st.integers(-(2**63), 2**63),
    over_length=st.sampled_from(["split", "split", "truncate"]),
    io=st.sampled_from(["mmap", "pread"]),
)
def test_every_piece_comes_exactly_once_an_epoch(caches, kind, T, G, seed, over_length, io):
    folder, documents = caches[kind]
    T = max(T, 4) if over_length == "truncate" else T  # without a target in any row a stream is refused
    options = {"T": T, "seed": seed, "epochs": 2, "over_length": over_length, "io": io}
    rows = rows_of(PackedStream(folder, global_batch_size=G, **options), pad_id=4 if kind == "sft" else 0)
    pieces = plain_pieces(documents, T, over_length)
    assert len(rows) % 2 == 0
    for epoch in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        assert sorted(segment for row in epoch for segment in row) == pieces


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@settings(derandomize=True, max_examples=15)
@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=12), T=st.integers(1, 12), shard=st.integers(1, 40))
def test_each_token_but_the_first_of_its_document_is_a_target_once_an_epoch(dtype, lengths, T, shard):
    with quick_folder() as root:
        documents = write_documents(root / "c", lengths, shard=shard, dtype=dtype)
        stream = PackedStream(root / "c", T=T, global_batch_size=2, seed=0, epochs=1, dtype=dtype)
        targets = torch.cat([batch.y for batch in stream]).view(-1)
    assert sorted(targets[targets != -100].tolist()) == [id for ids, _ in documents for id in ids[1:]]
    assert stream.counts.tokens == sum(lengths) and stream.counts.tokens_lost == 0


def test_a_mixture_of_all_kinds_gives_each_its_rows(caches):
    """Two ranks; after seven steps another mixture continues from the state. Each source: as it is alone, in order."""
    (pretrain, _), (chats, _) = caches["pretrain"], caches["sft"]

    def opened(**common):
        epochs = EpochStream(pretrain / "train", **common)
        return [PackedStream(pretrain, **common), epochs, PackedStream(chats, **common), SFTStream(chats, **common)]

    state = None
    taken = [[], [], [], []]
    for steps in (7, 20):
        ranks = []
        for rank in range(2):
            streams = opened(T=6, seed=0, global_batch_size=6, rank=rank, world_size=2)
            one = MixtureStream(streams, [0.4, 0.1, 0.3, 0.2], seed=0, block_size=10)
            if state is not None:
                one.load_state_dict(state)
            ranks.append(list(islice(one, steps)))
        state = ranks[0][-1].state
        for batch in (batch for together in zip(*ranks, strict=True) for batch in together):
            assert batch.source is not None
            for source, row in zip(batch.source.tolist(), segments_of(batch), strict=True):
                taken[source].append(row)
    for rows, stream in zip(taken, opened(T=6, seed=0, global_batch_size=1), strict=True):
        alone = [[one.x[0].tolist(), one.y[0].tolist()] for one in islice(stream, len(rows))]
        joined = [[[id for segment in row for id in segment[part]] for part in (2, 3)] for row in rows]
        assert joined == alone and len(rows) >= 15
    assert [row[0][0] >= 0 for row in taken[1]] == [False] * len(taken[1])
    packed = [segments_of(batch)[0] for batch in islice(opened(T=6, seed=0, global_batch_size=1)[0], len(taken[0]))]
    assert taken[0] == packed


def test_documents_longer_than_a_row(caches):
    """Of 9, 1, 4, 2, 16, 3, 8 and 5 tokens; T = 8."""
    folder, documents = caches["pretrain"]
    options = {"T": 8, "global_batch_size": 1, "seed": 0, "epochs": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = PackedStream(folder, **options).counts
    assert (counts.documents, counts.documents_cut, counts.pieces, counts.tokens_lost) == (8, 2, 10, 0)
    assert counts.tokens == 48 and counts.rows == 6 and counts.fill == 1.0
    with pytest.warns(CodedWarning, match="2 of 8 documents are longer than T = 8 tokens and are truncated: 9 of 48"):
        truncated = PackedStream(folder, over_length="truncate", **options)
    assert truncated.counts.documents_truncated == 2 and truncated.counts.tokens_lost == 9
    with pytest.warns(CodedWarning, match="are dropped: 25 of 48 tokens"):
        dropped = PackedStream(folder, over_length="drop", **options)
    assert dropped.counts.documents_dropped == 2 and dropped.counts.pieces == 6
    assert sorted(one for row in rows_of(dropped) for one in row) == plain_pieces(documents, 8, "drop")
    with pytest.raises(CacheError, match="2 of 8 are longer than T = 8 tokens, the longest is number 4 with 16"):
        PackedStream(folder, over_length="error", **options)


def test_a_split_whose_documents_are_all_dropped_is_refused(tmp_path):
    write_documents(tmp_path / "c", [9, 9])
    with refused("E107", "all 2", "T = 8", kind=CacheError):
        PackedStream(tmp_path / "c", T=8, global_batch_size=1, seed=0, over_length="drop")


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_ranges_of_a_split_cross_its_shards(tmp_path, io):
    """Shards of 4, 1, 4 and 2 tokens, whose ids count from 0."""
    split = PretrainSplit(write_shards(tmp_path / "train", [range(4), [4], range(5, 9), [9, 10]]), io=io)
    for begin in range(11):
        for end in range(begin + 1, 12):
            ids = split.read(np.array([begin, 0, begin]), np.array([end, 11, begin + 1]))
            assert ids.tolist() == [*range(begin, end), *range(11), begin]
    for begin, end in ((-1, 2), (3, 3), (10, 12)):
        with pytest.raises(IndexError, match=f"no tokens {begin} to {end - 1}: it has 11"):
            split.read(np.array([0, begin]), np.array([1, end]))


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    """Ten documents of 10 tokens, 10 to 109, in shards of 40: 105 is token 15 of the third shard."""
    folder = number_cache(tmp_path / "c").parent
    meta = read_meta(str(folder / "meta.json"))
    write_meta(str(folder / "meta.json"), {**meta, "vocab_size": 105})
    stream = PackedStream(folder, T=10, global_batch_size=1, seed=0, epochs=1)
    with pytest.raises(
        CacheError, match=r"shard_00002.bin: token 15 at byte 30 is id 105, expected ids below vocab_size 105"
    ):
        list(stream)


def test_supervised_tokens_that_are_lost_are_counted_as_the_batches_have_them(tmp_path):
    """T = 8; the letters, the role before them and the end after them: 3 + n and 3 + m of each turn."""
    build_chats(tmp_path / "chats", CHATS)
    build_chats(tmp_path / "long", [[(30, 5)]] * 3)
    give_bits(tmp_path / "long")
    for over_length in ("split", "truncate", "drop"):
        stream = PackedStream(tmp_path / "chats", T=8, global_batch_size=2, seed=0, epochs=1, over_length=over_length)
        total = sum(sum(has_loss) for _, has_loss in read_chats(tmp_path / "chats"))
        kept = sum(int((batch.y != -100).sum()) for batch in stream)
        assert (stream.counts.supervised_tokens, stream.counts.supervised_tokens_lost) == (total, total - kept)
        assert (kept < total) == (over_length != "split")
    with pytest.warns(CodedWarning, match=r"in no row, and \d+ of \d+ supervised tokens \(.*%\) are lost"):
        PackedStream(tmp_path / "chats", T=8, global_batch_size=2, seed=0, over_length="truncate")
    with pytest.raises(CacheError, match="no target is left in any row") as refused:
        PackedStream(tmp_path / "long", T=16, global_batch_size=2, seed=0, over_length="truncate")
    assert refused.value.code == "E107"
