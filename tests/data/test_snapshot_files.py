"""A snapshot's files: appended only, resumed without a row lost or doubled, checked by sha256."""

import datetime
import gzip
import json

import pytest
from support import snapshots
from support.errors import refused
from support.snapshots import MANIFEST_NAME, check_files, manifest_of

ABOUT = {
    "dataset": "a/b",
    "config": None,
    "revision": "0" * 40,
    "licence": "mit",
    "attribution": "b by a",
    "datasets_version": "5",
    "shuffle": {"seed": 1, "buffer": 10},
}
ROWS = [{"text": f"document {number} " + "x" * 40, "n": number} for number in range(100)]


@pytest.fixture(autouse=True)
def small_files():
    with snapshots.files_of(700):  # bytes: eight or nine rows
        yield


def take(
    folder,
    rows=ROWS,
    *,
    about=ABOUT,
    stop=None,
    stop_in="train",
    error=ConnectionError,
    asked=None,
    **given,
):
    """Take a snapshot of `rows` as each split; in `stop_in` the hub fails before row number `stop`."""

    def rows_of(revision, split):
        if asked is not None:
            asked.append(f"{revision} {split}")
        for row in rows:
            if (split, row["n"]) == (stop_in, stop):
                raise error("the wire was cut")
            yield row

    arguments = {"splits": ("train",), "text_of": lambda row: row["text"], "max_text_bytes": None, **given}
    return snapshots.take(folder, about, rows_of, **arguments)


def kept(folder):
    paths = sorted(folder.glob("*.jsonl.gz"))
    return [json.loads(line)["n"] for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_all_rows_are_kept_in_order_in_files_of_bounded_size(tmp_path):
    manifest = take(tmp_path)
    assert kept(tmp_path) == list(range(100))
    assert manifest["ended"] and manifest["finished"] and len(manifest["files"]) > 5
    assert manifest == manifest_of(tmp_path)
    files = [tmp_path / file["name"] for file in manifest["files"]]
    check_files(tmp_path, manifest, files)
    assert take(tmp_path / "other") == manifest  # with the same sha256
    take(tmp_path, stop=0)  # finished: nothing is asked


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
@pytest.mark.parametrize("stop", [0, 8, 9, 99])
def test_what_came_before_a_failure_is_kept_and_the_next_run_goes_on(tmp_path, stop, error):
    with pytest.raises(error):
        take(tmp_path, stop=stop, error=error)
    assert kept(tmp_path) == list(range(stop))
    take(tmp_path)
    assert kept(tmp_path) == list(range(100))


def test_a_process_killed_between_file_and_manifest_loses_nothing(tmp_path):
    with refused("E601", kind=ConnectionError):
        take(tmp_path, stop=50)
    manifest = manifest_of(tmp_path)
    with refused("E307", "snapshot.json", "50 rows"):
        check_files(tmp_path, manifest, [])
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**manifest, "files": manifest["files"][:-1]}))
    for name in (".train-00099.jsonl.gz.part", "train-00077.jsonl.gz"):
        (tmp_path / name).write_bytes(b"half a file")
    manifest = take(tmp_path)
    assert kept(tmp_path) == list(range(100)) and not list(tmp_path.glob(".*.part"))
    check_files(tmp_path, manifest)


def test_the_revision_of_the_first_contact_is_kept_before_a_row_is(tmp_path):
    with refused("E601", kind=ConnectionError):
        take(tmp_path, stop=0)
    manifest = manifest_of(tmp_path)
    assert manifest["revision"] == ABOUT["revision"] and not manifest["finished"]
    asked = []
    done = take(tmp_path, about={**ABOUT, "revision": "1" * 40}, asked=asked)
    assert asked == ["0" * 40 + " train"] and done["revision"] == "0" * 40


def test_a_bound_stops_the_stream_and_a_larger_one_goes_on(tmp_path):
    first = take(tmp_path, max_text_bytes=1_000)
    assert first["finished"] and not first["ended"] and 1_000 <= first["text_bytes"] < 1_100
    assert take(tmp_path, max_text_bytes=900) == first
    second = take(tmp_path, max_text_bytes=2_000)
    assert 2_000 <= second["text_bytes"] < 2_100
    assert kept(tmp_path) == list(range(len(kept(tmp_path))))
    assert take(tmp_path)["ended"] and kept(tmp_path) == list(range(100))


def test_splits_go_on_where_each_stopped(tmp_path):
    splits = ("train", "validation")
    with refused("E601", kind=ConnectionError):
        take(tmp_path, ROWS[:20], stop=5, stop_in="validation", splits=splits)
    take(tmp_path, ROWS[:20], splits=splits)
    assert kept(tmp_path) == [*range(20), *range(20)]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add"])
def test_damage_is_named_and_a_damaged_snapshot_is_neither_finished_nor_made_longer(tmp_path, damage):
    manifest = take(tmp_path, max_text_bytes=1_000)
    path = tmp_path / "train-00001.jsonl.gz"
    content = path.read_bytes()
    path.unlink()
    if damage == "add":
        (tmp_path / "train-00001-copy.jsonl.gz").write_bytes(content)
    if damage != "remove":
        path.write_bytes({"flip": content[:30] + b"\x80" + content[31:], "cut": content[:100]}.get(damage, content))
    with refused("E307", "train-00001"):
        check_files(tmp_path, manifest)
    for bound in (1_000, 5_000) if damage != "add" else ():
        with refused("E307", "train-00001"):
            take(tmp_path, max_text_bytes=bound)


def test_another_order_of_rows_is_not_mixed_in_and_a_folder_with_other_files_is_left_alone(tmp_path):
    take(tmp_path / "shuffled", max_text_bytes=500)
    with refused("E307", "snapshot.json", "shuffle"):
        take(tmp_path / "shuffled", about={**ABOUT, "shuffle": None})
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with refused("E307", "mine.jsonl"):
        take(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 2}', '{"format_version": 1, "files": [1]}'])
def test_a_manifest_that_is_none_is_named(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_text(content)
    with refused("E307", "snapshot.json"):
        snapshots.check_manifest(tmp_path)


def test_values_of_a_row_survive(tmp_path):
    row = {"text": "U+2028 \u2028 and \u00e9", "n": 0, "score": 0.1, "none": None, "list": [{"a": [1]}]}
    take(tmp_path, [row | {"day": datetime.date(2024, 2, 29)}])
    (line,) = gzip.decompress((tmp_path / "train-00000.jsonl.gz").read_bytes()).splitlines()
    assert json.loads(line) == row | {"day": "2024-02-29"}
    with refused("E302", "train-00000.jsonl.gz, row 1", "bytes"):
        take(tmp_path / "other", [{"text": "", "n": 0, "image": b"\x89PNG"}])
