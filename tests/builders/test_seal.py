"""A seal refuses what is not finished, names it with a command that mends it, and may be killed at any moment."""

import errno
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time

import pytest
from support.data_files import write
from support.disk import meta_bytes, versions_dir
from support.errors import refused
from support.partition_builds import (
    COMMANDS,
    SHA256,
    TOTAL,
    UNITS,
    build_part,
    cloned,
    held,
    planned,
    plans,
    remove_plan,
    restart,
    seal_again,
    seal_small,
    states,
    whole,
)
from support.power_loss import Disk, put, recorded_below, tree_of
from support.small_builds import locked, quick_folder

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import tokenizer_above
from niels_gpt.kinds.folders import caches_below
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.gc import collect
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings
from niels_gpt.storage.meta_json import content_sha256, file_records
from niels_gpt.storage.versions import removable


@pytest.fixture(scope="module")
def built():
    """A folder of plans of four finished partitions, which tests copy: one of each of UNITS, by its name."""
    with quick_folder() as folder:
        for kind in UNITS:
            plan = planned(folder / kind / "c", of=kind)
            for number in range(TOTAL):
                build_part(plan, number)
        yield folder


@pytest.fixture
def plan(built, tmp_path, request):
    """A plan of four finished partitions, of pretrain unless the test says of which kind."""
    shutil.copytree(built / getattr(request, "param", "pretrain"), tmp_path / "d", symlinks=True)
    return plans(tmp_path / "d" / "c")[0]


def each_kind(test):
    """Run a test with a plan of each kind."""
    return pytest.mark.parametrize("plan", UNITS, indirect=True)(test)


@pytest.fixture(scope="module")
def expected():
    """What a folder holds after a seal, by kind."""
    found = {}
    for kind in UNITS:
        with quick_folder() as folder:
            whole(folder / "c", of=kind)
            found[kind] = without_lock(folder)
    return found


def without_lock(folder):
    return {name: content for name, content in tree_of(folder).items() if not name.endswith("/lock")}


def version(plan, number):
    return plan.unit_path(number).resolve()


def described(plan, number, **keys):
    """Change keys of a receipt, with a good checksum."""
    path = version(plan, number) / "meta.json"
    path.write_bytes(meta_bytes({**json.loads(path.read_bytes()), **keys}))


def tokens_of(plan, number):
    """Return the first file of tokens of a partition."""
    meta = json.loads((version(plan, number) / "meta.json").read_bytes())
    return version(plan, number) / meta["shards"]["train"][0]["name"]


def remove_unit(plan, number):
    plan.unit_path(number).unlink()
    shutil.rmtree(versions_dir(plan.unit_path(number)))


def missing(plan):
    remove_unit(plan, 1)


def started(plan):
    missing(plan)
    (versions_dir(plan.unit_path(1)) / "building-0123456789ab.journal").mkdir(parents=True)


def doubled(plan):
    described(plan, 1, partition={"number": 2, "total": TOTAL, "plan": plan.sha256})


def of_another_plan(plan):
    described(plan, 1, partition={"number": 1, "total": TOTAL, "plan": SHA256})


def of_another_builder(plan):
    described(plan, 1, builder_version=2)


def of_other_settings(plan):
    described(plan, 1, seed=7)


def without_partition(plan):
    path = version(plan, 1) / "meta.json"
    meta = json.loads(path.read_bytes())
    del meta["partition"]
    path.write_bytes(meta_bytes(meta))


def a_link_out(plan):
    plan.unit_path(1).unlink()
    plan.unit_path(1).symlink_to(version(plan, 2))


def a_shard_is_a_link(plan):
    shard = tokens_of(plan, 1)
    shard.rename(plan.folder.parent / "elsewhere")
    shard.symlink_to(plan.folder.parent / "elsewhere")


def a_shorter_shard(plan):
    shard = tokens_of(plan, 1)
    shard.write_bytes(shard.read_bytes()[:-2])


def a_missing_file(plan):
    (version(plan, 1) / "index/val_ids.txt").unlink()


def no_json(plan):
    (version(plan, 1) / "meta.json").write_text("{")


def huge_counts(plan):
    meta = json.loads((version(plan, 1) / "meta.json").read_bytes())
    huge = {key: dict.fromkeys(meta[key], 1 << 62) for key in ("docs", "totals", "scores") if key in meta}
    described(plan, 1, **huge)


def no_number(plan):
    described(plan, 1, dropped={"empty": -1})


