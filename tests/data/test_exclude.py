"""What --exclude leaves out: its file, what it matches, and what a build makes of it."""

import dataclasses
import hashlib
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.data_files import exclusion_facts
from support.errors import refused

from niels_gpt.data import ChatMessage, ChatSample, PretrainSample, remaining
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.recipes.plan import recipes


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def listed(tmp_path, *lines):
    path = tmp_path / "left_out.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def page(text, **meta):
    return PretrainSample(text, "web", dict(meta))


def left(path, *samples):
    counters = Counter()
    return [sample.text for sample in remaining(samples, str(path), counters)], counters


@pytest.mark.parametrize(
    ("entries", "samples", "kept"),
    [
        (
            ("# a comment", "", "<urn:uuid:1>", digest("two").upper(), "#notes/with a hash.md"),
            [page("1", id="<urn:uuid:1>"), page("two"), page("3", id=3), page("4", path="#notes/with a hash.md")],
            ["3"],
        ),
        ((digest("naïve\n"),), [page("naïve"), page("naïve\n"), page("naive\n")], ["naïve", "naive\n"]),
        (("17",), [page("a", id=17), page("b", index=17)], ["b"]),
        (("absent",), [page("a")], ["a"]),
        (  # as sha256sum prints them
            (f"{digest('two')}  questions/two.txt", f"{digest('three')} *three.bin"),
            [page("one"), page("two"), page("three")],
            ["one"],
        ),
    ],
)
def test_ids_and_sha256_of_texts_leave_out_and_are_counted(tmp_path, entries, samples, kept):
    texts, counters = left(listed(tmp_path, *entries), *samples)
    assert texts == kept and counters == Counter({"excluded": len(samples) - len(kept)})


def test_a_chat_goes_by_one_message_or_one_id(tmp_path):
    path = listed(tmp_path, digest("What is 2 + 2?"), "tree-9", "message-5")

    def chat(question, **meta):
        return ChatSample([ChatMessage("user", question), ChatMessage("assistant", "4")], "own", dict(meta))

    left_out = [
        chat("What is 2 + 2?"),
        chat("x", message_tree_id="tree-9"),
        chat("x", message_ids=["message-4", "message-5"]),
    ]
    kept = chat("x", message_ids=["message-4"])
    assert list(remaining([*left_out, kept], str(path), Counter())) == [kept]


def test_the_log_says_how_many_entries_named_something(tmp_path, caplog):
    caplog.set_level("INFO")
    left(listed(tmp_path, "a.md", "./b.md", digest("c")), page("x", path="a.md"), page("y", path="b.md"), page("c"))
    assert "2 of its 3 entries named a document" in caplog.text


def test_order_case_and_comments_change_no_fingerprint_but_an_entry_does(tmp_path):
    first = exclusion_facts(listed(tmp_path, "a", digest("b")))
    assert exclusion_facts(listed(tmp_path, "# new", digest("b").upper(), "a", "a")) == first
    assert first["entries"] == 2
    assert exclusion_facts(listed(tmp_path, "a", digest("c"))) != first


@pytest.mark.parametrize(("content", "code"), [(b"", "E303"), (b"# only\n\n", "E303"), (b"\xff\xfe", "E302")])
def test_a_file_without_an_entry_is_an_error_that_names_it(tmp_path, content, code):
    (tmp_path / "x.txt").write_bytes(content)
    with refused(code, tmp_path / "x.txt", "sha256"):
        left(tmp_path / "x.txt", page("a"))
    with refused("E301", "absent.txt", kind=FileNotFoundError):
        left(tmp_path / "absent.txt", page("a"))


def test_what_is_no_file_or_too_large_is_refused_before_it_is_read(settings, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    for name, code in (("pipe", "E205"), ("/dev/zero", "E205"), ("large", "E206")):
        with refused(code, name):
            build(dataclasses.replace(settings, exclude=str(tmp_path / name)), "sft/oasst1")


def first_file(root, folder):
    return min(path.relative_to(f"{root}/{folder}").as_posix() for path in Path(root, folder).rglob("*.*"))


FIRST_ENTRIES = {  # what leaves out the first document of a source, by what it offers
    "pretrain/fineweb_edu": lambda root: digest(next(iter_fineweb_edu(source_root=root)).text),
    "pretrain/wikitext": lambda root: digest(next(iter_wikitext(split="train", source_root=root)).text),
    "pretrain/roam": lambda root: first_file(root, "roam"),
    "pretrain/gutenberg": lambda root: first_file(root, "gutenberg"),
    "sft/dolly15k": lambda root: digest(next(iter_dolly_sft(source_root=root, shuffle=False)).messages[0].content),
    "sft/oasst1": lambda root: next(iter_oasst1_sft(source_root=root, shuffle_trees=False)).meta["message_tree_id"],
    "trees/oasst1": lambda root: next(iter_oasst1_sft(source_root=root, shuffle_trees=False)).meta["message_tree_id"],
}


def build(settings, key):
    return recipes(settings)[key](settings)


@pytest.mark.parametrize("key", FIRST_ENTRIES)
def test_a_build_leaves_out_counts_and_is_built_anew(settings, tmp_path, key):
    if key == "pretrain/gutenberg":  # the sample's two books are one for each split
        root = shutil.copytree(settings.source_root, tmp_path / "more")
        (root / "gutenberg" / "third.txt").write_text("It was a short book.\n" * 50)
        settings = dataclasses.replace(settings, source_root=str(root))
    whole = build(settings, key)
    path = listed(tmp_path, FIRST_ENTRIES[key](settings.source_root))
    without = dataclasses.replace(settings, exclude=str(path))
    outcome = build(without, key)
    assert not outcome.reused and outcome.fingerprint != whole.fingerprint
    source = outcome.meta["source"]
    assert source["counters"]["excluded"] >= 1
    assert source["exclude"] == exclusion_facts(path)
    read = {"pretrain": "documents_read", "sft": "examples_read", "trees": "samples_read"}[key.partition("/")[0]]
    assert outcome.meta[read] == whole.meta[read] - source["counters"]["excluded"]
    assert build(without, key).reused
    path.write_text("# reworded\n" + path.read_text())
    assert build(without, key).reused
    path.write_text(path.read_text() + "one more, of another source\n")
    assert build(without, key).reused
    again = build(settings, key)
    assert not again.reused and again.fingerprint == whole.fingerprint


def test_a_build_with_an_absent_file_says_so_and_builds_nothing(settings):
    with refused("E301", "absent.txt", kind=FileNotFoundError):
        build(dataclasses.replace(settings, exclude="absent.txt"), "sft/oasst1")
    assert not Path(settings.cache_dir, "sft").exists()


def test_every_built_in_cache_has_an_entry_above(settings):
    assert recipes(settings).keys() == FIRST_ENTRIES.keys()
