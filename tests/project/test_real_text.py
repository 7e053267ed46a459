"""Every cache of real text: documents come back letter by letter, and every one that went in is accounted for.

Run: NIELS_GPT_TEST_DATA=MIRROR pytest -m real_text, where MIRROR is laid out as README's "A mirror" says.
"""

import dataclasses
import filecmp
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support import LONG
from support.real_text import chats_of, files_of, rows_of, sample_rows, target_cache, texts_of

from niels_gpt.chat_template import format_chat
from niels_gpt.data import roam
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings
from niels_gpt.special_tokens import find_reserved_literal
from niels_gpt.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.real_text,
    pytest.mark.skipif(
        "NIELS_GPT_TEST_DATA" not in os.environ, reason="NIELS_GPT_TEST_DATA names no mirror of real text (README)"
    ),
]

TRAINING = {} if LONG else {"tokenizer_max_bytes": 4_000_000}
"""In the short form the tokenizer is trained on a part of the text: on all of it takes two minutes."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of the README's command on the mirror, but for TRAINING."""
    cache = tmp_path_factory.mktemp("real") / "cache"
    return Settings(source_root=os.environ["NIELS_GPT_TEST_DATA"], cache_dir=str(cache), seed=42, **TRAINING)


@pytest.fixture(scope="module")
def metas(settings):
    """Every cache built once: a 16,000-piece tokenizer is trained first."""
    return {key: recipe(settings).meta for key, recipe in recipes(settings).items()}


@pytest.fixture(scope="module")
def tokenizer(settings, metas):
    """The tokenizer that the caches were built with."""
    tokenizer = load_tokenizer(Path(settings.cache_dir) / "tokenizer")
    assert tokenizer.vocab_size == 16_000
    return tokenizer


