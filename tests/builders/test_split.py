"""A split follows from text and seed alone, equal texts are in one, and budgets cut what does not fit (D5)."""

import hashlib
import itertools
import json
import random
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.disk import meta_bytes
from support.small_builds import batches_of, quick_folder
from support.splits import (
    IN_MEMORY,
    SPLITS,
    build,
    chat_key,
    die_at_document,
    hold_in_memory,
    key,
    letters,
    obvious_splits,
    stored,
)

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, read_meta
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.data.roam import list_roam_paths, split_roam_paths
from niels_gpt.engine import meta as meta_keys
from niels_gpt.engine.meta import BUILDER_VERSIONS
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import stats
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.recipes.plan import recipes

TEXTS = [f"Page {number} is about " + "the river and the mill "[: number % 24] for number in range(400)]


def named(texts):
    """Return documents whose source id is their text."""
    return [(None, text, text) for text in texts]


def source_ids(cache, split):
    lines = (cache / "index" / f"{split}_ids.txt").read_text(encoding="ascii").splitlines()
    return [line.encode().decode("unicode_escape") for line in lines]


def split_ids(folder, documents, tokenizer, train, val, **more):
    """Build a cache; returns the source ids of train and of val."""
    arguments = {"tokenizer": tokenizer, "shard_bytes": 1 << 20, "seed": 0, "shuffle_buffer": None, **more}
    build_pretrain(documents, folder, max_train_tokens=train, max_val_tokens=val, **arguments)
    return [source_ids(folder, split) for split in SPLITS]


def test_a_sweep_over_vocabularies_has_one_split(tmp_path, tiny_tokenizer):
    for name, budgets in {"all of it": (10**6, 10**5), "a part of it": (3_000, 300)}.items():
        found = [
            split_ids(tmp_path / name / type(tokenizer).__name__, named(TEXTS), tokenizer, *budgets)
            for tokenizer in (ByteTokenizer(), tiny_tokenizer)
        ]
        for short, long in zip(*found, strict=True):  # the budgets end sooner where a text has more tokens
            assert short == long[: len(short)] and len(short) > 3
        assert (found[0] == found[1]) == (name == "all of it")


def test_another_order_and_other_neighbours_give_the_same_split(tmp_path):
    order = random.Random(0).sample(TEXTS, len(TEXTS))
    first, second, half = (
        split_ids(tmp_path / name, named(texts), ByteTokenizer(), None, None, val_frac=0.1, shuffle_buffer=buffer)
        for name, texts, buffer in (("a", TEXTS, None), ("b", order, 7), ("c", TEXTS[::2], None))
    )
    assert [set(ids) for ids in first] == [set(ids) for ids in second]
    assert all(set(ids) < set(more) for ids, more in zip(half, first, strict=True))
    assert first[1] == [text for text in TEXTS if key(text) < 0.1 * 2**64]


@settings(derandomize=True, max_examples=30)
@given(
    texts=st.lists(st.sampled_from(["", "<|eot|>", *(f"text {number}" for number in range(6))]), max_size=14),
    share=st.sampled_from([0.0, 0.01, 0.5, 0.99]),
    held=st.sampled_from([0, 1 << 20]),
)
def test_equal_texts_are_in_one_split_and_counted(texts, share, held):
    expected = obvious_splits(texts, Fraction(share))
    kept = [text for text in texts if text in expected]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, pytest.MonkeyPatch.context() as patch:
        hold_in_memory(patch, held)
        if not kept:
            with pytest.raises(ValueError, match="no token for the train split"):
                build(Path(name, "c"), texts, None, None, val_frac=share)
            return
        meta = build(Path(name, "c"), texts, None, None, val_frac=share)
        found = {split: stored(Path(name, "c"), split) for split in SPLITS}
    assert found == {split: [text for text in kept if expected[text] == split] for split in SPLITS}
    assert meta["duplicates"] == {split: len(found[split]) - len(set(found[split])) for split in SPLITS}
    assert found["train"] and (bool(found["val"]) == (len(set(kept)) > 1 and share > 0))


def test_what_waits_for_val_is_bounded(tmp_path):
    """Of a share of a half 40 documents wait; behind them the nearest one is not looked for."""
    texts = list(itertools.islice((f"n{n}" for n in itertools.count() if key(f"n{n}") >= 2**63), 41))
    assert build(tmp_path / "short", texts[:39], None, None, val_frac=0.5)["docs"] == {"train": 38, "val": 1}
    assert stored(tmp_path / "short", "val") == [min(texts[:39], key=key)]
    assert build(tmp_path / "long", texts, None, None, val_frac=0.5)["docs"] == {"train": 41, "val": 0}


