"""Evaluation: every token of a split but the first is a target exactly once; bits per byte of the text behind it."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import build
from support.number_caches import BEYOND, DTYPES, number_cache, numbered, write_shards
from support.small_builds import pretrain, sft

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.sampling import bits_per_byte, iter_eval

pytestmark = pytest.mark.filterwarnings("ignore:.*are shorter than T")


def told(batches):
    return [(x.tolist(), y.tolist()) for x, y in batches]


ON_PAPER = [
    # targets 1-3, 4-6, 7-8, the last window padded
    (
        [[0, 1, 2, 3, 4], [5, 6, 7, 8]],
        2,
        3,
        [([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]), ([[6, 7, 8]], [[7, 8, -100]])],
    ),
    ([[0, 1, 2, 3], [4, 5, 6]], 5, 3, [([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])]),  # it divides evenly
    ([[7, 8]], 2, 4, [([[7, 8, 0, 0]], [[8, -100, -100, -100]])]),  # shorter than a window
    ([[65533], [65534, 65535]], 1, 3, [([[65533, 65534, 65535]], [[65534, 65535, -100]])]),  # the largest id
]


@pytest.mark.parametrize(("shards", "B", "T", "batches"), ON_PAPER)
def test_the_windows_of_a_split(tmp_path, shards, B, T, batches):
    assert told(iter_eval(str(write_shards(tmp_path / "val", shards)), B=B, T=T)) == batches


@settings(derandomize=True, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    B=st.integers(1, 6),
    T=st.integers(1, 30),
    io=st.sampled_from(["mmap", "pread"]),
    dtype=st.sampled_from(DTYPES),
)
def test_every_token_but_the_first_is_a_target_exactly_once(lengths, B, T, io, dtype):
    assume(sum(lengths) > 1)
    with tempfile.TemporaryDirectory() as name:
        batches = list(iter_eval(str(numbered(Path(name), lengths, dtype)), B=B, T=T, io=io, dtype=dtype))
    first = BEYOND * (dtype == "uint32")
    tokens = list(range(first, first + sum(lengths)))
    for x, y in batches:
        assert x.shape == y.shape == (len(x), T) and x.dtype == y.dtype == torch.int64
        assert x.is_contiguous() and y.is_contiguous()
    assert {len(x) for x, _ in batches[:-1]} <= {B} and 1 <= len(batches[-1][0]) <= B
    x, y = (torch.cat(parts).flatten() for parts in zip(*batches, strict=True))
    targets = len(tokens) - 1
    assert len(y) == -(-targets // T) * T
    assert y[:targets].tolist() == tokens[1:] and set(y[targets:].tolist()) <= {-100}
    assert x[: len(tokens)].tolist() == tokens[: len(x)] and set(x[len(tokens) :].tolist()) <= {0}


@settings(derandomize=True, max_examples=25)
@given(tokens=st.integers(2, 60), B=st.integers(1, 4), T=st.integers(1, 7), world=st.sampled_from([1, 2, 3, 8]))
def test_ranks_share_the_batches_of_one_process_and_yield_equally_many(tokens, B, T, world):
    with tempfile.TemporaryDirectory() as name:
        folder = str(numbered(Path(name), [tokens]))
        whole = told(iter_eval(folder, B=B, T=T))
        ranks = [told(iter_eval(folder, B=B, T=T, rank=rank, world_size=world)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {-(-len(whole) // world)}
    in_turn = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    assert in_turn[: len(whole)] == whole
    assert all(batch == ([[0] * T], [[-100] * T]) for batch in in_turn[len(whole) :])


def test_a_pass_ends_and_two_are_equal_and_leave_the_global_random_state_alone(tmp_path):
    folder, before = numbered(tmp_path, [50, 20]), torch.get_rng_state()
    one, other = (iter_eval(str(folder), B=3, T=4) for _ in range(2))
    assert isinstance(one, Iterator) and told(one) == told(other) and list(one) == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"T": 0}, "T=0"),
        ({"B": 0}, "B=0"),
        ({"B": -1}, "B=-1"),
        ({"io": "mmapp"}, "mmapp"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
    ],
)
def test_arguments_are_checked_at_the_call(tmp_path, changed, named):
    folder = numbered(tmp_path, [9])
    with pytest.raises(ValueError, match=named):
        iter_eval(str(folder), **{"B": 1, "T": 4, **changed})


def test_the_cache_is_checked_at_the_call(tmp_path):
    folder = number_cache(tmp_path / "pretrain" / "numbers", val=20).parent / "val"
    meta = json.loads((folder.parent / "meta.json").read_text())
    expect = {"split": "val", "tokens": 20, "content_sha256": meta["content_sha256"], "tokenizer_sha256": "ab" * 32}
    assert len(told(iter_eval(str(folder), B=1, T=19, tokenizer_sha256="ab" * 32, expect=expect))) == 1
    for key, value in {"tokens": 21, "content_sha256": "0" * 64, "tokenizer_sha256": "cd" * 32}.items():
        with pytest.raises(CacheError, match=key):
            iter_eval(str(folder), B=1, T=4, expect={**expect, key: value})
    with pytest.raises(CacheError, match="cdcd"):
        iter_eval(str(folder), B=1, T=4, tokenizer_sha256="cd" * 32)


def test_a_rebuild_does_not_disturb_a_pass(folder):
    build(folder / "letters", ["abcdefgh", "ijklmnop"], 16)
    batches = iter_eval(str(folder / "letters" / "train"), B=1, T=5)
    first = next(batches)
    build(folder / "letters", ["ABCDEFGH", "IJKLMNOP"], 16)
    found = told([first, *batches])
    ids = [byte + 10 for byte in b"abcdefghijklmnop"]
    assert [id for _, y in found for id in y[0] if id != -100] == ids[1:]


def test_bits_per_byte_on_paper(folder):
    """ "abé" has four bytes, so four ids and three targets: at 6 bits each these are 18 bits over 4 bytes."""
    build(folder / "letters", ["abé"], 4)
    train = folder / "letters" / "train"
    targets = sum(int((y != -100).sum()) for _, y in iter_eval(str(train), B=4, T=8))
    loss = targets * math.log(64)  # of a model that gives every id of 64 the same chance
    assert loss == pytest.approx(18 * math.log(2))
    assert bits_per_byte(loss, str(train)) == pytest.approx(4.5, rel=1e-12)


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda loss: torch.tensor(loss, dtype=torch.float64)])
def test_the_sum_may_be_a_number_or_a_tensor_and_bits_are_a_float(folder, kind):
    build(folder / "letters", ["abcd"], 4)
    found = bits_per_byte(kind(8 * math.log(2)), str(folder / "letters" / "train"))
    assert type(found) is float and found == pytest.approx(2, rel=1e-6)
    assert bits_per_byte(kind(0.0), str(folder / "letters" / "train"), check=False) == 0


def test_a_mean_that_is_given_for_a_sum_is_refused(folder):
    """3 nats over 20,000 bytes are 0.0002 bits for each: no model of text is that good."""
    build(folder / "letters", ["ab" * 10_000], 20_000)
    train = folder / "letters" / "train"
    for mean in (3.0, torch.tensor(3.0)):
        with pytest.raises(ValueError, match=r"0\.00022 bits.*sum over all targets.*check=False"):
            bits_per_byte(mean, train)
    assert bits_per_byte(3.0, train, check=False) == pytest.approx(3 / math.log(2) / 20_000)
    assert bits_per_byte(3.0 * 19_999, train) > 4


@settings(derandomize=True, max_examples=5)
@given(
    texts=st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<|>"), min_size=1, max_size=12),
        min_size=1,
        max_size=8,
    )
)
def test_the_bytes_are_those_of_the_texts_in_each_split(texts):
    """The byte tokenizer has one id a byte; an end-of-text has no byte, so that its bits go to its text's."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "texts"
        documents = [("train", text) for text in texts] + [("val", text * 2) for text in texts]
        pretrain(path, items=documents, max_train_tokens=None, max_val_tokens=None)
        size = sum(len(text.encode()) for text in texts)
        for split, num_bytes in (("train", size), ("val", 2 * size)):
            ids = num_bytes + len(texts)
            assert bits_per_byte((ids - 1) * math.log(2), path / split) == pytest.approx((ids - 1) / num_bytes)


