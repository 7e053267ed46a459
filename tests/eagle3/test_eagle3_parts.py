"""Processes make parts in one folder, which is sealed to the bytes of one run; what does not fit is refused."""

import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support import eagle3_runs as small
from support.commands import niels_gpt
from support.disk import LEASES_DIR, lease_path, lock_by_leases
from support.eagle3_damage import flip_bit
from support.eagle3_runs import (
    NATIVE,
    has_shard,
    join,
    never,
    part_lock,
    patched,
    run,
    samples_of,
    seal,
    times,
    whole_tree,
)
from support.power_loss import MODELS, Disk, put, recorded_below, tree_of

from niels_gpt.storage.errors import CacheError

FORMS = {"dense": {}, "native": NATIVE}
PARTS_NAME = ".parts"
FORK = multiprocessing.get_context("fork")


def make(folder, part, form="native", **how):
    """Make a part of a cache of three shards; returns the shards that were made."""
    return run(folder, given=small.plan(samples_of(), **FORMS[form]), part=part, **how).shards


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return str(request.param)


@pytest.fixture(scope="module")
def whole(form, eagle3_caches):
    return whole_tree(eagle3_caches[form])


@pytest.fixture(scope="module")
def finished_parts(tmp_path_factory):
    """Three parts in one folder, not sealed. Nothing may change it."""
    folder = tmp_path_factory.mktemp("parts") / "c"
    for number in (3, 1, 2):
        make(folder, (number, 3))
    return folder


@pytest.fixture
def parts(finished_parts, tmp_path):
    return shutil.copytree(finished_parts, tmp_path / "c")


def partition(number, total):
    """The flags that make a partition."""
    return ["--partitions", str(total), "--partition", str(number)]


def again(number, total=3):
    """The end of the command that makes a partition again."""
    return " ".join(partition(number, total))


def refused(action, *words, code="E712"):
    with pytest.raises(CacheError) as caught:
        action()
    assert caught.value.code == code and all(word in str(caught.value) for word in words), str(caught.value)
    return caught.value


def started(folder, part, form, **how):
    process = FORK.Process(target=make, args=(folder, part, form), kwargs=how)
    process.start()
    return process


def test_parts_at_once_and_sealed_are_the_bytes_of_one_run(tmp_path, form, whole):
    folder = tmp_path / "c"
    processes = [started(folder, (number, 3), form) for number in (1, 2, 3)]  # each may be the first: the plan's race
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    before = times(folder)
    assert make(folder, (2, 3), form, load=never) == 0 and times(folder) == before, "a repeated part does nothing"
    assert seal(folder).is_new
    assert whole_tree(folder) == whole and not (folder / PARTS_NAME).exists()
    before = times(folder)
    assert not seal(folder).is_new and make(folder, (2, 3), form, load=never) == 0
    assert whole_tree(folder) == whole and {**before, "sidecar/lock": 0} == {**times(folder), "sidecar/lock": 0}


def test_a_part_that_was_killed_is_made_elsewhere_while_others_run(tmp_path, form, whole):
    folder, ready = tmp_path / "c", tmp_path / "ready"

    def hang(*_):
        if (folder / PARTS_NAME / "2-of-3.lock").exists():  # not in the trial
            ready.touch()
            time.sleep(600)

    def load(device):  # in the process that is forked
        model = small.load(device)
        model.register_forward_pre_hook(hang)
        return model

    make(folder, (1, 3), form)
    process = started(folder, (2, 3), form, load=load)
    while not ready.exists() and process.is_alive():
        time.sleep(0.01)
    writing = folder / ".shard-000001.safetensors.01234567.tmp"  # of the part that runs
    own = folder / ".shard-000002.safetensors.01234567.tmp"  # of a process that was killed
    writing.touch()
    own.touch()
    make(folder, (3, 3), form)
    assert writing.exists() and not own.exists()
    for action in (
        lambda: make(folder, (2, 3), form),
        lambda: make(folder, (2, 6), form),
        lambda: run(folder, given=small.plan(samples_of(), **FORMS[form]), resume=True),
        lambda: seal(folder),
        lambda: join(tmp_path / "j", [folder]),
    ):
        refused(action, "partition 1 of 3 is being written", code="E503")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert make(folder, (2, 3), form) == 1 and seal(folder).is_new
    assert whole_tree(folder) == whole


def test_leases_leave_nothing_in_the_sealed_folder(tmp_path, form, whole):
    folder = tmp_path / "c"
    lock_by_leases(folder)
    for number in (1, 2):
        assert make(folder, (number, 2), form) == 3 - number
    with part_lock(folder, (1, 4)):
        assert lease_path(folder / PARTS_NAME / "1-of-4.lock").exists()
    (folder / ".probe-01234567").mkdir()  # of a check of the file system that was killed
    (folder / ".probe-01234567" / "old").touch()
    assert seal(folder).is_new and whole_tree(folder) == whole
    assert not (folder / ".probe-01234567").exists()


