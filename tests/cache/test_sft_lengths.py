"""What T loses of an sft split is counted at open: truncated rows, lost ends, rows without a target."""

import os
import pickle
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.byte_tokenizer import build as build_tokens
from support.errors import refused

from niels_gpt.cache import SFTExampleDataset, build_sft_cache, read_meta, sft_counts, sft_dataset
from niels_gpt.cache.sft_counts import SFTCounts
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import unless_held

SYS, USR, ASST, EOT = 1, 2, 3, 4
U, A, B = 11, 12, 13  # words of the user, and of the assistant
FITS = [USR, U, EOT, ASST, A, EOT]
CUT = [USR, U, EOT, ASST, A, B, EOT]
CUT_BEFORE_THE_REPLY = [USR, U, U, U, EOT, ASST, A, EOT]
CUT_AFTER_THE_REPLY = [USR, U, EOT, ASST, A, EOT, USR, U]
NO_REPLY = [SYS, U, EOT]
EXAMPLES = [FITS, CUT, CUT_BEFORE_THE_REPLY, CUT_AFTER_THE_REPLY, NO_REPLY]
# At T = 5 a row has 6 tokens. EXAMPLES have 2 + 3 + 2 + 2 + 0 targets, of which their rows keep 2 + 2 + 0 + 2 + 0.
_ROWS = dict(rows=5, rows_cut=3, rows_dropped=0, rows_without_last_eot=2, rows_without_target=2)
_TOKENS = dict(supervised_tokens=9, supervised_tokens_lost=3)
TRUNCATED = SFTCounts(examples=5, rows_left_out_without_target=0, **_ROWS, **_TOKENS)
DROPPED = dict(rows_cut=0, rows_dropped=3, rows_without_last_eot=0, supervised_tokens_lost=7)


def write_split(folder, examples, dtype="<u2"):
    np.concatenate([np.asarray(example, dtype=dtype) for example in examples]).tofile(folder / "train_tokens.bin")
    np.save(folder / "train_idx.npy", np.cumsum([0, *map(len, examples[:-1])], dtype=np.int64))
    return folder


def opened(folder, *, quiet=True, **arguments):
    """Open a split with T = 5; quiet: without warnings."""
    files = (folder / "train_tokens.bin", folder / "train_idx.npy")
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore", UserWarning)
        return SFTExampleDataset(*files, **{"T": 5, "device": "cpu", "eot_id": EOT, "asst_id": ASST, **arguments})


def rows_drawn(dataset):
    """Return the rows, T + 1 tokens each, of 200 draws."""
    x, y, _ = dataset.get_batch(B=200, generator=torch.Generator().manual_seed(0))
    return {(*row, *last) for row, last in zip(x.tolist(), y[:, -1:].tolist(), strict=True)}


LEFT_OUT = dict(rows_cut=2, rows_without_last_eot=1, rows_without_target=0, rows_left_out_without_target=2)
ON_PAPER = [
    ({}, EXAMPLES, {}),
    ({"require_targets": True}, [FITS, CUT, CUT_AFTER_THE_REPLY], LEFT_OUT),
    ({"over_length": "drop"}, [FITS, NO_REPLY], {**DROPPED, "rows_without_target": 1}),
    (
        {"over_length": "drop", "require_targets": True},
        [FITS],
        {**DROPPED, "rows_without_target": 0, "rows_left_out_without_target": 1},
    ),
    # T = 7: all fit, and only the chat without a reply has no target.
    (
        {"T": 7, "over_length": "error"},
        EXAMPLES,
        {**DROPPED, "rows_dropped": 0, "rows_without_target": 1, "supervised_tokens_lost": 0},
    ),
]


@pytest.mark.parametrize(("arguments", "rows", "expected"), ON_PAPER)
def test_the_counts_and_the_rows_are_those_found_on_paper(tmp_path, arguments, rows, expected):
    dataset = opened(write_split(tmp_path, EXAMPLES), **arguments)
    assert dataset.counts == SFTCounts(**{**vars(TRUNCATED), "rows": len(rows), **expected})
    width = dataset.T + 1
    assert rows_drawn(dataset) == {(*row[:width], *[EOT] * (width - len(row))) for row in rows}
    assert len(dataset) == 5 and [dataset.example(number).tolist() for number in range(5)] == EXAMPLES


