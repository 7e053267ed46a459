"""Which document goes to val: its text and the seed decide, and what does not fit a budget is cut and counted (D5)."""

import itertools
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.splits import IN_MEMORY, SPLITS, build, key, letters, obvious_splits, stored

from niels_gpt.builders.pretrain import build_pretrain
from niels_gpt.builders.split import TextSplit


def obvious_split(documents: list[str], limits: dict[str, int]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Fill the splits document by document: the slow oracle."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    counts = {"read": 0, "empty": 0, "split_full": 0, "cut": 0, "cut_tokens": 0}
    split_of = obvious_splits(documents, Fraction(limits["val"], sum(limits.values()) or 1))
    for text in documents:
        used = {split: sum(map(len, found[split])) for split in SPLITS}
        if used == limits:
            break
        counts["read"] += 1
        if not text:
            counts["empty"] += 1
            continue
        split = split_of[text]
        if used[split] == limits[split]:
            counts["split_full"] += 1
            continue
        kept = text[: limits[split] - used[split]]
        counts["cut"] += kept != text
        counts["cut_tokens"] += len(text) - len(kept)
        found[split].append(kept)
    return found, counts


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=26),
    limits=st.fixed_dictionaries({"train": st.integers(0, 60), "val": st.integers(0, 30)}),
)
def test_the_builder_splits_as_the_slow_oracle_does(lengths: list[int], limits: dict[str, int]) -> None:
    documents = letters(lengths)
    expected, counts = obvious_split(documents, limits)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        cache = Path(name, "cache")
        if not expected["train"]:
            with pytest.raises(ValueError, match="no token for the train split"):
                build(cache, documents, limits["train"], limits["val"])
            assert not cache.exists()
            return
        meta = build(cache, documents, limits["train"], limits["val"])
        found = {split: stored(cache, split) for split in SPLITS}
    assert found == expected
    assert not {text[0] for text in found["train"]} & {text[0] for text in found["val"]}  # no document in both
    for split in SPLITS:
        tokens = sum(map(len, found[split]))
        assert meta["totals"][f"{split}_tokens"] == meta["utf8_bytes"][split] == tokens <= limits[split]
        assert meta["budget_reached"][split] == (tokens == limits[split])
        assert meta["docs"][split] == len(found[split])
    assert meta["cut"] == {"documents": counts["cut"], "tokens": counts["cut_tokens"]}
    assert (meta["documents_read"], meta["dropped"].get("empty", 0)) == (counts["read"], counts["empty"])
    assert meta["dropped"].get("split_full", 0) == counts["split_full"]
    assert meta["documents_read"] == sum(meta["docs"].values()) + sum(meta["dropped"].values())


def test_a_share_is_compared_exactly() -> None:
    """The bound of a third is no float; its neighbours are told apart."""
    rule = TextSplit(Fraction(1, 3), seed=0)
    assert rule.bound == 6148914691236517206  # ceil(2**64 / 3)
    assert (rule.of(rule.bound - 1), rule.of(rule.bound)) == ("val", "train")
    assert {TextSplit(Fraction(0), 0).of(number) for number in (0, 2**64 - 1)} == {"train"}
    assert {TextSplit(Fraction(1), 0).of(number) for number in (0, 2**64 - 1)} == {"val"}


def test_an_end_of_text_counts_as_a_token_and_may_be_cut(tmp_path: Path) -> None:
    in_val, in_train = sorted(["aaa", "bbb"], key=key)
    meta = build(tmp_path / "c", [in_val, in_train], train=4, val=3, append_eot=True)
    assert meta["totals"] == {"train_tokens": 4, "val_tokens": 3}
    ids = [np.fromfile(tmp_path / "c" / split / "shard_00000.bin", dtype="<u2").tolist() for split in SPLITS]
    assert ids == [[*ByteTokenizer().encode(in_train), 4], ByteTokenizer().encode(in_val)]
    assert meta["cut"] == {"documents": 1, "tokens": 1}


def test_the_stream_is_not_read_further_than_the_budgets_and_a_batch(tmp_path: Path) -> None:
    def endless() -> Any:
        for number in itertools.count():
            yield None, f"{number:010}"

    arguments = {"tokenizer": ByteTokenizer(), "shard_bytes": 64, "seed": 0, "shuffle_buffer": 4}
    meta = build_pretrain(endless(), tmp_path / "c", max_train_tokens=90, max_val_tokens=10, **arguments)
    assert meta["totals"] == {"train_tokens": 90, "val_tokens": 10}
    assert meta["documents_read"] == 10 + meta["dropped"].get("split_full", 0) < 200


def test_text_with_a_sentinel_is_dropped_and_counted(tmp_path: Path) -> None:
    meta = build(tmp_path / "c", ["aa", "b<|eot|>b", "", "cc"], train=4, val=2)
    assert meta["dropped"] == {"empty": 1, "sentinel_in_text": 1} and meta["documents_read"] == 4
    assert [stored(tmp_path / "c", split) for split in ("val", "train")] == [
        [text] for text in sorted(["aa", "cc"], key=key)
    ]


def test_documents_that_name_their_split_go_there_without_any_bound(tmp_path: Path) -> None:
    meta = build(tmp_path / "c", [("train", "aa"), ("train", "bbb"), ("val", "c")], train=None, val=None)
    assert stored(tmp_path / "c", "train") == ["aa", "bbb"] and stored(tmp_path / "c", "val") == ["c"]
    assert meta["budget_reached"] == {"train": None, "val": None}


def test_a_document_that_names_a_full_split_is_dropped_and_counted(tmp_path: Path) -> None:
    meta = build(tmp_path / "c", [("train", "aaa"), ("train", "b"), ("val", "cc")], train=3, val=2)
    assert stored(tmp_path / "c", "train") == ["aaa"] and stored(tmp_path / "c", "val") == ["cc"]
    assert meta["dropped"] == {"split_full": 1}


NO_BUDGETS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (-1, 5, {}, "max_train_tokens=-1"),
    (5, -2, {}, "max_val_tokens=-2"),
    (0, 10, {}, "no token for the train split: 1 documents read, 1 to val, dropped: none"),
    (None, None, {}, r"names no split.*val_frac"),
    (None, None, {"val_frac": 1.5}, r"val_frac=1\.5"),
]


@pytest.mark.parametrize(("train", "val", "extras", "named"), NO_BUDGETS)
def test_budgets_that_cannot_be_are_refused(tmp_path: Path, train: Any, val: Any, extras: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(tmp_path / "c", ["only"], train=train, val=val, **extras)
    assert {path.name for path in tmp_path.iterdir()} <= (set() if "max_" in named else {".versions"})
