"""A build may be cut anywhere, by kill -9 or by a loss of power: the next one ends with the same bytes.

Run: pytest tests/builders/test_power_loss.py, and with -m faults for every cut under every model.
Every operation of a build on the disk is recorded, the record is cut behind each of them, and the build runs again on
what is left then. power_loss.py says what is left, and the first tests here say it on paper.
"""

import json
import shutil
from pathlib import Path

import pytest
from support import LONG
from support.fault_builds import place_of
from support.power_loss import Disk, below, put, recorded_below, recording, tree_of
from support.small_builds import BATCH_ITEMS, BUILDERS, ITEMS, SHARD_BYTES, Counted, quick_folder, whole_version

from niels_gpt.storage import fileio

WRITTEN = [("create", "a"), ("write", "a", 0, b"12"), ("fsync", "a"), ("write", "a", 2, b"34")]


def left(operations, model, before=None, seed=0):
    disk = Disk(before or {})
    disk.apply(operations)
    return disk.left(model, seed)


OLD = {"a": b"old", "b": b"new"}
TWO = {"x": None, "x/a": b"1", "y": None}
TWO_AFTER = {"x": None, "y": None, "y/a": b"1"}
LINKED = {"x": None, "x/a": b"1", "x/b": "a"}
REMOVED = [("unlink", "x/a"), ("unlink", "x/b"), ("rmdir", "x")]
MOVED = ("rename", "x/a", "y/a")
UNSYNCED = [("create", "x/a"), ("write", "x/a", 0, b"1"), MOVED, ("fsync_dir", "y")]
TOP = ("fsync_dir", ".")
MADE = [("mkdir", "x"), ("create", "x/a"), ("fsync_dir", "x")]
EMPTY = {"x": None, "y": None}

LEFT = {
    "a kill leaves everything": ("kill", {}, WRITTEN, {"a": b"1234"}),
    "a file whose folder was not synced is absent": ("power", {}, WRITTEN, {}),
    "a file has the bytes of its last fsync": ("power", {}, [*WRITTEN, TOP], {"a": b"12"}),
    "a name durable before its bytes is an empty file": ("power", {}, [*WRITTEN[:2], TOP], {"a": b""}),
    "a truncation is lost until it is synced": ("power", {"a": b"12"}, [("cut", "a", 1)], {"a": b"12"}),
    "a synced truncation counts": ("power", {"a": b"12"}, [("cut", "a", 1), ("fsync", "a")], {"a": b"1"}),
    "a rename is undone without an fsync of a folder": ("power", OLD, [("rename", "b", "a")], OLD),
    "a synced rename counts": ("power", OLD, [("rename", "b", "a"), TOP], {"a": b"new"}),
    "a rename is one step, by its source": ("power", TWO, [MOVED, ("fsync_dir", "x")], TWO_AFTER),
    "a rename is one step, by its target": ("power", TWO, [MOVED, ("fsync_dir", "y")], TWO_AFTER),
    "an unsynced file in a synced folder is empty": ("power", EMPTY, UNSYNCED, {**EMPTY, "y/a": b""}),
    "a folder of an unsynced name is lost": ("power", {}, MADE, {}),
    "a folder of a synced name stays": ("power", {}, [*MADE, TOP], {"x": None, "x/a": b""}),
    "an unsynced removal is undone": ("power", LINKED, REMOVED, LINKED),
    "a synced removal counts": ("power", LINKED, [*REMOVED, TOP], {}),
    "a folder made again is empty": ("power", LINKED, [*REMOVED, ("mkdir", "x"), TOP], {"x": None}),
}


@pytest.mark.parametrize(("model", "before", "operations", "expected"), LEFT.values(), ids=list(LEFT))
def test_what_a_cut_leaves(model, before, operations, expected):
    assert left(operations, model, before) == expected


