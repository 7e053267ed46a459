"""Windows that say where documents are: from the index of a cache, also where no end-of-text stands between documents.

The ids of the splits count through all shards, so that id t is token t of the split.
"""

import pickle
from bisect import bisect_right
from inspect import signature
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.number_caches import number_cache, numbered

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset
from niels_gpt.kinds.look import locate
from niels_gpt.sampling import Batch, EpochStream, MixtureStream, block_causal_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]


def with_index(folder, documents, shards):
    """Write shards of so many tokens, and the index of documents of so many; returns the split's folder."""
    (folder / "index").mkdir(parents=True, exist_ok=True)
    np.save(folder / "index" / "train_docs.npy", np.cumsum([0, *documents], dtype=np.int64))
    return numbered(folder, shards)


def opened(folder, **changed):
    arguments = {"T": 4, "global_batch_size": 3, "seed": 0, "documents": True, **changed}
    return EpochStream(str(folder), **arguments)


def test_the_fields_of_a_batch_written_out(tmp_path):
    """Five documents in two shards: the third lies in both, the second is one token, the fourth ends with its window.

    token     0 1 2 | 3 | 4 5 6 7 8 / 9 10 | 11 12 | 13 14 15 16
    windows  [0 1 2   3] [4 5 6 7]   [9 10   11 12]
    """
    folder = with_index(tmp_path, [3, 1, 7, 2, 4], [9, 8])
    batch = next(iter(opened(folder, seed=3)))
    assert batch.x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 10, 11, 12]]
    assert batch.y.tolist() == [[1, 2, -100, -100], [5, 6, 7, 8], [10, -100, 12, -100]]
    fields = batch.cu_seqlens, batch.documents, batch.piece_ids, batch.position_ids
    assert [field.tolist() for field in fields if field is not None] == [
        [0, 3, 4, 8, 10, 12],
        [0, 1, 2, 2, 3],
        [0, 1, 2, 2, 3],
        [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]],
    ]
    assert [field.dtype for field in fields if field is not None] == [torch.int32, *[torch.int64] * 3]
    assert batch.max_seqlen == 4 and batch.x.is_contiguous() and batch.y.is_contiguous()


def by_hand(first, T, starts):
    """Return the targets of the window that begins at token `first`, and its segments: (document, tokens)."""
    documents = [bisect_right(starts, token) - 1 for token in range(first, first + T + 1)]
    targets = [first + at + 1 if documents[at] == documents[at + 1] else -100 for at in range(T)]
    segments = [(number, documents[:T].count(number)) for number in sorted(set(documents[:T]))]
    return targets, segments


def check(batch, plain, starts):
    """Compare a batch with the same batch without documents and with the rule in plain Python."""
    assert torch.equal(batch.x, plain.x) and batch.state == plain.state
    assert torch.equal(torch.where(batch.y == -100, plain.y, batch.y), plain.y)
    T, segments, targets = batch.x.shape[1], [], []
    for first in batch.x[:, 0].tolist():
        row_targets, row_segments = by_hand(first, T, starts)
        targets.append(row_targets)
        segments += row_segments
    lengths = [length for _, length in segments]
    assert batch.cu_seqlens is not None and batch.documents is not None and batch.position_ids is not None
    assert batch.y.tolist() == targets
    assert batch.documents.tolist() == [number for number, _ in segments]
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch.position_ids.flatten().tolist() == [at for length in lengths for at in range(length)]
    assert batch.max_seqlen == max(lengths, default=0)


@settings(derandomize=True, max_examples=40)
@given(
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 60), max_size=3),
    T=st.integers(1, 7),
    changed=st.fixed_dictionaries({"random_offset": st.booleans(), "io": st.sampled_from(["mmap", "pread"])}),
    world=st.integers(1, 2),
)
def test_batches_are_those_of_the_plain_stream_with_documents_by_the_rule(
    tmp_path_factory,
    documents,
    cuts,
    T,
    changed,
    world,
):
    total = sum(documents)
    borders = [0, *sorted(cut for cut in cuts if cut < total), total]
    shards = np.diff(borders).tolist()
    assume(max(shards) > T)
    folder = with_index(tmp_path_factory.mktemp("split"), documents, shards)
    starts = np.cumsum([0, *documents]).tolist()
    for rank in range(world):
        arguments = {"T": T, "global_batch_size": 4, "rank": rank, "world_size": world, "epochs": 3, **changed}
        pairs = zip(opened(folder, **arguments), opened(folder, documents=False, **arguments), strict=True)
        for batch, plain in pairs:
            check(batch, plain, starts)


def test_a_run_resumes_with_documents_or_without_and_a_pickled_stream_continues(tmp_path):
    folder = with_index(tmp_path, [7, 1, 30, 2, 41], [50, 31])
    stream, plain = opened(folder), opened(folder, documents=False)
    next(iter(stream))
    plain.load_state_dict(stream.state_dict())
    again = pickle.loads(pickle.dumps(stream))
    expected = next(iter(plain))
    for one in (again, stream):
        check(next(iter(one)), expected, [0, 7, 8, 38, 40, 81])
    assert stream.identity() == plain.identity()


def test_shards_without_an_index_are_refused_with_the_reason(tmp_path):
    folder = numbered(tmp_path, [26])
    with pytest.raises(CacheError, match=r"index/train_docs\.npy: no such file, and documents=True.*without documents"):
        opened(folder)
    opened(folder, documents=False)


@pytest.mark.parametrize("documents", [[25], [], [26, 1]])
def test_an_index_of_other_tokens_is_refused(tmp_path, documents):
    with pytest.raises(CacheError, match=r"train_docs\.npy: ends at token \d+, expected 26"):
        opened(with_index(tmp_path, documents, [26]))


