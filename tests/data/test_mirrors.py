"""Where source text comes from: mirrors, rows, splits and fingerprints."""

import hashlib
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from support.data_files import fingerprint_of, invalid_utf8, mirror_files, numbered_rows, rows_of, write, write_parquet
from support.errors import refused

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.sources import SOURCES, credit_of

pytestmark = pytest.mark.filterwarnings("error")


def test_the_sample_is_packaged_and_a_missing_mirror_is_named(tmp_path):
    assert next(iter_fineweb_edu(source_root="sample")).text
    with refused("E301", str(tmp_path / "nowhere"), "--source-root sample", kind=FileNotFoundError):
        iter_fineweb_edu(source_root=str(tmp_path / "nowhere"))


def test_files_come_in_order_of_relative_path_without_hidden_or_unknown_ones(tmp_path):
    for name in ("b.jsonl", "a/z.md", "B.txt", "é.jsonl", ".git/x.md", "a/.hidden.md", "card.yaml", "a.jsonl.gz"):
        write(tmp_path / "set" / name)
    names = [path.relative_to(tmp_path / "set").as_posix() for path in mirror_files(tmp_path, "set")]
    assert names == ["B.txt", "a.jsonl.gz", "a/z.md", "b.jsonl", "é.jsonl"]


def test_pipes_and_links_to_nothing_are_passed_over_with_a_warning(tmp_path, caplog):
    real = write(tmp_path / "set/a.md")
    write(tmp_path / "out.md")
    os.mkfifo(tmp_path / "set/pipe.md")
    (tmp_path / "set/gone.md").symlink_to("nowhere")
    (tmp_path / "set/again.md").symlink_to("a.md")
    (tmp_path / "set/linked.md").symlink_to("../out.md")
    assert mirror_files(tmp_path, "set", follow_links=True) == [real, tmp_path / "set/linked.md"]
    warned = sorted(message.partition(": ")[0] for message in caplog.messages)
    assert warned == [str(tmp_path / "set/gone.md"), str(tmp_path / "set/pipe.md")]


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_an_absent_or_empty_dataset_names_the_folder_expected(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with refused("E301", tmp_path / folder, kind=FileNotFoundError):
        mirror_files(tmp_path, folder)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000.parquet", "train"),
        ("validation.txt", "validation"),
        ("test.jsonl", "test"),
        ("val.jsonl", "train"),
        ("pages.jsonl", "train"),
        ("test/pages.jsonl", "train"),  # the file's name counts, not its folder's
    ],
)
def test_the_start_of_a_file_name_is_its_split(tmp_path, name, split):
    path = write(tmp_path / "set" / name)
    for each in ("train", "validation", "test"):
        with nullcontext() if each == split else refused("E301", each, name, kind=FileNotFoundError):
            assert mirror_files(tmp_path, "set", split=each, suffixes=(path.suffix,)) == [path]


def test_all_splits_are_read_train_first_and_one_that_is_not_there_is_an_error(tmp_path):
    for name in ("other.jsonl", "test.jsonl", "validation.jsonl"):
        write(tmp_path / "set" / name)
    files = mirror_files(tmp_path, "set", split="all")
    assert [path.name for path in files] == ["other.jsonl", "validation.jsonl", "test.jsonl"]
    (tmp_path / "set/other.jsonl").unlink()
    with refused("E301", "'train'", "test.jsonl, validation.jsonl", kind=FileNotFoundError):
        mirror_files(tmp_path, "set", split="train")
    with refused("E302", "'dev'"):
        mirror_files(tmp_path, "set", split="dev")


def test_a_named_inner_folder_is_read_alone(tmp_path):
    write(tmp_path / "set/copy.jsonl")
    inner = write(tmp_path / "set/data/CC/train.jsonl")
    assert mirror_files(tmp_path, "set", split="train", folders=("CC", "data/CC")) == [inner]


def test_parquet_text_that_is_not_utf8_is_replaced_and_counted_in_every_kind_of_column(tmp_path, counters):
    import pyarrow as pa

    texts, ends = invalid_utf8(b"caf\xe9", b"ok", None), pa.array([0, 1, 2, 3], pa.int32())
    columns = {
        "plain": texts,
        "view": texts.cast(pa.string_view()),
        "map": pa.MapArray.from_arrays(ends, pa.array(["k"] * 3), texts),
        "fixed": pa.FixedSizeListArray.from_arrays(texts, 1),
        "turns": pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([texts], ["content"])),
    }
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert rows_of(path) == rows_of(path, counters=counters)
    assert rows_of(path) == [
        {"plain": text, "view": text, "map": [("k", text)], "fixed": [text], "turns": [{"content": text}]}
        for text in ("caf\ufffd", "ok", None)
    ]
    assert counters == {"repaired_utf8": 5}  # one of each column
    plain = write_parquet(tmp_path / "b.parquet", {"text": texts})
    counters.clear()
    assert len(rows_of(plain, counters=counters)) == 3 and counters == {"repaired_utf8": 1}


