"""Loss on the assistant's words only: from after its sentinel up to and including the next end of turn."""

import json
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused

from niels_gpt.cache import SFTExampleDataset
from niels_gpt.cache.formats import target_mask
from niels_gpt.cache.sft_dataset import chosen_targets
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.storage.errors import CacheError

SYS, USR, ASST, EOT = 1, 2, 3, 4
S, U, A, B = 10, 11, 12, 13  # one word each of the system, the user and the assistant
NO = -100

# The spec's example, drawn by hand. `target` is the token after `token`; it counts if it is inside an assistant span.
SPEC_TABLE = [
    # token, target, inside, y_masked
    (SYS, S, False, NO),
    (S, EOT, False, NO),
    (EOT, USR, False, NO),
    (USR, U, False, NO),
    (U, EOT, False, NO),
    (EOT, ASST, False, NO),
    (ASST, A, True, A),
    (A, B, True, B),
    (B, EOT, True, EOT),
]


def write_split(folder, examples, dtype="<u2"):
    (folder / "train_tokens.bin").write_bytes(np.concatenate(examples).astype(dtype).tobytes())
    np.save(folder / "train_idx.npy", np.cumsum([0, *map(len, examples[:-1])], dtype=np.int64))
    return folder


def open_split(folder, *, T, io="mmap", device="cpu"):
    files = (folder / "train_tokens.bin", folder / "train_idx.npy")
    return SFTExampleDataset(*files, T=T, device=device, eot_id=EOT, asst_id=ASST, io=io)


def batch_of_one(example, T, warning=None):
    """Return x, y and y_masked of a cache that holds one example; warning: what the dataset warns of, if it does."""
    warns = pytest.warns(UserWarning, match=warning) if warning else nullcontext()
    with tempfile.TemporaryDirectory() as name, warns:
        dataset = open_split(write_split(Path(name), [example]), T=T)
        x, y, masked = dataset.get_batch(B=1, generator=torch.Generator().manual_seed(0))
    return x[0].tolist(), y[0].tolist(), masked[0].tolist()


def test_the_table_of_the_spec():
    x, y, masked = batch_of_one([SYS, S, EOT, USR, U, EOT, ASST, A, B, EOT], T=9)
    assert list(zip(x, y, masked, strict=True)) == [(token, target, want) for token, target, _, want in SPEC_TABLE]
    assert [value != NO for value in masked] == [inside for _, _, inside, _ in SPEC_TABLE]


CHAT = [SYS, S, EOT, USR, U, EOT, ASST, A, B, EOT]
NO_TARGET = "1 of 1 rows have no target"


@pytest.mark.parametrize(
    ("example", "T", "masked", "warning"),
    [
        (CHAT, 12, [NO] * 6 + [A, B, EOT, NO, NO, NO], None),  # padded
        ([USR, U, EOT, ASST, A, EOT, USR, U, EOT, ASST, B, EOT], 11, [NO] * 3 + [A, EOT] + [NO] * 4 + [B, EOT], None),
        ([USR, U, EOT, ASST, EOT], 4, [NO, NO, NO, EOT], None),  # an empty reply
        ([USR, U, EOT, ASST, A, B, EOT], 5, [NO, NO, NO, A, B], "T=5 loses 1 of 3 supervised tokens"),
        ([USR, U, EOT, ASST, A, EOT], 3, [NO] * 3, NO_TARGET),  # cut before the reply
        ([USR, U, EOT, ASST], 5, [NO] * 5, NO_TARGET),  # padding after a bare sentinel
        ([SYS, S, EOT, USR, U, EOT], 6, [NO] * 6, NO_TARGET),
        ([ASST, A], 4, [A, NO, NO, NO], None),  # no end of turn but those of the padding
    ],
)
def test_targets_are_what_follows_the_assistants_sentinel_up_to_its_end_of_turn(example, T, masked, warning):
    padded = (example + [EOT] * T)[: T + 1]
    assert batch_of_one(example, T, warning) == (padded[:-1], padded[1:], masked)