def slow_counts(examples, T, *, drop, require_targets):
    """Count token by token: the oracle."""
    found = dict.fromkeys(vars(TRUNCATED), 0)
    for example in examples:
        inside, targets = False, []
        for place, token in enumerate(example):
            if inside:
                targets.append(place)
            inside = token == ASST or (inside and token != EOT)
        left = [place for place in targets if place <= T]
        is_cut, ends = len(example) > T + 1, [place for place, token in enumerate(example) if token == EOT]
        is_dropped = is_cut and drop
        is_left_out = not is_dropped and require_targets and not left
        is_row = not is_dropped and not is_left_out
        found["examples"] += 1
        found["rows"] += is_row
        found["rows_cut"] += is_row and is_cut
        found["rows_dropped"] += is_dropped
        found["rows_without_last_eot"] += is_row and bool(ends) and ends[-1] > T
        found["rows_without_target"] += is_row and not left
        found["rows_left_out_without_target"] += is_left_out
        found["supervised_tokens"] += len(targets)
        found["supervised_tokens_lost"] += len(targets) - (len(left) if is_row else 0)
    return SFTCounts(**found)


@settings(derandomize=True, max_examples=80)
@given(
    examples=st.lists(
        st.lists(st.sampled_from([USR, ASST, EOT, A, B]), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    T=st.integers(1, 13),
    drop=st.booleans(),
    require_targets=st.booleans(),
    io=st.sampled_from(["mmap", "pread"]),
    block=st.sampled_from([1, 7, 20, 1 << 20]),
    beyond=st.sampled_from([0, 1_000_000]),
)
def test_the_counts_are_what_a_walk_over_all_tokens_finds_however_they_are_read(
    examples, T, drop, require_targets, io, block, beyond
):
    """beyond: added to every id of a split of 32 bits."""
    expected = slow_counts(examples, T, drop=drop, require_targets=require_targets)
    over_length = "drop" if drop else "truncate"
    arguments = {"T": T, "over_length": over_length, "require_targets": require_targets, "io": io}
    arguments |= {"eot_id": EOT + beyond, "asst_id": ASST + beyond, "dtype": "uint32" if beyond else "uint16"}
    with tempfile.TemporaryDirectory() as name, mock.patch.object(sft_counts, "_BLOCK_TOKENS", block):
        folder = write_split(Path(name), [[id + beyond for id in ids] for ids in examples], arguments["dtype"])
        if expected.rows:
            dataset = opened(folder, **arguments)
            assert dataset.counts == expected
            *_, masked = dataset.get_batch(B=30, generator=torch.Generator().manual_seed(0))
            assert bool((masked != -100).any(dim=1).all()) or expected.rows_without_target
        else:
            with refused("E107", "train_tokens.bin", "over_length", "require_targets"):
                opened(folder, **arguments)


def test_over_length_error_names_the_longest_example_and_the_t_that_would_do(tmp_path):
    folder = write_split(tmp_path, EXAMPLES)
    with refused("E107") as error:
        opened(folder, over_length="error")
    assert str(error.value) == (
        f"{folder}/train_tokens.bin: 3 of 5 examples are longer than T + 1 = 6 tokens, the longest is example 2 with "
        '8. Pass T=7, or over_length="truncate" or "drop"'
    )


def test_no_row_left_is_an_error_that_says_why(tmp_path):
    said = r"of 5 examples 4 are longer than T \+ 1 = 4 tokens .* and 1 have no target"
    with pytest.raises(CacheError, match=said):
        opened(write_split(tmp_path, EXAMPLES), T=3, over_length="drop", require_targets=True)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_long_example_is_counted_by_pieces_and_never_read_whole(tmp_path, io):
    examples = [FITS, [USR, U, EOT, ASST, *[A] * 40, EOT, USR, U, EOT, ASST, B, EOT], CUT]
    read, sizes = SFTSplit.unchecked, []

    def measured(dataset, start, end):
        sizes.append(end - start)
        return read(dataset, start, end)

    block = mock.patch.object(sft_counts, "_BLOCK_TOKENS", 8)
    warned = pytest.warns(UserWarning, match="T=20 loses 26 of 48 .*T=8 or more keeps")
    with block, mock.patch.object(SFTSplit, "unchecked", measured), warned:
        counts = opened(write_split(tmp_path, examples), quiet=False, T=20, io=io).counts
    # 2 + 43 + 3 targets; of the long example the first 21 tokens hold 17.
    assert (counts.supervised_tokens, counts.supervised_tokens_lost) == (48, 26)
    assert (counts.rows_cut, counts.rows_without_last_eot) == (1, 1)
    assert sizes == [6, *[8] * 6, 3, 7, 6, 8, 7]  # and the beginnings again, for the T that would do


@pytest.mark.parametrize(
    ("name", "value"), [*(("T", T) for T in (True, 2.5, "5", None, -1, 0)), ("over_length", "cut"), ("io", "read")]
)
def test_a_t_that_is_no_count_and_an_unknown_setting_are_refused(tmp_path, name, value):
    said = (
        rf"^T={value!r}: expected an integer of 1 or more"
        if name == "T"
        else "expected one of (truncate, drop, error|mmap, pread)"
    )
    with pytest.raises(ValueError, match=said):
        opened(write_split(tmp_path, EXAMPLES), **{name: value})
    assert type(opened(tmp_path, T=np.int64(5)).T) is int


def test_rows_without_a_target_are_warned_of_once_where_the_dataset_is_made(tmp_path):
    write_split(tmp_path, EXAMPLES)
    with pytest.warns(UserWarning) as caught:
        dataset = SFTExampleDataset(
            tmp_path / "train_tokens.bin", tmp_path / "train_idx.npy", T=5, device="cpu", eot_id=EOT, asst_id=ASST
        )
    (warning,) = caught
    assert warning.filename == __file__
    assert "2 of 5 rows have no target in T + 1 = 6 tokens" in str(warning.message)
    assert "3 of 9 supervised tokens are lost. Pass a larger T, or require_targets=True" in str(warning.message)
    assert pickle.loads(pickle.dumps(dataset)).counts == dataset.counts  # a warning here would be an error


def test_no_warning_where_every_row_has_a_target_and_next_to_nothing_is_lost(tmp_path):
    opened(write_split(tmp_path, EXAMPLES), quiet=False, T=7, require_targets=True)
    opened(write_split(tmp_path, [FITS] * 19 + [CUT]), quiet=False)  # 41 targets, of which one is cut off: 2.4 %


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # A row keeps 2 + 2 + 0 + 2 of 9 targets; those lost are tokens 6, 6 and 7 of their examples.
        ({}, r"T=5 loses 3 of 9 supervised tokens \(33\.3%\)\. T=7 keeps 99 % of them, T=7 all"),
        # Three examples of 7, 8 and 8 tokens are left out whole, with 3 + 2 + 2 targets.
        ({"over_length": "drop"}, r"T=5 loses 7 of 9 supervised tokens \(77\.8%\)\. T=7 keeps 99 %"),
    ],
)
def test_a_large_loss_is_warned_of_with_a_t_that_does(tmp_path, arguments, words):
    write_split(tmp_path, EXAMPLES)
    with pytest.warns(UserWarning, match=words) as caught:
        opened(tmp_path, quiet=False, require_targets=True, **arguments)
    assert len(caught) == 1