def lose_leases(folder):
    """Remove them, as another machine does that has seen them run out."""
    for path in (folder / LEASES_DIR).iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("least", "how"),
    [(0, {"part": (2, 3)}), (1, {"part": (2, 3)}), (1, {"resume": True, "workers": 2, "start": "fork"})],
    ids=["part-before-its-shard", "part-in-its-shard", "workers"],
)
def test_a_run_that_lost_its_lease_leaves_shards_and_files_alone(tmp_path, least, how):
    folder, given = tmp_path / "c", small.plan(samples_of(), batch_size=1, **NATIVE)  # batches to report between
    lock_by_leases(folder)
    run(folder, given=given, part=(1, 3))
    others = folder / ".shard-000001.safetensors.01234567.tmp"

    def lose(size, *_):
        if size >= least and not others.exists():
            lose_leases(folder)
            others.touch()

    refused(lambda: run(folder, given=given, progress=lose, **how), "lost its lease", code="E512")
    assert others.exists() and [path.name for path in folder.glob("shard-*")] == ["shard-000000.safetensors"]
    assert [path for path in folder.glob(".shard-*") if path != others] == [] or "workers" in how


def test_a_run_that_lost_its_lease_writes_no_plan_and_no_meta_json(tmp_path):
    folder = tmp_path / "c"
    lock_by_leases(folder)
    with patched(code=lambda _, folder, code: lose_leases(folder)):
        refused(lambda: make(folder, (1, 3)), "lost its lease", code="E512")
    assert not (folder / "sidecar" / "plan.json").exists()

    def lose(*_):
        if has_shard(folder, 2):
            lose_leases(folder)

    refused(lambda: run(folder, progress=lose), "lost its lease", code="E512")
    assert has_shard(folder, 2) and not (folder / "meta.json").exists()


def test_parts_of_other_numbers_and_a_run_without_parts_go_on(tmp_path, form, whole):
    folder = tmp_path / "c"
    assert make(folder, (1, 2), form) == 2 and make(folder, (3, 4), form) == 0
    assert make(folder, (2, 5), form) == 1
    seal(folder)
    assert whole_tree(folder) == whole
    shutil.rmtree(folder)
    make(folder, (3, 3), form)
    assert run(folder, given=small.plan(samples_of(), **FORMS[form]), resume=True).shards == 2
    assert whole_tree(folder) == whole


def remove_first(error, path):
    """Run the part of the commands that an error names which removes a shard, before it is made again."""
    (line,) = [line for line in error.remedy.splitlines() if line.startswith("rm -rf ")]
    command = line.partition(" && ")[0]
    assert command.split() == ["rm", "-rf", str(path)]
    subprocess.run(command.split(), check=True)


def test_the_seal_names_what_is_missing_damaged_or_foreign(parts, tmp_path):
    (parts / "shard-000000.safetensors").unlink()
    flip_bit(parts / "shard-000001.safetensors", -1)
    receipt = parts / "sidecar" / "shard-000002.json"
    other = json.loads(receipt.read_bytes())
    other["facts"]["plan"] = "0" * 64
    receipt.write_text(json.dumps(other))
    before = whole_tree(parts)
    error = refused(lambda: seal(parts), "missing: 0", "stale: 2", again(0), again(2))
    assert whole_tree(parts) == before
    remove_first(error, parts / "shard-000002.safetensors")
    assert [make(parts, (number, 3)) for number in (1, 2, 3)] == [1, 0, 1]
    error = refused(lambda: seal(parts), "damaged: 1 (", "sample", again(1))  # all is read now
    remove_first(error, parts / "shard-000001.safetensors")
    assert make(parts, (2, 3)) == 1
    shutil.copy(parts / "shard-000001.safetensors", parts / "shard-000003.safetensors")
    refused(lambda: seal(parts), "shard-000003", "3 shards")
    (parts / "shard-000003.safetensors").unlink()
    (parts / PARTS_NAME / "mine").touch()
    refused(lambda: seal(parts), ".parts/mine")
    (parts / PARTS_NAME / "mine").unlink()
    assert seal(parts).meta["totals"]["shards"] == 3


@pytest.mark.parametrize("name", ["sidecar/samples.safetensors", "target_weights.safetensors", "sidecar/batches.jsonl"])
def test_what_no_shard_holds_is_written_again_by_any_part(parts, name, whole_native):
    flip_bit(parts / name, -1)
    refused(lambda: seal(parts), "Build a partition again")
    assert make(parts, (2, 3)) == 0
    seal(parts)
    assert whole_tree(parts) == whole_native


