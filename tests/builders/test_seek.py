"""A build of files that were not changed resumes without reading again what it has, and makes the same bytes."""

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.fault_builds import checkpoints, cut_off, die_at, left, line, unfinished, values_of
from support.readings import opened_source, read_in_small_batches
from support.small_builds import batches_of

from niels_gpt.cache import CacheError
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.data import reader
from niels_gpt.data.files import parquet, rows
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings

LIMIT = 1_000
SOUGHT = "are not read again"
"""In the log, where a build resumes so."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    batches_of(monkeypatch, 4)
    read_in_small_batches(monkeypatch, rows=5, documents=2_000)


def text_rows(name):
    """Return rows with all that may happen to one."""
    rows = [{"id": f"{name}-{number}", "text": f"{name} {number} words"} for number in range(19)]
    rows[3] = {"other": 1}
    rows[6]["text"] = "x" * LIMIT
    rows[8]["text"] = "the same everywhere"
    rows[11]["text"] = f"{name} nul \0"
    rows[13]["text"] = "<|eot|>"
    rows[14]["text"] = ""
    return rows


def chat_rows(name):
    rows = [
        {"messages": [{"role": "user", "content": f"{name} {number}"}, {"role": "assistant", "content": "yes"}]}
        for number in range(19)
    ]
    rows[2] = {"other": 1}
    rows[5]["messages"][0]["role"] = "tool"
    rows[9]["messages"][1]["content"] = "x" * LIMIT
    rows[12]["messages"] = rows[13]["messages"]
    return rows


def dolly_rows(name):
    rows = [{"instruction": f"{name} {number}", "response": "yes", "context": ""} for number in range(19)]
    rows[2] = {"other": 1}
    rows[5]["response"] = ""
    return rows


def lines(rows):
    """Return them as JSON lines with a byte-order mark, a blank line, one that is no row and one that is no UTF-8."""
    found = [json.dumps(row).encode() + b"\n" for row in rows]
    found[4:4] = [b"\n", b"no row\n"]
    found[10] = found[10].replace(b"words", b"w\xffrds").replace(b"yes", b"y\xffs")
    return b"\xef\xbb\xbf" + b"".join(found)


def put_parquet(path, rows):
    columns = sorted({key for row in rows for key in row} - {"other"})
    texts = {key: [row.get(key) for row in rows] for key in columns}
    if "text" in texts:  # two that are no UTF-8, in one batch
        raw = [None if text is None else text.encode() for text in texts["text"]]
        raw[10], raw[12] = b"\xff 10", b"\xff 12"
        lengths = pa.array(raw, pa.binary())
        texts["text"] = pa.Array.from_buffers(pa.string(), len(raw), lengths.buffers(), lengths.null_count)
    pq.write_table(pa.table(texts), path, row_group_size=11)


def put_folder(folder, rows):
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(rows("a")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(rows("b"))))
    (folder / "c.json").write_text(json.dumps(rows("c")))
    put_parquet(folder / "d.parquet", rows("d"))
    (folder / "e.jsonl").write_bytes(lines(rows("e")))
    return folder


def text_folder(folder):
    put_folder(folder, text_rows)
    for number in range(7):
        (folder / f"e{number}.txt").write_bytes(f"document {number}".encode() * (99 if number == 3 else 1))
    (folder / "e5.txt").write_bytes(b"\xef\xbb\xbfmark \xff")
    (folder / "e6.md.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "z.txt").write_bytes(b"x" * (LIMIT + 1))
    (folder / "picture.png").write_bytes(b"")
    return folder


def mirror(folder):
    dolly, wikitext = folder / "databricks/databricks-dolly-15k", folder / "Salesforce/wikitext/wikitext-103-raw-v1"
    dolly.parent.mkdir(parents=True)
    put_folder(dolly, dolly_rows)
    (dolly / "c.json").unlink()
    (dolly / "d.parquet").unlink()
    wikitext.mkdir(parents=True)
    (wikitext / "train-0.jsonl").write_bytes(lines(text_rows("a")))
    (wikitext / "train-1.txt").write_bytes(b"".join(b"line %d \xff\n" % number for number in range(9)) + b" \nlast")
    put_parquet(wikitext / "validation-0.parquet", text_rows("v"))
    return folder


class Case:
    """One source, and its builds."""

    def __init__(self, key, put, home, **given):
        self.family, _, self.name = key.partition("/")
        self.folder = put(home / "files")
        where = {"source_root": str(self.folder)}
        if self.name == "own":
            where = {"pretrain" if self.family == "pretrain" else "sft": f"own={self.folder}"}
        self.settings = Settings(max_document_bytes=LIMIT, **where, **given)

    def build(self, path, at=None, **changed):
        """Build as a recipe does, with a checkpoint after each batch; at: stop behind so many documents."""
        items, about = opened_source(self.settings, self.name)
        arguments = {"tokenizer": ByteTokenizer(), "seed": 0, "num_threads": 0, "source": about}
        given = {**arguments, "checkpoint_seconds": 0, **changed}
        if self.family == "sft":
            return build_sft(cut_off(items, at), path, **{"val_frac": 0.1, **given})
        unbounded = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "shard_bytes": 240}
        return build_pretrain(cut_off(items, at), path, **{"val_frac": 0.3, **unbounded, **given})

    def interrupt(self, path, at, **changed):
        """Leave a build unfinished; returns how many documents it has."""
        with refused("E601", kind=ConnectionError):
            self.build(path, at, **changed)
        return int(checkpoints(path)[-1]["documents"])


def journal(path):
    return unfinished(path, ".journal") / "journal.jsonl"


def forge(path, change):
    """Change the last line of a journal, with a good CRC-32."""
    values = values_of(journal(path).read_bytes())
    change(values[-1])
    journal(path).write_bytes(b"".join(map(line, values)))


def read_by(meta):
    """Return how many documents a build has read."""
    return int(meta.get("documents_read", meta.get("examples_read")))


CASES = {
    "texts": ("pretrain/own", text_folder),
    "chats": ("sft/own", lambda folder: put_folder(folder, chat_rows)),
    "dolly": ("sft/dolly15k", mirror),
    "wikitext": ("pretrain/wikitext", mirror),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES), indirect=True)


@pytest.fixture
def case(request, folder):
    return Case(*request.param, folder)


@EACH
def test_killed_at_any_checkpoint_bytes_are_equal(case: Case, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    meta = case.build(folder / "whole" / "c")
    expected = left(folder / "whole" / "c")
    read = read_by(meta)
    assert read > 30 and meta["source"]["counters"]["repaired_utf8"] >= 2
    with caplog.at_level("INFO"):
        for at in range(9, read + 1, 3):
            path = folder / str(at) / "c"
            done = case.interrupt(path, at) if at < read else case.interrupt(path, read - 1)
            caplog.clear()
            assert case.build(path) == meta
            assert (
                f"resuming after {done} documents of an earlier run, which are not" in caplog.text
                and left(path) == expected
            )
    path, done = folder / "again" / "c", 0
    while read - done > 9:  # killed again and again
        before, done = done, case.interrupt(path, 9)
        assert before < done
    case.build(path)
    assert left(path) == expected


@EACH
def test_killed_when_all_is_read_the_rest_of_the_source_still_counts(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meta = case.build(folder / "whole" / "c")
    with monkeypatch.context() as patched:
        die_at(patched, "description", ConnectionError("killed"))
        case.interrupt(folder / "again" / "c", 1_000)
    with caplog.at_level("INFO"):
        assert case.build(folder / "again" / "c") == meta and SOUGHT in caplog.text


@pytest.mark.parametrize("budgets", [(400, 150), (1_000, 150)], ids=str)
def test_a_build_that_ends_by_its_budget_counts_what_it_read(folder, budgets):
    case = Case(*CASES["texts"], folder)
    limits = dict(zip(("max_train_tokens", "max_val_tokens"), budgets, strict=True))
    meta = case.build(folder / "whole" / "c", **limits)
    for at in range(12, read_by(meta), 5):
        case.interrupt(folder / str(at) / "c", at, **limits)
        assert case.build(folder / str(at) / "c", **limits) == meta


def test_what_was_read_is_neither_opened_nor_decoded_again(folder, monkeypatch):
    decoded = []

    def watched(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: decoded.append(name) or real(*given, **more))

    case = Case(*CASES["texts"], folder)
    meta = case.build(folder / "whole" / "c")
    for module, name in ((rows, "parsed"), (rows, "opened_text"), (reader, "read_text")):
        watched(module, name)
    watched(parquet, "usual_columns")
    case.build(folder / "other" / "c")
    at_all, path = Counter(decoded), folder / "again" / "c"
    case.interrupt(path, read_by(meta) - 1)
    decoded.clear()
    assert case.build(path) == meta
    again = Counter(decoded)
    # files lie in this order: a, b, c, d, e.jsonl, then the documents
    assert at_all["parsed"] > 50 and at_all["opened_text"] == 5 and at_all["usual_columns"] > 3
    assert set(again) == {"read_text"} and again["read_text"] < at_all["read_text"]


def test_files_that_changed_are_compared_row_by_row(folder, caplog):
    case, path = Case(*CASES["texts"], folder), folder / "c" / "c"
    case.interrupt(path, 40)
    changed = case.folder / "a.jsonl"
    before = changed.read_bytes()
    changed.write_bytes(before.replace(b"a 9 words", b"a 9 other"))
    for _ in range(2):
        with refused("E306", "a-9"):
            case.build(path)
    changed.write_bytes(before)
    (case.folder / "zz.txt").write_text("one more behind all that was read")
    caplog.clear()
    with caplog.at_level("INFO"):
        case.interrupt(path, 50)
        assert SOUGHT not in caplog.text and "are read again to compare them" in caplog.text
        meta = case.build(path)
        assert SOUGHT in caplog.text
    assert meta == case.build(folder / "other" / "c")


def test_what_lies_beside_the_files_is_counted_as_it_is_now(folder):
    case, path = Case(*CASES["texts"], folder), folder / "c" / "c"
    case.interrupt(path, 40)
    (case.folder / "other.png").write_bytes(b"")
    meta = case.build(path)
    assert meta["source"]["counters"]["other_files"] == 2 and meta == case.build(folder / "other" / "c")


def test_an_exclusion_counts_what_it_left_out_before_the_kill(folder):
    (folder / "exclude.txt").write_text("a-1\nb-2\ne-18\n")
    case = Case(*CASES["texts"], folder, exclude=str(folder / "exclude.txt"))
    meta = case.build(folder / "whole" / "c")
    assert meta["source"]["counters"]["excluded"] == 3
    for at in (20, 50, 60):
        case.interrupt(folder / str(at) / "c", at)
        assert case.build(folder / str(at) / "c") == meta


@pytest.mark.parametrize("given", [{"shuffle_buffer": 5}, {"val_frac": 1e-9}], ids=str)
def test_a_shuffled_order_is_read_again_and_the_bound_of_the_split_is_remembered(folder, given, caplog):
    case, path = Case(*CASES["texts"], folder), folder / "c" / "c"
    meta = case.build(folder / "whole" / "c", **given)
    assert "shuffle_buffer" in given or meta["docs"]["val"] == 1

    def killed(documents, tokens, expected):
        if documents > 30:
            raise ConnectionError("killed")

    assert case.interrupt(path, 1_000, progress=killed, **given) > 30
    with caplog.at_level("INFO"):
        assert case.build(path, **given) == meta
    assert (SOUGHT in caplog.text) == ("shuffle_buffer" not in given)


FORGED = {
    "another file": lambda seek: seek["position"].update(file=0),
    "no such file": lambda seek: seek["position"].update(file=99),
    "an earlier row": lambda seek: seek["position"].update(row=seek["position"]["row"] - 1),
    "a later row": lambda seek: seek["position"].update(row=seek["position"]["row"] + 1),
    "a row beyond the end": lambda seek: seek["position"].update(row=2**62),
    "another index": lambda seek: seek["position"].update(index=3),
    "counters of before": lambda seek: seek["counters"].update(too_large=7),
    "counters of the last": lambda seek: seek["last_counters"].update(too_large=7),
    "the last place": lambda seek: seek["last_position"].update(row=1),
    "below 0": lambda seek: seek["position"].update(file=-1),
    "too large": lambda seek: seek["position"].update(row=2**63),
    "true": lambda seek: seek["position"].update(row=True),
    "a text": lambda seek: seek["position"].update(row="1"),
    "a list": lambda seek: seek.update(position=[1, 2]),
    "nothing": lambda seek: seek.update(last_position=None),
    "a key less": lambda seek: seek.pop("before"),
    "a key more": lambda seek: seek.update(more={}),
    "no fingerprint": lambda seek: seek.update(fingerprint=7),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_place_that_is_not_the_builds_is_refused(folder, what):
    case, path = Case(*CASES["texts"], folder), folder / "c" / "c"
    case.interrupt(path, 26)
    forge(path, lambda last: FORGED[what](last["seek"]))
    before = left(path)
    with pytest.raises(CacheError, match=r"document 23|no checkpoint of a build") as error:
        case.build(path)
    assert "To start this build from scratch" in str(error.value) and left(path) == before


@pytest.mark.parametrize("seek", [None, "absent", {"fingerprint": "0"}], ids=str)
def test_a_journal_that_names_no_place_is_read_from_the_beginning(folder, seek):
    case, path = Case(*CASES["texts"], folder), folder / "c" / "c"
    case.interrupt(path, 26)
    if seek == "absent":
        forge(path, lambda last: last.pop("seek"))
    else:
        forge(path, lambda last: last["seek"].update(seek) if seek else last.update(seek=None))
    assert case.build(path) == case.build(folder / "other" / "c")


@pytest.mark.parametrize("key", ["pretrain/wikitext", "pretrain/notes", "sft/dolly15k", "sft/support", "sft/oasst1"])
def test_recipes_of_files_resume_so(key, settings, mirror, folder, caplog):
    chats = next((mirror / "databricks").rglob("*.jsonl"))
    more = {"pretrain": f"notes={mirror / 'roam'}", "sft": f"support={chats}", "cache_dir": str(folder / "mine")}
    mine = dataclasses.replace(settings, **more)

    def killed(documents, tokens, expected):
        if documents > 5:
            raise ConnectionError("killed")

    with refused("E601", kind=ConnectionError):
        recipes(mine)[key](mine, progress=killed)
    with caplog.at_level("INFO"):
        meta = recipes(mine)[key](mine).meta
    assert (SOUGHT in caplog.text) == (key != "sft/oasst1")
    other = dataclasses.replace(mine, cache_dir=str(folder / "other"))
    assert recipes(other)[key](other).meta == meta
