"""Codes of errors and warnings: which one an error has, and the text that explains one.

An error has its code as an attribute `code`, set by its class, by its constructor (CacheError) or by `coded`. An error
that Python or a library raised gets one by its class and, for errors of the system, its number. A record of logging has
its code in `extra`, a warning of Python is a `CodedWarning`.
"""

from __future__ import annotations

import errno
from typing import TypeVar

from niels_gpt.storage.error_codes import ERRORS, Code
from niels_gpt.storage.warning_codes import WARNINGS

CODES: dict[str, Code] = {each.code: each for each in (*ERRORS, *WARNINGS)}
"""Every code and its row."""

_BY_ERRNO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "E501"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "E502"),
}
_BY_CLASS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionError, "E601"),
    (FileNotFoundError, "E105"),
    (NotADirectoryError, "E105"),
    (OSError, "E509"),
    (ImportError, "E901"),
    (ValueError, "E102"),
    (TypeError, "E102"),
    (LookupError, "E102"),
)
_Error = TypeVar("_Error", bound=BaseException)


def code_of(error: BaseException) -> str:
    """Return the code of any error: its own, or the one of its class; E902 of a class that has none."""
    own = getattr(error, "code", None)
    if isinstance(own, str) and own in CODES:  # an error of another library may have a code of its own kind
        return own
    by_number = _BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    return by_number or next((code for kind, code in _BY_CLASS if isinstance(error, kind)), "E902")


def coded(code: str, error: _Error) -> _Error:
    """Return the error with a code: `raise coded("E302", ValueError(...))`."""
    error.code = code  # type: ignore[attr-defined]
    return error


class CodedWarning(UserWarning):
    """A warning of Python with its code, which stands at the end of its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]"


def explained(code: str) -> str:
    """Return what a code means and what to do. Raises: ValueError for a code that does not exist."""
    row = CODES.get(code.upper())
    if row is None:
        subject = [known for known in CODES if known[:2] == code[:2].upper()]
        raise coded("E101", ValueError(f"no code is called {code!r}, expected one of {', '.join(subject or CODES)}"))
    kind = "error" if row.code.startswith("E") else "warning"
    lines = [f"{row.code} {row.name}", row.meaning, f"What to do: {row.remedy}"]
    if row.example:
        lines.append(f"For example:\n\n    {kind}[{row.code}]: {row.example}")
    return "\n\n".join(lines)