@pytest.fixture
def whole_native(eagle3_caches):
    return whole_tree(eagle3_caches["native"])


def test_a_machine_with_another_plan_or_other_code_is_refused(tmp_path):
    folder, samples = tmp_path / "c", samples_of()
    first = small.plan(samples, **NATIVE)
    run(folder, given=first, part=(1, 3), code={"niels_gpt": "1", "libraries": {"torch": "2"}})
    before = whole_tree(folder)

    def other(code="2", **changed):
        given = small.plan(samples, **{**NATIVE, **changed})
        libraries = {"niels_gpt": "1", "libraries": {"torch": code}}
        return run(folder, given=given, part=(2, 3), code=libraries)

    refused(lambda: other(run={"threads": 2}), "partition 1 of 3", "run.threads: 1, now 2")
    refused(lambda: other(target={"config_sha256": "d" * 64}), "target.config_sha256")
    refused(lambda: other(batch_size=2), "batches.batch_size: 3, now 2")
    refused(lambda: other(selected_token_ids=[1, 2, 3], draft_vocab_size=3), "manifest.draft_vocab_size")
    refused(lambda: other("3"), "libraries.torch: '2', here '3'", "Install the same version")
    assert whole_tree(folder) == before
    other()
    assert has_shard(folder, 1)


def test_an_unsealed_folder_says_so(parts):
    (parts / "shard-000001.safetensors").unlink()
    for command in ("verify", "stats"):
        done = niels_gpt("eagle3", command, "--json", parts)
        error = done.json["error"]
        assert done.status == 1 and error["code"] == "E712" and f"niels-gpt seal {parts}" in json.dumps(error)
        assert "2 of 3 shards are there" in json.dumps(error) and "partition 1 of 3, 0 of 1 shard" in json.dumps(error)


def test_nothing_is_written_through_a_link(tmp_path):
    folder = tmp_path / "c"
    make(folder, (1, 3))
    shutil.move(folder / PARTS_NAME, tmp_path / "elsewhere")
    (folder / PARTS_NAME).symlink_to(tmp_path / "elsewhere")
    refused(lambda: make(folder, (2, 3)), PARTS_NAME, code="E205")
    refused(lambda: seal(folder), PARTS_NAME, code="E205")
    (folder / PARTS_NAME).unlink()
    with part_lock(folder, (2, 3)):
        refused(lambda: seal(folder), "partition 1 of 3", code="E503")


def cut_everywhere(trace, before, scratch, after, every):
    """Run `after` on what is left in `scratch` after a cut before each operation, or before each `every`th."""
    disk, seen = Disk(before), set()
    for number in range(len(trace) + 1):
        if number % every == 0 or number == len(trace):
            for model in MODELS:
                left = disk.left(model, number)
                if (key := tuple(sorted(left.items()))) in seen:
                    continue
                seen.add(key)
                put(left, scratch)
                after()
                shutil.rmtree(scratch)
        disk.apply(trace[number : number + 1])


def test_a_seal_that_was_cut_is_repeated(folder, finished_parts, whole_native):
    shutil.copytree(finished_parts, folder / "build" / "c")
    before = tree_of(folder / "build")

    def again():
        seal(folder / "scratch" / "c")
        assert whole_tree(folder / "scratch" / "c") == whole_native

    trace = recorded_below(folder / "build", lambda: seal(folder / "build" / "c"))
    cut_everywhere(trace, before, folder / "scratch", again, every=2)


@pytest.mark.slow
def test_a_first_part_that_was_cut_is_made_again(folder, whole_native):
    (folder / "build").mkdir()

    def again():
        for number in (2, 1, 3):
            make(folder / "scratch" / "c", (number, 3))
        seal(folder / "scratch" / "c")
        assert whole_tree(folder / "scratch" / "c") == whole_native

    trace = recorded_below(folder / "build", lambda: make(folder / "build" / "c", (1, 3)))
    cut_everywhere(trace, {}, folder / "scratch", again, every=9)


