"""CacheError: which path, what was found, what was expected, and the remedy. LeftOut: why a build lacks a cache."""

from __future__ import annotations

import os

from niels_gpt.storage.remedies import build_again

REBUILD = "rebuild"
"""A remedy that becomes the command that builds the cache at the error's path from scratch."""


class LeftOut(Exception):
    """Base of the errors that no build of all caches ends with: it leaves the cache out, with a warning.

    A build that names the cache fails with the error.
    """

    warning = "W411"
    """Code of the warning."""
    found = ""
    """The reason in a few words, for a table."""


class CacheError(ValueError):
    """A cache is damaged, foreign, or does not match its use (D24, D30): "PATH: FOUND, expected EXPECTED. REMEDY".

    path: the file or folder. found: what is wrong with it. expected: the correct state, "" if `found` implies it.
    remedy: what to do, as a sentence that ends in a command; REBUILD if building from scratch helps. code: a row of
    `storage/codes.py`. All are attributes, and the message is made of the first four. A path alone is a whole message:
    what torch's DataLoader makes of an error of a worker process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        found: str = "",
        expected: str = "",
        remedy: str = "",
        *,
        code: str = "E201",
    ) -> None:
        super().__init__(os.fspath(path), found, expected, remedy)  # the arguments of a pickled copy
        self.path, self.found, self.expected, self._remedy = os.fspath(path), found, expected, remedy
        self.code = code

    @property
    def remedy(self) -> str:
        """What to do. REBUILD becomes a command here and not earlier, since that reads the record of the last build."""
        return build_again(self.path) if self._remedy == REBUILD else self._remedy

    @property
    def problem(self) -> str:
        """What was found and expected, without path and remedy."""
        return f"{self.found}, expected {self.expected}" if self.expected else self.found

    @property
    def own_remedy(self) -> str:
        """The remedy, "" where it is to build again: a caller who knows a nearer one replaces that."""
        return "" if self._remedy == REBUILD else self._remedy

    def __repr__(self) -> str:
        return f"CacheError({str(self)!r})"

    def __str__(self) -> str:
        if not self.found:
            return self.path
        text = f"{self.path}: {self.problem}"
        return f"{text}. {self.remedy}" if self.remedy else text
