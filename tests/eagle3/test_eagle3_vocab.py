"""Which of the target's tokens a draft knows: the choice worked out on paper, and saved, loaded and mapped."""

import io
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.disk_faults import renaming_fails
from support.errors import refused
from support.small_eagle3 import DRAFT_VOCAB, TARGET_VOCAB, write_cache

from niels_gpt.eagle3.vocab import build_eagle3_token_mapping, d2t_t2d, load_token_mapping, save_token_mapping


def batch(ids, mask):
    return {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}


ON_PAPER = [
    # Supervised: 7 7 2, then 9 2 5 and ids that the target does not have.
    batch([[7, 7, 2, 4], [1, 1, 1, 1]], [[1, 1, 1, 0], [0, 0, 0, 0]]),
    batch([[9, 2, 5, 10, -100, 4]], [[1, 1, 1, 1, 1, 0]]),
]
"""7 and 2 are supervised twice, 5 and 9 once; 4 and 1 are there, but not supervised."""


def chosen(batches, vocab, draft, special=None):
    ids, mask = build_eagle3_token_mapping(
        batches, target_vocab_size=vocab, draft_vocab_size=draft, special_token_ids=special
    )
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool and mask.shape == (vocab,)
    assert mask.nonzero().flatten().tolist() == sorted(ids.tolist())
    return ids.tolist()


@pytest.mark.parametrize("draft", [None, 10, 11])
def test_a_draft_that_knows_all_tokens_has_them_in_their_order_and_reads_nothing(draft):
    def never():
        raise AssertionError("was read")
        yield

    assert chosen(never(), 10, draft, [8]) == list(range(10))


def test_batches_may_be_arrays_that_cannot_be_written_to_and_are_read_once():
    def once():
        for each in ON_PAPER:
            arrays = {"input_ids": each["input_ids"].numpy().astype(np.int32), "loss_mask": each["loss_mask"].numpy()}
            arrays["loss_mask"] = arrays["loss_mask"].astype(np.uint8)
            for array in arrays.values():
                array.flags.writeable = False
            yield arrays

    with refused("E707", "batch 1", "input_ids of shape (1, 2)", "loss_mask of shape (2,)"):
        chosen([*ON_PAPER[:1], batch([[1, 2]], [1, 1])], 10, 2)
    batches = once()
    assert chosen(batches, 10, 4) == [2, 7, 5, 9]
    assert next(batches, None) is None


@given(
    batches=st.lists(st.lists(st.tuples(st.integers(-2, 22), st.integers(0, 1)), max_size=30), max_size=4),
    special=st.lists(st.one_of(st.none(), st.integers(-2, 22)), max_size=4),
    draft=st.integers(1, 25),
)
def test_the_choice_is_that_of_a_slow_and_plain_one(batches, special, draft):
    counts = Counter(token for pairs in batches for token, mask in pairs if mask and 0 <= token < 20)
    plain = []
    for token in [*(s for s in special if s is not None), *sorted(counts, key=lambda t: (-counts[t], t)), *range(20)]:
        if 0 <= token < 20 and token not in plain:
            plain.append(token)
    given_batches = [batch(*map(list, zip(*pairs, strict=True))) for pairs in batches if pairs]
    assert chosen(given_batches, 20, draft, special) == (plain[:draft] if draft < 20 else list(range(20)))


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_sizes_are_positive_integers(size):
    with refused("E707", "draft_vocab_size="):
        build_eagle3_token_mapping([], target_vocab_size=4, draft_vocab_size=size)
    with refused("E707", "target_vocab_size="):
        build_eagle3_token_mapping([], target_vocab_size=size, draft_vocab_size=2)
    with refused("E707", "target_vocab_size=None"):
        build_eagle3_token_mapping([], target_vocab_size=None, draft_vocab_size=2)


def counted_together(store, backend, ids):
    """Count these ids, one row for each of as many processes; returns what each of them prints."""
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "from niels_gpt.eagle3.vocab import build_eagle3_token_mapping\n"
        "rank, ids = int(sys.argv[1]), eval(sys.argv[4])\n"
        "how = {'init_method': 'file://' + sys.argv[2], 'rank': rank, 'world_size': len(ids)}\n"
        "dist.init_process_group(sys.argv[3], **how)\n"
        "row = torch.tensor([ids[rank]])\n"
        "batches = [{'input_ids': row, 'loss_mask': torch.ones_like(row)}]\n"
        "found, _ = build_eagle3_token_mapping(batches, target_vocab_size=9, draft_vocab_size=3)\n"
        "print(found.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-c", program]
    ranks = ([*command, str(rank), str(store), backend, repr(ids)] for rank in range(len(ids)))
    running = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in ranks]
    return [one.communicate(timeout=100)[0].strip() for one in running]


