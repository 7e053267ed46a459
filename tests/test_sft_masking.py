"""Loss on the assistant's words only: from after its sentinel up to and including the next end of turn."""

import json
import tempfile
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache import SFTExampleDataset, sft_dataset
from niels_gpt.cache.formats import target_mask
from niels_gpt.cache.mmap import IO
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


def write_split(folder: Path, examples: list[list[int]]) -> Path:
    (folder / "train_tokens.bin").write_bytes(np.concatenate(examples).astype("<u2").tobytes())
    np.save(folder / "train_idx.npy", np.cumsum([0, *map(len, examples[:-1])], dtype=np.int64))
    return folder


def open_split(folder: Path, *, T: int, io: IO) -> SFTExampleDataset:
    files = (folder / "train_tokens.bin", folder / "train_idx.npy")
    return SFTExampleDataset(*files, T=T, device="cpu", eot_id=EOT, asst_id=ASST, io=io)


def batch_of_one(example: list[int], T: int, *, has_target: bool = True) -> tuple[list[int], list[int], list[int]]:
    """Return x, y and y_masked of a cache that holds one example; the dataset warns of one without a target."""
    warns: AbstractContextManager[object] = nullcontext()
    if not has_target:
        warns = pytest.warns(UserWarning, match="1 of 1 rows have no target")
    with tempfile.TemporaryDirectory() as name:
        tokens, idx = Path(name, "train_tokens.bin"), Path(name, "train_idx.npy")
        tokens.write_bytes(np.asarray(example, dtype="<u2").tobytes())
        np.save(idx, np.zeros(1, dtype=np.int64))
        with warns:
            dataset = SFTExampleDataset(str(tokens), str(idx), T=T, device="cpu", eot_id=EOT, asst_id=ASST)
        x, y, masked = dataset.get_batch(B=1, generator=torch.Generator().manual_seed(0))
    return x[0].tolist(), y[0].tolist(), masked[0].tolist()


def test_the_table_of_the_spec() -> None:
    x, y, masked = batch_of_one([SYS, S, EOT, USR, U, EOT, ASST, A, B, EOT], T=9)
    assert list(zip(x, y, masked, strict=True)) == [(token, target, want) for token, target, _, want in SPEC_TABLE]
    assert [value != NO for value in masked] == [inside for _, _, inside, _ in SPEC_TABLE]


def test_only_a_b_and_their_eot_are_targets_when_the_row_is_padded() -> None:
    x, y, masked = batch_of_one([SYS, S, EOT, USR, U, EOT, ASST, A, B, EOT], T=12)
    assert x[9:] == [EOT, EOT, EOT] and y[9:] == [EOT, EOT, EOT]
    assert masked == [NO, NO, NO, NO, NO, NO, A, B, EOT, NO, NO, NO]


def test_each_reply_of_several_turns_is_a_target_and_no_question_is() -> None:
    _, _, masked = batch_of_one([USR, U, EOT, ASST, A, EOT, USR, U, EOT, ASST, B, EOT], T=11)
    assert masked == [NO, NO, NO, A, EOT, NO, NO, NO, NO, B, EOT]


def test_an_empty_reply_has_its_eot_as_only_target() -> None:
    assert batch_of_one([USR, U, EOT, ASST, EOT], T=4)[2] == [NO, NO, NO, EOT]


def test_a_reply_cut_by_t_keeps_the_targets_that_are_left() -> None:
    with pytest.warns(UserWarning, match="T=5 loses 1 of 3 supervised tokens"):
        assert batch_of_one([USR, U, EOT, ASST, A, B, EOT], T=5)[2] == [NO, NO, NO, A, B]


def test_a_row_cut_before_the_reply_has_no_target() -> None:
    batch = batch_of_one([USR, U, EOT, ASST, A, EOT], T=3, has_target=False)
    assert batch == ([USR, U, EOT], [U, EOT, ASST], [NO, NO, NO])


