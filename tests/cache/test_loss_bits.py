"""Examples whose loss is in bits beside the tokens, and parts of examples of both kinds: read, masked, counted."""

import json
import os
import pickle
import random
import tempfile
import warnings
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits_caches import TEMPLATE, give_bits, put_bits, sealed
from support.byte_tokenizer import ByteTokenizer
from support.disk import META_NAME
from support.errors import refused

from niels_gpt.cache import CacheError, SFTExampleDataset, build_sft_cache, read_meta, sft_counts, write_meta
from niels_gpt.cache.mmap import IO
from niels_gpt.cache.sft_counts import SFTCounts, count_rows, warn_of_counts
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.kinds.verify import find_damage, refusal

PAD, NO = 9, -100
# Two examples of a template that begins each turn with 1 and a role: 20 to 23 are words, and 2 ends a turn.
FIRST, LOSS_FIRST = [1, 10, 20, 2, 1, 11, 21, 22, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]
SECOND, LOSS_SECOND = [1, 10, 23, 2, 1, 11, 2, 1, 11, 20, 2], [0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1]
BITS = "c0810c"  # bits 6 7 8, and 15 18 19: c0 is 6 and 7, 81 is 8 and 15, 0c is 18 and 19

Example = tuple[list[int], list[bool]]


def written(folder, examples, dtype="<u2", pad=PAD):
    """Write a split with bits, with the least that a meta.json of it has; returns the folder."""
    ids = np.concatenate([ids for ids, _ in examples]).astype(dtype)
    ids.tofile(folder / "train_tokens.bin")
    np.save(folder / "train_idx.npy", np.cumsum([0, *(len(ids) for ids, _ in examples[:-1])], dtype=np.int64))
    mask = [has_loss for _, mask in examples for has_loss in mask]
    (folder / "train_loss.bits").write_bytes(np.packbits(mask, bitorder="little").tobytes())
    known = {"sha256": "0" * 64}
    files = {
        group: {"name": name, "bytes": (folder / name).stat().st_size, **known}
        for group, name in (
            ("shards", "train_tokens.bin"),
            ("index", "train_idx.npy"),
            ("loss_bits", "train_loss.bits"),
        )
    }
    meta = {group: {"train": record} for group, record in files.items()}
    meta["shards"] = {"train": [{**files["shards"], "tokens": len(ids)}]}
    meta |= {"chat_template": TEMPLATE, "pad_id": pad, "token_dtype": f"uint{8 * ids.itemsize}-le"}
    (folder / META_NAME).write_text(json.dumps(meta))
    return folder


PAPER = [(FIRST, [bool(bit) for bit in LOSS_FIRST]), (SECOND, [bool(bit) for bit in LOSS_SECOND])]


def test_the_bits_of_the_two_examples_on_paper(tmp_path):
    folder = written(tmp_path, PAPER)
    assert (folder / "train_loss.bits").read_bytes().hex() == BITS
    data = SFTExampleDataset.open(folder, "train", T=10)
    assert (data.eot_id, data.asst_id, data.counts.supervised_tokens) == (PAD, None, 6)
    assert [data[number].mask.tolist() for number in (0, 1)] == [LOSS_FIRST, LOSS_SECOND]
    x, y, masked = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))
    expected = {
        (*FIRST, PAD): [NO] * 5 + [21, 22, 2, NO, NO],
        tuple(SECOND[:10]): [NO] * 5 + [2, NO, NO, 20, 2],
    }
    assert set(map(tuple, x.tolist())) == set(expected)
    assert all(row == expected[tuple(begin)] for begin, row in zip(x.tolist(), masked.tolist(), strict=True))
    assert y[:, :-1].equal(x[:, 1:]) and masked.dtype == torch.int64 and masked.is_contiguous()


@pytest.mark.parametrize("io", get_args(IO))
def test_parts_of_the_examples_on_paper(tmp_path, io):
    split = SFTSplit(written(tmp_path, PAPER), "train", io=io)
    begins, ends = np.array([5, 9, 16]), np.array([8, 19, 20])  # of the first, of the second, and its last four
    ids = split.read(begins, ends)
    assert ids.tolist() == FIRST[5:8] + SECOND[:10] + SECOND[7:]
    assert split.is_target(ids, begins, ends).tolist() == LOSS_FIRST[5:8] + LOSS_SECOND[:10] + LOSS_SECOND[7:]
    rows = split.padded(begins, ends, 10)
    assert rows.tolist() == [FIRST[5:8] + [PAD] * 7, SECOND[:10], SECOND[7:] + [PAD] * 6]
    masked = [[21, 22] + [NO] * 7, [NO] * 5 + [2, NO, NO, 20], [NO, 20, 2] + [NO] * 6]
    assert split.masked(rows, begins, ends).tolist() == masked
    assert split.targets(rows, begins, ends).tolist() == [[target != NO for target in row] for row in masked]
    assert split.starts.tolist() == [0, 9, 20] and len(split) == 2
    assert repr(split) == f"SFTSplit({tmp_path}, train: 2 examples, 20 tokens, checksums: none)"