def test_the_mixed_model_loses_any_of_what_is_not_durable_and_nothing_else():
    trace = [*WRITTEN, ("fsync_dir", "."), ("write", "a", 4, b"56"), ("create", "b"), ("unlink", "c")]
    found = [left(trace, "mixed", {"c": b""}, seed) for seed in range(200)]
    contents = {tree["a"] for tree in found}
    assert contents == {b"12", b"1234", b"123456", b"12345", b"12\0\x0056", b"12\0\x005"}
    assert {("b" in tree, "c" in tree) for tree in found} == {(b, c) for b in (True, False) for c in (True, False)}
    trace = [("create", "t"), ("rename", "t", "a"), ("rename", "a", "b")]
    assert {tuple(left(trace, "mixed", seed=seed)) for seed in range(100)} == {(), ("t",), ("a",), ("b",)}


def test_a_record_can_be_replayed_on_the_real_disk(tmp_path):
    before = {"a": b"1", "x": None, "x/l": "../a"}
    put(before, tmp_path / "d")
    trace = []
    with fileio.recorded(trace):
        fileio.write_bytes(tmp_path / "d" / "a", b"22")
        fileio.make_dir(tmp_path / "d" / "y" / "z")
        fileio.rename(tmp_path / "d" / "x", tmp_path / "d" / "y" / "x")
        fileio.remove(tmp_path / "d" / "y" / "z")
    after = {"a": b"22", "y": None, "y/x": None, "y/x/l": "../a"}
    assert tree_of(tmp_path / "d") == left(below(tmp_path / "d", trace), "kill", before) == after


class Recorded:
    """A build that was recorded from its first operation to its last."""

    def __init__(self, folder, kind, over):
        """over: what is committed before: "nothing", "another version", "the same version", "a damaged version"."""
        self.kind, self.path, self.damaged = kind, folder / "build", over == "a damaged version"
        self.path.mkdir()
        self.contents = {None}
        if over != "nothing":
            seed = 1 if over == "another version" else 0
            self.contents = {BUILDERS[kind](self.path / "c", seed=seed)["content_sha256"]}
        if self.damaged:
            next((self.path / "c").rglob("*.bin")).write_bytes(b"damaged")
        self.before = tree_of(self.path)
        self.trace = recorded_below(self.path, lambda: BUILDERS[kind](self.path / "c"))
        self.contents.add(whole_version(self.path / "c"))
        self.after = tree_of(self.path)
        self.seen = set()

    def check(self, tree, scratch, where):
        """Build again on what was left: before, a whole version or none is there; after, all is as it should be."""
        key = tuple(sorted(tree.items()))
        if key in self.seen:
            return
        self.seen.add(key)
        put(tree, scratch)
        version, inode = self._committed(scratch / "c", where)
        try:
            BUILDERS[self.kind](scratch / "c")
        except Exception as error:
            raise AssertionError(f"no build after {where}: {error!r}") from error
        after = tree_of(scratch)
        assert version is None or version.stat().st_ino == inode, f"{where}: a whole version was put away"
        shutil.rmtree(scratch)
        without_lock = {name: content for name, content in after.items() if not name.endswith("/lock")}
        assert without_lock == {name: self.after[name] for name in self.after if not name.endswith("/lock")}, where

    def _committed(self, public, where):
        """Return the folder of the version at the public path, and its inode: it is whole, and old or new."""
        if self.damaged:
            return None, 0  # there it may be missing for a moment
        found = whole_version(public) if public.is_symlink() else None
        assert found in self.contents and public.is_symlink() == public.exists(), where
        return (None, 0) if found is None else (public.resolve(), public.resolve().stat().st_ino)


def cut_everywhere(recorded, folder, models, seeds):
    """Check what is left behind every `models[model]`-th operation, under each model."""
    disk = Disk(recorded.before)
    for number in range(len(recorded.trace) + 1):
        for model, every in models.items():
            for seed in range(seeds if model == "mixed" else 1):
                if number % every == 0:
                    where = (recorded.kind, model, seed, number, recorded.trace[max(0, number - 2) : number])
                    recorded.check(disk.left(model, 1000 * number + seed), folder / "scratch", where)
        disk.apply(recorded.trace[number : number + 1])


RECORDS = {}


OVER = ("nothing", "another version", "the same version", "a damaged version")
CASES = [
    *((kind, over) for kind in ("pretrain", "sft") for over in OVER),
    ("rollouts", "another version"),  # the engine is that of the other two
    ("templated", "another version"),
    *(pytest.param(("rollouts", over), marks=pytest.mark.faults) for over in OVER if LONG and "another" not in over),
]