BAD = {
    missing: "missing",
    started: "started",
    doubled: "doubled",
    of_another_plan: "stale",
    of_another_builder: "stale",
    of_other_settings: "stale",
    without_partition: "foreign",
    a_link_out: "foreign",
    a_shard_is_a_link: "damaged",
    a_shorter_shard: "damaged",
    a_missing_file: "damaged",
    no_json: "damaged",
    huge_counts: "damaged",
    no_number: "damaged",
}


@each_kind
@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_each_kind_of_bad_partition_is_named_with_its_command(plan, spoil):
    total = sum(state.items for state in states(plan))
    spoil(plan)
    found = states(plan)
    assert [state.state for state in found] == ["finished", BAD[spoil], "finished", "finished"]
    assert found[1].items == found[1].tokens == 0 and found[0].items > 0
    with refused("E510") as error:
        seal_small(plan, deep=False, commands=COMMANDS)
    text = str(error.value)
    assert error.value.code == "E510" and f"{BAD[spoil]}: 1" in text
    assert not plan.path.exists() and plan.folder.is_dir()
    *_, command, last = text.splitlines()
    assert last == "seal"
    assert command.endswith("build --partition 1")
    if BAD[spoil] not in ("missing", "started"):
        assert os.system(command.partition(" && ")[0]) == 0
        build_part(plan, 1)
        assert held(plan, seal_small(plan)) == total > 30


def test_compared_pieces_are_summed_and_a_receipt_of_an_earlier_release_has_none(plan):
    path = version(plan, 1) / "meta.json"
    earlier = json.loads(path.read_bytes())
    del earlier["compared"]
    path.write_bytes(meta_bytes(earlier))
    receipts = [json.loads((version(plan, number) / "meta.json").read_bytes()) for number in range(TOTAL)]
    pieces = [receipt.get("compared", {"pieces": 0})["pieces"] for receipt in receipts]
    assert pieces[1] == 0 and 0 < pieces[0] <= sum(receipts[0]["docs"].values())
    seal_small(plan)
    compared = json.loads((plan.path / "meta.json").read_bytes())["compared"]
    assert compared["pieces"] == sum(pieces) and 1 / compared["finds_one_in"] > 3 / sum(pieces) * 0.9


FORGED = [
    (("totals", "x_tokens"), "a"),
    (("docs", "x"), "a"),
    (("first_noticed",), 5),
    (("built",), "no"),
    (("split_rule",), None),
    (("val_frac",), "x"),
    (("document_start",), 5),
    (("document_end",), 5),
    (("source", "accepted_code"), {"torch": 1}),
    (("checksums", "block_bytes"), 128),
    (("documents_read",), "a"),
    (("index", "train", "entries"), 5),
    (("files",), []),
]


FORGED_BY_KIND = {
    "pretrain": FORGED,
    "sft": [
        (("totals", "train_examples"), 1),
        (("index", "train", "entries"), 5),
        (("supervised_tokens", "train"), "a"),
        (("shards", "train"), []),
        (("examples_read",), -1),
        (("on_special",), None),
        (("files",), []),
    ],
    "templated": [
        (("chat_template",), None),
        (("chat_template", "sha256"), "x"),
        (("pad_id",), 1 << 40),
        (("loss_bits", "val", "bytes"), 0),
    ],
    "rollouts": [
        (("totals", "train_groups"), 1),
        (("totals", "val_samples"), 1),
        (("scores", "train"), 1),
        (("fields",), {"logprobs": "sample"}),
        (("fields",), {}),
        (("ranges", "reward", "min"), "a"),
        (("ranges", "routed"), {"min": 0, "mean": 0, "max": 0}),
        (("largest_id",), -1),
        (("index", "train_samples", "entries"), 5),
        (("shards", "val"), []),
        (("val_frac",), None),
        (("files",), []),
    ],
}
CASES = [
    pytest.param(kind, *each, id=f"{kind} {'.'.join(each[0])}")
    for kind, some in FORGED_BY_KIND.items()
    for each in some
]


@pytest.mark.parametrize(("plan", "keys", "value"), CASES, indirect=["plan"])
def test_forged_receipts_of_all_partitions_make_no_cache_that_readers_refuse(plan, keys, value):
    for number in range(TOTAL):
        path = version(plan, number) / "meta.json"
        meta = json.loads(path.read_bytes())
        inner = functools.reduce(dict.__getitem__, keys[:-1], meta)
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        path.write_bytes(meta_bytes(meta))
    try:
        seal_small(plan, deep=False)
    except CacheError as error:
        assert error.code == "E510" and not plan.path.exists()
    else:  # what is not read is left out
        assert keys[0] in ("totals", "docs") and not find_damage(plan.path, deep=True)


