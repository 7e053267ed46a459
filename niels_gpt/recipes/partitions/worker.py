"""What runs on a worker of Dask: look whether it can build the partitions of a cache, and build one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from niels_gpt.data.exclude import read_exclusion
from niels_gpt.recipes.partitions.shared import code_identity
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.tokenizer import tokenizer_state
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import CacheError

Said = tuple[str | None, str]
"""A warning or an obstacle: its code and its text."""
BUSY: Said = (None, "it builds for another command")
"""Of a worker that cannot be looked at yet."""
_WAIT_S = 5.0  # of a look for the end of a build on the same worker
_ONE_AT_A_TIME = threading.Lock()  # the current folder is the process's, and a build takes all of its threads


@dataclass(frozen=True)
class Work:
    """What the command sends to a worker about a cache."""

    settings: Settings
    name: str
    """Of the source."""
    plan: str
    """The sha256 of the plan's file."""
    folder: str
    """The current folder of the command: relative paths of the settings start there."""
    probe: str
    """The absolute path of a file in the folder of caches."""
    token: str
    """What is in that file."""
    code: dict[str, Any]
    """The program that the command is: see `code_identity`."""
    inputs: dict[str, str]
    """See `inputs_seen`."""


@dataclass(frozen=True)
class Built:
    """What became of one partition."""

    documents: int = 0
    tokens: int = 0
    error: Exception | None = None
    """What ended its build early."""
    code: str = ""
    """Of the error."""
    warnings: list[Said] = field(default_factory=list)
    """Of the build, in order."""


class _NotWanted(Exception):
    """The task was cancelled."""


async def obstacle(work: Work) -> Said | None:
    """Return why this worker cannot build the partitions of a cache; None if it can, and BUSY if it builds."""
    return await asyncio.to_thread(_obstacle, work)


def build_there(work: Work, number: int) -> Built:
    """Build a partition in a task of Dask. An error of the build is returned: Dask would repeat or change it.

    Where the task is cancelled the build stops, and the next build of the partition resumes it.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def check_wanted(*_: object) -> None:
        task = worker.state.tasks.get(key)
        if task is None or task.state != "executing":
            raise _NotWanted

    settings = replace(work.settings, threads=work.settings.threads or worker.state.nthreads)
    with _ONE_AT_A_TIME, _collected_warnings() as warnings:
        try:
            check_wanted()
            with contextlib.chdir(work.folder):
                meta = Units(settings, work.name).build(number, wait=True, progress=check_wanted).meta
            receipt = meta.get("partition")
            if receipt is None:  # another command has sealed the cache
                return Built(warnings=warnings)
            if receipt["plan"] != work.plan:
                raise CacheError(
                    work.probe, f"the worker has built partition {number} of another plan", "equal inputs", code="E513"
                )
        except Exception as error:
            return Built(error=_portable(error), code=code_of(error), warnings=warnings)
    return Built(sum(meta["docs"].values()), sum(meta["totals"].values()), warnings=warnings)


def inputs_seen(settings: Settings, name: str) -> dict[str, str]:
    """Return what this machine sees of a build's inputs, by what it is: equal on machines that see the same.

    The files of the source count by name and size alone: reading them may take hours.
    Raises: as `resolve_source` and `read_exclusion`.
    """
    found = resolve_source(settings, name).found
    names = hashlib.sha256()
    for path in () if found is None else found.files:
        names.update(f"{found.name_of(path) if found else ''}\0{path.stat().st_size}\n".encode())
    return {
        "source": f"{len(found.files) if found else 0:,} files {names.hexdigest()[:12]}",
        "exclude": "none" if settings.exclude is None else str(read_exclusion(settings.exclude).facts["sha256"]),
        "tokenizer": tokenizer_state(settings),
    }


def _obstacle(work: Work) -> Said | None:
    if not work.settings.accept_code and (differing := _differing(code_identity(), work.code)):
        return "E511", f"it runs another niels-gpt: {differing}. Install the same version there"
    try:
        token = Path(work.probe).read_text(encoding="utf-8")
    except OSError as error:
        token = str(error.strerror)
    if token != work.token:
        return "E513", f"it does not see the folder of caches: {work.probe} is {token[:80]!r} there"
    if not os.path.isdir(work.folder):
        return "E513", f"it does not see the current folder {work.folder}. Run the command in a folder that all share"
    if not _ONE_AT_A_TIME.acquire(timeout=_WAIT_S):
        return BUSY
    try:
        with contextlib.chdir(work.folder), _collected_warnings():
            differing = _differing(inputs_seen(work.settings, work.name), work.inputs)
    except Exception as error:
        return code_of(error), str(error)
    finally:
        _ONE_AT_A_TIME.release()
    return ("E513", f"it sees other inputs: {differing}") if differing else None


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    return ", ".join(f"{key} {there.get(key)!r} there and {here.get(key)!r} here" for key in keys)


def _portable(error: Exception) -> Exception:
    """Return the error, or its text where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextlib.contextmanager
def _collected_warnings() -> Iterator[list[Said]]:
    """Yield a list that receives the warnings that the package logs in the block."""
    found: list[Said] = []

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((getattr(record, "code", None), record.getMessage()))

    handler, logger = _Keep(logging.WARNING), logging.getLogger("niels_gpt")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
