"""Builds that meet a fault of the disk, of rights or of a source: what they kept, and what their errors say of it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.builders import resume
from niels_gpt.builders.pretrain import build_pretrain
from niels_gpt.builders.sft import build_sft
from niels_gpt.storage import versions
from support.byte_tokenizer import ByteTokenizer, build

TEXTS = [f"Document {number}. " + "abcdefgh " * 30 for number in range(40)]
OLD = "the old text"
NOBODY = 65534


def build_new(path: Path, kind: str = "pretrain", texts: Any = TEXTS, **arguments: Any) -> dict[str, Any]:
    """Build the cache that the faults meet, with a checkpoint after each batch."""
    common: dict[str, Any] = {"tokenizer": ByteTokenizer(), "seed": 0, "checkpoint_seconds": 0, "num_threads": 0}
    if kind == "sft":
        chats = ([{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in texts)
        return build_sft(chats, path, val_frac=0.1, **{**common, **arguments})
    limits = {"max_train_tokens": 10**6, "max_val_tokens": 10**5, "shard_bytes": 8192, "shuffle_buffer": None}
    return build_pretrain(((None, text) for text in texts), path, **{**common, **limits, **arguments})


def documents_in_journal(path: Path) -> int:
    """Read the journal of the one unfinished build by its format; returns how many documents its last line has.

    Every line but the last one, which may be cut, has the CRC-32 that it says.
    """
    (journal,) = versions.versions_dir(path).glob("building-*.journal/journal.jsonl")
    lines = journal.read_bytes().split(b"\n")
    whole = [line for line in lines[:-1] if line[:9] == b"%08x " % zlib.crc32(line[9:])]
    assert len(whole) >= len(lines) - 2 and "journal_version" in json.loads(whole[0][9:])
    return int(json.loads(whole[-1][9:])["documents"]) if len(whole) > 1 else 0


def said_to_be_kept(error: BaseException) -> int:
    """Return the number of documents that a message says are kept; 0 where it says nothing of it."""
    found = re.search(r"(\d+) documents are done and kept: the same command resumes", str(error))
    return int(found.group(1)) if found else 0


class Heard(logging.Handler):
    """Holds the numbers of documents after which builds said that they resume."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        resume.logger.addHandler(self)
        resume.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"resuming after (\d+) documents of an earlier run", record.getMessage())
        self.numbers += [int(found.group(1))] if found else []


def error_of(path: Path) -> dict[str, Any]:
    """Return the error that a build of a cache ends with."""
    try:
        build(path, ["new"])
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
    return {"type": None}


def skip_unless(*command: str) -> None:
    """Skip the test, with what the system says, where it refuses a command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{' '.join(command)}: {probe.stderr.strip()}")


Ask = Callable[..., Any]
"""Asks another process to do something; returns its answer."""


@contextmanager
def asking(*command: str, **options: Any) -> Iterator[Ask]:
    """Start a process that runs `answer`; yield a function that asks it for an action with some arguments."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:

        def ask(action: str, *arguments: object) -> Any:
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


def answer(actions: Mapping[str, Callable[..., Any]]) -> None:
    """Do what stdin asks for, line by line, and print each result as a line of JSON."""
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        print(json.dumps(actions[action](*arguments)), flush=True)
