"""What decides whether a finished cache is good: every check passes on a good one and says what it found in a bad one.

Run: pytest tests/test_verify.py
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from niels_gpt.build.describe import Source, content_sha256
from niels_gpt.build.pretrain import build_pretrain, build_stub
from niels_gpt.build.sft import build_sft
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.fileio import CacheError, sha256_file
from niels_gpt.inspection import checksums, damage
from niels_gpt.inspection import verify as module
from niels_gpt.inspection.verify import CHECKS, Limits, verify
from niels_gpt.recipes.plan import RECIPES, ensure_tokenizer
from niels_gpt.recipes.produce import cache_root, restart
from niels_gpt.remedies import rebuild_command
from niels_gpt.settings import Settings


def again(folder: Path) -> str:
    """Return the remedy of a damaged cache, or of its tokenizer."""
    remove = f"Remove {folder}, then build" if folder.name == "tokenizer" else "Build"
    return f"{remove} it again: {rebuild_command(folder)}"


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
"""Six tokens: usr q eot asst a eot; the last two carry loss."""


class SavedByteTokenizer(ByteTokenizer):
    """A byte tokenizer with a model file, so that its caches say whose ids they hold."""

    def __init__(self, model_path: Path) -> None:
        self.model_path = str(model_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache folder with tokenizer/, pretrain/notes (train: 3 shards of 10 tokens, no val), sft/chats (3 examples)."""
    folder = tmp_path / "cache"
    model = folder / "tokenizer" / "spm.model"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"a model")
    record = {"name": "spm.model", "bytes": 7, "sha256": sha256_file(model)}
    described = {"tokenizer_sha256": record["sha256"], "files": [record], "content_sha256": content_sha256([record])}
    write_meta(str(model.parent / "meta.json"), {"kind": "tokenizer", **described})
    notes(folder, [(None, "a" * 30)])
    chats(folder, [CHAT] * 3)
    return folder


def notes(root: Path, documents: Any, **arguments: Any) -> Path:
    """Build pretrain/notes anew: 30 tokens for train and none for val unless the arguments say otherwise."""
    path = root / "pretrain" / "notes"
    chosen = {"max_train_tokens": 30, "max_val_tokens": 0, "shard_bytes": 20, "seed": 0, "shuffle_buffer": None}
    tokenizer = SavedByteTokenizer(root / "tokenizer" / "spm.model")
    build_pretrain(documents, path, tokenizer=tokenizer, **{**chosen, **arguments})
    return path


def chats(root: Path, examples: Any, val_frac: float = 0) -> Path:
    """Build sft/chats anew."""
    path, tokenizer = root / "sft" / "chats", SavedByteTokenizer(root / "tokenizer" / "spm.model")
    build_sft(examples, path, tokenizer=tokenizer, val_frac=val_frac, seed=0)
    return path


def problems(cache: Path, check: str, **limits: Any) -> list[str]:
    """Return what one check finds."""
    return verify(cache, Limits(**limits), names=[check])[check]


def change(cache: Path, **keys: Any) -> None:
    """Change keys of a cache's meta.json."""
    path = cache / "meta.json"
    write_meta(str(path), {**json.loads(path.read_bytes()), **keys})


def put(path: Path, position: int, token: int) -> None:
    """Write one id into a token file."""
    tokens = np.fromfile(path, dtype="<u2")
    tokens[position] = token
    tokens.tofile(path)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("key", ["tokenizer", "pretrain/notes", "sft/chats"])
def test_a_good_cache_passes_every_check(root: Path, key: str, deep: bool) -> None:
    kind = read_meta(str(root / key / "meta.json"))["kind"]
    assert verify(root / key, Limits(deep=deep)) == {check.name: [] for check in CHECKS[kind]}


def test_every_cache_of_the_recipes_passes_every_blocking_check(settings: Settings) -> None:
    for build in (ensure_tokenizer, *RECIPES.values()):
        outcome = build(settings)
        found = verify(outcome.path, Limits(deep=True))
        blocking = [check.name for check in CHECKS[outcome.meta["kind"]] if check.blocking]
        assert {name: found[name] for name in blocking} == {name: [] for name in blocking}, outcome.key


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:18])


