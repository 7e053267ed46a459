"""What begins each document of a pretrain cache: what its tokenizer's post-processor writes, or a named token."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.commands import niels_gpt
from support.errors import refused
from support.foreign import MANIFEST_NAME, NAMES, tokens_of
from support.power_loss import tree_of
from support.small_builds import batches_of
from support.splits import die_at_document
from support.start_tokenizers import FORMS, start_tokenizer
from tokenizers import Tokenizer

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.meta import read_meta
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.exchange.transfer.fetch import stage
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.exchange.imports import import_cache
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.sampling import PackedStream
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_start

TEXTS = ["the heron\n\nwaits", "na\u00efve \U0001f98a", "a b", *(f"the note {number} ends" for number in range(20))]


def own(folder, tokenizer, texts=TEXTS, **changed):
    """Return settings of a user-defined source of texts."""
    rows = "".join(json.dumps({"text": text, "id": f"row {number}"}) + "\n" for number, text in enumerate(texts))
    (folder / "rows.jsonl").write_text(rows)
    given = {"engine": "reference", "cache_dir": str(folder / "cache"), "tokenizer": str(tokenizer)}
    return Settings(pretrain=f"own={folder / 'rows.jsonl'}", **{**given, **changed})


def build(path, tokenizer, texts, **arguments):
    """Build a cache with document_start="auto" and nothing behind documents, unless `arguments` say otherwise."""
    given = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 64, "seed": 0, "shuffle_buffer": None}
    given |= {"val_frac": 0.3, "document_start": "auto", "num_threads": 0, **arguments}
    return build_pretrain([(None, text) for text in texts], path, tokenizer=load_tokenizer(tokenizer), **given)


def ids_of(cache, splits=("train", "val")):
    """Return the ids of each document, by the document index."""
    opened, found = tokens_of(Path(cache)), []
    for split in splits:
        ids = [token for file in opened.files(split) for token in file.ids.tolist()]
        found += [ids[begin:end] for begin, end in pairwise(opened.bounds(split).tolist())]
    return found


def codes(caplog):
    return [record.code for record in caplog.records if getattr(record, "code", "") == "W414"]


@pytest.mark.parametrize("name", FORMS)
def test_documents_have_the_ids_that_the_tokenizers_own_library_gives(tmp_path, caplog, name):
    folder = start_tokenizer(tmp_path / "t", name)
    settings = own(tmp_path, folder, document_end="none")
    plain = build_token_cache(settings, "own")
    assert codes(caplog) == ["W414"] * (FORMS[name] is not None) and "document_start" not in plain.meta
    caplog.clear()
    assert build_token_cache(replace(settings, document_start="none"), "own").reused

    built = build_token_cache(replace(settings, document_start="auto"), "own")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert sorted(ids_of(built.path)) == sorted(library.encode(text, add_special_tokens=True).ids for text in TEXTS)
    assert built.reused is (FORMS[name] is None) and codes(caplog) == [] and not find_damage(built.path, deep=True)
    start = FORMS[name] and {"id": library.token_to_id(FORMS[name]), "token": FORMS[name]}
    assert built.meta.get("document_start") == start
    if start:
        assert built.meta["utf8_bytes"] == plain.meta["utf8_bytes"]
        assert build_token_cache(replace(settings, document_start=FORMS[name]), "own").reused
    shown = niels_gpt("stats", built.path)
    assert shown.status == 0 and (f"{FORMS[name]} (id {start['id']})" in shown.out if start else True)


def test_the_warning_counts_for_strict_and_ends_with_either_choice(tmp_path):
    settings = own(tmp_path, start_tokenizer(tmp_path / "t", "gemma"))
    command = ["build", "own", "--pretrain", settings.pretrain, "--cache-dir", settings.cache_dir, "--strict"]
    command += ["--tokenizer", settings.tokenizer, "--engine", "reference", "--restart"]
    warned = niels_gpt(*command)
    assert warned.status == 1 and "W414" in warned.err and "--document-start auto" in warned.err
    for choice in ("none", "auto"):
        done = niels_gpt(*command, "--document-start", choice)
        assert done.status == 0 and "W414" not in done.err, done.err


def test_a_token_that_is_none_is_refused_with_those_that_are_like_it(tmp_path):
    settings = own(tmp_path, start_tokenizer(tmp_path / "t", "gemma"), document_start="<boss>")
    with refused("E102", "<boss>", "<bos>", "--document-start"):
        build_token_cache(settings, "own")
    assert not (tmp_path / "cache/pretrain").exists()


def test_a_post_processor_that_writes_several_tokens_needs_one_by_name(tmp_path, caplog):
    folder = start_tokenizer(tmp_path / "t", "gemma", single="<bos> <eos> $A")
    with pytest.raises(ValueError, match=r"<bos>.*<eos>"):
        document_start(load_tokenizer(folder))
    settings = own(tmp_path, folder, document_start="<bos>")
    assert build_token_cache(settings, "own").meta["document_start"]["token"] == "<bos>"
    build_token_cache(replace(settings, document_start=None), "own")
    assert codes(caplog) == ["W414"]


def test_what_a_post_processor_writes_behind_a_text_begins_no_document(tmp_path):
    tokenizer = load_tokenizer(start_tokenizer(tmp_path / "t", "mistral", single="$A </s>"))
    assert document_start(tokenizer) is None


def test_a_text_that_gives_the_token_itself_is_one_with_a_special_token(tmp_path):
    gemma = start_tokenizer(tmp_path / "t", "gemma")
    meta = build(tmp_path / "a", gemma, [*TEXTS, "the <bos> token"])
    assert meta["dropped"] == {"special_in_text": 1} and len(ids_of(tmp_path / "a")) == len(TEXTS)
    word = build(tmp_path / "b", gemma, TEXTS, document_start="the")  # of ordinary text
    without = sum("the" not in text for text in TEXTS)
    assert word["document_start"]["token"] == "the" and sum(word["docs"].values()) == without
    assert not find_damage(tmp_path / "b", deep=True)


@pytest.mark.parametrize("budget", range(2, 14))
def test_budgets_are_exact_and_what_begins_a_document_is_no_text(tmp_path, budget):
    gpt2 = start_tokenizer(tmp_path / "t", "gpt2")
    how = {"document_start": "<|endoftext|>", "document_end": "<|endoftext|>", "val_frac": 0}
    meta = build(tmp_path / "c", gpt2, ["bc", "de", "ghi"], max_train_tokens=budget, **how)
    whole = [token for text in ("bc", "de", "ghi") for token in (259, *load_tokenizer(gpt2).encode(text), 259)]
    ids = [token for document in ids_of(tmp_path / "c") for token in document]
    assert ids == whole[:budget] and len(ids) == meta["train_tokens"]
    assert meta["utf8_bytes"]["train"] == sum(token != 259 for token in ids)
    assert not find_damage(tmp_path / "c", deep=True)


def test_a_packed_row_on_paper(tmp_path):
    gemma = start_tokenizer(tmp_path / "t", "gemma")
    build(tmp_path / "c", gemma, ["bc", "d"], document_end="<eos>", val_frac=0)
    (bos, eos), (b, c, d) = (2, 1), load_tokenizer(gemma).encode("bcd")
    stream = PackedStream(tmp_path / "c", T=8, global_batch_size=1, seed=0, epochs=1)
    (batch,) = stream
    documents = {0: [bos, b, c, eos], 1: [bos, d, eos]}
    order = batch.documents.tolist()[:2]
    assert batch.x[0].tolist()[:7] == documents[order[0]] + documents[order[1]]
    targets = [[*documents[number][1:], -100] for number in order]
    assert batch.y[0].tolist() == [*targets[0], *targets[1], -100]
    starts = batch.cu_seqlens.tolist()[:2]
    assert torch.equal(batch.x[0, starts], torch.tensor([bos, bos]))
    assert batch.position_ids[0, starts].tolist() == [0, 0]


def test_a_killed_build_resumes_to_the_same_bytes(tmp_path):
    llama = start_tokenizer(tmp_path / "t", "llama3")
    how = {"document_end": "<|end_of_text|>", "checkpoint_seconds": 0}
    build(tmp_path / "whole/c", llama, TEXTS, **how)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        batches_of(patch, 5)
        die_at_document(patch, 10)
        build(tmp_path / "killed/c", llama, TEXTS, **how)
    assert not (tmp_path / "killed/c").exists()
    build(tmp_path / "killed/c", llama, TEXTS, **how)
    assert tree_of(tmp_path / "killed") == tree_of(tmp_path / "whole")
    assert all(ids[0] == 259 and ids[-1] == 260 for ids in ids_of(tmp_path / "killed/c"))


def test_partitions_begin_their_documents_as_the_whole_does(tmp_path, caplog):
    mistral = start_tokenizer(tmp_path / "t", "mistral")
    whole = build_token_cache(own(tmp_path, mistral, document_start="auto"), "own")
    parts = own(tmp_path, mistral, document_start="auto", partitions=3, cache_dir=str(tmp_path / "parts"))
    built = build_token_cache(parts, "own")
    assert sorted(ids_of(built.path)) == sorted(ids_of(whole.path)) and codes(caplog) == []
    assert built.meta["document_start"] == whole.meta["document_start"] == {"id": 1, "token": "<s>"}
    assert not find_damage(built.path, deep=True) and build_token_cache(parts, "own").reused
    assert not build_token_cache(replace(parts, document_start=None), "own").reused
    assert codes(caplog) == ["W414"]


@pytest.mark.parametrize("name", NAMES)
def test_an_export_and_its_import_keep_it(tmp_path, name):
    gemma = start_tokenizer(tmp_path / "t", "gemma")
    cache = tmp_path / "c"
    meta = build(cache, gemma, TEXTS, document_end="<eos>")
    export_cache(cache, name, tmp_path / "out")
    manifest = tmp_path / "out" / MANIFEST_NAME
    said = json.loads(manifest.read_text())
    assert said["cache"]["document_start"] == meta["document_start"]
    where = {"cache_dir": tmp_path / "other", "tokenizer": str(gemma), "format": name}
    back = import_cache(tmp_path / "out", "back", **where)
    assert {key: back.meta.get(key) for key in ("document_start", "document_end", "utf8_bytes")} == {
        key: meta[key] for key in ("document_start", "document_end", "utf8_bytes")
    }
    assert ids_of(back.path) == ids_of(cache) and not find_damage(back.path, deep=True)

    said["cache"]["document_start"] = {"id": 0, "token": "<pad>"}
    manifest.write_text(json.dumps(said))
    other = import_cache(tmp_path / "out", "other", **where).meta
    assert "document_start" not in other and other["noticed"] == {"documents_without_start": len(TEXTS)}


def test_a_staged_part_keeps_it(tmp_path):
    meta = build(tmp_path / "c", start_tokenizer(tmp_path / "t", "gemma"), TEXTS, document_end="<eos>")
    staged = stage(str(tmp_path / "c"), tmp_path / "part", max_bytes=200)
    part = read_meta(str(tmp_path / "part/meta.json"))
    assert staged.fetched_bytes and part["document_start"] == meta["document_start"]
    assert all(ids[0] == 2 for ids in ids_of(tmp_path / "part")) and not find_damage(tmp_path / "part", deep=True)


def test_lines_of_wikitext_are_no_documents_and_have_neither_token_nor_warning(tmp_path, caplog):
    mistral = start_tokenizer(tmp_path / "t", "mistral")
    settings = Settings(source_root="sample", cache_dir=str(tmp_path), tokenizer=str(mistral), engine="reference")
    built = build_token_cache(settings, "wikitext")
    assert codes(caplog) == [] and "document_start" not in built.meta
    assert build_token_cache(replace(settings, document_start="auto"), "wikitext").reused
