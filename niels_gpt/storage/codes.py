"""Codes of errors and warnings: the code of an error, and the text that explains it.

An error of this project has an attribute `code`, set by its class or by a keyword of its constructor (errors.py). For
an error of Python, the system or a library its errno or its class decides. A log record has its code in `extra`; a
warning of Python is a `CodedWarning`. The texts are in codes.txt.
"""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

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


@dataclass(frozen=True)
class Code:
    """One situation in which an error or a warning is printed."""

    code: str
    """E or W, the digit of its subject, and two more digits."""
    name: str
    """A few words, joined by hyphens."""
    meaning: str
    """What happened and why, in two or three sentences."""
    remedy: str
    """What to do."""
    example: str
    """A message with this code, without `error[CODE]: `; "" if there is none."""


@cache
def codes() -> dict[str, Code]:
    """Return every code with its row, in the order of codes.txt."""
    from importlib.resources import files

    _, *blocks = files("niels_gpt.storage").joinpath("codes.txt").read_text("utf-8").strip().split("\n\n")
    found = {}
    for block in blocks:
        head, _, text = block.partition("\n")
        meaning, _, rest = text.partition("\n> ")
        remedy, _, example = rest.partition("\n= ")
        code, name = head.split()
        found[code] = Code(code, name, *(" ".join(part.split("\n")) for part in (meaning, remedy, example)))
    return found


def code_of(error: BaseException) -> str:
    """Return the code of any error: its own, or one by its errno or class; E902 for all others.

    >>> code_of(FileNotFoundError("cache"))
    'E105'
    """
    by_number = _BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    by_class = next((code for kind, code in _BY_CLASS if isinstance(error, kind)), "E902")
    return own_code(error) or by_number or by_class


def own_code(error: BaseException) -> str | None:
    """Return the code in an error's attribute `code`; None without one."""
    own = getattr(error, "code", None)  # of another library's error, this may be anything
    return own if isinstance(own, str) and re.fullmatch(r"[EW]\d{3}", own) else None


class CodedWarning(UserWarning):
    """A warning of Python with a code, which ends its text: "... [W104]"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]"


def earlier_name(module: str, name: str, now: Mapping[str, str]) -> Any:
    """Return what has moved from a module, and warn (W104): for the module's `__getattr__`.

    now: names, and the modules below niels_gpt that have them. Raises: AttributeError for another name.
    """
    if name not in now:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(CodedWarning("W104", f"{module}.{name} is in niels_gpt.{now[name]} now"), stacklevel=3)
    return getattr(import_module(f"niels_gpt.{now[name]}"), name)


def give_earlier_names(package: str, places: Mapping[str, Mapping[str, str]], said: str) -> None:
    """Warn (W104) the importer of a moved package, and create its earlier modules with the same objects.

    package: the earlier name, being imported. places: earlier module -> name in it -> module below niels_gpt where the
    name is now; a package before its modules. said: the text of the warning.
    """
    warnings.warn(CodedWarning("W104", said), stacklevel=3)
    for name, now in places.items():
        module = ModuleType(f"{package}.{name}", f"Moved names: {', '.join(now)}.")
        for attribute, place in now.items():
            setattr(module, attribute, getattr(import_module(f"niels_gpt.{place}"), attribute))
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)


def __getattr__(name: str) -> Any:
    return earlier_name(__name__, name, {"explained": "commands.doctor"})