@pytest.fixture(params=CASES, ids="{0[0]} over {0[1]}".format)
def recorded(request, small_batches):
    """A record that the tests share, with the trees that they have checked."""
    kind, over = request.param
    if (kind, over) not in RECORDS:
        with quick_folder() as folder:
            RECORDS[kind, over] = Recorded(folder, kind, over)
    return RECORDS[kind, over]


@pytest.mark.parametrize(
    ("models", "seeds"),
    [
        ({"power": 5, "kill": 13, "mixed": 11}, 1),
        pytest.param({"power": 1, "kill": 1, "mixed": 1 if LONG else 3}, 10 if LONG else 1, marks=pytest.mark.faults),
    ],
    ids=["some", "all"],
)
def test_a_build_ends_with_the_same_bytes_wherever_it_was_cut(recorded, folder, models, seeds):
    assert len(recorded.trace) > 100
    cut_everywhere(recorded, folder, models, seeds)


def cut_twice(recorded, folder, first, every):
    """Kill a build behind operation `first`, build again, and lose the power behind each `every`-th operation then."""
    disk = Disk(recorded.before)
    disk.apply(recorded.trace[:first])
    again = folder / "again"
    put(disk.left("kill"), again)
    trace = recorded_below(again, lambda: BUILDERS[recorded.kind](again / "c"))
    shutil.rmtree(again)
    for number in range(len(trace) + 1):
        if number % every == 0 or number == len(trace):
            recorded.check(disk.left("power"), folder / "scratch", (recorded.kind, first, number))
        disk.apply(trace[number : number + 1])
    assert (disk.left("power").get("c")) == recorded.after["c"]  # what a build has committed stays


@pytest.mark.parametrize(
    ("step", "every"), [(40, 37), pytest.param(*((2, 3) if LONG else (10, 7)), marks=pytest.mark.faults)]
)
def test_a_killed_build_may_lose_the_power_later(recorded, folder, step, every):
    for first in range(0, len(recorded.trace), step):
        cut_twice(recorded, folder, first, every)


def last_line(trace, part):
    """Return how many operations there were when the last line of the journal with `part` was written, not synced."""
    lines = (at for at, found in enumerate(trace) if found[0] == "write" and "journal.jsonl" in found[1])
    return max(at for at in lines if part in trace[at][3]) + 1


@pytest.mark.parametrize(("part", "every"), [(b'"ended": false', 7), (b'"sealed": null', 7), (b'"sealed": "', 2)])
def test_a_line_that_was_written_and_not_synced_is_durable_before_the_next_run_acts_on_it(
    recorded, folder, part, every
):
    """Else a run that found its build complete would commit it, and a loss of power take the line that says so."""
    cut_twice(recorded, folder, last_line(recorded.trace, part), every)


def positions(trace, verb, path, end):
    return [number for number in range(end) if trace[number][:2] == (verb, path)]


def assert_durable(trace, path, end):
    """Assert that before operation `end` a file was synced after its last write, and its folder after its naming."""
    moved = [number for number in range(end) if trace[number][0] == "rename" and trace[number][2] == path]
    made = max(positions(trace, "create", path, end) + moved)  # the last operation that gave the file its name
    names = {path} | ({trace[made][1]} if trace[made][0] == "rename" else set())
    writes = [number for name in names for number in positions(trace, "write", name, end)]
    syncs = [number for name in names for number in positions(trace, "fsync", name, end)]
    assert syncs and max(syncs) > max(writes, default=made), f"{path}: not synced before operation {end}"
    parent = str(Path(path).parent)
    assert any(number > made for number in positions(trace, "fsync_dir", parent, end)), (
        f"{path}: named by operation {made}, and {parent} not synced before operation {end}"
    )


def made_before(trace, end):
    made = {operation[1] for operation in trace[:end] if operation[0] == "create"}
    return made.__contains__


