"""What differs between two caches: settings, and documents that are new, gone, moved or at another place.

Run: pytest tests/test_diff.py
"""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from niels_gpt.build.pretrain import build_pretrain
from niels_gpt.build.sft import build_sft
from niels_gpt.inspection.diff import PARTS, diff, is_equal
from niels_gpt.inspection.matching import match
from niels_gpt.recipes.report import difference_lines
from niels_gpt.records import meta_bytes


class Shifted(ByteTokenizer):
    """Other ids for the same bytes: caches of both have no token in common."""

    vocab_size = 400

    def encode(self, text):
        return [byte + 110 for byte in text.encode()]


def cache(path: Path, train: list[str], val: list[str] = [], tokenizer: Any = None, **arguments: Any) -> Path:  # noqa: B006
    """Build a cache whose documents name their split; the id of a text is `id of TEXT`."""
    documents = [(split, text, f"id of {text}") for split, texts in (("train", train), ("val", val)) for text in texts]
    fixed: dict[str, Any] = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 8, "shuffle_buffer": None}
    chosen = {**fixed, "seed": 0, **arguments}
    build_pretrain(documents, path, tokenizer=tokenizer or ByteTokenizer(), **chosen)
    return path


def compared(a: Path, b: Path, limit: int = 10, tokenizers: Any = (None, None)) -> dict[str, Any]:
    return diff(a, b, tokenizers=tokenizers, limit=limit)


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {part: found[part]["count"] for part in PARTS if found[part]["count"]}


def test_a_cache_is_equal_to_itself_and_to_its_like(tmp_path: Path) -> None:
    a, b = (cache(tmp_path / name, ["one", "two", "three", "one"], ["four"]) for name in "ab")
    for pair in ((a, a), (a, b), (a.resolve(), b)):
        found = compared(*pair)
        assert is_equal(found) and found["settings"] == {} and counts(found) == {}
        assert difference_lines(found) == "equal"
    assert found["documents"] == {"a": {"train": 4, "val": 1}, "b": {"train": 4, "val": 1}}


def test_documents_of_one_cache_only_are_named(tmp_path: Path) -> None:
    a = cache(tmp_path / "a", ["one", "two", "three"], ["four"])
    b = cache(tmp_path / "b", ["one", "three"], ["four", "five is longer than a shard"])
    found = compared(a, b)
    assert counts(found) == {"only_a": 1, "only_b": 1} and not is_equal(found)
    assert found["compared"] == "tokens"
    assert found["only_a"]["first"] == [{"split": "train", "document": 1, "source_id": "id of two", "words": None}]
    (told,) = found["only_b"]["first"]
    assert (told["split"], told["document"], told["source_id"]) == ("val", 1, "id of five is longer than a shard")
    text = difference_lines(found)
    assert "only in A: 1 document\n  train 1, source id id of two" in text and "moved" not in text


