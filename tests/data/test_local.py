"""User-defined sources of text: files found, rows read, documents streamed."""

import gzip
import logging
import os
from pathlib import Path

import pytest
from support.data_files import lines, write, write_parquet
from support.errors import refused

from niels_gpt.data import LocalFiles, PretrainSample, open_files

ODD = "pipes, devices or links to nothing"
TREE = ("b.md", "a/z.txt", "B.jsonl", "é.md", "a/picture.png", ".git/x.md", "a/.obsidian/y.md", "a/.hidden.md")


def tree(folder, names=TREE):
    for name in names:
        write(folder / name)
    return folder


def followed(pattern, *, base):
    return open_files(pattern, base=base, follow_links=True)


def names(found):
    return [found.name_of(path) for path in found.files]


def texts_of(pattern, **more):
    return list(open_files(str(pattern)).texts(source="own", **more))


def test_a_file_too_large_for_one_document_is_counted_and_named_with_the_way_to_cut_it(tmp_path, caplog, counters):
    for name in ("a.txt", "b.md.gz", "c.rst"):
        write(tmp_path / name, b"x" * (1_000 if name < "c" else 100))
    assert [sample.text for sample in texts_of(tmp_path, counters=counters, max_document_bytes=999)] == ["x" * 100]
    assert counters == {"too_large": 2}
    message, more = caplog.messages
    assert more == f"{tmp_path}: and 1 more, counted as too_large"
    assert f"{tmp_path}/a.txt: more than 999 bytes" in message and "split -C 10M --additional-suffix .txt a" in message
    with refused("E303", "too_large", "split -C"):
        texts_of(tmp_path, max_document_bytes=9)


def test_a_folder_is_all_below_it_that_can_be_read(tmp_path):
    found = open_files(str(tree(tmp_path)))
    assert names(found) == ["B.jsonl", "a/z.txt", "b.md", "é.md"]  # in order of their bytes
    assert found.root == tmp_path and found.files[1] == tmp_path / "a" / "z.txt"
    assert found.other_files == 1  # the picture; what is hidden is not looked at


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**", ["B.jsonl", "a/z.txt", "b.md", "é.md"]),
        ("**/*.md", ["b.md", "é.md"]),
        ("*", ["B.jsonl", "b.md", "é.md"]),  # it matches the folder a, too: a folder is no file
        ("[ab]/*.*", ["a/z.txt"]),
        ("a/../b.m?", ["b.md"]),
        ("a/.h*.md", [".hidden.md"]),  # named, so wanted
        ("a/z.txt", ["z.txt"]),
    ],
)
def test_a_glob_is_the_files_that_it_matches(tmp_path, pattern, expected):
    assert names(open_files(pattern, base=tree(tmp_path))) == expected


def test_a_new_file_leaves_the_names_of_the_others_as_they_are(tmp_path):
    write(tmp_path / "notes/journal/may.md")
    for pattern in ("notes", "notes/**/*.md"):
        assert names(open_files(pattern, base=tmp_path)) == ["journal/may.md"]
    write(tmp_path / "notes/ideas.md")
    assert "journal/may.md" in names(open_files("notes/**/*.md", base=tmp_path))


FORMS = ("in", "in/**", "in/**/*")


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_and_the_glob_of_all_below_it_are_the_same_files(tmp_path, form):
    tree(tmp_path, ("in/n1.md", "in/sub/n2.md", "in/.hidden/x.md", "in/photo.png", "out/o.md", "out/more/p.md"))
    links = {"in/linked": "../out", "in/sub/again": "../../out", "in/dup.md": "n1.md", "in/copy.png": "photo.png"}
    loops = {"in/all": "..", "in/sub/up": "..", "in/sub/self": "self", "out/back": "../in", "in/secret": ".hidden"}
    for name, target in (links | loops).items():
        (tmp_path / name).symlink_to(target)
    found = followed(form, base=tmp_path)
    assert names(found) == ["linked/more/p.md", "linked/o.md", "n1.md", "sub/n2.md"] and found.links == ()
    assert found.other_files == 2 and found.root == tmp_path / "in"  # the photo, and a link to itself
    found = open_files(form, base=tmp_path)
    assert (names(found), found.other_kinds) == (["n1.md", "sub/n2.md"], ((".png", 1), (ODD, 1)))
    not_followed = ["all", "dup.md", "linked", "secret", "sub/again", "sub/up"]
    assert [path.relative_to(found.root).as_posix() for path in found.links] == not_followed


