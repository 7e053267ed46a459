"""What differs between two caches: settings, and documents that are new, gone or moved."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer

from niels_gpt.builders.pretrain import build_pretrain
from niels_gpt.builders.sft import build_sft
from niels_gpt.commands.report import difference_lines
from niels_gpt.inspection.diff import PARTS, diff, is_equal, match
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import meta_bytes


class Shifted(ByteTokenizer):
    """Other ids for the same bytes: caches of both have no token in common."""

    vocab_size = 400

    def encode(self, text):
        return [byte + 110 for byte in text.encode()]


def of(path: Path, documents: Any, tokenizer: Any = None, **arguments: Any) -> Path:
    """Build a cache of documents that name their split."""
    fixed: dict[str, Any] = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 8, "shuffle_buffer": None}
    build_pretrain(documents, path, tokenizer=tokenizer or ByteTokenizer(), **{**fixed, "seed": 0, **arguments})
    return path


def cache(path: Path, train: list[str], val: list[str] = [], tokenizer: Any = None, **arguments: Any) -> Path:  # noqa: B006
    """Build a cache of texts; the id of a text is `id of TEXT`."""
    documents = [(split, text, f"id of {text}") for split, texts in (("train", train), ("val", val)) for text in texts]
    return of(path, documents, tokenizer, **arguments)


def edit(cache: Path, change: Any) -> None:
    """Change a meta.json as its author would."""
    meta = json.loads((cache / "meta.json").read_bytes())
    change(meta)
    (cache / "meta.json").write_bytes(meta_bytes(meta))


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
        ("train", 1, {"split": "val", "document": 0, "source_id": "id of two"}),
        ("val", 0, {"split": "train", "document": 1, "source_id": "id of four"}),
    ]
    assert "moved to the other split: 2 documents\n  train 1, source id id of two, in B val 0" in difference_lines(
        found
    )


def test_documents_in_another_order_or_of_other_ids_differ_by_their_content_alone(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one", "two", "three"]), cache(tmp_path / "b", ["one", "three", "two"])
    assert counts(compared(a, cache(tmp_path / "c", ["two", "three"]))) == {"only_a": 1}
    of(tmp_path / "d", [("train", text, f"new id of {text}") for text in ("one", "two", "three")])
    for other in (b, tmp_path / "d"):
        found = compared(a, other)
        assert counts(found) == {} == found["settings"] and not is_equal(found)
        assert difference_lines(found).startswith("content_sha256: A ")


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
    edit(b, lambda meta: (meta["source"].update(counters={"blank": True}), meta.pop("noticed")))
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
    edit(b, lambda meta: meta.pop("ids"))
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
    with pytest.raises(ValueError, match="limit=-1: expected 0 or more"):
        compared(a, b, limit=-1)


def test_of_equal_documents_the_first_goes_with_the_first(tmp_path: Path) -> None:
    a = cache(tmp_path / "a", ["x", "one", "x", "two", "x"], ["y", "z"])
    assert counts(compared(a, cache(tmp_path / "b", ["x", "one", "x", "two", "x"], ["y", "z"]))) == {}
    found = compared(a, cache(tmp_path / "c", ["x", "one", "two"], ["x", "y", "x", "z"]))
    assert counts(found) == {"moved": 2}
    assert [(told["document"], told["in_b"]["document"]) for told in found["moved"]["first"]] == [(2, 0), (4, 2)]


def test_of_equal_documents_those_of_one_source_id_go_together(tmp_path: Path) -> None:
    """A file is left out that others are equal to: it is gone, and none of the others is."""
    files = [("train", "one", "a.md"), ("train", "one", "b.md"), ("val", "one", "c.md"), ("train", "two", "d.md")]
    for name, documents in (("a", files), ("b", files[1:]), ("c", [files[0], ("train", "one", "e.md"), files[3]])):
        of(tmp_path / name, documents)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert counts(found) == {"only_a": 1} and found["only_a"]["first"][0]["source_id"] == "a.md"
    assert counts(compared(tmp_path / "b", tmp_path / "a")) == {"only_b": 1}
    found = compared(tmp_path / "a", tmp_path / "c")
    assert counts(found) == {"only_a": 1} and found["only_a"]["first"][0]["source_id"] == "c.md"


def test_a_list_of_source_ids_that_is_cut_is_an_error(tmp_path: Path) -> None:
    a, b = (cache(tmp_path / name, ["one", "two", "three"]) for name in "ab")
    path = b / "index" / "train_ids.txt"
    for content, said in (
        (b"id of one\n", "1 lines, expected 3"),
        (path.read_bytes() + b"x\n", "more lines, expected 3"),
    ):
        path.write_bytes(content)
        with pytest.raises(CacheError, match=rf"index/train_ids\.txt: {said}"):
            compared(a, b)


def test_caches_of_another_content_are_never_called_equal(tmp_path: Path) -> None:
    a, b = (cache(tmp_path / name, ["one"]) for name in "ab")
    real = json.loads((b / "meta.json").read_bytes())["content_sha256"]
    edit(b, lambda meta: meta.update(content_sha256="f" * 64))
    found = compared(a, b)
    assert found["settings"] == {} and counts(found) == {} and not is_equal(found)
    assert f"content_sha256: A {real[:12]}, B {'f' * 12}\n" in difference_lines(found)


def test_shards_that_hold_less_than_the_totals_say_are_an_error(tmp_path: Path) -> None:
    a, b = (cache(tmp_path / name, ["one", "two", "three"]) for name in "ab")
    edit(b, lambda meta: meta["shards"]["train"].pop())
    with pytest.raises(CacheError, match=r"meta\.json: its shards of train hold 8 tokens, its totals say 11"):
        compared(a, b)


def test_empty_objects_and_totals_are_told_once(tmp_path: Path) -> None:
    a, b = cache(tmp_path / "a", ["one"]), cache(tmp_path / "b", ["one", ""])
    settings = compared(a, b)["settings"]
    assert settings == {"documents_read": {"a": 1, "b": 2}, "dropped.empty": {"b": 1}}
    c = cache(tmp_path / "c", ["one", "two"])
    assert [key for key in compared(a, c)["settings"] if "tokens" in key] == ["totals.train_tokens"]


def test_matching_is_right_for_small_multisets_of_all_kinds() -> None:
    """Against counting by hand: what is common, what stays in its split, what moves."""
    draw = random.Random(0)
    for _ in range(300):
        a, b = ([[draw.randrange(4) for _ in range(draw.randrange(5))] for _ in range(2)] for _ in range(2))
        digests = np.array([[n, 7] for split in (*a, *b) for n in split], dtype=np.uint64).reshape(-1, 2)
        found = match(digests, [len(split) for split in (*a, *b)])
        of_a, of_b = (Counter(itertools.chain(*x)) for x in (a, b))
        stays = sum((Counter(mine) & Counter(theirs)).total() for mine, theirs in zip(a, b, strict=True))
        assert sum(map(len, found.only_a)) == (of_a - of_b).total()
        assert sum(map(len, found.only_b)) == (of_b - of_a).total()
        assert sum(len(left) for left, _ in found.moved) == (of_a & of_b).total() - stays
        for split, (left, right) in enumerate(found.moved):
            assert [a[split][i] for i in left] == [b[1 - split][i] for i in right] and sorted(left) == list(left)
            for value in range(4):  # the k-th with the k-th
                numbers = [j for i, j in zip(left, right, strict=True) if a[split][i] == value]
                assert numbers == sorted(numbers)


def test_a_tokenizer_has_settings_but_no_documents(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_bytes(meta_bytes({"kind": "tokenizer", "vocab_size": size}))
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found["compared"] is None and found["settings"] == {"vocab_size": {"a": 1, "b": 2}}
    assert "documents were not compared" in difference_lines(compared(tmp_path / "a", tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match="c: no such folder"):
        compared(tmp_path / "a", tmp_path / "c")
