"""Kill builds at random moments with SIGKILL, let each be finished by the tries that follow, and compare the bytes.

Run: python tests/support/kill_builds.py EMPTY_FOLDER [--kills 200] [--seed 0]
     python tests/support/kill_builds.py EMPTY_FOLDER --thirds SPM_MODEL

A build is a forked child of a process that has imported everything. All builders take turns, and 0, 1 and 2 threads
that encode. A process of its own polls the public paths all the while, and must see whole versions of finished builds
only. Prints a line of JSON; the exit status is 1 if anything was not as it must be.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.engine import stream
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.fileio import Operation
from niels_gpt.tokenizer import load_tokenizer
from support.disk import versions_dir
from support.power_loss import tree_of
from support.small_builds import BUILDERS, ITEMS, whole_version

COUNT = 2_000
"""Items of a source: a build of them takes some tenths of a second."""
SETTINGS = {
    "pretrain": {"max_train_tokens": 12_500, "max_val_tokens": 1_500, "shard_bytes": 4_000, "shuffle_buffer": 100},
    "sft": {},
    "templated": {},
    "rollouts": {},
}
MOST_TRIES = 100


class Stages(list[Operation]):
    """A record that is not kept: a pipe is told when the build has gone that far."""

    def __init__(self, pipe):
        self._pipe, self._told = pipe, 0

    def append(self, operation):
        stage = 1 if operation[0] == "create" and "index_" in operation[1] else self._told
        stage = 2 if operation[0] == "rename" and operation[2].endswith("meta.json") else stage
        if stage > self._told:
            self._told = stage
            os.write(self._pipe, b"%d" % stage)


def child(work, pipe):
    """Do some work in a forked process; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with fileio.recorded(Stages(pipe)):
            work()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def killed(pid, pipe, stage, seconds):
    """Kill a process some time after it has told of a stage (0: after its start); returns whether it had not ended."""
    while stage:
        told = os.read(pipe, 1)
        if not told:
            break  # it has ended
        stage = 0 if int(told) >= stage else stage
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return not ended(pid)


def ended(pid):
    """Wait for a process; returns whether it has ended well, which it must have unless it was killed."""
    status = os.waitpid(pid, 0)[1]
    if status and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        sys.exit(f"a build failed: status {status}")
    return status == 0


def attempt(work, stage, seconds):
    """Run a build in a process that is killed, unless `stage` is None; returns whether it was."""
    read, write = os.pipe()
    pid = child(work, write)
    os.close(write)
    was_killed = not ended(pid) if stage is None else killed(pid, read, stage, seconds)
    os.close(read)
    return was_killed


def finish_killed(work, duration, chance, most, where, public):
    """Kill a build again and again, `most` times at most, until it ends by itself; returns the number of kills."""
    kills = 0
    while True:
        stage = chance.choice((0, 0, 0, 1, 2)) if kills < most else None  # two of five: index and meta.json, commit
        if not attempt(work, stage, chance.uniform(0, duration if stage == 0 else duration / 3)):
            return kills
        kills += 1
        where[left_by(public)] += 1


def left_by(public):
    """Tell how far a killed build had come, by what it left."""
    folder = versions_dir(public)
    entries = {entry.name: entry for entry in folder.iterdir()} if folder.is_dir() else {}
    journals = [entry for name, entry in entries.items() if name.endswith(".journal")]
    if not journals or not (journals[0] / "journal.jsonl").exists():
        return "before the first checkpoint, or after the end"
    text = (journals[0] / "journal.jsonl").read_text(errors="replace")
    if not journals[0].with_suffix("").exists():
        return "in the commit"
    return "sealed" if '"sealed": "' in text else "in the end" if '"ended": true' in text else "while filling"


# --- the reader -------------------------------------------------------------------------------------------------------


def look(kind, public, generator):
    """Open a cache, read a batch or group and hash all files; returns its content sha256, None where there is none."""
    if not os.path.lexists(public):
        return None
    if kind == "pretrain":
        dataset = PretrainTokenStreamDataset(public / "train", T=8, device="cpu")
        dataset.get_batch(B=4, generator=generator)
    elif kind == "rollouts":
        RolloutDataset(public).group(0)
    elif kind == "sft":
        pair = (public / "train_tokens.bin", public / "train_idx.npy")
        SFTExampleDataset(*pair, T=64, device="cpu", eot_id=4).get_batch(B=4, generator=generator)
    return whole_version(public)