@pytest.mark.parametrize("form", FORMS)
def test_a_link_is_followed_where_the_pattern_names_it_and_never_below(tmp_path, form):
    tree(tmp_path, ("out/o.md", "secret.md"))
    (tmp_path / "in").symlink_to("out")
    (tmp_path / "out/c.md").symlink_to(tmp_path / "secret.md")
    found = open_files(form, base=tmp_path)
    assert (names(found), found.links) == (["o.md"], (tmp_path / "in/c.md",))
    assert names(open_files("in/c.md", base=tmp_path)) == ["c.md"]
    with refused("E301", "1 symbolic links", "c.md", "--follow-links", kind=FileNotFoundError):
        open_files("in/c*.md", base=tmp_path)
    assert open_files("*/o.md", base=tmp_path).files == (tmp_path / "out/o.md",)


@pytest.mark.parametrize("form", FORMS)
def test_a_link_gives_a_file_its_suffix(tmp_path, form):
    tree(tmp_path, ("in/blobs/0123", "in/blobs/4567"))  # as huggingface_hub's cache is
    (tmp_path / "in/rows.jsonl").symlink_to("blobs/0123")
    found = followed(form, base=tmp_path)
    assert (names(found), found.other_files) == (["rows.jsonl"], 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_link_into_a_hidden_folder_of_the_same_tree_is_hidden(tmp_path, form):
    tree(tmp_path, ("in/a.md", "in/cache/.versions/notes/1/meta.json"))
    (tmp_path / "in/cache/notes").symlink_to(".versions/notes/1")
    assert names(followed(form, base=tmp_path)) == ["a.md"]
    assert names(open_files("in/cache/notes", base=tmp_path)) == ["meta.json"]  # named, so wanted


@pytest.mark.parametrize("form", FORMS)
def test_pipes_and_links_to_nothing_are_counted_and_not_read(tmp_path, form):
    tree(tmp_path, ("in/a.md",))
    os.mkfifo(tmp_path / "in/pipe.md")
    (tmp_path / "in/gone.md").symlink_to("nowhere")
    found = followed(form, base=tmp_path)
    assert (names(found), found.other_files, found.other_kinds) == (["a.md"], 2, ((ODD, 2),))
    found = open_files(form, base=tmp_path)
    assert (names(found), found.other_files, found.links) == (["a.md"], 1, (tmp_path / "in/gone.md",))
    for name in ("in/pipe.md", "in/gone.md", "in/[gp]*.md"):
        with refused("E301", f"({ODD})", kind=FileNotFoundError):
            followed(name, base=tmp_path)


def test_the_case_of_a_suffix_does_not_matter(tmp_path):
    write(tmp_path / "A.TXT", b"one")
    write(tmp_path / "B.JSONL", b'{"text": "two"}')
    (tmp_path / "C.Json.GZ").write_bytes(gzip.compress(b'[{"text": "three"}]'))
    write_parquet(tmp_path / "D.Parquet", {"text": ["four"]})
    assert [sample.text for sample in texts_of(tmp_path)] == ["one", "two", "three", "four"]


def test_wildcards_in_names_are_literal_and_a_name_that_is_not_utf8_can_be_printed(tmp_path):
    base = tree(tmp_path / "notes [old]", ("a*b.md", "axb.md", "sub/c.md", "sub/sub/x.md"))
    assert names(open_files("a*b.md", base=base)) == ["a*b.md"]
    assert names(open_files("**/c.*", base=base)) == ["sub/c.md"]
    assert names(open_files("**/sub/**/x*", base=base)) == ["sub/sub/x.md"]  # matched twice
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd/caf\xe9.md")))
    assert names(open_files("odd", base=tmp_path)) == ["caf\ufffd.md"]


def test_the_current_folder_and_the_home_folder_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tree(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_files("a") == open_files("~/a") == open_files("~/a", base=Path("/")) == open_files(str(tmp_path / "a"))


def test_only_the_kinds_asked_for_are_read(tmp_path):
    found = open_files(str(tree(tmp_path, ("a.json", "b.jsonl.gz", "c.txt", "d.parquet"))), rows_only=True)
    assert (names(found), found.other_files) == (["a.json", "b.jsonl.gz", "d.parquet"], 1)


def test_nothing_at_all_is_said_with_what_was_looked_for(tmp_path):
    for pattern in ("nowhere", "*.md", "nowhere/**/*.md"):
        with refused("E301", repr(pattern), f"at {tmp_path / pattern}", "'notes/**/*.md'", kind=FileNotFoundError):
            open_files(pattern, base=tmp_path)


def test_nothing_readable_is_said_with_what_there_is_and_what_can_be(tmp_path):
    tree(tmp_path, ("in/x.png", "in/y.png", "in/LICENCE"))
    for pattern in ("in", "in/*"):
        with refused("E301", "3 files", "(.png, LICENCE)", ".txt .md ", "--as-text", kind=FileNotFoundError):
            open_files(pattern, base=tmp_path)
    (tmp_path / "empty").mkdir()
    with refused("E301", "an empty folder", tmp_path / "empty", ".txt .md ", kind=FileNotFoundError):
        open_files("empty", base=tmp_path)


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".html", ".htm"])
def test_a_text_file_is_a_document_as_it_is(tmp_path, suffix, packed):
    text = " <p>one &amp; \r\n\r\ntwo\n"
    write(tmp_path / f"a{suffix}{packed}", text)
    write(tmp_path / "b.txt")
    assert texts_of(tmp_path) == [
        PretrainSample(text, "own", {"index": 0, "path": f"a{suffix}{packed}"}),
        PretrainSample("", "own", {"index": 1, "path": "b.txt"}),
    ]