def test_documents_that_moved_to_the_other_split_are_not_new(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one", "two"], ["four"]), cache(tmp_path / "b", ["one", "four"], ["two"])
    found = compared(a, b)
    assert counts(found) == {"moved": 2}
    assert [(told["split"], told["document"], told["in_b"]) for told in found["moved"]["first"]] == [
        ("train", 1, {"split": "val", "document": 0}),
        ("val", 0, {"split": "train", "document": 1}),
    ]
    assert "moved to the other split: 2 documents\n  train 1, source id id of two, in B val 0" in difference_lines(
        found
    )


def test_another_order_is_a_difference_but_a_document_less_is_none_of_order(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one", "two", "three"]), cache(tmp_path / "b", ["one", "three", "two"])
    found = compared(a, b)
    assert counts(found) == {"reordered": 2}
    assert found["reordered"]["first"][0]["in_b"] == {"split": "train", "document": 2}
    assert counts(compared(a, cache(tmp_path / "c", ["two", "three"]))) == {"only_a": 1}


def test_a_document_that_is_there_twice_needs_two_of_its_like(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one", "one", "one"]), cache(tmp_path / "b", ["one"], ["one"])
    found = compared(a, b)
    assert counts(found) == {"only_a": 1, "moved": 1}
    assert [told["document"] for told in found["only_a"]["first"]] == [2]


def test_settings_that_differ_are_dotted_and_the_lists_of_files_are_left_out(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one"]), cache(tmp_path / "b", ["one"], seed=7, shard_bytes=10)
    found = compared(a, b)
    assert found["settings"] == {"seed": {"a": 0, "b": 7}, "shard_bytes": {"a": 8, "b": 10}}
    assert not is_equal(found) and "seed: A 0, B 7" in difference_lines(found)
    meta = json.loads((b / "meta.json").read_bytes())
    meta["source"]["counters"] = {"blank": True}
    del meta["noticed"]
    (b / "meta.json").write_bytes(meta_bytes(meta))
    settings = compared(a, b)["settings"]
    assert settings["source.counters.blank"] == {"b": True} and settings["noticed"] == {"a": {}}
    assert "source.counters.blank: A absent, B true" in difference_lines(compared(a, b))


def test_caches_of_two_tokenizers_are_compared_by_source_ids_and_it_is_said(tmp_path: Path) -> None:
    a = cache(tmp_path / "a", ["one", "two"], ["four"])
    b = cache(tmp_path / "b", ["one", "three"], ["four"], tokenizer=Shifted())
    found = compared(a, b)
    assert found["compared"] == "source ids" and found["why_not_tokens"] == "their tokenizers differ"
    assert counts(found) == {"only_a": 1, "only_b": 1} and found["settings"]["vocab_size"] == {"a": 300, "b": 400}
    assert "compared by source ids, for their tokenizers differ" in difference_lines(found)
    meta = json.loads((b / "meta.json").read_bytes())
    del meta["ids"]
    (b / "meta.json").write_bytes(meta_bytes(meta))
    found = compared(a, b)
    assert found["compared"] is None and "source ids of B were not recorded" in difference_lines(found)


def test_examples_of_sft_caches_are_compared_as_documents(tmp_path: Path) -> None:
    chats = [
        (f"chat {n}", [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]) for n in range(9)
    ]
    for name, given, seed in (("a", chats, 0), ("b", chats[1:], 0), ("c", chats, 1)):
        build_sft(given, tmp_path / name, tokenizer=ByteTokenizer(), val_frac=0.4, seed=seed)
    assert counts(compared(tmp_path / "a", tmp_path / "b"))["only_a"] == 1
    found = counts(compared(tmp_path / "a", tmp_path / "c"))
    assert found["moved"] > 0 and "only_a" not in found


def test_the_first_words_are_decoded_by_the_tokenizer_of_the_ids(tmp_path: Path, tiny_tokenizer: Any) -> None:
    a, b = (cache(tmp_path / name, [f"The heron\n walks {name}" * 9], tokenizer=tiny_tokenizer) for name in "ab")
    (told,) = compared(a, b, tokenizers=(tiny_tokenizer, tiny_tokenizer))["only_a"]["first"]
    assert told["words"].startswith("The heron walks a") and len(told["words"]) <= 60


def test_as_many_documents_are_named_as_asked_for_and_all_are_counted(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", list("abcdefgh"), list("ij")), cache(tmp_path / "b", ["x"])
    found = compared(a, b, limit=3)
    assert found["only_a"]["count"] == 10 and len(found["only_a"]["first"]) == 3
    assert "and 7 more" in difference_lines(found)
    assert len(compared(a, b, limit=9)["only_a"]["first"]) == 9 and compared(a, b, limit=0)["only_a"]["first"] == []


def test_matching_is_right_for_small_multisets_of_all_kinds() -> None:
    """Against counting by hand: what is common, what stays in its split, what moves."""
    draw = random.Random(0)
    for _ in range(300):
        a, b = ([[draw.randrange(4) for _ in range(draw.randrange(5))] for _ in range(2)] for _ in range(2))
        found = match(
            *([np.array([[n, 7] for n in split], dtype=np.uint64).reshape(-1, 2) for split in x] for x in (a, b))
        )
        of_a, of_b = (Counter(itertools.chain(*x)) for x in (a, b))
        stays = sum((Counter(mine) & Counter(theirs)).total() for mine, theirs in zip(a, b, strict=True))
        assert sum(map(len, found.only_a)) == (of_a - of_b).total()
        assert sum(map(len, found.only_b)) == (of_b - of_a).total()
        assert sum(len(left) for left, _ in found.moved) == (of_a & of_b).total() - stays
        for split, (left, right) in enumerate(found.moved):
            assert [a[split][i] for i in left] == [b[1 - split][i] for i in right]
        if a == b:
            assert not any(len(left) for left, _ in found.reordered)


def test_a_tokenizer_has_settings_but_no_documents(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_bytes(meta_bytes({"kind": "tokenizer", "vocab_size": size}))
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found["compared"] is None and found["settings"] == {"vocab_size": {"a": 1, "b": 2}}
    assert "documents were not compared" in difference_lines(compared(tmp_path / "a", tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match=r"c/meta\.json"):
        compared(tmp_path / "a", tmp_path / "c")
