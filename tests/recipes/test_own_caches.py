"""A folder of notes and a ShareGPT file become two caches and two assets, with one command each, without a network."""

import dataclasses
import hashlib
import json
import logging
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from support.commands import niels_gpt
from support.dagster_runs import built, metadata, run, stale
from support.data_files import lines, write
from support.errors import refused
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache.meta import read_meta
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import stats
from niels_gpt.kinds.verify import verify
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from pipelines.definitions import niels_definitions

NOTES = {
    f"{'journal/' if number % 2 else ''}n{number:02}.md": f"# {number}\n\n{text}"
    for number, text in enumerate(TINY_TEXTS)
}


def turns(question, answer, by="gpt"):
    return [{"from": "human", "value": question}, {"from": by, "value": answer}]


SHAREGPT = [
    {"id": f"chat-{number}", "conversations": turns(f"What is {number} plus {number}?", f"It is {2 * number}.")}
    for number in range(40)
]


@pytest.fixture
def home(tmp_path):
    """The current folder, with notes, a picture among them, and a file of chats, one of them with a tool's turn."""
    for name, text in NOTES.items():
        write(tmp_path / "notes" / name, text)
    write(tmp_path / "notes" / "picture.png", b"\x89PNG")
    write(tmp_path / "chats.json", json.dumps([*SHAREGPT, {"conversations": turns("x", "y", "tool")}]))
    return tmp_path


def own(home, **given):
    """Settings of the hub, which nobody may need."""
    return Settings(**{"cache_dir": str(home / "cache"), "vocab_size": 400, **given})


def built_notes(*more):
    """Build a cache of the notes by the command line and return its meta.json."""
    return told_notes(*more)[0]


def told_notes(*more):
    """Build it, and return what was printed and logged too."""
    done = niels_gpt("build", "--pretrain", "notes=notes", "--vocab-size", "400", *more)
    assert done.status == 0, done.err
    return read_meta("cache/pretrain/notes/meta.json"), done.err


