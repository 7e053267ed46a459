"""Builds a native cache from another tool's folder while the tool still writes it: `eagle3 watch`.

Samples are taken in the order of their numbers, whatever the order in which their files come. The cache is the one that
`import_cache` makes of the complete folder, byte for byte, if the conventions are stated; otherwise they are proved on
the first samples, and `imported.proved` in manifest.json differs.

A sample is taken when its file is whole: it is read with all checks of an import and copied, and its inode, size and
times of change are the same before and after. A faulty file is read again when it changes, and refused once it has not
changed for `patience` seconds. A missing file is waited for as long after a later one came.

OUT holds shards, receipts and watch.json (format/watched.py) while the folder fills, and no manifest.json. A run that
was killed continues after the last shard that watch.json counts. One process holds the lock in the sidecar.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignSample, GrowingFiles
from niels_gpt.eagle3.exchange.move import Imported, Importer, Target, open_files, rows_of_import
from niels_gpt.eagle3.exchange.proof import Capture, Convention
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    LOCK_NAME,
    MANIFEST_NAME,
    SIDECAR,
    WATCH_NAME,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices
from niels_gpt.eagle3.format.native import DEFAULT_SHARD_BYTES
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.eagle3.format.watched import FRESH, command_of, new_journal, read_journal, write_journal
from niels_gpt.eagle3.resume import leftovers, refuse_foreign
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import check_lease, file_lock
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.versions import refuse_among_versions
from niels_gpt.work import Progress

DONE_NAME = "done"
"""A file of this name in the watched folder says that no more files come."""


@dataclass(frozen=True)
class Until:
    """When a watch ends, and how it waits."""

    samples_total: int | None = None
    """Number of samples of a SpecForge folder; None: until a file `done` is in it. speculators' rows give their own."""
    once: bool = False
    """Take the files that are there now, and end."""
    patience: float = 600.0
    """Seconds after which a file that does not change is refused, or counted as a gap."""
    poll: float = 1.0
    """Seconds between two looks at the folder."""


@dataclass(frozen=True)
class Waiting:
    """What a watch is waiting for."""

    name: str
    """The next sample."""
    seconds: float
    """Since when it is waited for."""
    samples: int
    """Samples in finished shards."""
    shards: int
    num_bytes: int
    """Bytes of the finished shards."""
    fault: str
    """Why the file that is there is not taken; empty if there is none."""


@dataclass(frozen=True)
class Watched:
    """The result of a watch."""

    imported: Imported
    removed_files: int
    """Source files that `consume` removed."""
    removed_bytes: int
    kept_files: int
    """Source files that it left, because they had changed since they were read."""


def watch_cache(
    tool: str,
    source: Path,
    out: Path,
    target: Target,
    *,
    command: list[str],
    capture: Capture | None = None,
    stated: Convention | None = None,
    samples: int = 8,
    draft_vocab_size: int | None = None,
    aux_fp8: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    drop_bad: bool = False,
    loss_mask: str | None = None,
    made_for: str | None = None,
    targets: str | None = None,
    until: Until = Until(),
    consume: bool = False,
    progress: Progress | None = None,
    waiting: Callable[[Waiting], object] = lambda _: None,
    follow_links: bool = False,
) -> Watched:
    """Build a native cache of another tool's folder while its files come, or continue one.

    Arguments as in `import_cache`, and:

    out: absent, empty, or of a run with the same settings that did not finish; `draft_vocab_size` may be another one.
    command: the words after `niels-gpt eagle3 watch` that continue the run, for messages.
    samples: the conventions are proved on so many of the first usable samples.
    consume: remove a sample's file once its shard is durable. waiting: called at each look at the folder.
    Raises: CacheError E711 for a sample that does not fit or a gap (without `drop_bad`), and if no file comes for
        `patience` seconds; E703 for another run's folder, naming the fields; E704 for a folder with anything else; E503
        while another process watches; as `import_cache`.
    """
    if (capture is None) == (stated is None) or samples < 1:
        raise ValueError("either a capture and one sample or more to prove the conventions on, or stated ones")
    targets, out = rows_of_import(tool, made_for, targets), out.absolute()
    _refuse_other_content(out, source)
    files: GrowingFiles = open_files(tool, source, target, made_for, follow_links=follow_links, grows=True)
    if (consume and follow_links) or (until.samples_total is not None and files.count is not None):
        raise ValueError("consume removes no links, and speculators' rows give the number of samples")
    settings = {"from": tool, "samples": samples, "loss_mask": loss_mask}  # and all else that decides the shards
    settings |= {"aux_dtype": "fp8" if aux_fp8 else "stored", "shard_bytes": shard_bytes}
    of_kind = {"targets": (targets, "loss"), "made_for": (made_for or "eagle3", "eagle3")}  # as before where usual
    settings |= _facts_of(target, stated) | files.facts()
    settings |= {name: value for name, (value, usual) in of_kind.items() if value != usual}
    fileio.make_dir(out / SIDECAR)
    lock = out / SIDECAR / LOCK_NAME
    with file_lock(lock, out, "is being written", wait=False):
        _refuse_other_content(out, source)
        journal = _journal_of(out, command, json.loads(json.dumps(settings)))
        importing = partial(Importer, tool, source, files, target, drop_bad, loss_mask, aux_fp8, shard_bytes)
        importing = partial(importing, targets, made_for)
        run = _Watch(out, source, files, journal, importing, partial(check_lease, lock), consume)
        arrivals = Arrivals(source, files, run.importer, run.end_of(until.samples_total), until, run.tell(waiting))
        run.take(arrivals, samples, capture, stated, progress)
        run.finish(arrivals, draft_vocab_size)
        return run.watched()