def test_padding_is_no_target_even_where_the_example_lacks_its_eot() -> None:
    assert batch_of_one([ASST, A], T=4) == ([ASST, A, EOT, EOT], [A, EOT, EOT, EOT], [A, NO, NO, NO])


def test_padding_after_a_bare_assistant_sentinel_is_no_target() -> None:
    assert batch_of_one([USR, U, EOT, ASST], T=5, has_target=False)[2] == [NO, NO, NO, NO, NO]


def test_a_chat_without_assistant_has_no_target() -> None:
    assert batch_of_one([SYS, S, EOT, USR, U, EOT], T=6, has_target=False)[2] == [NO] * 6


def test_rows_of_a_batch_do_not_leak_into_each_other(tmp_path: Path) -> None:
    examples = [[ASST, A, A, A], [USR, U, EOT, USR]]  # an open reply first, then a row without one
    (tmp_path / "t.bin").write_bytes(np.asarray([*examples[0], *examples[1]], dtype="<u2").tobytes())
    np.save(tmp_path / "i.npy", np.array([0, 4]))
    with pytest.warns(UserWarning, match="1 of 2 rows have no target"):
        dataset = SFTExampleDataset(tmp_path / "t.bin", tmp_path / "i.npy", T=3, device="cpu", eot_id=EOT, asst_id=ASST)
    x, _, masked = dataset.get_batch(B=32, generator=torch.Generator().manual_seed(0))
    expected = {ASST: [A, A, A], USR: [NO, NO, NO]}
    assert {ASST, USR} == set(x[:, 0].tolist())
    assert all(row.tolist() == expected[int(first)] for first, row in zip(x[:, 0], masked, strict=True))