@settings(derandomize=True, max_examples=30)
@given(st.lists(st.lists(st.sampled_from([USR, ASST, EOT, A, B]), min_size=1, max_size=9), min_size=1, max_size=8))
def test_the_targets_that_need_a_t_are_those_that_a_smaller_one_loses(examples):
    with tempfile.TemporaryDirectory() as name, mock.patch.object(sft_counts, "_BLOCK_TOKENS", 9):
        folder = write_split(Path(name), examples)
        files = (folder / "train_tokens.bin", folder / "train_idx.npy")
        found = [
            sft_counts._kept_by_t(SFTSplit.of_files(*files, pad_id=EOT, asst_id=ASST), drop) for drop in (False, True)
        ]
    for T in range(1, 9):
        for drop in (False, True):
            counts = slow_counts(examples, T, drop=drop, require_targets=False)
            assert found[drop][T] == counts.supervised_tokens - counts.supervised_tokens_lost


def test_a_split_is_opened_by_its_cache_and_name(tmp_path, monkeypatch):
    folder = built(tmp_path / "sft" / "chats", "a")
    eot_id = read_meta(str(folder / "meta.json"))["special_token_ids"]["eot"]
    by_files = SFTExampleDataset(
        folder / "train_tokens.bin", folder / "train_idx.npy", T=8, device="cpu", eot_id=eot_id
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (folder, str(folder), "~/sft/chats"):
        one = SFTExampleDataset.open(path, "train", T=8)
        assert rows_drawn(one) == rows_drawn(by_files) and one.fingerprint() == by_files.fingerprint()
    files = [f"~/sft/chats/train_{name}" for name in ("tokens.bin", "idx.npy")]
    assert SFTExampleDataset(*files, T=8, device="cpu", eot_id=eot_id).counts == by_files.counts
    for split in ("test", "../chats/train", "tr*"):
        with pytest.raises(ValueError, match="expected one of train, val"):
            SFTExampleDataset.open(folder, split, T=8)
    with refused("E204", "no_such", kind=FileNotFoundError):
        SFTExampleDataset.open(tmp_path / "no_such", "train", T=8)
    with pytest.warns(UserWarning, match="T=1 loses") as caught:
        SFTExampleDataset.open(folder, "train", T=1)
    assert caught[0].filename == __file__


def test_a_pretrain_cache_is_not_opened_as_chats_and_an_unknown_eot_is_an_error(tmp_path):
    build_tokens(tmp_path / "letters", ["abc", "def"])
    with refused("E202", "kind is 'pretrain'", "'sft'"):
        SFTExampleDataset.open(tmp_path / "letters", "train", T=2)
    (tmp_path / "bare").mkdir()
    with refused("E404", "eot_id=", "special_token_ids", "meta.json"):
        SFTExampleDataset.open(write_split(tmp_path / "bare", EXAMPLES), "train", T=5)


def test_a_dataset_names_its_cache_its_version_and_its_batches(tmp_path):
    folder = built(tmp_path / "sft" / "chats", "a")
    found = repr(SFTExampleDataset.open(folder, "train", T=8))
    assert str(folder) in found and folder.resolve().name in found and ".versions" not in found
    assert "int64 [B, 8] on cpu" in found and "train" in found and len(found) < 300


def test_a_pickled_copy_reads_no_token_and_draws_the_same_rows(tmp_path):
    dataset = opened(write_split(tmp_path, EXAMPLES), over_length="drop", require_targets=True)
    with mock.patch.object(sft_dataset, "count_rows", side_effect=AssertionError("counts again")):
        copy = pickle.loads(pickle.dumps(dataset))
    assert copy.counts == dataset.counts and rows_drawn(copy) == rows_drawn(dataset) == {tuple(FITS)}


def built(folder, letter):
    """Build a cache of two chats, of which `letter` is the first one's reply."""
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}] for reply in (letter, "z")]
    build_sft_cache(chats, str(folder), tokenizer=ByteTokenizer(), val_frac=0, seed=1)
    return folder


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_copy_of_a_real_folder_whose_place_another_cache_has_taken_is_refused(tmp_path, io):
    for name in "ab":
        shutil.copytree(built(tmp_path / f"built_{name}", name).resolve(), tmp_path / name)
    assert len({(tmp_path / name / "train_tokens.bin").stat().st_size for name in "ab"}) == 1
    pickled = pickle.dumps(opened(tmp_path / "a", T=50, io=io))
    assert len(pickle.loads(pickled)) == 2
    (tmp_path / "a").rename(tmp_path / "gone")
    (tmp_path / "b").rename(tmp_path / "a")
    with refused("E213", "a/train_tokens.bin", "content_sha256"):
        pickle.loads(pickled)
    (tmp_path / "a/meta.json").unlink()
    with refused("E213", "a/train_tokens.bin", "content_sha256 is None"):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("others", "said"),
    [([*EXAMPLES, NO_REPLY], "tokens is 35, expected 32"), ([[t for e in EXAMPLES for t in e]], "examples is 1")],
)
def test_a_copy_of_bare_files_of_other_sizes_is_refused(tmp_path, others, said):
    pickled = pickle.dumps(opened(write_split(tmp_path, EXAMPLES)))
    for path in tmp_path.iterdir():
        path.unlink()  # an open map keeps what it has
    write_split(tmp_path, others)
    with refused("E213", "train_tokens.bin", said):
        pickle.loads(pickled)


