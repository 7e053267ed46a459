"""The user's own sources: lines, sources.toml, and what is wrong with them."""

import os

import pytest
from support.errors import refused

from niels_gpt.recipes.user_sources import stated_credit, text_suffixes, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import UsageError


@pytest.mark.parametrize(
    ("line", "name", "files", "field"),
    [
        ("notes=~/notes", "notes", "~/notes", None),
        ("notes = a/**/*.md ", "notes", "a/**/*.md", None),
        ("papers=papers/*.jsonl.gz:abstract", "papers", "papers/*.jsonl.gz", "abstract"),
        ("p=data=2024/x.jsonl:body_text", "p", "data=2024/x.jsonl", "body_text"),
        ("p=C:/x.jsonl", "p", "C:/x.jsonl", None),  # a field has no slash
        ("p=x.jsonl:my text", "p", "x.jsonl", "my text"),
        ("p=x.jsonl:a.b", "p", "x.jsonl", "a.b"),
        ("p=there:b.md", "p", "there:b.md", None),  # a file of that name is there
    ],
)
def test_a_line_is_a_name_a_glob_and_perhaps_a_field(tmp_path, line, name, files, field):
    (tmp_path / "there:b.md").touch()
    (own,) = user_sources(Settings(pretrain=line)).values()
    assert (own.family, own.name, own.files, own.field) == ("pretrain", name, files, field)


def test_chats_have_no_field(tmp_path):
    with refused("E104", "support=a/*.json", kind=UsageError):
        user_sources(Settings(sft="support=a/*.json:x"))
    (tmp_path / "sources.toml").write_text('[sft]\nsupport = "a.jsonl:x"')
    with refused("E104", "sources.toml", "support=a.jsonl"):
        user_sources(Settings())
    (tmp_path / "sources.toml").unlink()
    for files in ("a/*:b.json", "C:/x.json"):
        (own,) = user_sources(Settings(sft=f"support={files}")).values()
        assert (own.family, own.files, own.field) == ("sft", files, None)


TOML = """
[pretrain]
notes = "notes/**/*.md"
papers = "papers.jsonl:abstract"

[sft.support]
files = "/data/chats/*.json"
licence = "CC BY 4.0"
attribution = "The support team"
"""


def test_lines_are_separated_by_semicolons_and_the_same_lines_stand_in_sources_toml(tmp_path):
    assert user_sources(Settings()) == {}
    found = user_sources(Settings(pretrain="a=x.md; b=y.md;", sft="c=z.json"))
    assert [(own.family, own.name) for own in found.values()] == [("pretrain", "a"), ("pretrain", "b"), ("sft", "c")]
    (tmp_path / "sources.toml").write_text(TOML)
    found = user_sources(Settings(pretrain="more=x.md"))
    assert list(found) == ["notes", "papers", "support", "more"]
    assert found["papers"].field == "abstract"
    assert found["notes"].base == tmp_path
    assert (found["support"].licence, found["support"].attribution) == ("CC BY 4.0", "The support team")
    assert found["notes"].licence == "not stated"
    with refused("E104", "notes=x.json", "sft/notes", "sources.toml", "pretrain/notes"):
        user_sources(Settings(sft="notes=x.json"))


def test_a_file_that_is_named_must_be_there_and_its_paths_are_relative_to_it(tmp_path):
    with refused("E104", "mine.toml", kind=FileNotFoundError):
        user_sources(Settings(sources_file="conf/mine.toml"))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.toml").write_text(TOML)
    assert user_sources(Settings(sources_file="conf/mine.toml"))["notes"].base == tmp_path / "conf"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(pretrain="oasst1=x.md"), r"--pretrain oasst1=x\.md: pretrain/oasst1: oasst1 is a built-in name"),
        (Settings(pretrain="a=x.md;a=y.md"), r"--pretrain a=x\.md names pretrain/a already"),
        (Settings(pretrain="a=x.md", sft="a=y.json"), r"sft/a: --pretrain a=x\.md names pretrain/a already"),
        (Settings(pretrain="my-notes=x.md"), "expected a name of letters, digits and _"),
        (Settings(pretrain="../a=x.md"), "expected a name of letters, digits and _"),
        (Settings(pretrain=f"{'a' * 101}=x.md"), "letters, digits and _, 100 at most"),
        (Settings(sft="tokenizer=x.md"), "tokenizer is a built-in name"),
        (Settings(pretrain="x.md"), r"--pretrain x\.md: expected NAME=GLOB\[:FIELD\]"),
        (Settings(sft="a="), r"--sft a=: expected NAME=GLOB$"),
    ],
)
def test_a_name_that_is_taken_and_a_line_that_is_none(settings, message):
    with pytest.raises(UsageError, match=message):
        user_sources(settings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[pretrain", r"sources\.toml: not TOML"),
        ('[pretrain]\na = "x"\na = "y"', r"sources\.toml: not TOML"),
        ('[train]\na = "x"', "found 'train', expected tables"),
        ('pretrain = "x"', "found 'pretrain', expected tables"),
        ('[pretrain]\na = " "', r"pretrain\.a: found ' ', expected a text"),
        ('[pretrain.a]\nfiles = "x"\nfield = ""', "expected a text"),
        ("[pretrain]\na = 3", r"pretrain\.a: found 3, expected a text"),
        ('[pretrain.a]\nlicence = "x"', r"`files` is required"),
        ('[pretrain.a]\nfiles = "x"\nlicense = "x"', "expected .* licence"),
        ('[sft.a]\nfiles = "x"\nfield = "y"', "the texts files, licence, attribution,"),
        ('[pretrain]\nwikitext = "x"', "wikitext is a built-in name"),
        ("a = " + "[" * 20_000, r"sources\.toml: .*nested too deeply"),
        ("a." * 1_001 + "a = 1", r"sources\.toml: a line with more than 1,000 dots"),
        ("#" * ((1 << 20) + 1), r"sources\.toml: .*more than 1,048"),
        (None, r"sources\.toml: a pipe"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_entry_or_a_file_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "sources.toml"
    os.mkfifo(path) if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=message):
        user_sources(Settings())


def test_more_suffixes_are_text_also_compressed():
    assert text_suffixes(Settings()) == ()
    assert text_suffixes(Settings(as_text=".py, .TeX,")) == (
        *(".py", ".py.gz", ".py.zst"),
        *(".tex", ".tex.gz", ".tex.zst"),
    )
    for none in ("py", "*.py", ".p y", ".", ".jsonl", ".py,.json.gz", ".a/b"):  # no suffix, or one of rows
        with refused("E104", "--as-text"):
            text_suffixes(Settings(as_text=none))


def test_a_line_says_the_licence_of_any_source(tmp_path):
    (tmp_path / "sources.toml").write_text(TOML)
    settings = Settings(licence="support=MIT; roam=all rights reserved", attribution="roam=N. Otes = me")
    assert stated_credit(settings, "support") == {"licence": "MIT"}
    assert stated_credit(settings, "roam") == {"licence": "all rights reserved", "attribution": "N. Otes = me"}
    assert stated_credit(settings, "oasst1") == {}
    for line in ("MIT", "nobody=MIT", "roam="):
        with refused("E104", "--licence", "SOURCE=TEXT", "fineweb_edu", kind=UsageError):
            stated_credit(Settings(licence=line), "roam")
