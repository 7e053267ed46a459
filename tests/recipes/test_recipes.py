"""Recipes build what their settings say, once, and again only when something they read has changed."""

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from niels_gpt.data.files import mirrors
from niels_gpt.data.files.rows import iter_rows
from niels_gpt.recipes import sources
from niels_gpt.recipes.plan import RECIPES, plan
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.run_recipe import Outcome
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError


def build_all(settings: Settings) -> dict[str, Outcome]:
    return {key: recipe(settings) for key, recipe in RECIPES.items()}


def test_everything_twice_builds_nothing_the_second_time(settings: Settings) -> None:
    first, second = build_all(settings), build_all(settings)
    assert not any(outcome.reused for outcome in first.values())
    assert all(outcome.reused for outcome in second.values())
    assert [first[key].meta for key in first] == [second[key].meta for key in second]


def test_a_changed_setting_rebuilds_the_caches_that_read_it_and_no_other(settings: Settings) -> None:
    build_all(settings)
    changed = build_all(dataclasses.replace(settings, sft_val_frac=0.2))
    assert [key for key, outcome in changed.items() if not outcome.reused] == ["sft/dolly15k", "sft/oasst1"]


def test_threads_and_folders_are_no_reason_to_build(settings: Settings, mirror: Path, tmp_path: Path) -> None:
    build_all(settings)
    moved = shutil.copytree(mirror, tmp_path / "moved")
    again = build_all(dataclasses.replace(settings, threads=1, source_root=str(moved)))
    assert all(outcome.reused for outcome in again.values())


def test_a_changed_note_rebuilds_roam_alone(settings: Settings, mirror: Path, tmp_path: Path) -> None:
    own = shutil.copytree(mirror, tmp_path / "own")
    settings = dataclasses.replace(settings, source_root=str(own))
    build_all(settings)
    note = next((own / "roam").rglob("*.md"))
    note.write_text("- another thought\n")
    assert [key for key, outcome in build_all(settings).items() if not outcome.reused] == ["pretrain/roam"]


def test_a_cut_shard_is_built_anew(settings: Settings) -> None:
    shard = build_all(settings)["pretrain/roam"].path / "train" / "shard_00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    outcome = RECIPES["pretrain/roam"](settings)
    assert not outcome.reused
    assert shard.read_bytes() == whole


def test_another_tokenizer_rebuilds_every_cache(settings: Settings, tmp_path: Path) -> None:
    from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

    build_all(settings)
    write_tokenizer(
        train_tokenizer(["some other text to learn from " * 50, "ein anderer Text"], vocab_size=300), tmp_path
    )
    changed = build_all(dataclasses.replace(settings, tokenizer_model=str(tmp_path / "spm.model")))
    assert not any(outcome.reused for outcome in changed.values())


def test_documents_in_are_documents_kept_and_dropped_reason_by_reason(settings: Settings, mirror: Path) -> None:
    meta = RECIPES["pretrain/fineweb_edu"](settings).meta
    rows = list(iter_rows(mirrors.source_files(mirror, settings.fineweb_edu_dataset)))
    assert meta["documents_read"] == len(rows)
    assert len(rows) == sum(meta["docs"].values()) + sum(meta["dropped"].values())
    assert meta["dropped"]["sentinel_in_text"] >= 1
    assert meta["dropped"]["empty"] == sum(row["text"] == "" for row in rows)


def test_the_sample_goes_to_a_folder_of_its_own_with_its_own_tokenizer(tmp_path: Path) -> None:
    settings = Settings(source_root="sample", cache_dir=str(tmp_path))
    outcome = RECIPES["sft/oasst1"](settings)
    assert outcome.path == tmp_path / "sample" / "sft" / "oasst1"
    tokenizer = ensure_tokenizer(settings)
    assert tokenizer.reused
    assert tokenizer.meta["trained_on"] == "sample"
    assert tokenizer.meta["vocab_size"] < tokenizer.meta["requested_vocab_size"] == 16_000


def test_real_text_refuses_a_tokenizer_trained_on_the_sample(mirror: Path, tmp_path: Path) -> None:
    ensure_tokenizer(Settings(source_root="sample", cache_dir=str(tmp_path), vocab_size=500))
    model = tmp_path / "sample" / "tokenizer" / "spm.model"
    settings = Settings(source_root=str(mirror), cache_dir=str(tmp_path), tokenizer_model=str(model))
    with pytest.raises(CacheError, match="trained on the bundled sample"):
        RECIPES["pretrain/roam"](settings)


def test_a_mirror_without_a_wikitext_train_split_gives_a_partial_cache(
    settings: Settings, mirror: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = shutil.copytree(mirror, tmp_path / "own")
    (own / "Salesforce" / "wikitext" / "train.txt").unlink()
    meta = RECIPES["pretrain/wikitext"](dataclasses.replace(settings, source_root=str(own))).meta
    assert meta["built"] == "partial"
    assert meta["train_tokens"] == 0 < meta["val_tokens"]
    assert "only val" in caplog.text


def test_gutenberg_on_the_hub_is_a_stub_that_asks_nobody(settings: Settings) -> None:
    outcome = RECIPES["pretrain/gutenberg"](dataclasses.replace(settings, source_root="hub"))
    assert outcome.meta["built"] is False
    assert outcome.meta["streaming"] is True
    assert sorted(path.name for path in outcome.path.iterdir()) == ["meta.json", "train", "val"]
    assert RECIPES["pretrain/gutenberg"](dataclasses.replace(settings, source_root="hub")).reused


def test_wikitext_lines_get_no_end_of_text_and_web_pages_do(settings: Settings) -> None:
    import numpy as np

    for name, expected in (("wikitext", False), ("fineweb_edu", True)):
        outcome = RECIPES[f"pretrain/{name}"](settings)
        tokens = np.fromfile(outcome.path / "train" / "shard_00000.bin", dtype="<u2")
        assert (outcome.meta["special_token_ids"]["eot"] in tokens.tolist()) is expected


def test_a_plan_says_what_would_be_done_and_writes_nothing(settings: Settings) -> None:
    before = {item.key: item.action for item in plan(settings, list(RECIPES))}
    assert not Path(settings.cache_dir).exists()
    build_all(settings)
    after = {item.key: item.action for item in plan(settings, list(RECIPES))}
    assert before == {"tokenizer": "copy", **dict.fromkeys(RECIPES, "build")}
    assert set(after.values()) == {"up to date"}


def test_the_plans_disk_is_enough(settings: Settings) -> None:
    expected = {item.key: item.disk_bytes for item in plan(settings, list(RECIPES))}
    for key, outcome in build_all(settings).items():
        # The tiny tokenizer spells in short pieces; a 16k tokenizer was measured at 4.2 bytes a token.
        text = sum(outcome.meta["utf8_bytes"].values())
        assert expected[key] >= 2 * text / 3.5, key


def test_chats_come_in_upstreams_order(settings: Settings) -> None:
    _, first = next(iter(sources.chats(settings, resolve_source(settings, "dolly15k"), None, Counter())))
    assert [turn["role"] for turn in first] == ["user", "assistant"]


@pytest.mark.slow
def test_two_builds_that_want_a_missing_tokenizer_at_once_train_it_once(mirror: Path, tmp_path: Path) -> None:
    flags = ["--source-root", str(mirror), "--cache-dir", str(tmp_path), "--vocab-size", "600"]
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build"]
    both = [subprocess.Popen([*command, name, *flags]) for name in ("dolly15k", "oasst1")]
    assert [build.wait() for build in both] == [0, 0]
    assert len((tmp_path / ".runs" / "tokenizer.jsonl").read_text().splitlines()) == 1
