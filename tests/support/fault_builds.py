"""Builds that meet a fault of the disk, of rights or of a source, or are interrupted or killed; what they leave."""

import functools
import json
import logging
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.build_templated import build_templated_sft
from niels_gpt.chat import Chat
from niels_gpt.documents import DocumentBatch
from niels_gpt.engine import build as engine_build
from niels_gpt.recipes import gc
from support.byte_tokenizer import ByteChats, ByteTokenizer, build
from support.disk import versions_dir
from support.power_loss import Disk, put, recorded_below, tree_of
from support.small_builds import BUILDERS, ITEMS, quick_folder

TEXTS = [f"Document {number}. " + "abcdefgh " * 30 for number in range(40)]
OLD = "the old text"
NOBODY = 65534


def build_new(path, kind="pretrain", texts=TEXTS, **arguments):
    """Build the cache that the faults meet, with a checkpoint after each batch."""
    common = {"tokenizer": ByteTokenizer(), "seed": 0, "checkpoint_seconds": 0, "num_threads": 0}
    chats = ([{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in texts)
    if kind == "sft":
        return build_sft(chats, path, val_frac=0.1, **{**common, **arguments})
    if kind == "templated":
        named = (Chat(str(number), messages) for number, messages in enumerate(chats))
        return build_templated_sft(named, path, chat_tokenizer=ByteChats(), val_frac=0.1, **{**common, **arguments})
    limits = {"max_train_tokens": 10**6, "max_val_tokens": 10**5, "shard_bytes": 8192, "shuffle_buffer": None}
    return build_pretrain(((None, text) for text in texts), path, **{**common, **limits, **arguments})


def said_to_be_kept(error):
    """Return the number of documents that a message says are kept; 0 where it says nothing of it."""
    found = re.search(r"(\d+) documents are done and kept: the same command resumes", str(error))
    return int(found.group(1)) if found else 0


_STEPS = {
    "description": "niels_gpt.engine.build.write_description",
    "commit": "niels_gpt.engine.build.versions.commit",
    "record": "niels_gpt.recipes.request.record_recipe",
}


def die_at(patch, step, error):
    """Let builds end with an error where they would write their description, commit, or record their recipe."""

    def die(*_, **__):
        raise error

    patch.setattr(_STEPS[step], die)


def before_each_removal(patch, meanwhile):
    """Let something happen whenever gc is about to remove a path."""
    real = gc.discard
    patch.setattr(gc, "discard", lambda path: (meanwhile(path), real(path)))


class Heard(logging.Handler):
    """Holds the numbers of documents after which builds said that they resume."""

    def __init__(self):
        super().__init__()
        self.numbers = []
        engine_build.logger.addHandler(self)
        engine_build.logger.setLevel(logging.INFO)

    def emit(self, record):
        found = re.search(r"resuming after (\d+) documents of an earlier run", record.getMessage())
        self.numbers += [int(found.group(1))] if found else []


def error_of(path):
    """Return the error that a build of a cache ends with."""
    try:
        build(path, ["new"])
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
    return {"type": None}


def skip_unless(*command):
    """Skip the test, with what the system says, where it refuses a command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{' '.join(command)}: {probe.stderr.strip()}")


Ask = Callable[..., Any]
"""Asks another process to do something; returns its answer."""


@contextmanager
def asking(*command, **options):
    """Start a process that runs `answer`; yield a function that asks it for an action with some arguments."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:

        def ask(action, *arguments):
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(json.dumps([action, *map(str, arguments)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, process.stderr.read()
            return json.loads(line)

        try:
            yield ask
        finally:
            process.communicate()


@contextmanager
def ready(command, line):
    """Run a process that prints a line when it is ready; it is killed at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == f"{line}\n"
            yield process
        finally:
            process.kill()


def answer(actions):
    """Do what stdin asks for, line by line, and print each result as a line of JSON."""
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        print(json.dumps(actions[action](*arguments)), flush=True)


KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))
ENCODED_KINDS = pytest.mark.parametrize("kind", ["pretrain", "sft"])


def cut_off(items, at):
    """Yield items, and fail at item number `at` as a network does; a batch has as many items as documents."""
    number = 0
    for item in items:
        end = number + (len(item) if isinstance(item, DocumentBatch) else 1)
        if at is not None and end > at:
            if number < at:
                yield _begin_of(item, at - number)
            raise ConnectionError("upstream is gone")
        number = end
        yield item


def _begin_of(batch, size):
    counters = [(first, counts) for first, counts in batch.counters if first < size]
    position = {name: places[:size] for name, places in batch.position.items()}
    return DocumentBatch(batch.texts[:size], batch.ids[:size], batch.split, counters, position)


def interrupt(kind, path, at, items=None, **changed):
    """Leave a build unfinished after `at` items of its source."""
    with pytest.raises(ConnectionError, match="upstream is gone"):
        BUILDERS[kind](path, items=cut_off(ITEMS[kind](0) if items is None else items, at), **changed)


def files_of(root):
    """Return all that a folder holds, without locks and the counts of runs that gained nothing."""
    return {name: content for name, content in tree_of(root).items() if not name.endswith(("/lock", "/attempts.json"))}


def left(path):
    """Return all files beside a cache, its versions and unfinished builds included."""
    return files_of(path.parent)


def uninterrupted(kind, folder, **changed):
    """Return what a build leaves that is not interrupted."""
    BUILDERS[kind](folder / "whole" / "c", **changed)
    return left(folder / "whole" / "c")


def unfinished(path, suffix=""):
    """Return the folder of the one unfinished build of a cache; suffix ".journal": the folder of its journal."""
    (entry,) = (entry for entry in versions_dir(path).glob("building-*") if entry.suffix == suffix)
    return entry


def checkpoints(path):
    """Return the checkpoints of an unfinished build."""
    raw = (unfinished(path, ".journal") / "journal.jsonl").read_bytes()
    header, *found = values_of(raw)
    assert "journal_version" in header and len(found) + 2 >= raw.count(b"\n") + 1  # the last line may be cut
    return found


def place_of(name, journal, found, is_there):
    """Return where a build keeps a file that it still writes: in the folder of its journal, or where it stays.

    journal: the journal's folder. found: the checkpoints so far. is_there: whether there is a file at a place.
    """
    if is_there(place := f"{journal}/{name}"):
        return place
    work, split = journal.removesuffix(".journal"), name.removesuffix(".bin")
    shards = sum(record["name"].startswith(f"{split}/") for each in found for record in each["finished"])
    places = (f"{work}/{name}", f"{work}/index/{name}", f"{work}/{split}/shard_{shards:05d}.bin")
    return next(filter(is_there, places), place)


def documents_in_journal(path):
    """Return how many documents the journal of the one unfinished build has."""
    found = checkpoints(path)
    return int(found[-1]["documents"]) if found else 0


def killed_after(kind, folder, is_last, **changed):
    """Return the path of a cache whose build was killed after the first operation for which `is_last` is true."""
    (folder / "recorded").mkdir()
    trace = recorded_below(folder / "recorded", lambda: BUILDERS[kind](folder / "recorded" / "c", **changed))
    disk = Disk({})
    disk.apply(trace[: next(number for number, operation in enumerate(trace) if is_last(operation)) + 1])
    put(disk.left("kill"), folder / "killed")
    return folder / "killed" / "c"


def journals(part):
    """Return a condition: the operation writes a line to the journal that holds `part`."""
    return lambda operation: (
        operation[0] == "write" and "journal.jsonl" in operation[1] and part.encode() in operation[3]
    )


def line(value):
    """Return a line of a journal as docs/formats.md has it."""
    text = json.dumps(value, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def values_of(raw):
    """Return the objects of a journal, the header included; a line without the CRC-32 that it says is none."""
    return [json.loads(text[9:]) for text in raw.splitlines() if text[:9] == b"%08x " % zlib.crc32(text[9:])]


@functools.cache
def unfinished_tree(kind, sealed=False):
    """Return what an unfinished build left, the name of its journal, and the content sha256 that it would end with.

    sealed: it has done everything but its last callback, and the version is committed. Call it with small batches.
    """

    def fail(meta):
        raise ConnectionError

    with quick_folder() as path:
        with pytest.raises(ConnectionError):
            if sealed:
                BUILDERS[kind](path / "c", committed=fail)
            else:
                BUILDERS[kind](path / "c", items=cut_off(ITEMS[kind](0), 34))
        tree = files_of(path)
        content = BUILDERS[kind](path / "other" / "c")["content_sha256"]
    return tree, next(name for name in tree if name.endswith("journal.jsonl")), content