def test_a_row_is_a_document_with_its_place_and_id(tmp_path):
    rows = b'{"text": "one", "id": 7}\n\n{"id": "x", "content": "two"}\r\n{"document": "", "id": true, "text": null}'
    write(tmp_path / "c/a.jsonl", rows)
    write(tmp_path / "d.json", b'[{"text": "t", "content": "c"}]')
    write(tmp_path / "é.md", b"note")
    assert [(sample.text, sample.meta) for sample in texts_of(tmp_path)] == [
        ("one", {"index": 0, "path": "c/a.jsonl", "row": 1, "id": "7"}),
        ("two", {"index": 1, "path": "c/a.jsonl", "row": 3, "id": "x"}),  # its line
        ("", {"index": 2, "path": "c/a.jsonl", "row": 4}),
        ("t", {"index": 3, "path": "d.json", "row": 1}),
        ("note", {"index": 4, "path": "é.md"}),
    ]


def test_a_field_that_is_named_is_the_only_one(tmp_path, counters):
    write(tmp_path / "a.jsonl", b'{"text": "t", "body": "b"}\n{"text": "t"}\n{"body": ["b"]}')
    assert [sample.text for sample in texts_of(tmp_path, field="body", counters=counters)] == ["b"]
    assert counters == {"missing_field": 2}


def test_rows_without_one_text_are_an_error_that_names_the_fields_there_are(tmp_path):
    write(tmp_path / "a.jsonl", b'[]\n{"title": "x", "body": "y"}\n{"title": 1}')
    counted, fields = "3 rows", "title, body"
    with refused("E303", "own: ", counted, "(2 missing_field, 1 unreadable_row)", "a.jsonl, row 2", fields) as caught:
        texts_of(tmp_path)
    assert "text or content or document" in str(caught) and "NAME=GLOB:FIELD" in str(caught)
    with refused("E303", "field summary;"):
        texts_of(tmp_path, field="summary")
    write_parquet(tmp_path / "b.parquet", {"title": ["x", "y"], "body": ["a", "b"]})
    with refused("E303", "2 rows", "(2 missing_field)", "row 1", fields):
        texts_of(tmp_path / "b.parquet")


def test_rows_of_which_none_can_be_read_are_an_error_that_shows_the_first(tmp_path):
    write(tmp_path / "a.jsonl", b"to be or\nnot to be")
    with refused("E303", "2 unreadable_row)", "a.jsonl, line 1") as failed:
        texts_of(tmp_path)
    assert "NAME=GLOB:FIELD" not in str(failed.value)  # no other field would help


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ('{"text": "a"}\n{"text": "b"}'.encode("utf-16-le"), ["UTF-16", "UTF-8"]),
        (b'[{"text": "a"},\n{"text": "b"}]', [".json and .json.gz", "rename"]),
        (b'[\n{"text": "a"},\n{"text": "b"}, {}]', [".json and .json.gz", "rename"]),
    ],
)
def test_a_file_of_another_kind_than_its_name_says_is_an_error_with_its_remedy(tmp_path, content, remedy):
    write(tmp_path / "a.jsonl", content)
    with refused("E303", *remedy):
        texts_of(tmp_path)


def test_the_first_row_without_a_text_is_told_with_its_fields(tmp_path, caplog):
    write(tmp_path / "a.jsonl", b'{"text": "one"}\n{"title": 1, "body": 2}\n{"text": null}\n')
    write(tmp_path / "b.jsonl", b'{"text": null}\n{"text": "x"}')
    with caplog.at_level(logging.WARNING):
        assert len(texts_of(tmp_path)) == 2
        assert len(texts_of(tmp_path / "b.jsonl")) == 1
    ending = "Counted as missing_field; more like it are counted only"
    assert caplog.messages == [
        f"{tmp_path}/a.jsonl, row 2: found the fields title, body. {ending}",
        f"{tmp_path}: and 2 more, counted as missing_field",
        f"{tmp_path}/b.jsonl, row 1: found NoneType in the field text. {ending}",
    ]