@pytest.mark.slow
def test_processes_that_train_together_count_together(tmp_path):
    ids = [[3, 3, 3, 5, 5], [6, 6, 5, 5, 6]]  # together 5: 4, 3: 3, 6: 3
    assert counted_together(tmp_path / "store", "gloo", ids) == ["[5, 3, 6]"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_which_adds_on_a_gpu_only_counts_too(tmp_path):
    assert counted_together(tmp_path / "store", "nccl", [[3, 3, 3, 5, 5, 6]]) == ["[3, 5, 6]"]


def test_the_tables_lead_from_a_draft_id_to_the_target_and_back():
    d2t, t2d = d2t_t2d(torch.tensor([5, 0, 3]), 7)
    assert d2t.tolist() == [5, -1, 1] and d2t.dtype == torch.int64
    assert t2d.tolist() == [True, False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([5, 0, 5], "3 ids, only 2 of them different"),
        ([5, 7], "id 7, expected 0 <= id < target_vocab_size=7"),
        ([-1], "id -1"),
        ([], "torch.float32 and shape (0,)"),
        ([0.5], "torch.float32 and shape (1,)"),
        ([[1]], "shape (1, 1)"),
        ([True], "torch.bool"),
    ],
)
def test_ids_of_a_draft_are_different_ids_of_the_target(ids, said, tmp_path):
    with refused("E707", "selected_token_ids", said):
        d2t_t2d(torch.tensor(ids), 7)
    with refused("E707", "selected_token_ids", said):
        save_token_mapping(tmp_path / "map.pt", torch.tensor(ids), 7)
    path = tmp_path / "foreign.pt"
    torch.save({"selected_token_ids": torch.tensor(ids), "target_vocab_size": 7}, path)
    with refused("E707", "foreign.pt", said):
        load_token_mapping(path, target_vocab_size=7, draft_vocab_size=None)


def test_what_was_saved_is_loaded_and_equal_choices_give_equal_bytes(tmp_path):
    path = tmp_path / "new" / "folder" / "map.pt"
    save_token_mapping(path, torch.tensor([5, 0, 3], dtype=torch.int32), 7)
    for draft in (3, None):
        ids, mask = load_token_mapping(path, target_vocab_size=7, draft_vocab_size=draft)
        assert ids.tolist() == [5, 0, 3] and ids.dtype == torch.int64
        assert mask.nonzero().flatten().tolist() == [0, 3, 5] and mask.shape == (7,)
    save_token_mapping(tmp_path / "again.pt", [5, 0, 3], 7)
    assert (tmp_path / "again.pt").read_bytes() == path.read_bytes()
    (tmp_path / "link.pt").symlink_to("again.pt")  # is followed
    assert load_token_mapping(tmp_path / "link.pt", target_vocab_size=7, draft_vocab_size=3)[0].tolist() == [5, 0, 3]
    with refused("E707", "gone.pt", kind=FileNotFoundError):
        load_token_mapping(tmp_path / "gone.pt", target_vocab_size=7, draft_vocab_size=2)
    save_token_mapping(path, torch.arange(100)[5:8], 100)
    found = torch.load(path, weights_only=True)  # the published form
    assert found.keys() == {"selected_token_ids", "target_vocab_size"} and found["target_vocab_size"] == 100
    assert found["selected_token_ids"].tolist() == [5, 6, 7]
    assert found["selected_token_ids"].untyped_storage().nbytes() == 3 * 8, "the rest of the tensor was saved too"


def test_a_file_is_complete_or_absent(tmp_path):
    save_token_mapping(tmp_path / "map.pt", [1], 7)
    before = (tmp_path / "map.pt").read_bytes()
    with renaming_fails(), pytest.raises(OSError, match="no"):
        save_token_mapping(tmp_path / "map.pt", [2], 7)
    assert [path.name for path in tmp_path.iterdir()] == ["map.pt"] and (tmp_path / "map.pt").read_bytes() == before


def test_the_choice_of_a_cache_is_taken_from_its_manifest(tmp_path):
    write_cache(tmp_path / "cache", samples=2, shard_size=2)
    ids, mask = load_token_mapping(tmp_path / "cache", target_vocab_size=TARGET_VOCAB, draft_vocab_size=DRAFT_VOCAB)
    assert ids.tolist() == list(range(DRAFT_VOCAB)) and mask.sum() == DRAFT_VOCAB
    with refused("E707", tmp_path / "cache", f"target_vocab_size is {TARGET_VOCAB}, expected 30"):
        load_token_mapping(tmp_path / "cache", target_vocab_size=30, draft_vocab_size=None)
    (tmp_path / "empty").mkdir()
    with refused("E105", "empty/manifest.json", kind=FileNotFoundError):
        load_token_mapping(tmp_path / "empty", target_vocab_size=30, draft_vocab_size=None)


class Program:
    """Pickled, it makes a folder where it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def saved(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


GOOD = saved({"selected_token_ids": torch.tensor([1, 2]), "target_vocab_size": 7})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text\n",
        GOOD[:-40],
        GOOD[: len(GOOD) // 2],
        saved([1, 2]),
        saved({"selected_token_ids": [1, "x"], "target_vocab_size": 7}),
        saved({"selected_token_ids": None, "target_vocab_size": 7}),
        saved({"target_vocab_size": 7}),
        saved({"selected_token_ids": torch.tensor([1, 2])}),
        saved({"selected_token_ids": torch.tensor([1, 2]), "target_vocab_size": 8}),
        saved({"selected_token_ids": torch.tensor([1, 2, 3]), "target_vocab_size": 7}),
        saved({"selected_token_ids": torch.tensor([1, 2]), "target_vocab_size": 7, "more": Program()}),
    ],
    ids=range(12),
)
def test_a_file_of_something_else_is_an_error_that_names_it_and_nothing_runs(content, tmp_path):
    path = tmp_path / "map.pt"
    path.write_bytes(content)
    with refused("E707", "map.pt"):
        load_token_mapping(path, target_vocab_size=7, draft_vocab_size=2)
    assert [each.name for each in tmp_path.iterdir()] == ["map.pt"]
    os.mkfifo(tmp_path / "pipe")  # what is no regular file is not waited for
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "circle", "link"):
        with refused("E707", name, "save_token_mapping"):
            load_token_mapping(tmp_path / name, target_vocab_size=7, draft_vocab_size=2)