def test_a_build_that_is_resumed_has_the_split_it_had(monkeypatch):
    """The nearest document goes to val although it was not the nearest one of what had been read."""
    batches_of(monkeypatch, 2)
    texts = list(itertools.islice((f"n{n}" for n in itertools.count() if key(f"n{n}") >= 2**62), 12))
    arguments = {"train": None, "val": None, "val_frac": 0.25, "checkpoint_seconds": 0, "num_threads": 0}

    with quick_folder() as folder:
        whole = build(folder / "whole", texts, **arguments)
        assert whole["docs"]["val"] == 1
        for name in ("c", "changed"):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                die_at_document(patch, 6)
                build(folder / name, texts, **arguments)
        assert build(folder / "c", texts, **arguments) == whole
        nearer = next(f"m{n}" for n in itertools.count() if key(f"m{n}") < min(map(key, texts)))
        again = build(folder / "changed", [*texts, nearer], **arguments)
        assert again["docs"]["val"] == 2  # a document that came later moves nothing: the checkpoint has the bound


def chat(text, role="user"):
    return [{"role": role, "content": text}, {"role": "assistant", "content": "ok"}]


@settings(derandomize=True, max_examples=15)
@given(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=25), val_frac=st.sampled_from([0, 0.1, 0.5]))
def test_the_key_of_roles_and_contents_splits_chats(numbers, val_frac):
    roles = {0: "system"}
    chats = [
        (f"{row}", chat("x" if number < 2 else str(number), roles.get(number, "user")))
        for row, number in enumerate(numbers)
    ]
    keys = {number: chat_key(messages, 3) for number, (_, messages) in zip(numbers, chats, strict=True)}
    bound = val_frac * 2**64
    if val_frac:  # a split that would be empty gets the nearest
        bound = min(max(bound, min(keys.values()) + 1), max(keys.values()))
    in_val = {number for number in numbers if keys[number] < bound}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        meta = build_sft(chats, Path(name, "c"), tokenizer=ByteTokenizer(), val_frac=val_frac, seed=3)
        rows = {split: [int(row) for row in source_ids(Path(name, "c"), split)] for split in SPLITS}
    assert rows["val"] == [row for row, number in enumerate(numbers) if number in in_val]
    assert rows["train"] == [row for row, number in enumerate(numbers) if number not in in_val]
    for split in SPLITS:
        assert meta["duplicates"][split] == len(rows[split]) - len({numbers[row] for row in rows[split]})


def test_equal_notes_follow_the_first_and_distinct_ones_are_split_as_before(settings, mirror):
    """Copies of notes stand at the end of the list of files, so that the permutation of the others is what it was."""
    notes = mirror / "roam"
    paths = list_roam_paths(notes)
    texts = {Path(path).read_bytes(): path for path in reversed(paths)}
    distinct = [path for path in paths if texts[Path(path).read_bytes()] == path]
    for number, path in enumerate(distinct[::3]):
        shutil.copyfile(path, notes / f"~{number:03}.md")
    meta = recipes(settings)["pretrain/roam"](settings).meta
    cache = Path(settings.cache_dir) / "pretrain" / "roam"
    found = [{(notes / name).read_bytes() for name in source_ids(cache, split)} for split in SPLITS]
    expected = split_roam_paths(distinct, val_frac=settings.roam_val_frac, seed=settings.seed)
    assert found == [{Path(path).read_bytes() for path in paths if Path(path).stat().st_size} for paths in expected]
    assert not found[0] & found[1] and sum(meta["duplicates"].values()) >= len(distinct[::3]) - 1
    assert meta["val_frac"] == settings.roam_val_frac


def test_one_book_of_a_mirror_goes_to_train_and_of_two_one_goes_to_each(settings, mirror):
    shutil.rmtree(mirror / "gutenberg", ignore_errors=True)
    (mirror / "gutenberg").mkdir()
    for number, docs in ((1, {"train": 1, "val": 0}), (2, {"train": 1, "val": 1})):
        (mirror / "gutenberg" / f"book{number}.txt").write_text(f"The book {number} of the river and the mill.")
        assert recipes(settings)["pretrain/gutenberg"](settings).meta["docs"] == docs


