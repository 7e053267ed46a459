"""How many runs of a build have ended without a checkpoint beyond the one that they started from.

Only a warning depends on it: it is not synced, and what cannot be read or written counts as nothing.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from niels_gpt.fileio import CacheError
from niels_gpt.records import parse_object, read_regular
from niels_gpt.versions import ATTEMPTS_NAME

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 12


class Attempts:
    """Counts the runs of one build. A run that is killed is counted too, for it is noted when it starts."""

    def __init__(self, folder: Path, key: str, documents: int) -> None:
        """folder: the versions folder, whose lock is held. key: of the build. documents: done when this run starts.

        Warns where the runs before have come no further.
        """
        self._path, self._documents = folder / ATTEMPTS_NAME, documents
        self._process = os.getpid()
        self._where = folder.parent.parent / folder.name
        before = self._runs_before(key)
        if before:
            logger.warning(
                "%s: the last %s no further than %s. A run first reads those again, so a short one gains nothing: "
                "give this one more time",
                self._where,
                "run of this build came" if before == 1 else f"{before} runs of this build came",
                f"{documents:,} documents" if documents else "its start",
            )
        self._write({"build": key, "documents": documents, "runs": before + 1})

    def gained(self, documents: int) -> bool:
        """Whether a checkpoint has been made since; then there is nothing to count."""
        if documents == self._documents:
            return False
        self.forget()
        return True

    def interrupted(self, documents: int) -> None:
        """Say so where this run, which was interrupted, has gained nothing."""
        if not self.gained(documents):
            logger.warning("%s: this run has gained nothing: %s documents are done, as before", self._where, documents)

    def forget(self) -> None:
        """Count from 0 again: the build has ended, or its error says what to do."""
        if os.getpid() == self._process:  # and is no forked child's
            with suppress(OSError):
                os.unlink(self._path)

    def _runs_before(self, key: str) -> int:
        try:
            found = parse_object(read_regular(self._path, _MAX_BYTES))
        except (OSError, CacheError, ValueError):
            return 0
        runs = found.get("runs")
        same = (found.get("build"), found.get("documents")) == (key, self._documents)
        return runs if same and type(runs) is int and 0 < runs < 1 << 31 else 0

    def _write(self, found: dict[str, str | int]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(self._path, flags, 0o666), "w", encoding="utf-8") as file:
            json.dump(found, file)