def test_a_line_of_the_journal_follows_the_fsync_of_every_file_that_it_names(recorded):
    trace = recorded.trace
    lines = [(number, line) for number, line in enumerate(trace) if line[0] == "write" and "journal.jsonl" in line[1]]
    folder = str(Path(lines[-1][1][1]).parent)
    found = []
    for number, (_, _, _, raw) in lines[1:]:  # the first is the header
        found.append(checkpoint := json.loads(raw[9:]))
        finished = {record["name"] for record in checkpoint["finished"]}
        for name, (size, _) in checkpoint["files"].items():
            if size and not checkpoint["sealed"]:
                assert_durable(trace, place_of(name, folder, found, made_before(trace, number)), number)
        for name in finished:
            assert_durable(trace, f"{folder.removesuffix('.journal')}/{name}", number)
    assert len(lines) > 8


def test_a_file_is_written_where_it_stays_and_is_durable_before_its_folder_becomes_the_version(recorded):
    version, trace = str(recorded.after["c"]), recorded.trace
    if version in recorded.before and not recorded.damaged:
        return  # no file of it is new but meta.json
    end, work = next((at, found[1]) for at, found in enumerate(trace) if found[0] == "rename" and found[2] == version)
    names = [name.replace(version, work) for name, content in recorded.after.items() if name.startswith(f"{version}/")]
    files = [name for name in names if positions(trace, "create", name, end)]
    assert len(files) >= 7 and not {found[2] for found in trace[:end] if found[0] == "rename"} & set(files)
    for name in files:
        assert_durable(trace, name, end)


def test_meta_json_is_the_last_file_and_the_link_comes_last_of_all(recorded):
    trace = recorded.trace
    meta = next(number for number, found in enumerate(trace) if found[0] == "rename" and found[2].endswith("meta.json"))
    link = next(number for number, found in enumerate(trace) if found[0] == "rename" and found[2] == "c")
    later = {found[1] for found in trace[meta + 1 :] if found[0] in ("create", "write")}
    names = {name.rsplit("/", 1)[-1] for name in later}
    assert {name for name in names if not name.startswith(".meta.json.")} == {"journal.jsonl"}
    assert {found[0] for found in trace[link + 1 :]} == {"fsync_dir", "unlink", "rmdir"}
    version = str(recorded.after["c"])
    if version in recorded.before and not recorded.damaged:
        return  # no file of it is new but meta.json
    for name in recorded.after:
        if name.startswith(f"{version}/") and recorded.after[name]:
            work = next(found[1] for found in trace if found[0] == "rename" and found[2] == version)
            assert positions(trace, "fsync", name.replace(version, work), link), name


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seconds", [0, 1e9], ids=["a checkpoint a batch", "a checkpoint a shard"])
def test_a_killed_build_tokenizes_at_most_a_shard_again(folder, seconds):
    asked = []

    class Noting(Counted):
        def encode(self, text):
            asked.append((len(trace), text))
            return super().encode(text)

    arguments = {"max_val_tokens": 0, "checkpoint_seconds": seconds, "max_train_tokens": 420}
    (folder / "build").mkdir()
    with recording() as trace:
        BUILDERS["pretrain"](folder / "build" / "c", tokenizer=Noting(), **arguments)
    ended = next(number for number, found in enumerate(trace) if found[0] == "unlink")  # the journal is no more
    disk = Disk({})
    longest = max(len(text.encode(errors="replace")) + 1 for _, text, _ in ITEMS["pretrain"](0))
    batch = 2 * BATCH_ITEMS * longest
    assert batch < SHARD_BYTES
    lost = []
    for number, operation in enumerate(below(folder / "build", trace)[:ended]):
        if number % 3:
            disk.apply([operation])
            continue
        put(disk.left("kill"), folder / "scratch")
        tokenizer = Counted()
        BUILDERS["pretrain"](folder / "scratch" / "c", tokenizer=tokenizer, **arguments)
        shutil.rmtree(folder / "scratch")
        before = [text for when, text in asked if when <= number and text]
        again = [text for text in tokenizer.texts if text in before]
        assert {*tokenizer.texts, *before, ""} == {text for _, text in asked}
        lost.append(sum(2 * len(super(Counted, tokenizer).encode(text)) + 2 for text in again))
        disk.apply([operation])
    assert max(lost) <= (batch if seconds == 0 else SHARD_BYTES + batch) and min(lost) == 0