SYS, USR, ASST, EOT, A, B = 1, 2, 3, 4, 12, 13


def walked(ids):
    """Return which tokens carry loss by the sentinels: the slow oracle."""
    inside, mask = False, []
    for token in ids:
        mask.append(inside)
        inside = token == ASST or (inside and token != EOT)
    return mask


def of_loss(ids, chosen):
    return [False, *(chosen.random() < 0.3 for _ in ids[1:])]


WORDS = st.lists(st.sampled_from([USR, ASST, EOT, A, B]), min_size=1, max_size=40)


def opened(folder, examples, masks, io, beyond):
    """Open a split of these examples: with bits, or without where masks is None. beyond: added to every id."""
    ids = [[id + beyond for id in example] for example in examples]
    dtype = "<u4" if beyond else "<u2"
    if masks is not None:
        return SFTSplit(written(folder, list(zip(ids, masks, strict=True)), dtype, EOT + beyond), "train", io=io)
    files = folder / "train_tokens.bin", folder / "train_idx.npy"
    np.concatenate(ids).astype(dtype).tofile(files[0])
    np.save(files[1], np.cumsum([0, *map(len, ids[:-1])], dtype=np.int64))
    options = {"io": io, "dtype": "uint32" if beyond else "uint16"}
    return SFTSplit.of_files(*files, pad_id=EOT + beyond, asst_id=ASST + beyond, **options)


@settings(derandomize=True, max_examples=120)
@given(
    examples=st.lists(WORDS, min_size=1, max_size=6),
    has_bits=st.booleans(),
    io=st.sampled_from(get_args(IO)),
    beyond=st.sampled_from([0, 1_000_000]),
    seed=st.integers(0, 99),
)
def test_any_parts_of_examples_are_what_a_walk_over_their_tokens_finds(examples, has_bits, io, beyond, seed):
    chosen = random.Random(seed)
    masks = [of_loss(ids, chosen) if has_bits else walked(ids) for ids in examples]
    parts = []  # number of the example, first token, and the one after the last
    for _ in range(chosen.randrange(1, 9)):
        number = chosen.randrange(len(examples))
        first, last = sorted(chosen.choices(range(len(examples[number])), k=2))
        parts.append((number, first, last + 1))
    width = max(end - begin for _, begin, end in parts) + chosen.randrange(9)
    look_back = mock.patch("niels_gpt.cache.sft_split._LOOK_BACK", 3)  # so that some replies begin further back
    with tempfile.TemporaryDirectory() as name, look_back:
        split = opened(Path(name), examples, masks if has_bits else None, io, beyond)
        starts = [int(split.starts[number]) for number, _, _ in parts]
        begins = np.array([start + begin for start, (_, begin, _) in zip(starts, parts, strict=True)])
        ends = np.array([start + end for start, (_, _, end) in zip(starts, parts, strict=True)])
        ids = split.read(begins, ends)
        found = split.is_target(ids, begins, ends).tolist()
        rows = split.padded(begins, ends, width)
        masked, targets = split.masked(rows, begins, ends), split.targets(rows, begins, ends)
    assert ids.tolist() == [token + beyond for number, begin, end in parts for token in examples[number][begin:end]]
    assert found == [has_loss for number, begin, end in parts for has_loss in masks[number][begin:end]]
    for row, y, is_target, (number, begin, end) in zip(rows, masked, targets, parts, strict=True):
        padding = width - (end - begin)
        tokens = [token + beyond for token in examples[number][begin:end] + [EOT] * padding]
        has_loss = masks[number][begin:end] + [False] * padding
        assert row.tolist() == tokens and is_target.tolist() == has_loss[1:]
        assert y.tolist() == [token if loss else NO for token, loss in zip(tokens[1:], has_loss[1:], strict=True)]
    assert masked.dtype == np.int64