@pytest.mark.slow
def test_commands_at_once_one_of_them_killed(tmp_path, model, chats):
    what = ["--target-model", str(model), "--input-data", str(chats), "--seq-length", "40", "--threads", "1"]
    what += ["--format", "native", "--shard-bytes", "20000", "--device", "cpu", "--output-dir"]
    folder, program = tmp_path / "c", [sys.executable, "-m", "niels_gpt.eagle3.precompute"]
    runs = [subprocess.Popen([*program, *what, str(folder), *partition(number, 2)]) for number in (0, 1)]
    while not (folder / "sidecar" / "plan.json").exists():  # one of the two writes it
        time.sleep(0.005)
    runs[1].kill()
    assert runs[0].wait() == 0 and runs[1].wait() is not None
    assert niels_gpt("eagle3", "precompute", *what, folder, *partition(1, 2)).status == 0
    assert niels_gpt("eagle3", "seal", folder).status == 0
    assert niels_gpt("eagle3", "precompute", *what, tmp_path / "d").status == 0
    found = subprocess.run(["diff", "-r", "c", "d"], cwd=tmp_path, capture_output=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_commands_make_parts_in_one_folder_and_seal_it(tmp_path, model, chats, made):
    folder = tmp_path / "a folder"

    def part(*flags):
        words = ["--target-model", model, "--input-data", chats, "--output-dir", folder, "--seq-length", "40"]
        done = niels_gpt("eagle3", "precompute", *words, "--shard-size", "4", "--device", "cpu", *flags)
        assert done.status == 0, done.err
        return done.out

    assert "to make in partition 0 of 2" in part(*partition(0, 2), "--threads", "1")
    assert "partition 0 of 2" not in part(*partition(1, 2), "--dry-run")
    done = niels_gpt("eagle3", "seal", "--json", folder)
    assert done.status == 1
    *_, command, last = map(str.strip, done.json["error"]["message"].splitlines())
    assert shlex.split(last) == ["niels-gpt", "seal", str(folder)]
    assert command.endswith(again(1, 2)) and "--threads 1" in command
    assert niels_gpt(*shlex.split(command)[1:]).status == 0
    assert niels_gpt("seal", folder).status == 0
    assert whole_tree(folder) == whole_tree(made)
    assert not subprocess.run(["diff", "-r", str(folder), str(made)], capture_output=True, check=False).stdout


@pytest.mark.parametrize("command", [["seal"], ["eagle3", "seal"]], ids=" ".join)
def test_both_seals_say_the_same(parts, command, monkeypatch, whole_native):
    (parts / "shard-000001.safetensors").rename(parts.parent / "kept")
    done = niels_gpt(*command, "--json", parts)
    assert done.status == 1 and done.json["error"]["code"] == "E712" and again(1) in done.json["error"]["message"]
    (parts.parent / "kept").rename(parts / "shard-000001.safetensors")
    monkeypatch.chdir(parts.parent)
    parts.rename("roam")  # a source is called so too
    found = [niels_gpt(*command, "--json", "roam") for _ in range(2)]
    assert [done.status for done in found] == [0, 0] and whole_tree(parts.parent / "roam") == whole_native
    assert [done.json["changed"] for done in found] == [True, False]
    assert all(done.json.keys() == {"folder", "totals", "changed"} and done.json["folder"] == "roam" for done in found)
    done = niels_gpt(*command, "roam")
    assert "was sealed already" in done.out and "next: niels-gpt eagle3 verify roam" in done.out


def test_a_folder_of_partitions_is_sealed_without_the_flags_of_a_source(parts):
    before = whole_tree(parts)
    for flags in (["--partitions", "3"], ["--sizes-only"], ["--seed", "7", "--lock", "lease"]):
        done = niels_gpt("seal", parts, *flags)
        assert done.status == 2 and "error[E101]" in done.err and f"{flags[0]}" in done.err
        assert "leave the flags out" in done.err and whole_tree(parts) == before


def test_a_seal_that_ended_before_it_removed_its_locks_is_repeated(parts, whole_native):
    shutil.copytree(parts / PARTS_NAME, parts.parent / "kept")
    seal(parts)
    shutil.move(parts.parent / "kept", parts / PARTS_NAME)
    assert niels_gpt("seal", parts).status == 0 and whole_tree(parts) == whole_native
    assert not (parts / PARTS_NAME).exists()


def test_the_earlier_flag_makes_the_same_partition_and_warns(tmp_path, model, chats):
    words = ["eagle3", "precompute", "--target-model", model, "--input-data", chats, "--seq-length", "40"]
    words += ["--shard-size", "4", "--device", "cpu", "--threads", "1", "--json", "--output-dir", tmp_path / "c"]
    done = niels_gpt(*words, "--part", "2/3")
    assert done.status == 0 and "warning[W104]: --part 2/3 is --partitions 3 --partition 1 now" in done.err
    shutil.move(tmp_path / "c", tmp_path / "d")
    now = niels_gpt(*words, *partition(1, 3))
    assert now.status == 0 and "W104" not in now.err and now.json == done.json
    assert (now.json["partition"], now.json["partitions"], now.json["shards"]) == (1, 3, 1)
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")
