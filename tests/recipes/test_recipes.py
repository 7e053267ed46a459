"""Recipes build what their settings say, once, and again only when something they read has changed."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.disk import canonical_json

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.data.files import mirrors
from niels_gpt.data.files.rows import iter_rows
from niels_gpt.engine.meta import BUILDER_VERSIONS
from niels_gpt.recipes.asked import settings_fingerprint
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.request import recipe_fingerprint
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer


def build_all(settings):
    return {key: recipe(settings) for key, recipe in recipes(settings).items()}


def built_keys(settings):
    """Build everything and return the keys of what was not there already."""
    return [key for key, outcome in build_all(settings).items() if not outcome.reused]


def test_what_is_there_is_built_anew_only_where_something_that_it_reads_has_changed(settings, mirror, tmp_path):
    planned = plan(settings, list(recipes(settings)))
    builds = [(key, "build") for key in recipes(settings)]
    assert [(item.key, item.action) for item in planned] == [("tokenizer", "copy"), *builds]
    expected = {item.key: item.disk_bytes for item in planned}
    assert not Path(settings.cache_dir).exists()  # a plan writes nothing
    first = build_all(settings)
    assert not any(outcome.reused for outcome in first.values())
    for key, outcome in first.items():
        assert expected[key] < outcome.disk_bytes, key
    second = build_all(settings)
    assert {item.action for item in plan(settings, list(recipes(settings)))} == {"up to date"}
    assert [(second[key].meta, second[key].reused) for key in first] == [(first[key].meta, True) for key in first]

    own = shutil.copytree(mirror, tmp_path / "own")
    settings = dataclasses.replace(settings, threads=1, source_root=str(own))
    assert built_keys(settings) == []  # threads and folders decide nothing
    assert built_keys(dataclasses.replace(settings, sft_val_frac=0.2)) == ["sft/dolly15k", "sft/oasst1", "trees/oasst1"]
    assert built_keys(settings) == ["sft/dolly15k", "sft/oasst1", "trees/oasst1"]
    next((own / "roam").rglob("*.md")).write_text("- another thought\n")
    assert built_keys(settings) == ["pretrain/roam"]
    shard = Path(settings.cache_dir, "pretrain/roam/train/shard_00000.bin")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert built_keys(settings) == ["pretrain/roam"] and shard.read_bytes() == whole
    write_tokenizer(train_tokenizer(["some other text " * 50, "ein anderer Text"], vocab_size=300), tmp_path)
    assert built_keys(dataclasses.replace(settings, tokenizer=str(tmp_path / "spm.model"))) == list(recipes(settings))


def test_documents_in_are_documents_kept_and_dropped_reason_by_reason(settings, mirror):
    meta = recipes(settings)["pretrain/fineweb_edu"](settings).meta
    rows = list(iter_rows(mirrors.source_files(mirror, settings.fineweb_edu_dataset)))
    assert meta["documents_read"] == len(rows)
    assert len(rows) == sum(meta["docs"].values()) + sum(meta["dropped"].values())
    assert meta["dropped"]["sentinel_in_text"] >= 1
    assert meta["dropped"]["empty"] == sum(row["text"] == "" for row in rows)


def test_the_sample_goes_to_a_folder_of_its_own_with_its_own_tokenizer(tmp_path):
    settings = Settings(source_root="sample", cache_dir=str(tmp_path))
    outcome = recipes(settings)["sft/oasst1"](settings)
    assert outcome.path == tmp_path / "sample" / "sft" / "oasst1"
    tokenizer = ensure_tokenizer(settings)
    assert tokenizer.reused
    assert tokenizer.meta["trained_on"] == "sample"
    assert tokenizer.meta["vocab_size"] < tokenizer.meta["requested_vocab_size"] == 16_000


def test_a_mirror_without_a_wikitext_train_split_gives_a_partial_cache(settings, mirror, tmp_path, caplog):
    own = shutil.copytree(mirror, tmp_path / "own")
    (own / "Salesforce" / "wikitext" / "train.txt").unlink()
    meta = recipes(settings)["pretrain/wikitext"](dataclasses.replace(settings, source_root=str(own))).meta
    assert meta["built"] == "partial"
    assert meta["train_tokens"] == 0 < meta["val_tokens"]
    assert "only val" in caplog.text


def test_gutenberg_on_the_hub_is_a_stub_that_asks_nobody(settings):
    outcome = recipes(settings)["pretrain/gutenberg"](dataclasses.replace(settings, source_root="hub"))
    assert (outcome.meta["built"], outcome.meta["streaming"]) == (False, True)
    assert sorted(path.name for path in outcome.path.iterdir()) == ["meta.json", "train", "val"]
    assert recipes(settings)["pretrain/gutenberg"](dataclasses.replace(settings, source_root="hub")).reused


def test_wikitext_lines_get_no_end_of_text_and_web_pages_do(settings):
    for name, expected in (("wikitext", False), ("fineweb_edu", True)):
        outcome = recipes(settings)[f"pretrain/{name}"](settings)
        tokens = np.fromfile(outcome.path / "train" / "shard_00000.bin", dtype="<u2")
        assert (outcome.meta["special_token_ids"]["eot"] in tokens) is expected


def test_a_tokenizer_whose_link_leads_to_itself_is_refused(settings):
    tokenizer = Path(settings.cache_dir, "tokenizer")
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.symlink_to("tokenizer")
    with pytest.raises(CacheError, match=r"tokenizer: symbolic links in a circle"):
        ensure_tokenizer(dataclasses.replace(settings, tokenizer=None))


@pytest.mark.slow
def test_two_builds_that_want_a_missing_tokenizer_at_once_train_it_once(mirror, tmp_path):
    flags = ["--source-root", str(mirror), "--cache-dir", str(tmp_path), "--vocab-size", "600"]
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build"]
    both = [subprocess.Popen([*command, name, *flags]) for name in ("dolly15k", "oasst1")]
    assert [build.wait() for build in both] == [0, 0]
    assert len((tmp_path / ".runs" / "tokenizer.jsonl").read_text().splitlines()) == 1


def test_a_cache_of_before_there_were_other_ends_of_documents_has_the_fingerprint_of_now(settings, tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)

    def fingerprint(asked):
        recipe = {"seed": asked.seed, "document_end": asked.document_end}
        return recipe_fingerprint(asked, "pretrain/k", recipe, tokenizer, "s")

    for choice, appended in (("auto", True), ("eot", True), ("none", False)):
        now = fingerprint(dataclasses.replace(settings, document_end=choice))
        before = {"seed": settings.seed, "append_eot": appended}
        parts = {"recipe": "pretrain/k", "settings": before, "tokenizer": tokenizer.sha256, "source": "s"}
        parts["versions"] = [FORMAT_VERSION, BUILDER_VERSIONS["pretrain"]]
        assert now == hashlib.sha256(canonical_json(parts)).hexdigest()
    assert fingerprint(dataclasses.replace(settings, document_end="eos")) not in (now, fingerprint(settings))


@pytest.mark.parametrize(
    ("key", "changed", "expected"),
    [
        ("tokenizer", {}, "83196f0ed237"),
        ("tokenizer", {"tokenizer": "m/spm.model"}, "8443b8d9ea6d"),
        ("pretrain/roam", {}, "29c848dfbecb"),
        ("pretrain/roam", {"document_end": "eot"}, "29c848dfbecb"),
        ("pretrain/roam", {"document_end": "none"}, "6431977158d2"),
        ("pretrain/wikitext", {}, "a3d367c754d9"),
        ("sft/dolly15k", {}, "0db3085b0c7c"),
    ],
)
def test_the_settings_have_the_fingerprint_of_before_there_were_tokenizers_of_other_kinds(key, changed, expected):
    assert settings_fingerprint(Settings(**changed), key) == expected  # as computed before: Dagster's code version
    for other in ({"tokenizer_kind": "bpe"}, {"document_end": "eos"}):
        read = key in ("tokenizer", "pretrain/roam") and ("tokenizer_kind" in other) == (key == "tokenizer")
        assert (settings_fingerprint(Settings(**(changed | other)), key) != expected) == read


def test_the_engine_never_causes_a_rebuild_and_is_in_the_record_of_the_run(settings):
    built = recipes(settings)["pretrain/roam"](dataclasses.replace(settings, engine="reference"))
    assert built.engine == "sentencepiece" and "engine" not in built.meta
    line = (Path(settings.cache_dir) / ".runs" / "pretrain.roam.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["engine"] == "sentencepiece"
    assert recipes(settings)["pretrain/roam"](settings).reused