@pytest.mark.parametrize(
    "value", ["absent", None, 3, {}, {"train": 0}, {"train": -6}, {"train": "6"}, {"train": True}, [6]]
)
def test_byte_counts_that_cannot_be_or_are_absent_are_refused_by_name(folder, value):
    build(folder / "letters", ["abcdef"], 6)
    meta = {**read_meta(str(folder / "letters" / "meta.json")), "utf8_bytes": value}
    write_meta(str(folder / "letters" / "meta.json"), {key: value for key, value in meta.items() if value != "absent"})
    with pytest.raises(CacheError, match=r"meta\.json.*utf8_bytes"):
        bits_per_byte(1.0, str(folder / "letters" / "train"))


def bits(folder):
    return bits_per_byte(1.0, str(folder))


def windows(folder):
    return iter_eval(str(folder), B=1, T=4)


NO_SPLITS = [
    ("letters/val", bits, "letters"),  # it has no token
    ("letters/test", bits, "letters"),
    ("no_such/train", bits, "no such folder. "),
    ("no_such/train", windows, "no such folder. "),
    *(
        (f"chats{part}", bits, "chats") for part in ("", "/train", "/train_tokens.bin")
    ),  # its losses are of replies alone
    ("chats", windows, "chats"),
    ("bare/train", bits, "meta.json"),  # of another tool
]


@pytest.mark.parametrize(("name", "call", "said"), NO_SPLITS)
def test_what_is_no_split_of_text_is_refused(folder, name, call, said):
    build(folder / "letters", ["abcdef"], 6)
    sft(folder / "chats")
    numbered(folder / "bare", [9])
    with pytest.raises(FileNotFoundError if "no such" in said else (CacheError, FileNotFoundError), match=said):
        call(folder / name)


@pytest.mark.parametrize("loss_sum", [-1.0, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_what_is_no_sum_of_losses_is_refused(tmp_path, loss_sum):
    with pytest.raises(ValueError, match="expected a sum of cross entropies, 0 or more"):
        bits_per_byte(loss_sum, tmp_path)


def test_a_cache_in_place_of_its_split_is_refused_as_such(tmp_path):
    (tmp_path / "c").mkdir()
    write_meta(str(tmp_path / "c" / "meta.json"), {"vocab_size": 9})
    with pytest.raises(CacheError, match="a whole cache, expected the folder of a split"):
        iter_eval(tmp_path / "c", B=1, T=1)