@pytest.mark.parametrize("has_bits", [True, False])
def test_no_part_at_all_is_a_row_of_none(tmp_path, has_bits):
    """As a rank may get of the last batch."""
    examples = [[USR, A, EOT, ASST, *[B] * 200, EOT]]
    split = opened(tmp_path, examples, [walked(examples[0])] if has_bits else None, "mmap", 0)
    none = np.zeros(0, dtype=np.int64)
    rows, ids = split.padded(none, none, 9), split.read(none, none)
    assert rows.shape == (0, 9) and ids.shape == split.is_target(ids, none, none).shape == (0,)
    assert split.masked(rows, none, none).shape == split.targets(rows, none, none).shape == (0, 8)


def slow_rows(examples, T, over_length):
    """Return the number of its example, first token and last + 1 of each row, in plain Python."""
    rows = []
    for number, (ids, _) in enumerate(examples):
        if over_length == "split":
            begin = 0
            while True:
                rows.append((number, begin, min(begin + T + 1, len(ids))))
                begin += T
                if begin + 1 >= len(ids):
                    break
        elif len(ids) <= T + 1 or over_length == "truncate":
            rows.append((number, 0, min(T + 1, len(ids))))
    return rows


@settings(derandomize=True, max_examples=120)
@given(
    examples=st.lists(WORDS, min_size=1, max_size=8),
    has_bits=st.booleans(),
    T=st.integers(1, 41),
    over_length=st.sampled_from(["truncate", "drop", "split"]),
    require_targets=st.booleans(),
    io=st.sampled_from(get_args(IO)),
    block=st.sampled_from([1, 7, 20, 1 << 20]),
)
def test_rows_and_counts_are_what_a_walk_over_all_tokens_finds(
    examples,
    has_bits,
    T,
    over_length,
    require_targets,
    io,
    block,
):
    chosen = random.Random(len(examples))
    whole = [(ids, of_loss(ids, chosen) if has_bits else walked(ids)) for ids in examples]
    every = slow_rows(whole, T, over_length)
    empty = [not any(whole[number][1][begin + 1 : end]) for number, begin, end in every]
    rows = [row for row, nothing in zip(every, empty, strict=True) if not (nothing and require_targets)]
    with tempfile.TemporaryDirectory() as name, mock.patch.object(sft_counts, "_BLOCK_TOKENS", block):
        split = opened(Path(name), examples, [mask for _, mask in whole] if has_bits else None, io, 0)
        arguments = {"T": T, "over_length": over_length, "require_targets": require_targets}
        if not rows:
            with refused("E107", "train_tokens.bin", "over_length", "require_targets"):
                count_rows(split, **arguments)
            return
        counts, found = count_rows(split, **arguments)
        numbers = np.arange(counts.rows)
        begins, ends, _, of = found.places(split, numbers)
    assert list(zip(of.tolist(), begins - split.starts[of], ends - split.starts[of], strict=True)) == rows
    kept = sum(sum(whole[number][1][begin + 1 : end]) for number, begin, end in rows)
    total = sum(sum(mask) for _, mask in whole)
    cut = [(number, end) for number, _, end in rows if over_length == "truncate" and end < len(examples[number])]
    lost_end = [number for number, end in cut if any(_ends_of(*whole[number], has_bits)[end:])]
    assert counts == SFTCounts(
        examples=len(examples),
        rows=len(rows),
        rows_cut=len(cut),
        rows_dropped=sum(len(ids) > T + 1 for ids in examples) if over_length == "drop" else 0,
        rows_without_last_eot=len(lost_end),
        rows_without_target=0 if require_targets else sum(empty),
        rows_left_out_without_target=sum(empty) if require_targets else 0,
        supervised_tokens=total,
        supervised_tokens_lost=total - kept,
        examples_split=sum(len(ids) > T + 1 for ids in examples) if over_length == "split" else 0,
    )


def _ends_of(ids, mask, has_bits):
    """Return which tokens a row should have: every EOT, with bits every target."""
    return mask if has_bits else [token == EOT for token in ids]