def cache_command(*arguments):
    command = [sys.executable, "-m", "niels_gpt.cache.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})


@pytest.mark.slow
def test_one_command_makes_a_cache_of_a_folder_of_notes_and_one_of_a_file_of_chats(home):
    notes = cache_command("build", "--pretrain", "notes=notes", "--vocab-size", "400")
    assert notes.returncode == 0, notes.stderr
    chats = cache_command("build", "--sft", "support=chats.json", "--vocab-size", "400")
    assert chats.returncode == 0, chats.stderr
    meta = read_meta("cache/pretrain/notes/meta.json")
    assert (meta["documents_read"], meta["docs"]["train"] + meta["docs"]["val"]) == (len(NOTES), len(NOTES))
    assert meta["source"]["counters"] == {"other_files": 1}
    assert (meta["source"]["kind"], meta["dataset_name"]) == ("own", "notes")
    assert meta["document_end"]["id"] == meta["special_token_ids"]["eot"]
    tokenizer = load_tokenizer("cache/tokenizer/spm.model")
    ids = [np.fromfile(f"cache/pretrain/notes/{split}/shard_00000.bin", dtype="<u2") for split in ("train", "val")]
    eot = tokenizer.special_token_ids()["eot"]
    texts = [
        tokenizer.decode(part.tolist()) for both in ids for part in np.split(both, np.flatnonzero(both == eot) + 1)
    ]
    ends = tokenizer.decode([eot])
    assert Counter(text.removesuffix(ends) for text in texts if text) == Counter(NOTES.values())
    support = read_meta("cache/sft/support/meta.json")
    dropped = {"unknown_role": 1, "unknown_role:tool": 1}
    assert (support["examples_read"], support["source"]["counters"]) == (len(SHAREGPT), dropped)
    assert "role 'tool'" in chats.stderr
    assert read_meta("cache/tokenizer/meta.json")["trained_on"] == "own"


def test_the_split_is_by_hash_on_paper(home, tiny_model_path):
    """It neither follows length nor place, and another document, or seed, changes it for none, or for all."""
    texts = [f"{number} " + "x" * (number % 7) ** 4 for number in range(400)]
    shares = [int(hashlib.sha256(f"42\n{text}".encode()).hexdigest()[:16], 16) / 2**64 for text in texts]
    write(home / "rows.jsonl", lines(*({"text": text, "id": text[:4]} for text in texts)))
    settings = own(home, pretrain="rows=rows.jsonl", tokenizer=str(tiny_model_path))
    meta = recipes(settings)["pretrain/rows"](settings).meta
    in_val = Path(settings.cache_dir, "pretrain/rows/index/val_ids.txt").read_text().splitlines()
    assert in_val == [text[:4] for text, share in zip(texts, shares, strict=True) if share < 0.1]
    assert (meta["val_frac"], meta["duplicates"]) == (0.1, {"train": 0, "val": 0})
    for given, docs in (({"own_val_frac": 0.0}, 0), ({"seed": 7}, 39)):
        changed = dataclasses.replace(settings, **given)
        assert recipes(changed)["pretrain/rows"](changed).meta["docs"]["val"] == docs


def test_a_single_document_goes_to_train_and_an_empty_val_is_a_warning(home, caplog):
    settings = own(home, pretrain="book=notes/n00.md")
    assert recipes(settings)["pretrain/book"](settings).meta["docs"] == {"train": 1, "val": 0}
    assert "val is empty: too few distinct texts (1)" in caplog.text


def test_a_single_chat_goes_to_train_and_an_empty_val_is_a_warning(home, tiny_model_path, caplog):
    write(home / "chat.json", json.dumps(SHAREGPT[:1]))
    settings = own(home, sft="chat=chat.json", tokenizer=str(tiny_model_path))
    totals = recipes(settings)["sft/chat"](settings).meta["totals"]
    assert (totals["train_examples"], totals["val_examples"]) == (1, 0)
    assert "val is empty: too few distinct texts (1)" in caplog.text


def test_what_its_user_says_stands_in_meta_and_in_stats(home):
    toml = '[pretrain.notes]\nfiles = "notes"\nlicence = "CC BY 4.0"\nattribution = "N. Otes"\n'
    (home / "sources.toml").write_text(toml)
    assert niels_gpt("build", "notes", "--vocab-size", "400").status == 0
    source = read_meta("cache/pretrain/notes/meta.json")["source"]
    assert (source["licence"], source["attribution"]) == ("CC BY 4.0", "N. Otes")
    done = niels_gpt("stats", "cache/pretrain/notes")
    assert done.status == 0
    shown = done.out
    assert "CC BY 4.0" in shown and "N. Otes" in shown and "other_files 1" in shown


def test_the_users_line_wins_over_all_else_and_reaches_the_meta(home, settings):
    first = recipes(settings)["pretrain/roam"](settings)
    said = dataclasses.replace(settings, licence="roam=CC0 1.0", attribution="roam=N. Otes")
    outcome = recipes(said)["pretrain/roam"](said)
    source = outcome.meta["source"]
    assert (source["licence"], source["attribution"]) == ("CC0 1.0", "N. Otes") and not outcome.reused
    assert outcome.meta["content_sha256"] == first.meta["content_sha256"]
    assert recipes(said)["sft/oasst1"](said).meta["source"]["licence"] == "Apache-2.0"


def test_a_changed_file_or_line_builds_anew_and_nothing_else_does(home):
    settings = own(home, pretrain="notes=notes")
    build = recipes(settings)["pretrain/notes"]
    first = build(settings)
    assert build(settings).reused
    assert plan(settings, ["pretrain/notes"])[1].action == "up to date"
    moved = home / "notes" / "n00.md"
    moved.touch()
    assert build(settings).reused
    moved.write_text("another thought\n")
    assert not build(settings).reused
    (home / "sources.toml").write_text('[pretrain]\nmore = {files = "notes", licence = "MIT"}\n')
    assert build(settings).reused
    assert recipes(settings)["pretrain/more"](settings).meta["content_sha256"] != first.meta["content_sha256"]


def test_text_that_changes_while_it_is_read_is_no_cache_until_the_printed_command_is_run(home, settings, monkeypatch):
    settings, path = dataclasses.replace(settings, pretrain="notes=notes"), home / "notes" / "n00.md"
    logger = logging.getLogger("niels_gpt.recipes.user_sources")  # it says which files are not read, then reads
    with monkeypatch.context() as patch:
        patch.setattr(logger, "filters", [lambda record: bool(path.write_text("x"))])
        with refused("E306", "its files changed while they were read") as error:
            recipes(settings)["pretrain/notes"](settings)
    assert not (home / "cache" / "pretrain" / "notes").exists()
    done = niels_gpt(*shlex.split(str(error.value).partition("no longer change: ")[2])[1:])
    assert done.status == 0 and (home / "cache" / "pretrain" / "notes" / "meta.json").is_file(), done.err


def test_an_id_that_locate_could_not_read_is_none(home, settings):
    write(home / "rows.jsonl", lines({"text": "a short text", "id": "x" * 70_000}, {"text": "another", "id": "ok"}))
    settings = dataclasses.replace(settings, pretrain="rows=rows.jsonl", own_val_frac=0)
    path = recipes(settings)["pretrain/rows"](settings).path
    assert (path / "index" / "train_ids.txt").read_text() == "rows.jsonl#1\nok\n"


def test_rows_that_cannot_be_read_are_counted_and_too_many_are_a_warning(home):
    rows = [json.dumps({"body": text}) for text in TINY_TEXTS[:20]]
    (home / "rows.jsonl").write_text("\n".join([*rows, "{broken", "[]", '{"title": "no body"}']))
    done = niels_gpt("build", "--pretrain", "rows=rows.jsonl:body", "--vocab-size", "400")
    assert done.status == 0
    meta = read_meta("cache/pretrain/rows/meta.json")
    assert meta["source"]["counters"] == {"missing_field": 1, "unreadable_row": 2}
    assert meta["documents_read"] == 20
    assert "3 of 23 documents were dropped (13.04%)" in done.err
    verdicts = verify(Path("cache/pretrain/rows"), Limits(max_dropped_share=0.2))
    assert not any(verdict.problems for verdict in verdicts.values())


def test_files_of_another_encoding_are_warned_of_and_stats_shows_that_they_were_kept(home, caplog):
    for number in range(30):
        encoding = ("latin-1", "utf-16", "utf-16-le")[number % 3]
        (home / "notes" / f"m{number}.txt").write_bytes(f"Über den Fluß {number}".encode(encoding))
    meta, said = told_notes()
    assert "m0.txt: not UTF-8" in said and "m11.txt: a text with NUL characters" in said
    for warning in ("20 were not UTF-8", "10 hold NUL characters"):
        assert warning in said
    assert meta["documents_read"] == len(NOTES) + 30
    expected = {"other_files": 1, "repaired_utf8": 20, "byte_order_mark": 10, "texts_with_nul": 10}
    assert meta["source"]["counters"] == expected
    shown = dict(stats(Path("cache/pretrain/notes")))
    assert shown["left out by the loader"] == "other_files 1"
    assert shown["repaired by the loader"] == "repaired_utf8 20"
    assert shown["noticed by the loader"] == "byte_order_mark 10, texts_with_nul 10"


def test_kinds_and_links_that_are_not_read_are_counted_and_a_warning_until_they_are_asked_for(home, caplog):
    for name in ("a.py", "b.PY", "c.tex", "d.rst", "e.html", "LICENCE"):
        write(home / "notes" / name, f"the text of {name}")
    (home / "notes" / "c.md").symlink_to(write(home / "secret.md", "a secret"))
    counted = []
    for flags in ([], ["--as-text", ".py, .tex"], ["--follow-links"]):
        meta, told = told_notes(*flags)
        counted.append((meta["source"]["counters"], meta["documents_read"] - len(NOTES)))
        if not flags:
            said = told
    assert "notes: 5 files of kinds that are not read: 2 .py" in said and "1 .tex" in said and "--as-text" in said
    assert "c.md: a symbolic link, which is not followed; --follow-links" in said
    assert counted == [
        ({"other_files": 5, "links_not_followed": 1}, 2),
        ({"other_files": 2, "links_not_followed": 1}, 5),
        ({"other_files": 5}, 3),
    ]


def test_a_large_document_is_left_out_counted_and_a_loss(home, settings):
    for name in ("x.md", "y.txt"):
        (home / "notes" / name).write_text("long " * 1_000)
    settings = dataclasses.replace(settings, pretrain="notes=notes", sft="support=chats.json", max_document_bytes=4_000)
    meta = recipes(settings)["pretrain/notes"](settings).meta
    assert meta["source"]["counters"] == {"other_files": 1, "too_large": 2}
    found = verify(Path(settings.cache_dir) / "pretrain/notes", Limits(max_dropped_share=0))["dropped_share"]
    assert "too_large 2" in found.problems[0]
    more = dataclasses.replace(settings, max_document_bytes=6_000)
    assert not recipes(more)["pretrain/notes"](more).reused
    small = dataclasses.replace(settings, max_document_bytes=190)
    (home / "chats.json").write_text(json.dumps([*SHAREGPT, {"messages": [{"role": "user", "content": "x" * 200}]}]))
    counters = recipes(small)["sft/support"](small).meta["source"]["counters"]
    assert counters["too_large"] >= 1


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("--pretrain=notes=nowhere/*.md --vocab-size 400", 1, "nowhere"),
        ("--pretrain=rows=chats.json:body --vocab-size 400", 1, "NAME=GLOB:FIELD"),
        ("roam --source-root no/mirror", 1, "no/mirror"),
        ("--pretrain my-notes=x.md", 2, "expected a name of letters"),
        ("--sft roam=x.json", 2, "built-in name"),
        ("roam --licence nobody=MIT", 2, "expected SOURCE=TEXT"),
        ("", 2, "no source is named"),
        ("notes", 2, "no source is called 'notes'"),
    ],
)
def test_what_is_wrong_is_said_with_the_status(home, line, status, message):
    done = niels_gpt("build", *line.split())
    assert done.status == status
    assert message in done.err