FILE_DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("pretrain/notes/train/shard_00001.bin", cut, "18 bytes, expected 20 by its meta.json"),
    ("pretrain/notes/train/shard_00001.bin", Path.unlink, "no such file, expected 20 bytes by its meta.json"),
    ("pretrain/notes/index/train_docs.npy", Path.unlink, "no such file, expected 144 bytes by its meta.json"),
    ("sft/chats/train_tokens.bin", cut, "18 bytes, expected 36 by its meta.json"),
    ("sft/chats/val_idx.npy", Path.unlink, "no such file, expected 128 bytes by its meta.json"),
]


@pytest.mark.parametrize(("name", "damage", "found"), FILE_DAMAGE)
def test_a_file_that_is_cut_or_missing_is_named_with_the_remedy(
    root: Path, name: str, damage: Callable[[Path], None], found: str
) -> None:
    damage(root / name)
    cache = root / Path(*Path(name).parts[:2])
    assert problems(cache, "files_match_meta") == [f"{root / name}: {found}. {again(cache)}"]


@pytest.mark.parametrize(("key", "name"), [("pretrain/notes", "train/shard_00001.bin"), ("tokenizer", "spm.model")])
def test_a_flipped_bit_is_found_by_a_deep_check_and_in_a_model_always(root: Path, key: str, name: str) -> None:
    file = root / key / name
    before, content = sha256_file(file), file.read_bytes()
    file.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    problem = f"{file}: sha256 {sha256_file(file)[:12]}, expected {before[:12]} by its meta.json"
    where = "" if key == "tokenizer" else "; bit 0 of byte 4 is flipped"
    expected = [f"{problem}{where}. " + again(root / key)]
    assert problems(root / key, "files_match_meta", deep=True) == expected
    assert problems(root / key, "files_match_meta") == (expected if key == "tokenizer" else [])


def test_a_content_sha256_of_other_files_is_a_problem(root: Path) -> None:
    cache = root / "sft" / "chats"
    real = read_meta(str(cache / "meta.json"))["content_sha256"]
    change(cache, content_sha256="f" * 64)
    assert problems(cache, "files_match_meta") == [
        f"{cache}/meta.json: content_sha256 is {'f' * 12}, but the files it names give {real[:12]}. " + again(cache)
    ]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_name_that_leaves_the_folder_is_a_problem_and_its_file_is_not_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    cache = root / "pretrain" / "notes"
    (cache.resolve().parent / "outside.bin").write_bytes(b"\xff" * 20)  # ids of 65,535, were they read
    name = str(cache.resolve().parent / "outside.bin") if absolute else "../outside.bin"
    meta = read_meta(str(cache / "meta.json"))
    meta["shards"]["train"][1]["name"] = name
    change(cache, shards=meta["shards"])
    opened: list[str] = []
    for owner, reader in ((module, "mmap_tokens"), (damage, "open_regular"), (checksums, "open_regular")):
        real = getattr(owner, reader)
        monkeypatch.setattr(
            owner, reader, lambda path, real=real, **size: opened.append(path.name) or real(path, **size)
        )
    found = verify(cache, Limits(deep=True))
    expected = "expected the relative path of a file inside the cache"
    assert found["files_match_meta"][0].startswith(f"{cache}/meta.json: shards.train[1].name is ")
    assert found["ids_below_vocab_size"][0].startswith(f"{cache}: a file's name is ")
    assert all(expected in found[check][0] for check in ("files_match_meta", "ids_below_vocab_size"))
    assert "shard_00000.bin" in opened and "outside.bin" not in opened