def test_split_rows_on_paper(tmp_path):
    """Nine tokens at T = 3: rows of tokens 0 to 3, 3 to 6 and 6 to 8; eleven: 0 to 3, 3 to 6, 6 to 9, 9 to 10."""
    split = SFTSplit(written(tmp_path, PAPER), "train")
    counts, rows = count_rows(split, T=3, over_length="split", require_targets=False)
    begins, ends, pieces, examples = rows.places(split, np.arange(counts.rows))
    assert list(zip(begins, ends, strict=True)) == [
        *((0, 4), (3, 7), (6, 9)),
        *((9, 13), (12, 16), (15, 19), (18, 20)),
    ]
    assert (pieces.tolist(), examples.tolist()) == ([0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1, 1])
    assert (counts.rows, counts.examples_split, counts.rows_without_target) == (7, 2, 2)
    with pytest.warns(UserWarning, match=r"2 of 7 rows have no target .* lost\. Pass require_targets=True") as caught:
        warn_of_counts(split, counts, 3, "split")
    assert caught[0].filename == __file__
    counts, rows = count_rows(split, T=3, over_length="split", require_targets=True)
    assert rows.places(split, np.arange(counts.rows))[0].tolist() == [3, 6, 12, 15, 18]
    with refused("E107", "2 of 2 examples", "example 1 with 11", "T=10"):
        count_rows(split, T=3, over_length="error", require_targets=False)


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One cache with sentinels, and one with bits that mark the same tokens."""
    root, chosen = tmp_path_factory.mktemp("built"), random.Random(1)
    turns = ("user", "assistant")
    chats = [
        [
            {"role": turns[turn % 2], "content": "a" * chosen.randrange(1, 13)}
            for turn in range(2 * chosen.randrange(1, 4))
        ]
        for _ in range(12)
    ]
    for name in ("sentinels", "bits"):
        build_sft_cache(chats, str(root / name), tokenizer=ByteTokenizer(), val_frac=0.2, seed=0)
    give_bits(root / "bits", ByteTokenizer().special_token_ids()["eot"])
    return root


@pytest.fixture
def copied(built, tmp_path):
    """The version with bits, to be changed."""
    folder = tmp_path / "bits"
    folder.mkdir()
    for path in (built / "bits").resolve().rglob("*"):
        (folder / path.relative_to((built / "bits").resolve())).parent.mkdir(exist_ok=True)
        if path.is_file():
            (folder / path.relative_to((built / "bits").resolve())).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("io", get_args(IO))
@pytest.mark.parametrize("T", [3, 24, 90])
def test_bits_that_mark_what_the_sentinels_do_give_the_same_batches(built, io, T):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pair = [SFTExampleDataset.open(built / name, "train", T=T, io=io) for name in ("sentinels", "bits")]
    assert pair[0].counts == pair[1].counts
    batches = [data.get_batch(B=20, generator=torch.Generator().manual_seed(2)) for data in pair]
    assert all(a.equal(b) for a, b in zip(*batches, strict=True))
    copy = pickle.loads(pickle.dumps(pair[1]))
    again = copy.get_batch(B=20, generator=torch.Generator().manual_seed(2))
    assert all(a.equal(b) for a, b in zip(batches[1], again, strict=True))
    if (child := os.fork()) == 0:
        again = pair[1].get_batch(B=20, generator=torch.Generator().manual_seed(2))
        os._exit(0 if all(a.equal(b) for a, b in zip(batches[1], again, strict=True)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [example.mask.tolist() for example in pair[0]] == [example.mask.tolist() for example in copy]


def test_the_constructor_of_the_spec_reads_bits_and_takes_no_assistant_sentinel(built):
    files = [built / "bits" / f"val_{name}" for name in ("tokens.bin", "idx.npy")]
    data = SFTExampleDataset(*files, T=90, device="cpu", eot_id=0)
    x, _, masked = data.get_batch(B=4, generator=torch.Generator().manual_seed(0))
    assert x.shape == masked.shape == (4, 90) and data.counts.supervised_tokens > 0
    with refused("E102", "asst_id=3"):
        SFTExampleDataset(*files, T=90, device="cpu", eot_id=0, asst_id=3)


def refuses(folder, io="mmap"):
    """Return why the readers refuse a cache; all of them do, or none."""
    messages = []
    for split in ("train", "val"):
        try:
            data = SFTExampleDataset.open(folder, split, T=90, io=io)
            data.get_batch(B=4, generator=torch.Generator().manual_seed(0))
        except (CacheError, FileNotFoundError) as error:
            messages.append(str(error))
    return messages[0] if messages else ""


def flipped(name, byte, bit):
    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[byte] ^= 1 << bit
        (folder / name).write_bytes(content)

    return change


def test_every_flipped_and_truncated_byte_is_found(copied):
    assert find_damage(copied, deep=True) == [] and refusal(copied) is None and not refuses(copied)
    for name in ("train_loss.bits", "val_loss.bits"):
        good = (copied / name).read_bytes()
        for byte in range(len(good)):
            flipped(name, byte, byte % 8)(copied)
            found = find_damage(copied, deep=True)
            assert {damage.file for damage in found} == {name} and found[0].offset <= byte < found[0].end
            # A reader compares checksums; a quick look sees what no writer can have meant, and nothing else.
            assert refuses(copied) and bool(find_damage(copied, deep=False)) == bool(refusal(copied))
            (copied / name).write_bytes(good[:byte])
            expected = f"{byte} bytes, expected {len(good)}"
            assert any(expected in damage.problem for damage in find_damage(copied, deep=False))
            assert expected in refuses(copied) or not byte
            (copied / name).write_bytes(good)


def test_bits_of_other_tokens_are_refused_by_readers_and_named_by_verify(copied):
    """A first token with loss, a bit after the last token, and a number of targets that meta.json does not have."""
    meta, starts = read_meta(str(copied / META_NAME)), np.load(copied / "train_idx.npy")
    tokens, size = meta["totals"]["train_tokens"], (copied / "train_loss.bits").stat().st_size
    assert tokens % 8, "the last byte has unused bits"
    cases = {
        (int(starts[3]) >> 3, int(starts[3]) & 7): f"token {starts[3]} carries loss .* example 3 begins",
        (size - 1, 7): "bits of tokens after the last one",
    }
    for (byte, bit), said in cases.items():
        flipped("train_loss.bits", byte, bit)(copied)
        sealed(copied, meta)  # as a builder with a fault would write it
        for io in get_args(IO):
            with pytest.raises(CacheError, match=said):
                SFTExampleDataset.open(copied, "train", T=90, io=io)
        assert any("the readers refuse it" in damage.problem for damage in find_damage(copied, deep=False))
        flipped("train_loss.bits", byte, bit)(copied)
    flipped("train_loss.bits", int(starts[3] + 1) >> 3, int(starts[3] + 1) & 7)(copied)
    sealed(copied, meta)
    assert not refuses(copied) and find_damage(copied, deep=False) == []
    (damage,) = find_damage(copied, deep=True)
    assert damage.file == META_NAME and "supervised_tokens.train is" in damage.problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda meta, key=key: meta.pop(key), f"without {key}") for key in ("chat_template", "pad_id")),
        (lambda meta: meta.pop("loss_bits"), "chat_template without loss_bits"),
        (lambda meta: meta.update(pad_id=300), "pad_id is 300"),
        (lambda meta: meta.update(chat_template={"sha256": "0" * 64}), "chat_template is"),
        (lambda meta: meta["chat_template"].update(sha256="x"), "chat_template.sha256 is"),
        (lambda meta: meta["loss_bits"].pop("val"), "loss_bits.val.bytes is None"),
        (lambda meta: meta["loss_bits"]["train"].update(bytes=1), "loss_bits.train.bytes is 1, expected"),
        (lambda meta: meta["loss_bits"].update(train=3), "loss_bits.train"),
    ],
)
def test_keys_of_the_bits_that_do_not_fit_are_refused(copied, change, said):
    meta = read_meta(str(copied / META_NAME))
    change(meta)
    write_meta(str(copied / META_NAME), meta)
    with pytest.raises(CacheError, match=said):
        SFTSplit(copied, "train")
    assert find_damage(copied, deep=False) and refusal(copied)


def test_bits_behind_a_link_to_a_folder_are_refused(copied, tmp_path):
    meta = read_meta(str(copied / META_NAME))
    (copied / "train_loss.bits").rename(tmp_path / "train_loss.bits")
    (copied / "elsewhere").symlink_to(tmp_path)
    meta["loss_bits"]["train"]["name"] = "elsewhere/train_loss.bits"
    write_meta(str(copied / META_NAME), meta)
    for io in get_args(IO):
        with pytest.raises(CacheError, match="symbolic link"):
            SFTSplit(copied, "train", io=io)
    assert find_damage(copied, deep=False) and refusal(copied)


def test_an_empty_val_has_bits_of_no_byte(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    build_sft_cache([chat], str(tmp_path / "c"), tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    folder = put_bits((tmp_path / "c").resolve(), {"train": [False] * 4 + [True] * 2, "val": []}, 0, {})
    assert (folder / "val_loss.bits").read_bytes() == b""
    assert find_damage(folder, deep=True) == [] and refusal(folder) is None
    assert SFTExampleDataset.open(folder, "train", T=5).counts.supervised_tokens == 2
    with refused("E203", "val_tokens.bin"):
        SFTSplit(folder, "val")