def test_a_tokenizer_of_ones_own_sources_alone_is_named_where_others_use_it(home, settings, caplog):
    settings = dataclasses.replace(settings, tokenizer=None, vocab_size=400, pretrain="notes=notes")
    recipes(settings)["pretrain/notes"](settings)
    assert not caplog.records or "user-defined sources only" not in caplog.text
    recipes(settings)["pretrain/roam"](settings)
    assert "trained on user-defined sources only, and used for roam" in caplog.text


def test_a_broken_line_that_goes_leaves_the_tokenizer_and_the_other_caches_alone(home, settings):
    settings = dataclasses.replace(settings, tokenizer=None, vocab_size=400)
    (home / "broken.json").write_text("[{")
    both = dataclasses.replace(settings, pretrain="good=notes;broken=broken.json")
    before = ensure_tokenizer(both).meta
    assert before["trained_on_bytes"]["broken"] == "failed"
    alone = dataclasses.replace(settings, pretrain="good=notes")
    recipes(alone)["pretrain/good"](alone)
    assert ensure_tokenizer(alone).meta == before


def test_a_tokenizer_of_all_sources_is_never_replaced_by_one_of_ones_own(home, settings):
    settings = dataclasses.replace(settings, tokenizer=None, vocab_size=400, pretrain="notes=notes")
    assert ensure_tokenizer(settings).meta["trained_on"] == "mirror"
    other = dataclasses.replace(settings, vocab_size=380)
    recipes(other)["pretrain/notes"](other)
    meta = ensure_tokenizer(other).meta
    assert (meta["requested_vocab_size"], meta["trained_on"]) == (380, "mirror")