@pytest.mark.parametrize(("kind", "value"), [("date32", 10**7), ("tz", 1), ("date64", 10**17)])
def test_a_value_of_parquet_that_python_has_not_is_named_with_its_place(tmp_path, kind, value):
    import pyarrow as pa

    arrow = {"date32": pa.date32(), "date64": pa.date64(), "tz": pa.timestamp("us", tz="Mars/Phobos")}[kind]
    column = pa.array([1] * 1_000 + [value], arrow)
    write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 1_001, "when": column})
    with refused("E302", "a.parquet, rows 1", "'when'", "of type"):
        rows_of(tmp_path / "a.parquet")


def test_only_the_columns_asked_for_are_read_as_far_as_there_are_any(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"n": [1, 2], "text": ["a", "b"], "text.x": [3, 4], "a.b": [5, 6]})
    assert list(numbered_rows(path, columns=("text", "content"))) == [(1, {"text": "a"}), (2, {"text": "b"})]
    assert list(numbered_rows(path, columns=("a.b",))) == [(1, {"a.b": 5}), (2, {"a.b": 6})]
    assert list(numbered_rows(path, columns=("content",))) == [(1, {}), (2, {})]


LONG = "x" * (1 << 18)
SMALL_PAGES = {"row_group_size": 100, "data_page_size": 1, "write_batch_size": 1}


@pytest.mark.parametrize(
    ("texts", "options", "most"),
    [
        (["0" + LONG] * 200, SMALL_PAGES, 40 << 18),  # bytes: of 100 rows that a row group has
        ([f"{number}{LONG}" for number in range(200)], SMALL_PAGES, 40 << 18),
        (["small"] * 40 + ["x" * 1_000_000] * 150, {}, 3 * (64 << 20)),  # which the file has once
    ],
    ids=["the same text", "different texts", "a short text before long ones"],
)
def test_long_rows_of_parquet_are_read_a_few_at_a_time(tmp_path, texts, options, most):
    import pyarrow as pa

    path = write_parquet(tmp_path / "a.parquet", {"text": texts}, **options)
    before, peak = pa.total_allocated_bytes(), 0
    for text, (_, row) in zip(texts, numbered_rows(path), strict=True):
        assert row["text"] == text
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < most


def test_text_lines_keep_their_ends(tmp_path):
    path = write(tmp_path / "a.txt", b"one\r\n\n two\x0cx\n end")
    assert [row["text"] for row in rows_of(path)] == ["one\r\n", "\n", " two\x0cx\n", " end"]


def test_the_fingerprint_is_the_documented_sum(tmp_path):
    paths = [write(tmp_path / "b.txt", b"B!"), write(tmp_path / "a.txt", b"A")]
    lines = f"a.txt\x001\x00{hashlib.sha256(b'A').hexdigest()}\nb.txt\x002\x00{hashlib.sha256(b'B!').hexdigest()}\n"
    assert fingerprint_of(tmp_path, paths) == hashlib.sha256(lines.encode()).hexdigest()


def test_the_sample_is_mit_and_the_rest_as_upstream():
    assert credit_of("oasst1", "sample").licence == "MIT"
    assert credit_of("oasst1", "hub") == credit_of("oasst1", "/some/mirror")
    credits = {name: credit_of(name, "hub") for name in SOURCES}
    assert {name: credit.licence for name, credit in credits.items()} == {
        "fineweb_edu": "ODC-BY 1.0",
        "wikitext": "CC BY-SA 3.0 and GFDL",
        "roam": "the notes' owner's",
        "gutenberg": "public domain in the United States",
        "dolly15k": "CC BY-SA 3.0",
        "oasst1": "Apache-2.0",
    }
    pages = {name: credit.attribution.rpartition(" https://")[2] for name, credit in credits.items()}
    assert pages == {
        "fineweb_edu": "huggingface.co/datasets/HuggingFaceFW/fineweb-edu",
        "wikitext": "huggingface.co/datasets/Salesforce/wikitext",
        "roam": "the notes' owner",
        "gutenberg": "www.gutenberg.org",
        "dolly15k": "huggingface.co/datasets/databricks/databricks-dolly-15k",
        "oasst1": "huggingface.co/datasets/OpenAssistant/oasst1",
    }
    with refused("E103", "'pile'"):
        credit_of("pile", "hub")


def test_importing_the_loaders_loads_no_heavy_library():
    modules = "local, exclude, fineweb_edu, wikitext, roam, gutenberg, dolly, oasst1"
    heavy = "{'torch', 'datasets', 'pyarrow', 'huggingface_hub', 'numpy'}"
    code = f"import sys; from niels_gpt.data import {modules}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
