"""A run that is killed, or that loses the power, at whatever moment: the next one ends with the same bytes.

Run: pytest tests/eagle3/test_eagle3_kills.py, and with -m faults for kills and every cut under every model.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from support import LONG, SUPPORT
from support import eagle3_runs as small
from support.eagle3_runs import run, samples_of, whole_tree
from support.power_loss import MODELS, Disk, put, recorded_below, tree_of
from support.processes import assert_gone


class Recorded:
    """A run of three shards that was recorded from its first operation on the disk to its last."""

    def __init__(self, folder, **form):
        self.samples = samples_of()
        self.plan = small.plan(self.samples, **form)
        (folder / "build").mkdir()
        self.trace = recorded_below(folder / "build", lambda: self.run(folder / "build" / "c"))
        self.after = without_lock(tree_of(folder / "build"))
        self.seen = set()

    def run(self, cache):
        run(cache, samples=self.samples, given=self.plan, resume=True)

    def check(self, tree, scratch, where):
        """Run on what was left: a shard with a receipt is whole, and after it all is as it should be."""
        key = tuple(sorted(tree.items()))
        if key in self.seen:
            return
        self.seen.add(key)
        put(tree, scratch)
        for name in (f"c/shard-{shard:06d}.safetensors" for shard in range(3)):
            receipt = tree.get(name.replace("c/", "c/sidecar/").replace("safetensors", "json"))
            assert receipt is None or tree.get(name) == self.after[name], f"{where}: a receipt, but {name} is not whole"
        if "c/meta.json" in tree:
            assert without_lock(tree) == self.after, f"{where}: meta.json before everything else"
        self.run(scratch / "c")
        assert without_lock(tree_of(scratch)) == self.after, where
        shutil.rmtree(scratch)


def without_lock(tree):
    return {name: content for name, content in tree.items() if not name.endswith("/lock") and not name.endswith(".tmp")}


def cut_everywhere(recorded, folder, models, seeds):
    disk = Disk({})
    for number in range(len(recorded.trace) + 1):
        for model, every in models.items():
            for seed in range(seeds if model == "mixed" else 1):
                if number % every == 0 or number == len(recorded.trace):
                    where = (model, seed, number, [found[:2] for found in recorded.trace[max(0, number - 2) : number]])
                    recorded.check(disk.left(model, 1000 * number + seed), folder / "scratch", where)
        disk.apply(recorded.trace[number : number + 1])


@pytest.mark.parametrize(
    "form",
    [{}, *(pytest.param(form, marks=pytest.mark.slow) for form in (small.NATIVE, small.ALL))],
    ids=["dense", "native", "all"],
)
def test_a_run_ends_with_the_same_bytes_wherever_it_was_cut(folder, form):
    recorded = Recorded(folder, **form)
    assert len(recorded.trace) > 80
    cut_everywhere(recorded, folder, {"power": 6, "kill": 5, "mixed": 14}, seeds=1)


@pytest.mark.faults
@pytest.mark.parametrize("form", [{}, small.TOPK, small.FP8, small.ALL], ids=["dense", "topk", "fp8", "all"])
def test_a_run_ends_with_the_same_bytes_wherever_it_was_cut_by_any_model(folder, form):
    cut_everywhere(Recorded(folder, **form), folder, dict.fromkeys(MODELS, 1), seeds=5 if LONG else 2)


def test_a_run_that_was_killed_may_lose_the_power_later(folder):
    recorded = Recorded(folder)
    for first in range(5, len(recorded.trace), 25):
        disk = Disk({})
        disk.apply(recorded.trace[:first])
        put(disk.left("kill"), folder / "again")
        trace = recorded_below(folder / "again", lambda: recorded.run(folder / "again" / "c"))
        shutil.rmtree(folder / "again")
        for number in range(0, len(trace), 13):
            recorded.check(disk.left("power"), folder / "scratch", (first, number))
            disk.apply(trace[number : number + 13])
        assert without_lock(disk.left("power")) == recorded.after


@pytest.mark.parametrize(("weight", "form"), [("embeddings", {}), ("weights", small.NATIVE)])
def test_the_plan_comes_first_and_meta_json_last(folder, weight, form):
    recorded = Recorded(folder, **form)
    names = [found[2] for found in recorded.trace if found[0] == "rename"]
    assert names[0] == "c/sidecar/plan.json" and names[-1] == "c/meta.json"
    order = ["c/manifest.json", f"c/target_{weight}.safetensors", f"c/sidecar/{weight}.json"]
    for shard in range(3):
        order += [f"c/shard-{shard:06d}.safetensors", f"c/sidecar/shard-{shard:06d}.json"]
    assert names[4:-1] == order
    assert sorted(names[1:4]) == [f"c/sidecar/{name}" for name in ("batches.jsonl", "ids.txt", "samples.safetensors")]
    assert Counter(found[0] for found in recorded.trace)["rmdir"] == 0


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kills", "more"),
    [(50 if LONG else 10, []), (50 if LONG else 10, ["--parts"]), (6 if LONG else 2, ["--command"])],
    ids=["forked", "in parts", "the real command"],
)
def test_killed_runs_end_with_the_same_bytes(tmp_path, kills, more):
    program = [sys.executable, str(SUPPORT / "kill_eagle3.py"), str(tmp_path), "--kills", str(kills), *more]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == kills and found["different"] == []
    if LONG and not more:
        assert set(found["workers"]) == {"1", "2", "3"} and len(found["where"]) >= 3


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from support import SUPPORT
from support import eagle3_runs as small

def slow(device):
    model = small.load(device)
    model.get_input_embeddings().register_forward_pre_hook(hang)
    return model

def hang(*_):
    import os
    if os.path.exists(os.path.join(sys.argv[2], "sidecar", "plan.json")):  # else it is the trial
        os.write(1, b"%d\\n" % os.getpid())  # in one piece, for two of them write at once
        time.sleep(1200)

small.run(sys.argv[2], load=slow, workers=2, start="fork")
"""


def started(cache):
    """Start a run whose two workers hang; returns it, and the workers' pids."""
    program = [sys.executable, "-c", PARENT, str(SUPPORT.parent), str(cache)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen(program, text=True, start_new_session=True, restore_signals=True, **pipes)
    assert parent.stdout is not None
    return parent, [int(parent.stdout.readline()) for _ in range(2)]


@pytest.mark.slow
def test_workers_end_with_their_parent_when_it_is_killed(tmp_path):
    parent, workers = started(tmp_path / "c")
    parent.kill()
    parent.communicate()
    assert_gone(workers)
    run(tmp_path / "c", resume=True)
    run(tmp_path / "d")
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_the_parent_alone(tmp_path):
    parent, workers = started(tmp_path / "c")
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate()
    assert_gone(workers)
    assert errors.count("KeyboardInterrupt") == 1 and not list((tmp_path / "c").rglob("*.tmp"))