# --- the folder of the cache ------------------------------------------------------------------------------------------


def _facts_of(target: Target, stated: Convention | None) -> dict[str, Any]:
    """Return the settings that follow from the target and the stated conventions."""
    layers, last = (None, None) if stated is None else (stated.aux_layer_ids, stated.last_hidden)
    facts = {"target": target.name, "layers": layers, "last_hidden": last}
    facts |= {f"target.{name}": value for name, value in target.facts.items()}
    return facts | {f"head.{name}": value for name, value in target.head.facts().items()}


def _refuse_other_content(out: Path, source: Path) -> None:
    """Raise CacheError for a folder in `source`, or with anything but an unfinished watch; E205 for links in it."""
    refuse_among_versions(out)
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise CacheError(out, f"lies in {source}, which it is made from", "a folder elsewhere", code="E704")
    refuse_links(out)
    if os.path.lexists(out / WATCH_NAME):
        return
    if any(os.path.lexists(out / name) for name in (META_NAME, MANIFEST_NAME)) or existing_shard_indices(out):
        raise CacheError(out, "is a cache already", "a folder that is empty or absent", "Name another", code="E704")
    refuse_foreign(out)


def _journal_of(out: Path, command: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the journal of a folder, written if there was none, or one that fixed nothing yet.

    Raises: CacheError E703 for other settings.
    """
    for path in leftovers(out):
        fileio.remove(path)
    journal = read_journal(out)
    if journal is None or not (journal["proved"] or journal["taken"] or journal["shards"]):
        journal = new_journal(command, settings)
        write_journal(out, journal)
        return journal
    before = journal["settings"]
    if names := [name for name in {**settings, **before} if before.get(name) != settings.get(name)]:
        each = [f"{name}: {shortened(before.get(name))}, now {shortened(settings.get(name))}" for name in names]
        remedy = f"Continue it with its settings: {command_of(journal)}. Or name a fresh folder"
        found = f"belongs to a watch with other settings (mismatched fields: {names}): {'; '.join(each[:6])}"
        raise CacheError(out, found, remedy=remedy, code="E703")
    return journal | {"command": command}


class _Watch:
    """The cache that is being built, its journal, and the files that were taken."""

    def __init__(
        self,
        out: Path,
        source: Path,
        files: GrowingFiles,
        journal: dict[str, Any],
        importing: Callable[..., Importer],
        check: Callable[[], object],
        consume: bool,
    ) -> None:
        self._out, self._source, self._files, self._journal, self._consume = out, source, files, journal, consume
        self.importer = importing(after_shard=self._after_shard, check=check)
        self._num_bytes = 0
        self._taken: dict[int, list[int]] = {}
        self._end: int | None = journal["end"]
        try:
            self._restore()
        except CacheError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            found = f"does not fit its shards ({error!r:.300})"
            raise CacheError(out / WATCH_NAME, found, remedy=FRESH, code="E701") from error

    def _restore(self) -> None:
        """Take over the counts of the journal and of the shards that it counts. Raises: CacheError E701."""
        run, journal = self.importer, self._journal
        for shard in range(journal["shards"]):
            path = Path(shard_path(self._out, shard))
            receipt = read_receipt(self._out, shard)
            size = path.lstat().st_size if os.path.lexists(path) else None
            if receipt is None or size != receipt["bytes"]:
                raise CacheError(path, "is not there in the size of its receipt", remedy=FRESH, code="E701")
            facts = receipt["facts"]
            new = {"samples": receipt["samples"], "tokens": facts["tokens"], "shards": 1}
            new["supervised_tokens"] = facts["supervised"]
            run.totals = {name: number + new[name] for name, number in run.totals.items()}
            run.target_rows += facts["target_rows"]
            run.seq_length = max(run.seq_length, *receipt["slots"])
            self._num_bytes += receipt["bytes"]
        run.dropped.update(journal["dropped"])
        if (samples := run.totals["samples"] + run.dropped.total()) != journal["taken"]:
            raise ValueError(f"{samples:,} samples are in shards or left out, and {journal['taken']:,} were taken")
        for shard in sorted(existing_shard_indices(self._out)):
            if shard >= journal["shards"]:  # of a run that was killed before it was counted: it is made again
                fileio.remove(receipt_path(self._out, shard))
                fileio.remove(shard_path(self._out, shard))
        run.first_dropped += journal["first_dropped"]
        run.was_fp8 = journal["was_fp8"]
        if (proved := journal["proved"]) is not None:
            stated: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in proved["convention"].items()
            }
            layers, aux_dtype, dtype = proved["form"]
            run.fix((layers, DTYPES[aux_dtype], DTYPES[dtype]), Convention(**stated))
            run.mask_checked = proved["mask_checked"]
        self._files.look()
        self._remove_taken()

    def end_of(self, samples_total: int | None) -> int | None:
        """Return the number of samples that was fixed before, or is given. Raises: CacheError E703 for another one."""
        taken = self._journal["taken"]
        if samples_total is not None and (samples_total < taken or self._end not in (None, samples_total)):
            found = f"has {taken:,} samples already (mismatched fields: ['samples_total']), now {samples_total:,}"
            raise CacheError(self._out, found, remedy="Continue it without --samples-total", code="E703")
        return samples_total if self._end is None else self._end

    def tell(self, waiting: Callable[[Waiting], object]) -> Callable[[BadSample, float], object]:
        """Return a function that reports a wait for a sample, by its fault and the seconds."""

        def report(found: BadSample, seconds: float) -> None:
            totals, fault = self.importer.totals, "" if found.reason == "missing" else found.found
            waiting(Waiting(found.name, seconds, totals["samples"], totals["shards"], self._num_bytes, fault))

        return report

    def take(
        self,
        arrivals: Arrivals,
        samples: int,
        capture: Capture | None,
        stated: Convention | None,
        progress: Progress | None,
    ) -> None:
        """Settle the conventions, unless an earlier run did, and take all samples."""
        if self._journal["proved"] is None:
            self.importer.settle(arrivals.order(), arrivals.read, samples, capture, stated)
            assert self.importer.form is not None
            layers, *dtypes = self.importer.form
            names = {dtype: name for name, dtype in DTYPES.items()}
            form = [layers, *(names[dtype] for dtype in dtypes)]
            convention, checked = self.importer.convention.as_json(), self.importer.mask_checked
            self._journal["proved"] = {"convention": convention, "form": form, "mask_checked": checked}
            write_journal(self._out, self._journal)
        for index in arrivals.order(self._journal["taken"]):
            sample = arrivals.read(index)
            self._end = arrivals.end
            if sample is not None:
                self._taken[index] = arrivals.states.pop(index)
                self.importer.add(self._out, index, sample)
            if progress is not None:
                progress(index + 1, index + 1, arrivals.end)

    def finish(self, arrivals: Arrivals, draft_vocab_size: int | None) -> None:
        """Write the last shard and all other files; the folder is a cache then."""
        assert arrivals.end is not None
        self._end = arrivals.end
        self.importer.finish(self._out, arrivals.end, draft_vocab_size)
        fileio.remove(self._out / WATCH_NAME)
        fileio.fsync_dir(self._out)

    def watched(self) -> Watched:
        """Return the result."""
        return Watched(self.importer.imported(), *(self._journal[name] for name in _REMOVED))

    def _after_shard(self, behind: int) -> None:
        """Count a durable shard, whose samples are all before `behind`; then remove their files."""
        run, journal = self.importer, self._journal
        shards = run.totals["shards"]
        self._num_bytes += os.lstat(shard_path(self._out, shards - 1)).st_size
        taken = sorted(index for index in self._taken if index < behind)
        removing = [[index, self._taken.pop(index)] for index in taken]
        journal |= {"taken": behind, "shards": shards, "dropped": dict(run.dropped), "was_fp8": run.was_fp8}
        journal |= {"first_dropped": run.first_dropped, "removing": removing if self._consume else []}
        journal["end"] = self._end if behind == self._end else None
        write_journal(self._out, journal)
        self._remove_taken()

    def _remove_taken(self) -> None:
        """Remove the files of the last counted shard, with `consume`: regular ones, unchanged since they were read.

        A path is never of the journal: the reader of the folder gives it. A file that is gone was removed by a run that
        was killed.
        """
        journal = self._journal
        for index, state in journal["removing"] if self._consume else []:
            path = self._files.path(index)
            now = None if path is None else _state(path)
            if now is None:
                journal["removed_files"] += 1
                journal["removed_bytes"] += state[1]
            elif path is not None and now == state and stat.S_ISREG(path.lstat().st_mode):
                fileio.remove(path)
                journal["removed_files"] += 1
                journal["removed_bytes"] += state[1]
            else:
                journal["kept_files"] += 1
        journal["removing"] = []


_REMOVED = ("removed_files", "removed_bytes", "kept_files")


# --- the folder of the states -----------------------------------------------------------------------------------------


class Arrivals:
    """The samples of a folder in their order, each waited for until its file is whole."""

    def __init__(
        self,
        source: Path,
        files: GrowingFiles,
        importer: Importer,
        end: int | None,
        until: Until,
        tell: Callable[[BadSample, float], object],
    ) -> None:
        self._source, self._files, self._importer, self._is_closed = source, files, importer, until.once
        self._patience, self._poll, self._tell = until.patience, until.poll, tell
        self.end = end if files.count is None else files.count
        """Number of samples; None while more may come."""
        self.states: dict[int, list[int]] = {}
        """The states of the files of samples that were read."""
        self._final: set[int] = set()
        self._grew: list[tuple[int, float]] = []  # number behind the last file, and since when
        self._look()

    def order(self, begin: int = 0) -> Iterator[int]:
        """Yield the numbers of the samples, until the end is known and reached."""
        return itertools.takewhile(lambda index: self.end is None or index < self.end, itertools.count(begin))

    def read(self, index: int, *, is_counted: bool = True) -> ForeignSample | None:
        """Return a sample, once its file is whole; None for one that is left out, or behind the end.

        Raises: CacheError E711.
        """
        began = since = time.monotonic()
        before: object = self
        found = BadSample("missing", self._files.name(index), "")
        while self.end is None or index < self.end:
            path = self._files.path(index)
            state = None if path is None else _state(path)
            if state != before:
                since = since if before is self else time.monotonic()
                before = state
                try:
                    sample = self._importer.checked(index)
                    if is_counted:  # it will be stored: its tensors are mapped, and the file may be written over
                        sample = replace(sample, aux=sample.aux.clone(), last=sample.last.clone())
                    if path is not None and state is not None and _state(path) == state:
                        self.states[index] = state
                        return sample
                    found, before = BadSample("unreadable", self._files.name(index), "it changes"), None
                except BadSample as error:
                    found = error
            if self._is_final(index, found, since):
                self._final.add(index)
                self._importer.leave_out(found, is_counted=is_counted)
                return None
            self._tell(found, time.monotonic() - began)
            time.sleep(self._poll)
            self._look()
        return None

    def _is_final(self, index: int, found: BadSample, since: float) -> bool:
        """Return whether a fault or a gap will stay. Raises: CacheError E711 if no file comes any more."""
        if self._is_closed or index in self._final:
            return True
        now = time.monotonic()
        if found.reason != "missing":
            return now - since >= self._patience
        later = next((when for there, when in self._grew if there > index + 1), None)
        if later is not None:
            return now - later >= self._patience
        if now - since < self._patience:
            return False
        remedy = "Start the server or the tool again, and repeat the command; if nothing more comes, add --once"
        text = f"no file came for {self._patience:g} s; next is {found.name}"
        raise CacheError(self._source, text, remedy=remedy, code="E711")

    def _look(self) -> None:
        """List the folder, and whether its end is known."""
        self._is_closed |= os.path.lexists(self._source / DONE_NAME)  # before the listing: files written earlier count
        there = self._files.look()
        if not self._grew or there > self._grew[-1][0]:
            self._grew.append((there, time.monotonic()))
        if self.end is None and self._is_closed:
            self.end = self._grew[-1][0]


def _state(path: Path) -> list[int] | None:
    """Return inode, size, times of modification and change, and whether a lock is beside the file; None for no file."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return None
    is_locked = int(os.path.lexists(f"{path}.lock"))
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, is_locked]