def test_rows_left_out_are_left_out_by_one_draw_over_the_rest(tmp_path):
    examples = [[ASST, number, EOT] if number % 3 else [USR, number, EOT] for number in range(10, 40)]
    dataset = opened(write_split(tmp_path, examples), require_targets=True)
    generator, reference = (torch.Generator().manual_seed(3) for _ in range(2))
    x, _, _ = dataset.get_batch(B=50, generator=generator)
    left = [number for number in range(10, 40) if number % 3]
    assert x[:, 1].tolist() == [left[row] for row in torch.randint(20, (50,), generator=reference).tolist()]
    assert torch.equal(generator.get_state(), reference.get_state())


def test_positioned_reads_give_what_the_map_gives_and_map_no_token(tmp_path):
    folder = write_split(tmp_path, EXAMPLES)
    by_read = opened(folder, io="pread")
    maps = Path("/proc/self/maps").read_text()
    assert str(folder / "train_tokens.bin") not in maps and str(folder / "train_idx.npy") in maps
    by_map = opened(folder)
    batches = [data.get_batch(B=64, generator=torch.Generator().manual_seed(1)) for data in (by_read, by_map)]
    assert all(torch.equal(read, mapped) for read, mapped in zip(*batches, strict=True))
    assert [by_read.example(row).tolist() for row in range(5)] == EXAMPLES
    assert [len(t) for t in pickle.loads(pickle.dumps(by_read)).get_batch(B=0, generator=torch.Generator())] == [0] * 3