def poll(publics, connection):
    """Look at the caches until told to stop; report which versions were seen, how often, and what was wrong."""
    generator = torch.Generator().manual_seed(0)
    seen = {kind: Counter() for kind in publics}
    wrong = []
    told = False
    while not told:
        told = connection.poll()  # asked before: the last round sees the last versions
        for kind, public in publics.items():
            try:
                found = look(kind, public, generator)
            except Exception:
                wrong.append(f"{kind}: {traceback.format_exc()}")
            else:
                seen[kind].update([found] if found else [])
    connection.send((seen, wrong))


# --- the two programs -------------------------------------------------------------------------------------------------


def kill_builds(folder, kills, seed):
    """Kill builds until there were so many kills; returns what came out."""
    chance = random.Random(seed)
    publics = {kind: folder / "killed" / kind for kind in BUILDERS}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=poll, args=(publics, theirs), daemon=True)
    reader.start()
    theirs.close()
    done, where, different = Counter[str](), Counter[str](), list[str]()
    made = {kind: [] for kind in BUILDERS}
    while sum(done.values()) < kills:
        number = sum(map(len, made.values()))
        kind = sorted(BUILDERS)[number % len(BUILDERS)]
        whole, public = folder / "whole" / str(number) / kind, publics[kind]
        build = partial(BUILDERS[kind], seed=number, items=ITEMS[kind](number, COUNT), **SETTINGS[kind])
        started = time.monotonic()
        made[kind].append(build(whole)["content_sha256"])
        duration = time.monotonic() - started
        work = partial(build, public, num_threads=number % 3, checkpoint_seconds=chance.choice((0, 0.005, 2.0)))
        done[kind] += finish_killed(work, duration, chance, kills - sum(done.values()), where, public)
        different += [f"{kind} of seed {number}: {name}" for name in differences(whole, public, made[kind])]
    ours.send("stop")
    seen, wrong = ours.recv()
    reader.join()
    return {
        "kills": dict(done),
        "where": dict(where),
        "builds": sum(map(len, made.values())),
        "different": different,
        "looks": {kind: sum(seen[kind].values()) for kind in seen},
        "versions_seen": {kind: len(seen[kind]) for kind in seen},
        "strange": [content for kind in seen for content in seen[kind] if content not in made[kind]],
        "wrong": wrong,
    }


def differences(whole, public, made):
    """Return the files of a version that are not as they must be, and what a build left beside its versions."""
    right, found = tree_of(whole.resolve()), tree_of(public.resolve())
    wrong = [name for name in sorted({*right, *found}) if name not in right or right[name] != found.get(name)]
    known = {"lock", *(content[: versions.VERSION_DIGITS] for content in made)}
    return wrong + sorted(entry.name for entry in versions_dir(public).iterdir() if entry.name not in known)


def thirds(folder, model):
    """Kill builds again and again at a third of the time that they need; returns how many tries each took."""
    stream.BATCH_ITEMS = 256
    tokenizer = load_tokenizer(model)
    unbounded = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": 100, "shard_bytes": 1 << 30}
    builds = {
        "pretrain": partial(
            BUILDERS["pretrain"],
            items=[("train", " ".join([text] * 50), name) for _, text, name in ITEMS["pretrain"](0, 20_000)],
            **unbounded,
        ),
        "sft": partial(BUILDERS["sft"], items=[(name, chat * 25) for name, chat in ITEMS["sft"](0, 5_000)]),
    }
    found = {"equal": True}
    for kind, build in builds.items():
        work = partial(build, tokenizer=tokenizer, checkpoint_seconds=CHECKPOINT_SECONDS)
        started = time.monotonic()
        attempt(partial(work, folder / "whole" / kind), None, 0)
        duration = time.monotonic() - started
        tries = 1
        while attempt(partial(work, folder / "killed" / kind), 0, duration / 3) and tries < MOST_TRIES:
            tries += 1
        found[kind], found[f"{kind}_seconds"] = tries, round(duration, 2)
        public = folder / "killed" / kind
        found["equal"] &= public.exists() and tree_of(public.resolve()) == tree_of((folder / "whole" / kind).resolve())
    return found


def main():
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thirds", type=Path, metavar="SPM_MODEL")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    if arguments.thirds:
        found = thirds(arguments.folder, arguments.thirds)
        good = found["equal"]
    else:
        found = kill_builds(arguments.folder, arguments.kills, arguments.seed)
        good = not (found["different"] or found["strange"] or found["wrong"])
    print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
