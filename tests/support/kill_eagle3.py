"""Kill runs of the EAGLE-3 producer at random moments with SIGKILL, let others go on, and compare the bytes.

Run: python tests/support/kill_eagle3.py EMPTY_FOLDER [--kills 50] [--seed 0] [--command | --parts]

A run is a group of processes: a forked child of a process that has imported everything, and its workers, 0 to 3 of
them by chance; the whole group is killed, or the parent alone. With --command it is the real command line, each time in
a fresh process, whose workers are spawned. With --parts a run makes its shards in 2 or 3 parts, and seals them, or in
one piece; the next one may have another number. A run is resumed until it ends by itself; then every file of its folder
but the lock must be as a run that was left alone makes it. Prints a line of JSON; the exit status is 1 if anything
differs.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer
from support import eagle3_runs as small

COUNT = 150
"""Samples, four to a shard: a run takes some tenths of a second."""
MOST_KILLS = 5
"""Of one cache; then it is left alone, and the next one has another form."""
Start = Callable[[Path, int], int]
"""Starts a run into a folder with so many workers, in a process group of its own; returns its pid."""


def forked(folder, workers, *, seed, in_parts=False):
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        samples = small.samples_of(COUNT, seed=seed)
        form = ({}, small.TOPK, small.NATIVE, small.FP8, small.REPLY, small.ALL)[seed % 6]
        plan = small.plan(samples, **form)
        if in_parts and workers > 1:
            for number in range(workers):
                small.run(folder, samples=samples, given=plan, part=(number + 1, workers))
            small.seal(folder)
        else:
            small.run(folder, samples=samples, given=plan, workers=workers, resume=True, start="fork")
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def commanded(folder, workers, *, target, chats, form):
    program = [sys.executable, "-m", "niels_gpt.eagle3.precompute", "--target-model", str(target), "--resume"]
    program += ["--input-data", str(chats), "--output-dir", str(folder), "--workers", str(workers)]
    program += ["--seq-length", "64", "--threads", "1", *form]
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    return os.posix_spawn(sys.executable, program, os.environ, file_actions=quiet, setpgroup=0)


def ended(pid):
    """Wait for a process; returns whether it has ended well, which it must have unless it was killed."""
    status = os.waitpid(pid, 0)[1]
    if status and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        sys.exit(f"a run failed: status {status}")
    return status == 0


def killed(pid, seconds, *, group):
    """Kill a run after some time, with its workers or without; returns whether it had not ended."""
    time.sleep(seconds)
    (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    return not ended(pid)


def left_by(folder):
    """Tell how far a killed run had come, by what it left."""
    if not (folder / "sidecar" / "plan.json").exists():
        return "before the plan"
    if (folder / "meta.json").exists():
        return "at the end"
    receipts = len(list(folder.glob("sidecar/shard-*.json")))
    return "with some shards" if receipts else "before the first shard"


def kill_runs(folder, kills, chance, starts):
    """Kill runs until there were so many kills; returns what came out."""
    where, counts, different, number = Counter[str](), Counter[int](), list[str](), 0
    while where.total() < kills:
        start, whole, cache = starts(number), folder / f"{number}-whole", folder / f"{number}-killed"
        started = time.monotonic()
        assert ended(start(whole, 1))
        duration = time.monotonic() - started
        most = min(kills, where.total() + MOST_KILLS)
        while True:
            workers = chance.randint(1, 3)
            pid = start(cache, workers)
            if where.total() >= most:
                assert ended(pid)
                break
            if not killed(
                pid, chance.uniform(0, duration * chance.choice((0.05, 0.4, 1.2))), group=chance.random() < 2 / 3
            ):
                break
            where[left_by(cache)] += 1
            counts[workers] += 1
        right, found = small.whole_tree(whole), small.whole_tree(cache)
        names = sorted({*right, *found})
        different += [f"{number}: {name}" for name in names if right.get(name) != found.get(name)]
        number += 1
    return {"kills": where.total(), "where": where, "workers": counts, "runs": number, "different": different}


def command(folder):
    """Return what starts the real command, on a small target and chats that are written here."""
    texts = [f"Page {page}. The heron walks to the river and finds {page * 3} apples." for page in range(80)]
    model = write_tokenizer(
        train_tokenizer(texts, vocab_size=300, trained_on="a test"), folder / "tokenizer"
    ).model_path
    from niels_gpt.eagle3.target import write_small_target

    target, chats = write_small_target(folder / "target", load_tokenizer(model)), folder / "chats.jsonl"
    turns = [{"user": text, "assistant": text[page % 30 :]} for page, text in enumerate(texts)]
    chats_of = [[{"role": role, "content": text} for role, text in chat.items()] for chat in turns]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats_of))
    forms = ["--shard-size 4", "--shard-size 4 --target-probs-topk 8", "--format native --shard-bytes 60000"]
    forms += ["--format native --shard-bytes 60000 --for dspark"]
    return lambda number: partial(commanded, target=target, chats=chats, form=forms[number % 4].split())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    small.load(torch.device("cpu"))
    here = partial(forked, in_parts=arguments.parts)
    starts = command(arguments.folder) if arguments.command else lambda number: partial(here, seed=number)
    found = kill_runs(arguments.folder, arguments.kills, random.Random(arguments.seed), starts)
    print(json.dumps(found))
    return 1 if found["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