def test_the_three_tensors_are_contiguous_int64_and_one_draw(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(np.asarray([ASST, A, EOT, USR, U, EOT, ASST, B, EOT], dtype="<u2").tobytes())
    np.save(tmp_path / "i.npy", np.array([0, 3]))
    dataset = SFTExampleDataset(tmp_path / "t.bin", tmp_path / "i.npy", T=5, device="cpu", eot_id=EOT, asst_id=ASST)
    generator, reference = (torch.Generator().manual_seed(5) for _ in range(2))
    batch = dataset.get_batch(B=7, generator=generator)
    assert all(t.shape == (7, 5) and t.dtype == torch.int64 and t.is_contiguous() for t in batch)
    x, y, masked = batch
    assert torch.equal(y[:, :-1], x[:, 1:]) and torch.equal(masked[masked != NO], y[masked != NO])
    drawn = torch.randint(2, (7,), generator=reference)
    assert x[:, 0].tolist() == [(ASST, USR)[row] for row in drawn.tolist()]
    assert torch.equal(generator.get_state(), reference.get_state())


@pytest.mark.parametrize("T", [0, -3])
def test_t_below_1_is_refused(tmp_path: Path, T: int) -> None:
    with pytest.raises(ValueError, match=f"T={T}"):
        SFTExampleDataset(tmp_path / "t.bin", tmp_path / "i.npy", T=T, device="cpu", eot_id=EOT, asst_id=ASST)


def obvious_mask(ids: list[int], length: int) -> list[bool]:
    """Walk one row token by token: the slow oracle of target_mask."""
    inside, mask = False, []
    for position, token in enumerate(ids):
        mask.append(inside and position < length)
        if token == ASST:
            inside = True
        elif token == EOT:
            inside = False
    return mask


@settings(derandomize=True, deadline=None, max_examples=300)
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
def test_target_mask_is_what_a_walk_over_the_tokens_finds(rows: list[tuple[list[int], int]]) -> None:
    ids = np.array([row for row, _ in rows], dtype=np.uint16)
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    mask = target_mask(ids, lengths, asst_id=ASST, eot_id=EOT)
    assert mask.tolist() == [obvious_mask(row, length) for row, length in rows]


ids_of_any_kind = st.one_of(st.sampled_from([USR, ASST, EOT, 298, 299, 300, 65_535]), st.integers(0, 65_535))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    examples=st.lists(st.lists(ids_of_any_kind, min_size=1, max_size=12), min_size=1, max_size=5),
    T=st.integers(1, 13),
    io=st.sampled_from(["mmap", "pread"]),
    for_any_device=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_batch_is_what_a_walk_over_the_tokens_of_its_examples_finds(
    examples: list[list[int]], T: int, io: IO, for_any_device: bool, seed: int
) -> None:
    # A device that is not the CPU has its own way to the same values; on the CPU it gives them too.
    way = mock.patch.object(sft_dataset, "_masked_by_limit", sft_dataset._masked_by_choice)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), way if for_any_device else nullcontext():
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_split(write_split(Path(name), examples), T=T, io=io)
        generator, reference = (torch.Generator().manual_seed(seed) for _ in range(2))
        batch = dataset.get_batch(B=6, generator=generator)
    for number, *row in zip(torch.randint(len(examples), (6,), generator=reference).tolist(), *batch, strict=True):
        example = examples[number]
        padded = (example + [EOT] * T)[: T + 1]
        has_loss = obvious_mask(padded, len(example))[1:]
        masked = [target if counts else NO for target, counts in zip(padded[1:], has_loss, strict=True)]
        assert [t.tolist() for t in row] == [padded[:-1], padded[1:], masked]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_an_id_outside_the_vocabulary_is_named_by_its_place_in_the_file(tmp_path: Path, io: IO) -> None:
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
def test_a_file_of_another_size_than_meta_json_records_is_refused(tmp_path: Path, io: IO, cut: str) -> None:
    write_split(tmp_path, [[ASST, A, EOT], [ASST, B, EOT]])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    records = [{"name": name, "bytes": size, "sha256": "0" * 64} for name, size in sizes.items()]
    (tmp_path / "meta.json").write_text(json.dumps({"files": records}))
    assert len(open_split(tmp_path, T=2, io=io)) == 2
    write_split(tmp_path, [[ASST, A, EOT], [ASST, B]] if cut == "train_tokens.bin" else [[ASST, A, EOT, ASST, B, EOT]])
    with pytest.raises(CacheError, match=rf"{cut}: \d+ bytes, expected {sizes[cut]} by its meta\.json"):
        open_split(tmp_path, T=2, io=io)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_rows_of_nothing_have_no_target(shape: tuple[int, int]) -> None:
    ids, lengths = np.zeros(shape, dtype=np.uint16), np.zeros(shape[0], dtype=np.int64)
    assert target_mask(ids, lengths, asst_id=ASST, eot_id=EOT).shape == shape


def test_one_id_for_both_sentinels_gives_no_target() -> None:
    ids = np.array([[ASST, A, ASST, B]], dtype=np.uint16)
    assert not target_mask(ids, np.array([4]), asst_id=ASST, eot_id=ASST).any()


def test_a_reply_longer_than_its_length_has_targets_up_to_it() -> None:
    ids = np.array([[ASST, A, B, ASST, A], [A, ASST, A, EOT, ASST]], dtype=np.uint16)
    mask = target_mask(ids, np.array([2, 5]), asst_id=ASST, eot_id=EOT)
    assert mask.tolist() == [[False, True, False, False, False], [False, False, True, True, False]]


def test_another_device_than_the_cpu_gets_the_same_shapes(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(np.asarray([USR, U, EOT, ASST, A, EOT], dtype="<u2").tobytes())
    np.save(tmp_path / "i.npy", np.zeros(1, dtype=np.int64))
    dataset = SFTExampleDataset(tmp_path / "t.bin", tmp_path / "i.npy", T=7, device="meta", eot_id=EOT, asst_id=ASST)
    batch = dataset.get_batch(B=3, generator=torch.Generator())
    assert all(t.shape == (3, 7) and t.dtype == torch.int64 and t.device.type == "meta" for t in batch)