def test_duplicates_of_upstreams_own_splits_are_counted_and_stay(tmp_path):
    lines = [("train", "a"), ("train", "a"), ("train", "b"), ("val", "a"), ("val", "c"), ("val", "c")]
    meta = build(tmp_path / "c", lines, None, None)
    assert meta["duplicates"] == {"train": 1, "val": 1} and meta["docs"] == {"train": 3, "val": 3}
    assert dict(stats(tmp_path / "c"))["duplicates"] == "train 1, val 1"


def test_verify_looks_at_the_number_of_duplicates(tmp_path):
    meta = build(tmp_path / "c", ["a"], 10, 0)
    wrong = [-1, 1, True, "0", None]
    for number, problems in [(0, 0), *((value, 1) for value in wrong)]:
        (tmp_path / "c" / "meta.json").write_bytes(meta_bytes({**meta, "duplicates": {"train": number, "val": 0}}))
        found = find_damage(tmp_path / "c", deep=False)
        assert len(found) == problems and all("duplicates.train" in damage.problem for damage in found)


def rare_long(lengths, val_frac, long_in_val):
    """Return texts of these lengths; those of more than ten letters are all in val, or all in train."""
    found = []
    for number, length in enumerate(lengths):
        texts = (f"{number} {tail} ".ljust(length, "x") for tail in itertools.count())
        found.append(next(text for text in texts if length <= 10 or (key(text) < val_frac * 2**64) == long_in_val))
    return found


@pytest.mark.parametrize(
    ("lengths", "long_in_val", "far"),
    [
        ([10] * 275 + [1000] * 25, False, True),  # 25 of 300 documents hold most tokens
        ([10] * 50 + [5_000], True, True),  # 50 small files and a big one
        ([10] * 50 + [5_000], False, True),
        ([10] * 300, False, False),
        ([10] * 3, False, False),
    ],
    ids=["25 of 300", "a big one in val", "a big one in train", "alike", "three"],
)
def test_a_share_of_tokens_far_from_what_was_asked_is_a_warning(tmp_path, caplog, lengths, long_in_val, far):
    texts = rare_long(lengths, 0.1, long_in_val)
    meta = build(tmp_path / "c", texts, None, None, val_frac=0.1)
    said = [record.getMessage() for record in caplog.records if "were asked for" in record.getMessage()]
    assert len(said) == far
    share = meta["val_tokens"] / sum(meta["totals"].values())
    assert all(f"{100 * share:.1f} %" in line and "10.0 %" in line for line in said)
    assert f"{share:.1%} of all tokens (10.0% asked for)" in dict(stats(tmp_path / "c"))["val"]


def test_chats_and_budgets_warn_of_a_far_share_too(tmp_path, caplog):
    chats = [chat("x" * 5 + str(row)) for row in range(60)]
    long = next(some for n in itertools.count() if chat_key(some := chat("x" * 5_000 + str(n)), 3) < 0.1 * 2**64)
    chats[7] = long
    build_sft(chats, tmp_path / "sft", tokenizer=ByteTokenizer(), val_frac=0.1, seed=3)
    assert caplog.text.count("were asked for") == 1
    build(tmp_path / "budget", rare_long([10] * 50 + [5_000], 0.1, True), 90_000, 10_000)
    assert caplog.text.count("were asked for") == 2
    build(tmp_path / "full", rare_long([10] * 50 + [5_000], 0.1, True), 90, 10)  # both are full: the share is exact
    build(tmp_path / "given", [("train", "a" * 99), ("val", "b")], None, None)
    assert caplog.text.count("were asked for") == 2


@pytest.mark.parametrize("key_", ["pretrain/roam", "sft/oasst1"])
def test_a_cache_of_builder_2_is_replaced(settings, key_, monkeypatch):
    recipe, cache = recipes(settings)[key_], Path(settings.cache_dir) / key_
    with monkeypatch.context() as patch:
        patch.setattr(meta_keys, "BUILDER_VERSIONS", dict.fromkeys(BUILDER_VERSIONS, 2))
        recipe(settings)
        meta = {name: value for name, value in read_meta(str(cache / "meta.json")).items() if name != "duplicates"}
        (cache / "meta.json").write_bytes(raw := meta_bytes(meta))
        record = cache.parent / ".versions" / cache.name / "recipe.json"
        said = json.loads(record.read_text()) | {"meta_sha256": hashlib.sha256(raw).hexdigest()}
        record.write_text(json.dumps(said))
        assert recipe(settings).reused
    assert meta["builder_version"] == 2 and not find_damage(cache, deep=True)
    verdicts = verify(cache, Limits(deep=True))
    verdicts.pop("repaired_share")  # of the sample's note that is not UTF-8
    assert not any(verdict.problems for verdict in verdicts.values())
    assert dict(stats(cache))["duplicates"] == "not counted"
    if meta["kind"] == "pretrain":
        data = PretrainTokenStreamDataset(str(cache / "train"), T=2, device="cpu")
    else:
        files = [str(cache / name) for name in ("train_tokens.bin", "train_idx.npy")]
        data = SFTExampleDataset(*files, T=512, device="cpu", eot_id=meta["special_token_ids"]["eot"])
    assert data.get_batch(B=3, generator=torch.Generator().manual_seed(0))[0].shape == (3, data.T)
    replaced = recipe(settings)
    assert not replaced.reused and replaced.meta["builder_version"] == BUILDER_VERSIONS[meta["kind"]]
    assert "duplicates" in replaced.meta


