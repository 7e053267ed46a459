"""Codes of errors and warnings: which one an error has, and the text that explains one.

An error has its code as an attribute `code`, set by its class, by its constructor (CacheError) or by `coded`. A plain
error gets one where it is printed: by its number (errors of the system), by the module that raised it, or by its class.
A record of logging has its code in `extra`, a warning of Python is a `CodedWarning`.
"""

from __future__ import annotations

import errno
from textwrap import fill, wrap
from traceback import walk_tb
from typing import TypeVar

from niels_gpt.settings import UsageError
from niels_gpt.storage.code_tables.data import DATA_ERRORS
from niels_gpt.storage.code_tables.row import Code
from niels_gpt.storage.code_tables.runs import RUN_ERRORS
from niels_gpt.storage.code_tables.warnings import WARNINGS

CODES: dict[str, Code] = {each.code: each for each in (*DATA_ERRORS, *RUN_ERRORS, *WARNINGS)}
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
_ABSENT = (FileNotFoundError, NotADirectoryError)
_BY_PLACE: tuple[tuple[str, tuple[type[Exception], ...], str], ...] = (
    ("builders.build", (RuntimeError,), "E508"),
    ("builders.pipeline", (RuntimeError,), "E506"),
    ("cache", _ABSENT, "E204"),
    ("cache", (IndexError,), "E106"),
    ("chat.rows", (ValueError,), "E709"),
    ("chat.template_process", (RuntimeError,), "E506"),
    ("chat.template_tokenizer", (ValueError,), "E407"),
    ("chat.templates", (ValueError,), "E407"),
    ("chat.tokenizers", (ValueError, *_ABSENT), "E408"),
    ("commands.train_tokenizer", _ABSENT, "E301"),
    ("data", _ABSENT, "E301"),
    ("data.exclude", (ValueError,), "E302"),
    ("data.files", (ValueError,), "E302"),
    ("eagle3.format", _ABSENT, "E702"),
    ("eagle3.produce.workers", (RuntimeError,), "E506"),
    ("eagle3.target", (ValueError, RuntimeError), "E705"),
    ("eagle3.targets", (ValueError, *_ABSENT), "E705"),
    ("eagle3.vocab", (ValueError, *_ABSENT), "E707"),
    ("hub.datasets", (ValueError,), "E602"),
    ("hub.models", (ValueError,), "E603"),
    ("prefix_tree", (ValueError, TypeError), "E801"),
    ("prefix_tree.fold_checks", (ValueError,), "E803"),
    ("prefix_tree.rollouts", (ValueError, TypeError), "E102"),
    ("prefix_tree.savings.rollouts", (ValueError,), "E804"),
    ("prefix_tree.verify", (ValueError,), "E803"),
    ("recipes.eagle3.input", (ValueError, *_ABSENT), "E709"),
    ("recipes.snapshot", (ValueError,), "E307"),
    ("recipes.tokenizers.texts", (ValueError,), "E406"),
    ("recipes.user_sources", (ValueError, *_ABSENT), "E104"),
    ("sampling.changes", (ValueError,), "E108"),
    ("sampling.evaluation", _ABSENT, "E204"),
    ("sampling.position", (RuntimeError,), "E109"),
    ("sampling.state", (ValueError,), "E108"),
    ("sampling.stream", (RuntimeError, TypeError), "E109"),
)
"""A package or module, classes, and the code of a plain error of these classes that was raised there."""
_WIDTH = 100  # columns
_Error = TypeVar("_Error", bound=BaseException)


def code_of(error: BaseException) -> str:
    """Return the code of any error: its own, that of the place where it was raised, or that of its class.

    E902 where there is none of them.
    """
    own = getattr(error, "code", None)
    if isinstance(own, str) and own in CODES:  # an error of another library may have a code of its own kind
        return own
    by_number = _BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    by_class = next((code for kind, code in _BY_CLASS if isinstance(error, kind)), "E902")
    return by_number or _code_of_place(error) or by_class


def _code_of_place(error: BaseException) -> str | None:
    """Return the code that _BY_PLACE has for the innermost frame of the error it names, by its longest entry."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    for module in reversed(modules):
        found = [
            (len(place), code)
            for place, kinds, code in _BY_PLACE
            if isinstance(error, kinds) and f"{module}.".startswith(f"niels_gpt.{place}.")
        ]
        if found:
            return max(found)[1]
    return None


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
    """Return what a code means and what to do. Raises: UsageError for a code that does not exist."""
    row = CODES.get(code.upper())
    if row is None:
        subject = [known for known in CODES if known[:2] == code[:2].upper()]
        raise UsageError(f"no code is called {code!r}, expected one of {', '.join(subject or CODES)}")
    kind = "error" if row.code.startswith("E") else "warning"
    parts = [f"{row.code} {row.name}", row.meaning, f"What to do: {row.remedy}"]
    parts = [fill(part, _WIDTH, break_long_words=False, break_on_hyphens=False) for part in parts]
    if row.example:
        shown = wrap(f"{kind}[{row.code}]: {row.example}", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join(["For example:", "", *(f"    {line}" for line in shown)]))
    return "\n\n".join(parts)