def stored_documents(cache, meta, split):
    parts = [np.fromfile(cache / record["name"], dtype="<u2") for record in meta["shards"][split]]
    stream = np.concatenate(parts) if parts else np.empty(0, "<u2")
    starts = np.load(cache / meta["index"][split]["name"])
    return [stream[a:b].tolist() for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("name", ["fineweb_edu", "wikitext", "roam", "gutenberg"])
def test_every_kept_document_decodes_to_itself(settings, metas, tokenizer, name):
    meta, cache = metas[f"pretrain/{name}"], Path(settings.cache_dir) / "pretrain" / name
    eot = [meta["document_end"]["id"]] if meta["document_end"] else []
    stored = Counter()
    for split in ("train", "val"):
        for ids in stored_documents(cache, meta, split):
            assert ids[len(ids) - len(eot) :] == eot
            body = ids[: len(ids) - len(eot)]
            assert not set(body) & set(tokenizer.special_token_ids().values())
            stored[tokenizer.decode(body)] += 1
    given = Counter(text for text in texts_of(settings, name) if text and not find_reserved_literal(text))
    assert stored == given
    assert meta["documents_read"] == sum(stored.values()) + sum(meta["dropped"].values())
    assert meta["cut"] == {"documents": 0, "tokens": 0}


@pytest.mark.parametrize("name", ["dolly15k", "oasst1"])
def test_every_kept_chat_is_stored_as_the_template_says(settings, metas, tokenizer, name):
    meta, cache = metas[f"sft/{name}"], Path(settings.cache_dir) / "sft" / name
    stored = Counter()
    for split in ("train", "val"):
        tokens = np.fromfile(cache / f"{split}_tokens.bin", dtype="<u2")
        edges = [*np.load(cache / f"{split}_idx.npy").tolist(), len(tokens)]
        stored.update(tuple(tokens[a:b].tolist()) for a, b in itertools.pairwise(edges))
    chats = [chat for _, chat in chats_of(settings, name)]
    kept = [chat for chat in chats if not any(find_reserved_literal(turn["content"]) for turn in chat)]
    assert stored == Counter(tuple(format_chat(tokenizer, chat)) for chat in kept)
    assert meta["examples_read"] == len(chats) == sum(stored.values()) + sum(meta["dropped"].values())


def test_the_mirrors_files_as_sources_of_ones_own_give_the_same_documents(settings, metas, tmp_path):
    root, cache = Path(settings.source_root), Path(settings.cache_dir)
    own = dataclasses.replace(
        settings,
        cache_dir=str(tmp_path),
        tokenizer=str(cache / "tokenizer" / "spm.model"),
        pretrain=f"notes={root / 'roam'}",
        sft=f"mine={root / settings.dolly_dataset}",
    )
    made = {name: recipes(own)[key](own).meta for name, key in (("notes", "pretrain/notes"), ("mine", "sft/mine"))}
    for key in ("shards", "index"):  # the source ids are others: a row of one's own is named by its file and number
        assert made["mine"][key] == metas["sft/dolly15k"][key]
    notes, roam_notes = (
        Counter(
            tuple(ids)
            for split in ("train", "val")
            for ids in stored_documents(folder / "pretrain" / name, meta, split)
        )
        for folder, name, meta in ((tmp_path, "notes", made["notes"]), (cache, "roam", metas["pretrain/roam"]))
    )
    assert notes == roam_notes
    docs, size = made["notes"]["docs"], made["notes"]["utf8_bytes"]
    assert abs(docs["val"] / sum(docs.values()) - 0.1) < 0.02
    assert 0.5 < (size["val"] / docs["val"]) / (size["train"] / docs["train"]) < 2  # val is no choice of short notes


def test_every_row_of_the_mirror_is_kept_or_counted(settings, metas):
    assert all(recipe(settings).reused for recipe in recipes(settings).values())  # a second run builds nothing
    root = Path(settings.source_root)
    rows = {
        "pretrain/fineweb_edu": rows_of(settings, "fineweb_edu"),
        "pretrain/roam": len(roam.list_roam_paths(root / "roam")),
        "pretrain/gutenberg": len(files_of(settings, "gutenberg")),
        "pretrain/wikitext": rows_of(settings, "wikitext"),
        "sft/dolly15k": rows_of(settings, "dolly15k"),
    }
    for key, expected in rows.items():
        meta = metas[key]
        lost = sum(meta["source"]["counters"].get(name, 0) for name in ("blank", "blank_field", "missing_field"))
        assert meta.get("documents_read", meta.get("examples_read")) + lost == expected, key


def test_another_folder_hash_seed_locale_and_file_order_give_the_same_bytes(settings, metas, tmp_path):
    mirror = tmp_path / "other" / "mirror"
    for path in sorted(Path(settings.source_root).rglob("*"), reverse=True):  # written in another order
        if path.is_file():
            target = mirror / path.relative_to(settings.source_root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "LC_ALL": "C", "LANG": "C"}
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build-all", "--seed", "42", "--threads", "1"]
    places_ = ["--source-root", str(mirror), "--cache-dir", str(tmp_path / "cache")]
    places_ += [word for name, value in TRAINING.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([*command, *places_], env=environment, cwd=tmp_path, check=True, capture_output=True)
    files = relative_files(tmp_path / "cache")
    assert files == relative_files(Path(settings.cache_dir))
    assert sum(name.endswith("meta.json") for name in files) == 1 + len(recipes(settings))  # and the tokenizer's
    _, different, unread = filecmp.cmpfiles(settings.cache_dir, tmp_path / "cache", files, shallow=False)
    assert (different, unread) == ([], [])


def relative_files(root):
    """Files under a cache folder; .runs/ holds times and is left out."""
    found = (Path(folder, name).relative_to(root) for folder, _, names in os.walk(root) for name in names)
    return sorted(str(path) for path in found if path.parts[0] != ".runs")


@pytest.mark.parametrize("source", ["dolly15k", "oasst1"])
def test_a_target_cache_of_real_chats_holds_their_ids_and_is_good(settings, tokenizer, tmp_path, source):
    from niels_gpt.eagle3.cache import verify
    from niels_gpt.eagle3.target import write_small_target

    target, folder = write_small_target(tmp_path / "target", tokenizer), tmp_path / "cache"
    sizes = {"seq_length": 256, "draft_vocab_size": 2_000, "shard_size": 16, "limit": 40}
    meta = target_cache(settings, folder, target_model=str(target), input_data=source, **sizes)
    assert verify(folder) == []
    assert meta["totals"]["samples"] == 40
    chats = dict(chats_of(settings, source))
    for name, ids, mask in sample_rows(folder):
        assert ids.tolist() == format_chat(tokenizer, chats[name])[:256]
        assert mask.any()