def obvious_split(documents, limits):
    """Fill the splits document by document: the slow oracle."""
    found = {"train": [], "val": []}
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


@settings(derandomize=True, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=26),
    limits=st.fixed_dictionaries({"train": st.integers(0, 60), "val": st.integers(0, 30)}),
)
def test_the_builder_splits_as_the_slow_oracle_does(lengths, limits):
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


def test_an_end_of_text_counts_as_a_token_and_may_be_cut(tmp_path):
    in_val, in_train = sorted(["aaa", "bbb"], key=key)
    meta = build(tmp_path / "c", [in_val, in_train], train=4, val=3, document_end="eot")
    assert meta["totals"] == {"train_tokens": 4, "val_tokens": 3}
    ids = [np.fromfile(tmp_path / "c" / split / "shard_00000.bin", dtype="<u2").tolist() for split in SPLITS]
    assert ids == [[*ByteTokenizer().encode(in_train), 4], ByteTokenizer().encode(in_val)]
    assert meta["cut"] == {"documents": 1, "tokens": 1}


def test_the_stream_is_not_read_further_than_the_budgets_and_a_batch(tmp_path):
    def endless():
        for number in itertools.count():
            yield None, f"{number:010}"

    arguments = {"tokenizer": ByteTokenizer(), "shard_bytes": 64, "seed": 0, "shuffle_buffer": 4}
    meta = build_pretrain(endless(), tmp_path / "c", max_train_tokens=90, max_val_tokens=10, **arguments)
    assert meta["totals"] == {"train_tokens": 90, "val_tokens": 10}
    assert meta["documents_read"] == 10 + meta["dropped"].get("split_full", 0) < 200


def test_text_with_a_sentinel_is_dropped_and_counted(tmp_path):
    meta = build(tmp_path / "c", ["aa", "b<|eot|>b", "", "cc"], train=4, val=2)
    assert meta["dropped"] == {"empty": 1, "sentinel_in_text": 1} and meta["documents_read"] == 4
    assert [stored(tmp_path / "c", split) for split in ("val", "train")] == [
        [text] for text in sorted(["aa", "cc"], key=key)
    ]


def test_documents_that_name_their_split_go_there_without_a_bound_or_until_it_is_full(tmp_path):
    meta = build(tmp_path / "c", [("train", "aa"), ("train", "bbb"), ("val", "c")], train=None, val=None)
    assert stored(tmp_path / "c", "train") == ["aa", "bbb"] and stored(tmp_path / "c", "val") == ["c"]
    assert meta["budget_reached"] == {"train": None, "val": None}
    meta = build(tmp_path / "full", [("train", "aaa"), ("train", "b"), ("val", "cc")], train=3, val=2)
    assert stored(tmp_path / "full", "train") == ["aaa"] and stored(tmp_path / "full", "val") == ["cc"]
    assert meta["dropped"] == {"split_full": 1}


NO_BUDGETS = [
    (-1, 5, {}, "max_train_tokens=-1"),
    (5, -2, {}, "max_val_tokens=-2"),
    (0, 10, {}, "no token for the train split: 1 documents read, 1 to val, dropped: none"),
    (None, None, {}, r"names no split.*val_frac"),
    (None, None, {"val_frac": 1.5}, r"val_frac=1\.5"),
]


@pytest.mark.parametrize(("train", "val", "extras", "named"), NO_BUDGETS)
def test_budgets_that_cannot_be_are_refused(tmp_path, train, val, extras, named):
    with pytest.raises(ValueError, match=named):
        build(tmp_path / "c", ["only"], train=train, val=val, **extras)
    assert {path.name for path in tmp_path.iterdir()} <= (set() if "max_" in named else {".versions"})
