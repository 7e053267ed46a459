"""The named checks of a finished cache: each passes on a good one, and says what it found in a bad one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import small_caches
from support.commands import build_again, niels_gpt
from support.errors import refused
from support.looking import blocks_of, checks_of
from support.power_loss import put
from support.small_caches import CHAT, build_chats, build_notes, built_caches, change_meta, put_token

from niels_gpt.cache.build_pretrain import build_stub
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.verify import find_damage, refusal, verify
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.records import cache_root
from niels_gpt.recipes.request import restart
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.storage.fileio import sha256_file


@pytest.fixture
def root(tmp_path):
    """Caches: tokenizer/, pretrain/notes (train: 3 shards of 10 tokens, no val) and sft/chats (3 examples)."""
    put(built_caches(), tmp_path / "cache")
    return tmp_path / "cache"


def problems(cache, check, **limits):
    """Return what one check finds."""
    return verify(cache, Limits(**limits), names=[check])[check].problems


def all_problems(cache, **limits):
    """Return what each check finds that finds something."""
    verdicts = verify(cache, Limits(**limits))
    return {name: verdict.problems for name, verdict in verdicts.items() if verdict.problems}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("key", ["tokenizer", "pretrain/notes", "sft/chats"])
def test_a_good_cache_passes_every_check(root, key, deep):
    kind = read_meta(str(root / key / "meta.json"))["kind"]
    assert list(verify(root / key, Limits(deep=deep))) == checks_of(kind)
    assert all_problems(root / key, deep=deep) == {}


def test_a_check_says_what_it_measured_and_the_limit_passed_or_failed(root):
    found = verify(root / "sft" / "chats", Limits())
    assert all(verdict.sentence and verdict.values for verdict in found.values())
    tokens = sum(
        read_meta(str(root / "sft/chats/meta.json"))["totals"][f"{split}_tokens"] for split in ("train", "val")
    )
    assert found["ids_below_vocab_size"].values["tokens"] == tokens
    assert found["examples_supervised"].values["examples"] == 3
    assert 0 < float(found["examples_supervised"].values["supervised_share"]) < 1
    cache = build_notes(root, [(None, text) for text in ("", *["a"] * 9)], max_train_tokens=2_000)
    found = verify(cache, Limits(max_dropped_share=0.05))
    assert found["dropped_share"].problems
    assert found["dropped_share"].values["dropped_share"] == 0.1
    assert found["dropped_share"].values["limit"] == "5 %"
    assert found["budget_reached"].values["train_tokens"] == 9
    assert "2,000" in found["budget_reached"].sentence


def test_every_cache_of_the_recipes_passes_every_blocking_check_and_has_no_damage(settings):
    for build in (ensure_tokenizer, *recipes(settings).values()):
        outcome = build(settings)
        blocking = {*checks_of(outcome.meta["kind"], blocking=True)}
        assert blocking.isdisjoint(all_problems(outcome.path, deep=True)), outcome.key
        assert find_damage(outcome.path, deep=True) == find_damage(outcome.path, deep=False) == [], outcome.key


@pytest.mark.parametrize(("key", "name"), [("pretrain/notes", "train/shard_00001.bin"), ("tokenizer", "spm.model")])
def test_a_flipped_bit_is_found_by_a_deep_check_and_in_a_model_always(root, key, name):
    file = root / key / name
    before, content = sha256_file(file), file.read_bytes()
    file.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    problem = f"{file}: sha256 {sha256_file(file)[:12]}, expected {before[:12]} by its meta.json"
    where = "" if key == "tokenizer" else "; bytes 0 to 20 differ"
    expected = [f"{problem}{where}. " + build_again(root / key)]
    assert problems(root / key, "files_match_meta", deep=True) == expected
    assert problems(root / key, "files_match_meta") == (expected if key == "tokenizer" else [])


@pytest.mark.parametrize("read_bytes", [8, 16, 1 << 22])
def test_an_id_of_no_vocabulary_is_found_by_place(root, read_bytes):
    cache = root / "pretrain" / "notes"
    shard = cache / "train" / "shard_00001.bin"
    put_token(shard, 2, 299)  # the last id of the 300
    assert problems(cache, "ids_below_vocab_size") == []
    put_token(shard, 9, 65_535)
    put_token(shard, 5, 300)
    with blocks_of(read_bytes=read_bytes):
        (problem,) = problems(cache, "ids_below_vocab_size")
    assert (
        problem.startswith(f"{shard}: token 5 is id 300, ")
        and "2 of 10 tokens" in problem
        and build_again(cache) in problem
    )
    change_meta(cache, vocab_size=65_536)  # every uint16 is an id of it
    assert problems(cache, "ids_below_vocab_size") == []


def test_a_shard_that_cannot_be_read_is_a_problem_and_the_others_are_read(root):
    cache = root / "pretrain" / "notes"
    (cache / "train" / "shard_00000.bin").unlink()
    os.truncate(cache / "train" / "shard_00001.bin", 18)
    put_token(cache / "train" / "shard_00002.bin", 0, 300)
    missing, shorter, wrong = problems(cache, "ids_below_vocab_size")
    assert missing.startswith(f"{cache}/train/shard_00000.bin: no such file")
    assert shorter.startswith(f"{cache}/train/shard_00001.bin: 18 bytes, expected 20 by its meta.json")
    assert wrong.startswith(f"{cache}/train/shard_00002.bin: token 0 is id 300")


@pytest.mark.parametrize("key", ["pretrain/notes", "sft/chats"])
def test_ids_of_another_tokenizer_than_the_one_beside_the_cache_are_a_problem(root, key):
    model, real = root / "tokenizer" / "spm.model", sha256_file(root / "tokenizer" / "spm.model")
    model.write_bytes(b"another")
    other = sha256_file(model)
    ours, theirs = f"{root / key}/meta.json", root / "tokenizer"
    wrong = f"{model}: sha256 {other[:12]}, but {ours} has ids of tokenizer {real[:12]}."
    assert problems(root / key, "tokenizer_matches") == [f"{wrong} {build_again(theirs)}"]
    change_meta(theirs, tokenizer_sha256=other)
    build = build_again(root / key, "E402")
    assert problems(root / key, "tokenizer_matches") == [
        f"{ours}: ids of tokenizer {real[:12]}, but {theirs}/meta.json names tokenizer {other[:12]}. {build}",
        f"{wrong} {build}",
    ]


def test_a_tokenizer_that_is_not_there_is_a_problem(root):
    cache, sha256 = root / "sft" / "chats", sha256_file(root / "tokenizer" / "spm.model")
    (root / "tokenizer" / "spm.model").unlink()
    (problem,) = problems(cache, "tokenizer_matches")
    assert problem.startswith(f"{root}/tokenizer/spm.model: no such file, expected tokenizer {sha256[:12]}")
    shutil.rmtree(root / "tokenizer")
    (problem,) = problems(cache, "tokenizer_matches")
    assert problem == f"{cache}: no tokenizer/meta.json beside or above it, expected tokenizer {sha256[:12]}"
    change_meta(cache, tokenizer_sha256=None)
    (problem,) = problems(cache, "tokenizer_matches")
    assert "tokenizer_sha256 is null, expected" in problem


def test_an_example_without_a_token_that_carries_loss_is_found_by_its_number(root):
    cache = root / "sft" / "chats"
    put_token(cache / "train_tokens.bin", 6 + 3, 2)  # example 1: usr q eot usr a eot
    first, second = problems(cache, "examples_supervised")
    assert first.startswith(f"{cache}/train_tokens.bin: 1 of 3 examples have no") and "Examples: 1. " in first
    assert (
        second.startswith(f"{cache}/meta.json: supervised_tokens.train is 6, but 4 tokens")
        and build_again(cache) in second
    )


def test_only_the_first_examples_without_loss_are_named(root):
    distinct = [[{**CHAT[0], "content": chr(ord("a") + number)}, *CHAT[1:]] for number in range(12)]
    cache = build_chats(root, distinct, val_frac=0.5)
    assert problems(cache, "examples_supervised") == []
    for split in ("train", "val"):
        tokens = np.fromfile(cache / f"{split}_tokens.bin", dtype="<u2")
        np.where(tokens == 3, 2, tokens).astype("<u2").tofile(cache / f"{split}_tokens.bin")
    train, val = (len(np.load(cache / f"{split}_idx.npy")) for split in ("train", "val"))
    of_train, _, of_val, sum_of_val = problems(cache, "examples_supervised")
    assert f"train_tokens.bin: {train} of {train} examples" in of_train and train > 5
    assert "Examples: 0, 1, 2, 3, 4 and more. " in of_train
    assert f"val_tokens.bin: {val} of {val} examples" in of_val
    assert f"supervised_tokens.val is {2 * val}, but 0 tokens" in sum_of_val


def test_a_budget_that_was_not_reached_is_a_problem(root):
    cache = build_notes(root, [(None, "a" * 1_030)], max_train_tokens=2_000)
    (problem,) = problems(cache, "budget_reached")
    assert problem.startswith(f"{cache}/meta.json: train has 1,030 of 2,000 tokens") and "lower the budget" in problem
    cache = build_notes(root, [("train", "a"), ("val", "b")], max_train_tokens=None, max_val_tokens=None)  # no budget
    assert problems(cache, "budget_reached") == []


def test_a_cache_whose_source_lacks_a_split_says_which_and_a_stub_passes(root):
    cache = build_notes(root, [("val", "b" * 10)], max_train_tokens=None, max_val_tokens=None, partial=True)
    problem = f"{cache}/meta.json: built is partial: the source lacks a split. Empty: train"
    assert all_problems(cache, deep=True) == {"budget_reached": [problem]}
    stub = root / "pretrain" / "stub"
    build_stub(stub, tokenizer=small_caches.SavedByteTokenizer(root), source=Source(name="g"), seed=0, shard_bytes=20)
    assert all_problems(stub, deep=True) == {}


def test_dropped_documents_above_the_limit_are_a_problem_with_the_counts(root):
    texts = ["", "<|asst|>", *["a"] * 18]  # 2 of 20
    cache = build_notes(root, [(None, text) for text in texts])
    assert problems(cache, "dropped_share", max_dropped_share=0.1) == []
    (problem,) = problems(cache, "dropped_share")
    assert "2 of 20 documents were dropped (10.00%), expected at most 5.00%: empty 1, sentinel_in_text 1" in problem
    (problem,) = problems(build_chats(root, [CHAT, CHAT, CHAT[:1]]), "dropped_share")
    assert "1 of 3 examples were dropped (33.33%)" in problem and "no_assistant_turn 1" in problem
    source = {"kind": "own", "counters": {"malformed": 2, "not_text": 1}}
    change_meta(root / "sft" / "chats", examples_read=3, dropped={"malformed": 1}, source=source)
    (problem,) = problems(root / "sft" / "chats", "dropped_share", max_dropped_share=0.5)
    assert "4 of 6 examples were dropped (66.67%), expected at most 50.00%: malformed 3, not_text 1" in problem
    texts = [("train", "a" * 30), ("train", "b" * 30), ("val", "c")]
    cache = build_notes(root, texts, max_val_tokens=1)
    assert read_meta(str(cache / "meta.json"))["dropped"] == {"split_full": 1}
    assert problems(cache, "dropped_share") == []


MALFORMED = [
    ("pretrain/notes", "files_match_meta", {"shards": 3}),
    ("pretrain/notes", "files_match_meta", {"content_sha256": "f" * 64}),
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
def test_a_malformed_meta_json_is_a_problem_that_names_it(root, key, check, keys):
    change_meta(root / key, **keys)
    found = problems(root / key, check, deep=True)
    assert found and str(root / key) in found[-1]


def test_a_meta_json_that_cannot_be_read_is_an_error(root):
    cache = root / "sft" / "chats"
    change_meta(cache, kind="notes")
    with refused("E208", "kind is 'notes'", "tokenizer"):
        verify(cache, Limits())
    (cache / "meta.json").write_bytes(b"{")
    with refused("E202", "meta.json"):
        verify(cache, Limits())
    with refused("E204", "none/meta.json", kind=FileNotFoundError):
        verify(root / "sft" / "none", Limits())


REFUSED = [
    ("tokenizer_sha256", {}, "tokenizer_sha256 is {}"),
    ("tokenizer_sha256", None, "tokenizer_sha256 is absent"),
    ("tokenizer_sha256", "e" * 64, "ids of tokenizer eeeeeeeeeeee, expected tokenizer"),
    ("utf8_bytes", {"train": -1, "val": 0}, "utf8_bytes.train is -1"),
    ("utf8_bytes", {"val": 3}, "no utf8_bytes of a pretrain split train"),
    ("built", False, "built is false, but it names files that hold something"),
]


@pytest.mark.parametrize(("key", "value", "problem"), REFUSED)
def test_what_readers_refuse_is_a_damage_and_is_listed(root, key, value, problem):
    cache = root / "pretrain" / "notes"
    meta = {**read_meta(str(cache / "meta.json")), key: value}
    write_meta(str(cache / "meta.json"), {name: kept for name, kept in meta.items() if kept is not None})
    for deep in (False, True):
        (found,) = find_damage(cache, deep=deep)
        assert found.file == "meta.json" and problem in found.problem
    done = niels_gpt("list", root)
    _, *lines = done.out.splitlines()
    row, reason = [line for line in lines if line.startswith("pretrain/notes")]
    assert row.split()[1] == "refused" and f"refused: meta.json: {problem}"[:40] in reason
    assert done.status == 3
    rows = {row["key"]: row for row in niels_gpt("list", "--json", root).json["caches"]}
    assert problem in rows["pretrain/notes"]["refused"] and rows["pretrain/notes"]["state"] == "refused"
    assert rows["tokenizer"]["refused"] is None


def test_a_lost_folder_is_refused_and_another_tokenizer_beside_a_cache_is_its_damage(root):
    cache, tokenizer = root / "pretrain" / "notes", root / "tokenizer"
    (cache / "train").rename(cache / "elsewhere")
    assert refusal(cache) == "train: no such folder"
    (cache / "elsewhere").rename(cache / "train")
    change_meta(tokenizer, tokenizer_sha256="e" * 64)
    (found,) = find_damage(cache, deep=False)
    assert "the readers refuse it" in found.problem and "expected tokenizer eeeeeeeeeeee" in found.problem
    assert problems(cache, "readers_open")
    (tokenizer / "meta.json").write_bytes(b"{")
    (found,) = find_damage(cache, deep=False)
    assert "tokenizer/meta.json: not JSON" in found.problem


def test_a_split_with_tokens_and_no_shard_is_refused_as_by_its_reader(root):
    cache = root / "pretrain" / "notes"
    change_meta(cache, shards={"train": [], "val": []})
    with refused("E204", "train: this split has no shard"):
        PretrainSplit(cache / "train")
    assert refusal(cache) == "meta.json: shards.train is [], expected the files of its tokens"
    assert [niels_gpt(*words).status for words in (("stats", cache), ("list", root))] == [3, 3]


def test_only_the_named_checks_are_made(root):
    assert list(verify(root / "sft" / "chats", Limits(), names=["tokenizer_matches"])) == ["tokenizer_matches"]
    assert verify(root / "sft" / "chats", Limits(), names=[]) == {}
    with refused("E102", "'budget_reached'", "kind sft", "files_match_meta"):
        verify(root / "sft" / "chats", Limits(), names=["budget_reached"])


def test_a_check_reports_twenty_problems_at_most(root):
    cache = build_notes(root, [(None, "a" * 21)], shard_bytes=2, max_train_tokens=21)
    shutil.rmtree(cache / "train")
    found = problems(cache, "files_match_meta")
    assert len(found) == 21 and found[-1] == "... and more" and "train/shard_00019.bin: no such file" in found[-2]
    cache = build_notes(root, [(None, "b" * 20)], shard_bytes=2, max_train_tokens=20)
    shutil.rmtree(cache / "train")
    assert len(problems(cache, "files_match_meta")) == 20


def test_messages_name_the_path_that_was_given(root, monkeypatch):
    (root / "sft" / "chats" / "train_tokens.bin").unlink()
    monkeypatch.chdir(root)
    found = all_problems(Path("sft/chats"))
    for check in ("files_match_meta", "ids_below_vocab_size", "examples_supervised"):
        (problem,) = found[check]
        assert problem.startswith("sft/chats/train_tokens.bin: no such ") and ".versions" not in problem


def test_the_remedy_mends_what_a_second_build_would_reuse(settings):
    ensure_tokenizer(settings)
    cache = build_token_cache(settings, "oasst1").path
    assert cache == cache_root(settings) / "sft" / "oasst1"
    put_token(cache / "train_tokens.bin", 0, 65_535)  # the size is as before, and sizes are what a build looks at
    assert build_token_cache(settings, "oasst1").reused
    found = all_problems(cache, deep=True)
    assert all(build_again(cache) in found[name][0] for name in ("files_match_meta", "ids_below_vocab_size"))
    restart(settings, "sft/oasst1")  # --restart
    assert not build_token_cache(settings, "oasst1").reused
    assert not all_problems(cache, deep=True, max_dropped_share=1)


def test_no_check_loads_torch(root):
    program = (
        "import sys; from pathlib import Path; from niels_gpt.kinds.kind import Limits\n"
        "from niels_gpt.kinds.verify import verify\n"
        "for key in ('tokenizer', 'pretrain/notes', 'sft/chats'):\n"
        "    assert not any(found.problems for found in verify(Path(sys.argv[1]) / key, Limits(deep=True)).values())\n"
        "print(sorted({'torch', 'datasets', 'matplotlib', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