def test_a_mixture_tells_documents_of_each_source_apart(tmp_path):
    """Documents of both sources, and a plain source whose rows are one segment each, of which no more is known."""
    one, two = with_index(tmp_path / "one", [3, 6, 8], [17]), with_index(tmp_path / "two", [5, 12], [17])
    streams = [opened(one), opened(two), opened(two, documents=False)]
    mixed = next(iter(MixtureStream(streams, [1, 1, 1], seed=0, block_size=3)))
    assert mixed.source is not None and mixed.cu_seqlens is not None and mixed.documents is not None
    assert sorted(mixed.source.tolist()) == [0, 1, 2]
    segments, targets = [], []
    for source, first in zip(mixed.source.tolist(), mixed.x[:, 0].tolist(), strict=True):
        starts = [[0, 3, 9, 17], [0, 5, 17], [0, 17]][source]
        row_targets, row_segments = by_hand(first, 4, starts)
        targets.append(row_targets)
        segments += [(source, -1 if source == 2 else number, length) for number, length in row_segments]
    assert mixed.y.tolist() == targets
    assert mixed.documents.tolist() == [number for _, number, _ in segments]
    assert mixed.cu_seqlens.diff().tolist() == [length for _, _, length in segments]
    # The source of a segment is that of its row.
    assert mixed.source[mixed.cu_seqlens[:-1] // 4].tolist() == [source for source, _, _ in segments]


def test_from_a_document_of_a_batch_to_its_tokens_and_its_place_in_the_cache(tmp_path):
    folder = number_cache(tmp_path / "pretrain" / "numbers")
    stream = opened(folder, T=13, global_batch_size=4)
    data = PretrainTokenStreamDataset(str(folder), T=13, device="cpu")
    for batch in islice(stream, 3):
        assert batch.cu_seqlens is not None and batch.documents is not None
        for ids, number in zip(batch.x.view(-1).split(batch.cu_seqlens.diff().tolist()), batch.documents, strict=True):
            assert set(ids.tolist()) <= set(data[int(number)].ids.tolist())
            position = int(stream.split.documents[number])
            text = locate(folder.parent, None, split="train", position=position, num_tokens=5)
            assert f"{int(number)} of 10, 10 tokens" in text and "offset in it: 0 tokens" in text


def test_a_batch_keeps_its_fields_in_a_pickle_and_through_a_move(tmp_path):
    folder = with_index(tmp_path, [3, 1, 7, 2, 4], [9, 8])
    expected = next(iter(opened(folder, seed=3)))
    batch = pickle.loads(pickle.dumps(expected))
    assert batch.max_seqlen == 4 and repr(batch) == repr(expected) and "5 segments" in repr(batch)
    for name in ("x", "y", "cu_seqlens", "documents", "piece_ids", "position_ids"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    moved = batch.to("meta")
    assert batch.cu_seqlens is not None and moved.cu_seqlens is not None and moved.documents is not None
    assert [each.device.type for each in (moved.x, moved.cu_seqlens, moved.documents)] == ["meta", "meta", "cpu"]
    assert moved.max_seqlen == 4 and moved.state == batch.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_on_a_gpu_are_those_of_the_cpu(tmp_path):
    folder = with_index(tmp_path, [7, 1, 30, 2, 41], [50, 31])
    for ours, theirs in zip(islice(opened(folder, device="cuda"), 9), opened(folder), strict=False):
        for name in ("x", "y", "cu_seqlens", "documents", "position_ids"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_segments_on_a_gpu_is_that_under_the_mask(tmp_path, dtype):
    """The mask, made there; and torch's FlashAttention of pieces of different lengths, which takes 16 bits only."""
    batch = next(iter(opened(with_index(tmp_path, [7, 1, 30, 2, 41], [50, 31]), T=20, device="cuda")))
    shape, tokens = (len(batch.x), batch.x.shape[1]), batch.x.numel()
    mask = block_causal_mask(batch.cu_seqlens, shape, dtype=dtype)
    assert mask.is_cuda and torch.equal(mask.cpu(), block_causal_mask(batch.cu_seqlens.cpu(), shape, dtype=dtype))
    q, k, v = torch.randn(3, tokens, 2, 64, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    rows = [part.view(*shape, 2, 64).transpose(1, 2) for part in (q, k, v)]
    found = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
    alone = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part[a:b].transpose(0, 1) for part in (q, k, v)), is_causal=True
        )
        for a, b in pairwise(batch.cu_seqlens.tolist())
    ]
    expected, limit = torch.cat(alone, 1).transpose(0, 1), 1e-5 if dtype == torch.float32 else 2e-2
    assert float((found.transpose(1, 2).reshape(tokens, 2, 64) - expected).abs().max()) < limit
    if dtype == torch.bfloat16:
        varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn").varlen_attn
        lengths, longest = (batch.cu_seqlens, batch.cu_seqlens), (batch.max_seqlen, batch.max_seqlen)
        causal = {"window_size": (-1, 0)} if "window_size" in signature(varlen).parameters else {"is_causal": True}
        assert float((varlen(q, k, v, *lengths, *longest, **causal) - expected).abs().max()) < limit


def test_positions_of_the_longest_rows_of_16_bits_and_of_one_more_token():
    """A row of one token and one of all others, at 2 ** 15 tokens and beyond."""
    for T in (1 << 15, (1 << 15) + 1):
        x = torch.zeros((2, T), dtype=torch.int64)
        numbers = torch.zeros(3, dtype=torch.int64)
        batch = Batch(x, x, {}, None, torch.tensor([0, 1, T, 2 * T], dtype=torch.int32), numbers, numbers, T)
        assert batch.position_ids is not None and batch.position_ids.dtype == torch.int64
        assert batch.position_ids.tolist() == [[0, *range(T - 1)], list(range(T))]