def test_files_without_rows_give_nothing(tmp_path):
    empty = {"a.jsonl": b"", "b.json": b" \n", "c.json": b"[ ]", "d.json.gz": b"", "e.jsonl": b"\xef\xbb\xbf"}
    for name, content in empty.items():
        write(tmp_path / name, content)
    assert texts_of(tmp_path) == []


def test_unreadable_rows_are_counted_and_the_first_of_three_files_are_told(tmp_path, caplog, counters):
    write(
        tmp_path / "a.jsonl",
        b'{"text": "one"}\n{"text": "tw\nnull\n[1]\n{"text": "five"}\n{"text": "six"} {"text": "seven"}',
    )
    write(tmp_path / "b.json", b'[{"text": "one"}, null, [{"text": "x"}], 3, {"text": "five"}]')
    write(tmp_path / "c.json", b"[1]")
    write(tmp_path / "d.json", b"[1, 2]")
    with caplog.at_level(logging.WARNING):
        found = [(sample.text, sample.meta["row"]) for sample in texts_of(tmp_path, counters=counters)]
    assert found == [("one", 1), ("five", 5)] * 2
    assert counters == {"unreadable_row": 10}
    assert caplog.messages[3:] == [f"{tmp_path}: and 7 more, counted as unreadable_row"]
    assert caplog.messages[0].startswith(f"{tmp_path}/a.jsonl, line 2: expected a JSON object (Invalid control")
    assert caplog.messages[1].startswith(f"{tmp_path}/b.json, item 2: expected a JSON object, found 'null'")


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.parquet"])
def test_a_damaged_file_is_an_error_once_it_is_reached(tmp_path, name, damage):
    write(tmp_path / "a.json", b'{"text": "good"}')
    texts = [os.urandom(500).hex() for _ in range(20)]
    if name.endswith("parquet"):
        path = write_parquet(tmp_path / name, {"text": texts}, compression="zstd")
    else:
        path = write(tmp_path / name, lines(*({"text": text} for text in texts)))
    whole = path.read_bytes()
    path.write_bytes(whole[:200] if damage == "truncated" else whole[:10] + bytes(30) + whole[40:])
    stream = open_files(str(tmp_path)).texts(source="own")
    assert next(stream).text == "good"
    with refused("E302", tmp_path / name):
        list(stream)


def test_a_file_that_is_gone_is_not_called_damaged(tmp_path):
    for name in ("a.parquet", "a.json", "a.md"):
        with refused("E301", kind=FileNotFoundError):
            list(LocalFiles(tmp_path, (tmp_path / name,), 0).texts(source="own"))


def test_a_column_of_parquet_that_nobody_asks_for_does_no_harm(tmp_path):
    import pyarrow as pa

    no_date = pa.array([10**7], pa.date32())  # about the year 29,000
    write_parquet(tmp_path / "a.parquet", {"when": no_date, "text": ["one"], "id": ["x"], "text.x": no_date})
    assert texts_of(tmp_path) == [PretrainSample("one", "own", {"index": 0, "path": "a.parquet", "row": 1, "id": "x"})]
    with refused("E302", "a.parquet", "rows 1 to 1", "'when'", "date32", "read (date value out of range)"):
        texts_of(tmp_path, field="when")


def test_two_columns_of_one_name_are_read_row_by_row_also_as_blocks(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from niels_gpt.data.local import iter_documents

    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    options = {"field": None, "counters": None, "max_document_bytes": 1_000, "position": None, "blocks": True}
    (sample,) = iter_documents(open_files(str(tmp_path)), source="own", **options)
    assert (sample.text, sample.meta["row"]) == ("two", 1)


def test_rows_of_parquet_are_numbered_over_all_batches(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", {"text": [f"t{n}" for n in range(2_500)], "id": range(2_500)})
    samples = texts_of(tmp_path)
    assert [sample.text for sample in samples] == [f"t{n}" for n in range(2_500)]
    assert samples[-1].meta == {"index": 2_499, "path": "a.parquet", "row": 2_500, "id": "2499"}


def test_a_stream_that_is_left_early_closes_its_file(tmp_path):
    write(tmp_path / "a.json", b'[{"text": "one"}, {"text": "two"}]')
    stream = open_files(str(tmp_path)).texts(source="own")
    assert next(stream).text == "one"
    del stream  # an open file would be a warning, which is an error here