def test_a_seal_reads_the_files_that_the_receipt_names_and_no_other(plan, tmp_path):
    folder, path = version(plan, 0), plan.unit_path(0)
    shutil.copytree(folder / "index", tmp_path / "outside")
    (folder / "index").rename(folder / "other")
    (folder / "index").symlink_to(tmp_path / "outside")
    text = (folder / "meta.json").read_text().replace('"index/', '"other/')
    meta = json.loads(text)
    meta["content_sha256"] = content_sha256(file_records(meta))
    (folder / "meta.json").write_bytes(meta_bytes(meta))
    path.unlink()
    path.symlink_to(f".versions/{path.name}/{folder.rename(folder.with_name(meta['content_sha256'][:12])).name}")
    with refused("E510", "damaged: 0", "other files"):
        seal_small(plan)


def test_what_a_progress_raises_ends_the_seal_and_is_no_damage(plan):
    def cancel(*_):
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        seal_small(plan, progress=cancel)
    assert {state.state for state in states(plan, deep=True)} == {"finished"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_two_partitions_of_the_same_documents_are_refused_unless_they_came_from_two_places(plan, elsewhere):
    remove_unit(plan, 1)
    cloned(plan, [1], elsewhere=elsewhere)
    bad = [state for state in states(plan) if state.state != "finished"]
    if elsewhere:
        assert not bad and seal_small(plan)["partitions"]["total"] == TOTAL
        return
    assert [(state.number, state.state) for state in bad] == [(0, "doubled"), (1, "doubled")]
    with refused("E510", "doubled: 0") as error:
        seal_small(plan, commands=COMMANDS)
    for command in str(error.value).splitlines()[1:3]:
        assert os.system(command.partition(" && ")[0]) == 0
    build_part(plan, 0)
    build_part(plan, 1)
    assert seal_small(plan)["docs"] == {"train": 62, "val": 13}


def test_a_partition_of_files_says_where_it_ended(tmp_path, tiny_model_path, monkeypatch):
    """Two equal files are two places: their partitions have equal content, and are sealed."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", "".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(9)))
    settings = Settings(pretrain="notes=*.jsonl", partitions=2, tokenizer=str(tiny_model_path))
    units = Units(settings, "notes")
    made = [units.build(number).meta for number in (0, 1)]
    assert made[0]["content_sha256"] == made[1]["content_sha256"]
    assert [meta["partition"]["end"]["file"] for meta in made] == [0, 1]
    assert units.seal().meta["noticed"]["repeated_ids"] == 9


FILES = {
    "pretrain": ["train/shard_00000.bin", "index/crc32.bin", "index/train_texts.bin"],
    "sft": ["train_tokens.bin", "val_idx.npy", "index/val_ids.txt", "index/train_digests.bin"],
    "templated": ["train_loss.bits"],
    "rollouts": ["train_tokens.bin", "val_loss.bin", "train_reward.bin", "index/val_samples.npy", "index/last_ids.bin"],
}


@pytest.mark.parametrize(("plan", "name"), [(kind, name) for kind in FILES for name in FILES[kind]], indirect=["plan"])
def test_a_deep_look_finds_a_changed_bit_of_any_file(plan, name):
    path = version(plan, 2) / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    heard = []
    found = states(plan, deep=True, progress=lambda *numbers: heard.append(numbers))
    assert [state.state for state in found] == ["finished", "finished", "damaged", "finished"]
    assert name in found[2].found and heard[-1][1] == heard[-1][2]
    with refused("E510", "damaged: 2"):
        seal_small(plan)


def test_what_is_no_partition_of_the_plan_is_foreign(plan):
    (plan.folder / "00009").symlink_to(".versions/00009/0123456789ab")
    (plan.folder / ".versions" / "00009").mkdir()
    foreign = [state.found for state in states(plan) if state.number < 0]
    assert [text.partition(":")[0] for text in foreign] == ["00009", ".versions/00009"]
    with refused("E510", "00009") as error:
        seal_small(plan)
    for command in str(error.value).splitlines()[-2:]:
        assert os.system(command) == 0
    seal_small(plan)


@pytest.mark.parametrize("name", [": notes", "00001: copy", "it's\na\\b", b"\xff 1"])
def test_the_command_for_a_stray_file_removes_that_file_alone(plan, name):
    before = without_lock(plan.folder)
    stray = plan.folder / os.fsdecode(name)
    stray.touch()
    with refused("E510") as error:
        seal_small(plan, deep=False)
    subprocess.run(["bash", "-c", str(error.value).splitlines()[-1]], check=True)
    assert not stray.exists() and without_lock(plan.folder) == before


def test_a_partition_that_is_being_built_stops_a_seal_and_gc(plan):
    with locked(plan.unit_path(3)):
        for work in (lambda: seal_small(plan), lambda: restart(plan.path)):
            with refused("E503") as error:
                work()
            assert error.value.code == "E503"
        assert remove_plan(plan) is False
        assert any("left alone" in line and "00003" in line for line in collect(plan.path.parent, dry_run=False))
    assert len(plans(plan.path)) == 1 and {state.state for state in states(plan)} == {"finished"}


def test_a_seal_refuses_an_index_that_does_not_end_with_its_partition(plan):
    index = version(plan, 1) / "index/train_docs.npy"
    last = int.from_bytes(index.read_bytes()[-8:], "little")
    index.write_bytes(index.read_bytes()[:-8] + (last + 1).to_bytes(8, "little"))
    with refused("E510", "00001", "train_docs.npy") as error:
        seal_small(plan, deep=False)
    assert error.value.code == "E510" and not plan.path.exists()


WRONG = [
    ("sft", "train_idx.npy", -8, b"\xff\xff\xff\x7f\0\0\0\0"),
    ("sft", "val_idx.npy", 0, b"x"),
    ("sft", "index/train_ids.txt", 2, b"\n"),
    ("rollouts", "index/train_groups.npy", 0, b"x"),
    ("rollouts", "index/train_groups.npy", 128 + 3 * 8, b"\1"),
    ("rollouts", "index/train_groups.npy", 128 + 9 * 8 + 6 * 8, b"\1"),
    ("rollouts", "index/val_samples.npy", 128, b"\x7f"),
    ("rollouts", "index/train_ids.txt", 2, b"\n"),
]


@pytest.mark.parametrize(("plan", "name", "at", "wrong"), WRONG, indirect=["plan"])
def test_a_seal_by_sizes_refuses_files_that_do_not_fit_each_other(plan, name, at, wrong):
    path = version(plan, 1) / name
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at : at + len(wrong)] = wrong
    path.write_bytes(content)
    with refused("E510", "00001/"):
        seal_small(plan, deep=False)
    assert not plan.path.exists()


def test_gc_and_restart_remove_a_plan_of_ours_and_no_other_folder(plan):
    other = plan.folder.with_name("partitions-0123456789ab")
    (other / "00000").mkdir(parents=True)
    assert [path for path, _ in removable(plan.path)] == [plan.folder]
    assert caches_below(plan.unit_path(0)) == [plan.unit_path(0)]
    with refused("E212") as error:
        caches_below(plan.folder)
    assert error.value.code == "E212"
    (kept,) = (line for line in collect(plan.path.parent, dry_run=False) if plan.folder.name in line)
    assert kept.startswith("kept") and "--unsealed" in kept and plan.folder.is_dir()
    lines = list(collect(plan.path.parent, dry_run=True, unsealed=True))
    assert any("would remove" in line and plan.folder.name in line for line in lines)
    assert any("left alone" in line and other.name in line for line in lines)
    assert not any(str(plan.folder / ".versions") in line for line in lines)  # parts of an unfinished build
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(plan.folder / "plan.json", (long_ago, long_ago))
    os.utime(plan.folder, (long_ago, long_ago))
    list(collect(plan.path.parent, dry_run=False))
    assert not plan.folder.exists() and other.is_dir()


def test_restart_removes_a_plan(plan):
    restart(plan.path)
    assert plans(plan.path) == [] and not plan.folder.exists()


def test_a_plan_without_its_file_is_removed_only_if_it_is_empty(tmp_path):
    folder = versions_dir(tmp_path / "c")
    for name in ("partitions-0123456789ab", "partitions-0123456789ac"):
        (folder / name).mkdir(parents=True)
    (folder / "partitions-0123456789ab" / ".plan.json.01234567.tmp").touch()
    (folder / "partitions-0123456789ac" / "mine").touch()
    seal_again(tmp_path / "c")
    assert {entry.name for entry in folder.iterdir()} == {"partitions-0123456789ac", "lock"}


def test_files_that_cannot_be_linked_are_copied(plan, expected, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EXDEV, "no links here")

    monkeypatch.setattr(os, "link", refused)
    seal_small(plan)
    assert without_lock(plan.path.parent) == expected["pretrain"]


def test_a_seal_that_can_write_no_more_keeps_the_partitions_and_says_so(plan, expected):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"too large\. Its partitions are kept: the same command seals") as error:
            seal_small(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG and str(plan.path.parent) in error.value.filename
    seal_small(plan)
    assert without_lock(plan.path.parent) == expected["pretrain"]


def cut_everywhere(built, folder, expected, every, models):
    before = tree_of(built)
    put(before, folder / "first")
    trace = recorded_below(folder / "first", lambda: seal_again(folder / "first" / "c"))
    for number in range(0, len(trace) + 1, every):
        for model in models:
            disk = Disk(before)
            disk.apply(trace[:number])
            put(disk.left(model, number), folder / "scratch")
            seal_again(folder / "scratch" / "c")
            assert without_lock(folder / "scratch") == expected, (model, number)
            shutil.rmtree(folder / "scratch")
    return len(trace)


@pytest.mark.parametrize("kind", UNITS)
def test_a_seal_that_was_cut_ends_in_the_same_bytes(kind, built, expected):
    with quick_folder() as folder:
        assert cut_everywhere(built / kind, folder, expected[kind], 41, ("kill", "power")) > 60


@pytest.mark.faults
@pytest.mark.parametrize("kind", UNITS)
def test_a_seal_that_was_cut_anywhere_ends_in_the_same_bytes(kind, built, expected):
    with quick_folder() as folder:
        cut_everywhere(built / kind, folder, expected[kind], 1, ("kill", "power", "mixed"))


@each_kind
def test_the_sealed_cache_has_no_trace_of_its_partitions(plan):
    seal_small(plan)
    text = (plan.path / "meta.json").read_text()
    assert plan.sha256 not in text and "plan" not in json.loads(text) and "partition" not in json.loads(text)
    assert find_damage(plan.path, deep=True) == []
    assert [entry.name for entry in plan.folder.parent.iterdir() if entry.name.startswith("partitions")] == []


def test_a_partition_has_the_tokenizer_of_its_cache(plan):
    tokenizer = plan.path.parent / "tokenizer"
    put({"meta.json": b"{}"}, tokenizer)
    assert tokenizer_above(version(plan, 1)) == tokenizer


def cut_partition(folder, every, models, kind):
    """Build a partition, cut the build behind every so many operations, and build again."""
    plan = planned(folder / "first" / "c", 2, kind)
    before = tree_of(folder / "first")
    trace = recorded_below(folder / "first", lambda: build_part(plan, 1))
    expected = without_lock(folder / "first")
    for number in range(0, len(trace) + 1, every):
        for model in models:
            disk = Disk(before)
            disk.apply(trace[:number])
            put(disk.left(model, number), folder / "scratch")
            build_part(planned(folder / "scratch" / "c", 2, kind), 1)
            assert without_lock(folder / "scratch") == expected, (model, number)
            shutil.rmtree(folder / "scratch")
    return len(trace)


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.usefixtures("small_batches")
def test_a_partition_that_was_cut_ends_in_the_same_bytes(kind):
    with quick_folder() as folder:
        assert cut_partition(folder, 67, ("kill", "power"), kind) > 100


@pytest.mark.faults
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.usefixtures("small_batches")
def test_a_partition_that_was_cut_anywhere_ends_in_the_same_bytes(kind):
    with quick_folder() as folder:
        cut_partition(folder, 1, ("kill", "power", "mixed"), kind)


SEAL = """
import os, sys, tracemalloc
from pathlib import Path
from niels_gpt.engine.meta import Source
from niels_gpt.cache import joining
from niels_gpt.cache.kind.tokens import PRETRAIN
from niels_gpt.engine.units import plans_of, seal
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread reads: how many buffers overlap is chance
joining.MAX_DIGESTS = 1 << 12
(plan,) = plans_of(Path(sys.argv[1]))
tracemalloc.start()
seal(plan, PRETRAIN.units, source=Source())
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
def test_the_memory_of_a_seal_does_not_grow_with_its_documents(tmp_path):
    """In a process of its own: what the threads of other tests allocate meanwhile is not of the seal."""

    def peak(total):
        plan = planned(tmp_path / str(total) / "c", total)
        items = [(None, f"text {number}", f"name {number}") for number in range(12_000)]
        build_part(plan, 0, items=items, shard_bytes=1 << 16, checkpoint_seconds=1000)
        cloned(plan, range(1, total))
        return int(subprocess.check_output([sys.executable, "-c", SEAL, plan.path]))

    few, many = peak(4), peak(100)
    assert many < few + (4 << 20)  # the records of 96 times as many shards, and a meta.json of them