def test_a_file_cut_while_it_is_read_by_position_is_an_error(tmp_path):
    dataset = opened(write_split(tmp_path, EXAMPLES), io="pread")
    os.truncate(tmp_path / "train_tokens.bin", 40)
    with refused("E203", "train_tokens.bin"):
        rows_drawn(dataset)


def test_the_fingerprint_of_an_open_split_is_what_expect_compares(tmp_path):
    for name, text in (("a", "one"), ("b", "two")):
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "three"}]] * 2
        build_sft_cache(chats, str(tmp_path / name), tokenizer=ByteTokenizer(), val_frac=0.5, seed=1)
    meta = read_meta(str(tmp_path / "a/meta.json"))
    found = opened(tmp_path / "a", T=50).fingerprint()
    assert found == {
        "split": "train",
        "tokens": meta["totals"]["train_tokens"],
        "content_sha256": meta["content_sha256"],
        "tokenizer_sha256": meta["tokenizer_sha256"],
    }
    assert opened(tmp_path / "a", T=50, expect=found).fingerprint() == found
    with refused("E213", "content_sha256"):
        opened(tmp_path / "b", T=50, expect=found)
    found = opened(write_split(tmp_path, EXAMPLES)).fingerprint()  # without a meta.json
    assert found == {"split": "train", "tokens": 32, "content_sha256": None, "tokenizer_sha256": None}


def test_an_open_split_holds_its_version(tmp_path):
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    build_sft_cache(chats, str(tmp_path / "c"), tokenizer=ByteTokenizer(), val_frac=0, seed=1)
    dataset = opened(tmp_path / "c", T=50)
    for end in (False, True):
        if end:
            del dataset
        with unless_held((tmp_path / "c").resolve()) as why:
            assert (why == "") == end