def test_rows_of_a_batch_do_not_leak_into_each_other(tmp_path):
    write_split(tmp_path, [[ASST, A, A, A], [USR, U, EOT, USR]])  # an open reply first, then a row without one
    with pytest.warns(UserWarning, match="1 of 2 rows have no target"):
        dataset = open_split(tmp_path, T=3)
    x, _, masked = dataset.get_batch(B=32, generator=torch.Generator().manual_seed(0))
    expected = {ASST: [A, A, A], USR: [NO, NO, NO]}
    assert {ASST, USR} == set(x[:, 0].tolist())
    assert all(row.tolist() == expected[int(first)] for first, row in zip(x[:, 0], masked, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_three_tensors_are_contiguous_int64_on_the_device_and_one_draw(tmp_path, device):
    dataset = open_split(write_split(tmp_path, [[ASST, A, EOT], [USR, U, EOT, ASST, B, EOT]]), T=7, device=device)
    generator, reference = (torch.Generator().manual_seed(5) for _ in range(2))
    batch = dataset.get_batch(B=7, generator=generator)
    assert all(t.shape == (7, 7) and t.dtype == torch.int64 and t.is_contiguous() for t in batch)
    assert {t.device.type for t in batch} == {device}
    torch.randint(2, (7,), generator=reference)
    assert torch.equal(generator.get_state(), reference.get_state())


@pytest.mark.parametrize("T", [0, -3])
def test_t_below_1_is_refused(tmp_path, T):
    with refused("E102", f"T={T}"):
        open_split(tmp_path, T=T)


def obvious_mask(ids, length):
    """Walk one row token by token: the slow oracle of target_mask."""
    inside, mask = False, []
    for position, token in enumerate(ids):
        mask.append(inside and position < length)
        if token == ASST:
            inside = True
        elif token == EOT:
            inside = False
    return mask


@settings(derandomize=True, max_examples=300)
@given(
    rows=st.integers(1, 12).flatmap(
        lambda size: st.lists(
            st.tuples(
                st.lists(st.sampled_from([SYS, USR, ASST, EOT, A, B]), min_size=size, max_size=size),
                st.integers(0, size),
            ),
            min_size=1,
            max_size=4,
        )
    )
)
def test_target_mask_is_what_a_walk_over_the_tokens_finds(rows):
    ids = np.array([row for row, _ in rows], dtype=np.uint16)
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    mask = target_mask(ids, lengths, asst_id=ASST, eot_id=EOT)
    assert mask.tolist() == [obvious_mask(row, length) for row, length in rows]


ids_of_any_kind = st.one_of(st.sampled_from([USR, ASST, EOT, 298, 299, 300, 65_535]), st.integers(0, 65_535))


@settings(derandomize=True, max_examples=150)
@given(
    examples=st.lists(st.lists(ids_of_any_kind, min_size=1, max_size=12), min_size=1, max_size=5),
    T=st.integers(1, 13),
    io=st.sampled_from(["mmap", "pread"]),
    for_any_device=st.booleans(),
    seed=st.integers(0, 9),
    beyond=st.sampled_from([0, 1_000_000]),
)
def test_a_batch_is_what_a_walk_over_the_tokens_of_its_examples_finds(examples, T, io, for_any_device, seed, beyond):
    """beyond: added to every id of a split of 32 bits."""
    files, dtype = ("train_tokens.bin", "train_idx.npy"), "uint32" if beyond else "uint16"
    opening = {"eot_id": EOT + beyond, "asst_id": ASST + beyond, "dtype": dtype, "io": io}

    # A device that is not the CPU has its own way to the same values; on the CPU it gives them too.
    def by_choice(split, rows, *ranges, whole):
        y = torch.from_numpy(rows[:, 1:].astype(np.int64))
        return chosen_targets(y, split.targets(rows, *ranges, whole=whole)).numpy()

    way = mock.patch.object(SFTSplit, "masked", by_choice)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), way if for_any_device else nullcontext():
        warnings.simplefilter("ignore", UserWarning)
        folder = write_split(Path(name), [[id + beyond for id in example] for example in examples], dtype)
        dataset = SFTExampleDataset(*(folder / file for file in files), T=T, device="cpu", **opening)
        generator, reference = (torch.Generator().manual_seed(seed) for _ in range(2))
        batch = dataset.get_batch(B=6, generator=generator)
    for number, *row in zip(torch.randint(len(examples), (6,), generator=reference).tolist(), *batch, strict=True):
        example = examples[number]
        padded = (example + [EOT] * T)[: T + 1]
        has_loss = obvious_mask(padded, len(example))[1:]
        masked = [target if counts else NO for target, counts in zip(padded[1:], has_loss, strict=True)]
        expected = [padded[:-1], padded[1:], masked]
        assert [t.tolist() for t in row] == [[id + beyond * (id != NO) for id in ids] for ids in expected]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_an_id_outside_the_vocabulary_is_named_by_its_place_in_the_file(tmp_path, io):
    # Tokens 0 to 2, 3 to 6, 7 to 11; the bad one is token 9, at byte 18.
    write_split(tmp_path, [[ASST, A, EOT], [ASST, A, A, EOT], [USR, U, 20, ASST, EOT]])
    (tmp_path / "meta.json").write_text('{"vocab_size": 20}')
    dataset = open_split(tmp_path, T=4, io=io)
    said = r"train_tokens\.bin: token 9 at byte 18 is id 20, expected ids below vocab_size 20"
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    assert torch.randint(3, (4,), generator=generators[0]).tolist() == [1, 0, 1, 2]
    with pytest.raises(CacheError, match=said):
        dataset.get_batch(B=4, generator=generators[1])
    with pytest.raises(CacheError, match=said):
        dataset.example(2)
    assert dataset.example(1).tolist() == [ASST, A, A, EOT]


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("cut", ["train_tokens.bin", "train_idx.npy"])
def test_a_file_of_another_size_than_meta_json_records_is_refused(tmp_path, io, cut):
    write_split(tmp_path, [[ASST, A, EOT], [ASST, B, EOT]])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    records = [{"name": name, "bytes": size, "sha256": "0" * 64} for name, size in sizes.items()]
    (tmp_path / "meta.json").write_text(json.dumps({"files": records}))
    assert len(open_split(tmp_path, T=2, io=io)) == 2
    write_split(tmp_path, [[ASST, A, EOT], [ASST, B]] if cut == "train_tokens.bin" else [[ASST, A, EOT, ASST, B, EOT]])
    with refused("E203", cut, f"{sizes[cut]}", "meta.json"):
        open_split(tmp_path, T=2, io=io)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_rows_of_nothing_have_no_target(shape):
    ids, lengths = np.zeros(shape, dtype=np.uint16), np.zeros(shape[0], dtype=np.int64)
    assert target_mask(ids, lengths, asst_id=ASST, eot_id=EOT).shape == shape


def test_one_id_for_both_sentinels_gives_no_target():
    ids = np.array([[ASST, A, ASST, B]], dtype=np.uint16)
    assert not target_mask(ids, np.array([4]), asst_id=ASST, eot_id=ASST).any()