SOURCES = """
[pretrain]
notes = "notes"
[sft.support]
files = "chats.json"
licence = "CC BY 4.0"
attribution = "The support team"
"""


@pytest.fixture
def with_file(home, tiny_model_path, mirror):
    """Settings with a sources.toml that names both."""
    (home / "sources.toml").write_text(SOURCES)
    return own(home, tokenizer=str(tiny_model_path), source_root=str(mirror))


@pytest.mark.slow
def test_sources_toml_makes_two_assets_and_what_changes_in_a_source_is_stale(
    with_file: Settings, instance: dg.DagsterInstance, home: Path
) -> None:
    graph = niels_definitions(settings=with_file).resolve_asset_graph()
    support = graph.get(dg.AssetKey(["sft", "support"]))
    assert {key.to_user_string() for key in support.parent_keys} == {"tokenizer", "raw/support", "sft/"}
    assert support.group_name == "sft" and "The support team" in str(support.description)
    assert dg.AssetKey(["raw", "notes"]) in graph.observable_asset_keys
    assert {key.name for key in support.check_keys} >= {"files_match_meta", "examples_supervised"}
    result = run(instance, with_file, "tokenizer", "pretrain/notes", "sft/support", "raw/notes", "raw/support")
    assert built(result) == {"tokenizer", "pretrain/notes", "sft/support"}
    shown = metadata(result)
    source = shown["sft/support"]["source"]
    assert (source["licence"], source["attribution"]) == ("CC BY 4.0", "The support team")
    assert shown["pretrain/notes"]["source"]["licence"] == "not stated" and "picture" in shown["pretrain/notes"]
    assert built(run(instance, with_file, "pretrain/notes", "sft/support")) == set()
    ours = {"pretrain/notes", "sft/support"}
    assert not stale(instance, with_file).keys() & ours
    (home / "notes" / "n00.md").write_text("another thought\n")
    run(instance, with_file, "raw/notes")
    assert stale(instance, with_file).keys() & ours == {"pretrain/notes"}
    assert built(run(instance, with_file, *ours)) == {"pretrain/notes"}
    (home / "sources.toml").write_text(SOURCES.replace("CC BY", "CC BY-SA"))
    assert stale(instance, with_file).keys() & ours == {"sft/support"}
    result = run(instance, with_file, *ours)
    assert built(result) == {"sft/support"}
    assert metadata(result)["sft/support"]["source"]["licence"] == "CC BY-SA 4.0"


def test_a_prefix_goes_before_them_too(with_file):
    graph = niels_definitions("team/llm", with_file).resolve_asset_graph()
    parents = graph.get(dg.AssetKey(["team", "llm", "sft", "support"])).parent_keys
    assert {key.to_user_string() for key in parents} == {"team/llm/tokenizer", "team/llm/raw/support", "team/llm/sft/"}