@pytest.mark.parametrize("chunk_tokens", [4, 10, 1 << 22])
def test_an_id_that_is_not_in_the_vocabulary_is_found_at_its_position(
    root: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK_TOKENS", chunk_tokens)
    cache = root / "pretrain" / "notes"
    shard = cache / "train" / "shard_00001.bin"
    put(shard, 2, 299)  # the last id of the 300
    assert problems(cache, "ids_below_vocab_size") == []
    put(shard, 9, 65_535)
    put(shard, 5, 300)
    assert problems(cache, "ids_below_vocab_size") == [
        f"{shard}: token 5 is id 300, expected ids below vocab_size 300; 2 of 10 tokens are not. {again(cache)}"
    ]
    change(cache, vocab_size=65_536)  # every uint16 is an id of it
    assert problems(cache, "ids_below_vocab_size") == []


def test_a_shard_that_cannot_be_read_is_a_problem_and_the_others_are_read(root: Path) -> None:
    cache = root / "pretrain" / "notes"
    (cache / "train" / "shard_00000.bin").unlink()
    cut(cache / "train" / "shard_00001.bin")
    put(cache / "train" / "shard_00002.bin", 0, 300)
    missing, shorter, wrong = problems(cache, "ids_below_vocab_size")
    assert missing.startswith(f"{cache}/train/shard_00000.bin: no such token file")
    assert shorter.startswith(f"{cache}/train/shard_00001.bin: 18 bytes, expected 20 by its meta.json")
    assert wrong.startswith(f"{cache}/train/shard_00002.bin: token 0 is id 300")


@pytest.mark.parametrize("key", ["pretrain/notes", "sft/chats"])
def test_ids_of_another_tokenizer_than_the_one_beside_the_cache_are_a_problem(root: Path, key: str) -> None:
    model, real = root / "tokenizer" / "spm.model", sha256_file(root / "tokenizer" / "spm.model")
    model.write_bytes(b"another")
    other = sha256_file(model)
    ours, theirs = f"{root / key}/meta.json", root / "tokenizer"
    assert problems(root / key, "tokenizer_matches") == [
        f"{model}: sha256 {other[:12]}, but {ours} has ids of tokenizer {real[:12]}. {again(theirs)}"
    ]
    change(theirs, tokenizer_sha256=other)
    build = f"Build the cache again: {rebuild_command(root / key)}"
    assert problems(root / key, "tokenizer_matches") == [
        f"{ours}: ids of tokenizer {real[:12]}, but {theirs}/meta.json is of tokenizer {other[:12]}. {build}",
        f"{model}: sha256 {other[:12]}, but {ours} has ids of tokenizer {real[:12]}. {build}",
    ]


def test_a_tokenizer_that_is_not_there_is_a_problem(root: Path) -> None:
    cache, sha256 = root / "sft" / "chats", sha256_file(root / "tokenizer" / "spm.model")
    (root / "tokenizer" / "spm.model").unlink()
    (problem,) = problems(cache, "tokenizer_matches")
    assert problem.startswith(f"{root}/tokenizer/spm.model: no such file, expected tokenizer {sha256[:12]}")
    shutil.rmtree(root / "tokenizer")
    (problem,) = problems(cache, "tokenizer_matches")
    assert problem == f"{cache}: no tokenizer/meta.json beside or above it, expected tokenizer {sha256[:12]}"
    change(cache, tokenizer_sha256=None)
    (problem,) = problems(cache, "tokenizer_matches")
    assert "tokenizer_sha256 is null, so nothing says whose ids these are" in problem


def test_an_example_without_a_token_that_carries_loss_is_found_by_its_number(root: Path) -> None:
    cache = root / "sft" / "chats"
    put(cache / "train_tokens.bin", 6 + 3, 2)  # example 1: usr q eot usr a eot
    assert problems(cache, "examples_supervised") == [
        f"{cache}/train: 1 of 3 examples have no token that carries loss, expected at least one in each. Examples: 1. "
        + again(cache),
        f"{cache}/train: 4 tokens carry loss, expected 6 by supervised_tokens in its meta.json. {again(cache)}",
    ]


def test_only_the_first_examples_without_loss_are_named(root: Path) -> None:
    distinct = [[{**CHAT[0], "content": chr(ord("a") + number)}, *CHAT[1:]] for number in range(12)]
    cache = chats(root, distinct, val_frac=0.5)
    assert problems(cache, "examples_supervised") == []
    for split in ("train", "val"):
        tokens = np.fromfile(cache / f"{split}_tokens.bin", dtype="<u2")
        np.where(tokens == 3, 2, tokens).astype("<u2").tofile(cache / f"{split}_tokens.bin")
    of_train, _, of_val, sum_of_val = problems(cache, "examples_supervised")
    assert of_train.startswith(f"{cache}/train: 6 of 6 examples") and "Examples: 0, 1, 2, 3, 4 and more. " in of_train
    assert of_val.startswith(f"{cache}/val: 6 of 6 examples")
    assert sum_of_val.startswith(f"{cache}/val: 0 tokens carry loss, expected 12 by")


def test_a_budget_that_was_not_reached_is_a_problem(root: Path) -> None:
    cache = notes(root, [(None, "a" * 1_030)], max_train_tokens=2_000)
    assert problems(cache, "budget_reached") == [
        f"{cache}/meta.json: train has 1,030 of 2,000 tokens: the source ended first. "
        "Give it more text, or lower the budget"
    ]
    cache = notes(root, [("train", "a"), ("val", "b")], max_train_tokens=None, max_val_tokens=None)  # no budget
    assert problems(cache, "budget_reached") == []


def test_a_cache_whose_source_lacks_a_split_says_which(root: Path) -> None:
    cache = notes(root, [("val", "b" * 10)], max_train_tokens=None, max_val_tokens=None, partial=True)
    found = verify(cache, Limits(deep=True))
    assert found.pop("budget_reached") == [
        f"{cache}/meta.json: built is partial: the source lacks a split. Empty: train"
    ]
    assert set(map(tuple, found.values())) == {()}


def test_a_stub_passes(root: Path) -> None:
    cache, tokenizer = root / "pretrain" / "stub", SavedByteTokenizer(root / "tokenizer" / "spm.model")
    build_stub(cache, tokenizer=tokenizer, source=Source(name="g"), seed=0, shard_bytes=20)
    assert verify(cache, Limits(deep=True)) == {check.name: [] for check in CHECKS["pretrain"]}


def test_dropped_documents_above_the_limit_are_a_problem_with_the_counts(root: Path) -> None:
    texts = ["", "<|asst|>", *["a"] * 18]  # 2 of 20
    cache = notes(root, [(None, text) for text in texts])
    assert problems(cache, "dropped_share", max_dropped_share=0.1) == []
    assert problems(cache, "dropped_share") == [
        f"{cache}/meta.json: 2 of 20 documents were dropped (10.00%), expected at most 5.00%: "
        "empty 1, sentinel_in_text 1"
    ]
    cache = chats(root, [CHAT, CHAT, CHAT[:1]])
    assert problems(cache, "dropped_share") == [
        f"{cache}/meta.json: 1 of 3 examples were dropped (33.33%), expected at most 5.00%: no_assistant_turn 1"
    ]


def test_documents_for_a_split_that_is_full_are_not_lost(root: Path) -> None:
    texts = [("train", "a" * 30), ("train", "b" * 30), ("val", "c")]
    cache = notes(root, texts, max_val_tokens=1)
    assert read_meta(str(cache / "meta.json"))["dropped"] == {"split_full": 1}
    assert problems(cache, "dropped_share") == []


MALFORMED: list[tuple[str, str, dict[str, Any]]] = [
    ("pretrain/notes", "files_match_meta", {"shards": 3}),
    ("pretrain/notes", "files_match_meta", {"shards": {"train": [{"name": "train/shard_00000.bin"}]}}),
    ("pretrain/notes", "files_match_meta", {"index": {"train": {"name": 3, "bytes": 3}}}),
    ("pretrain/notes", "files_match_meta", {"index": {"train": {"name": "a\0b", "bytes": 3, "sha256": ""}}}),
    ("pretrain/notes", "ids_below_vocab_size", {"vocab_size": "many"}),
    ("pretrain/notes", "ids_below_vocab_size", {"shards": {"train": 3}}),
    ("pretrain/notes", "budget_reached", {"budget_reached": None}),
    ("pretrain/notes", "budget_reached", {"built": "partial", "totals": None}),
    ("pretrain/notes", "dropped_share", {"dropped": [1]}),
    ("pretrain/notes", "dropped_share", {"dropped": {"empty": 1}, "documents_read": 0}),
    ("sft/chats", "examples_supervised", {"supervised_tokens": {}}),
    ("sft/chats", "examples_supervised", {"shards": {}}),
    ("sft/chats", "examples_supervised", {"totals": {}}),
]


@pytest.mark.parametrize(("key", "check", "keys"), MALFORMED)
def test_a_malformed_meta_json_is_a_problem_that_names_it(root: Path, key: str, check: str, keys: Any) -> None:
    change(root / key, **keys)
    found = verify(root / key, Limits(deep=True))[check]
    assert found and str(root / key) in found[-1]


def test_a_meta_json_that_cannot_be_read_is_an_error(root: Path) -> None:
    cache = root / "sft" / "chats"
    change(cache, kind="notes")
    with pytest.raises(
        CacheError, match=r"chats/meta\.json: kind is 'notes', expected one of tokenizer, pretrain, sft"
    ):
        verify(cache, Limits())
    (cache / "meta.json").write_bytes(b"{")
    with pytest.raises(CacheError, match=r"meta\.json: not JSON"):
        verify(cache, Limits())
    with pytest.raises(FileNotFoundError, match=r"none/meta\.json: no such file"):
        verify(root / "sft" / "none", Limits())


def test_only_the_named_checks_are_made(root: Path) -> None:
    assert list(verify(root / "sft" / "chats", Limits(), names=["tokenizer_matches"])) == ["tokenizer_matches"]
    assert verify(root / "sft" / "chats", Limits(), names=[]) == {}
    with pytest.raises(ValueError, match=r"no check 'budget_reached' of kind sft, expected some of files_match_meta"):
        verify(root / "sft" / "chats", Limits(), names=["budget_reached"])


def test_a_check_reports_twenty_problems_at_most(root: Path) -> None:
    cache = notes(root, [(None, "a" * 21)], shard_bytes=2, max_train_tokens=21)
    shutil.rmtree(cache / "train")
    found = problems(cache, "files_match_meta")
    assert len(found) == 21 and found[-1] == "... and more" and "train/shard_00019.bin: no such file" in found[-2]
    cache = notes(root, [(None, "b" * 20)], shard_bytes=2, max_train_tokens=20)
    shutil.rmtree(cache / "train")
    assert len(problems(cache, "files_match_meta")) == 20


def test_messages_name_the_path_that_was_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "sft" / "chats" / "train_tokens.bin").unlink()
    monkeypatch.chdir(root)
    found = verify(Path("sft/chats"), Limits())
    for check in ("files_match_meta", "ids_below_vocab_size", "examples_supervised"):
        (problem,) = found[check]
        assert problem.startswith("sft/chats/train_tokens.bin: no such ") and ".versions" not in problem


def test_the_remedy_mends_what_a_second_build_would_reuse(settings: Settings) -> None:
    ensure_tokenizer(settings)
    cache = RECIPES["sft/oasst1"](settings).path
    assert cache == cache_root(settings) / "sft" / "oasst1"
    put(cache / "train_tokens.bin", 0, 65_535)  # the size is as before, and sizes are what a build looks at
    assert RECIPES["sft/oasst1"](settings).reused
    found = verify(cache, Limits(deep=True))
    assert all(again(cache) in found[name][0] for name in ("files_match_meta", "ids_below_vocab_size"))
    restart(settings, "sft/oasst1")  # --restart
    assert not RECIPES["sft/oasst1"](settings).reused
    assert not any(verify(cache, Limits(deep=True, max_dropped_share=1)).values())


def test_no_check_loads_torch(root: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from niels_gpt.inspection.verify import Limits, verify
for key in ("tokenizer", "pretrain/notes", "sft/chats"):
    assert not any(verify(Path({str(root)!r}) / key, Limits(deep=True)).values())
print(sorted({{"torch", "datasets", "matplotlib", "pyarrow", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
