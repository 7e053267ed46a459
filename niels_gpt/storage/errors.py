"""Errors with a code. Their classes say which subject failed.

A class has the code of its most common case; `code=` gives a nearer one. Each class also derives from the class of
Python that callers catch: ValueError, FileNotFoundError, IndexError. codes.txt explains the codes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from niels_gpt.storage.codes import own_code
from niels_gpt.storage.mounted import shown, url_of

REBUILD = "rebuild"
"""As a remedy, or at its end: becomes the command that builds the cache at the error's path from scratch."""


_ABSENT = (FileNotFoundError, NotADirectoryError)


class CodedError(Exception):
    """Base of the errors with a code."""

    code = "E902"

    def __init_subclass__(cls, code: str = "") -> None:
        cls.code = code or cls.code

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        if code:
            self.code = code


class UsageError(CodedError, ValueError, code="E101"):
    """A wrong setting or argument; a command exits with 2."""


@contextmanager
def errors_as(code: str, kinds: tuple[type[Exception], ...] = _ABSENT) -> Iterator[None]:
    """Give a code to the errors that Python, the system or a library raises in the block.

    kinds: classes of errors, by default for a missing file. An error that already has a code keeps it.
    """
    try:
        yield
    except kinds as error:
        if own_code(error) is None:
            error.code = code  # type: ignore[attr-defined]
        raise


class NotFound(CodedError, FileNotFoundError, code="E105"):
    """A file or folder is not there."""


class CacheNotFound(NotFound, code="E204"):
    """A cache, or one of its files, is not there."""


class OutOfRange(CodedError, IndexError, code="E106"):
    """No token, example or window has this index."""


class PositionError(CodedError, ValueError, code="E106"):
    """No position, sample or slot has this number."""


class StateError(CodedError, ValueError, code="E108"):
    """A state does not fit its stream."""


class StreamUseError(CodedError, RuntimeError, code="E109"):
    """A stream is used in a way that would repeat or lose samples."""


class NoLength(CodedError, TypeError, code="E109"):
    """A stream has no end, and so no length."""


class SourceError(CodedError, ValueError, code="E302"):
    """A source, or one of its files or rows, cannot be used."""


class DefinitionError(SourceError, code="E104"):
    """An entry that defines a source cannot be parsed."""


class SourceNotFound(NotFound, code="E301"):
    """A source, or one of its files, is not there."""


class TokenizerError(CodedError, ValueError, code="E408"):
    """A tokenizer cannot be used or trained."""


class TokenizerNotFound(NotFound, code="E401"):
    """A tokenizer is not there."""


class TemplateError(CodedError, ValueError, code="E407"):
    """A chat template cannot be used."""


class HubError(CodedError, ConnectionError, code="E601"):
    """The hub cannot be reached, or gives an unexpected answer."""


class HubRefusal(CodedError, ValueError, code="E602"):
    """The hub refuses a dataset or a model, or has something else under its name."""


class ServerError(CodedError, ConnectionError, code="E613"):
    """A server of a model cannot be reached, or did not answer in several attempts."""

    status: int | None = None
    """Of HTTP, of the last attempt; None without one."""


class ServerRefusal(CodedError, ValueError, code="E614"):
    """A server of a model refuses a question, or answers with something else than asked."""

    def __init__(self, *args: object, status: int | None = None) -> None:
        """status: of HTTP; None for a broken answer."""
        super().__init__(*args)
        self.status = status


class WorkerDied(CodedError, RuntimeError, code="E506"):
    """A worker process ended in the middle of its work."""


class ForkedBuild(CodedError, RuntimeError, code="E508"):
    """A forked copy of a building process reached the build's code."""


class NoRoomError(CodedError, OSError, code="E501"):
    """A build or a transfer would not fit on its disk."""


class InTheWay(CodedError, FileExistsError, code="E504"):
    """A file, folder or link is where a file is to be written."""


class TargetError(CodedError, ValueError, code="E705"):
    """A target model cannot be used."""


class TargetRunError(CodedError, RuntimeError, code="E705"):
    """A target model ran, and gave unusable values."""


class VocabularyError(CodedError, ValueError, code="E707"):
    """A draft vocabulary cannot be used."""


class InputError(CodedError, ValueError, code="E709"):
    """Chats or rows cannot be a target's input."""


class TreeError(CodedError, ValueError, code="E801"):
    """Rollouts, their fields or their masks cannot be folded."""


class TreeTypeError(CodedError, TypeError, code="E801"):
    """A field of rollouts has another type."""


class FoldError(CodedError, ValueError, code="E803"):
    """A model gives other values for a fold than for separate rows."""


class LeftOut(Exception):
    """Base of the errors for which a build of all caches leaves a cache out, with a warning.

    A build that names the cache fails with the error.
    """

    warning = "W411"
    """Code of the warning."""
    found = ""
    """The reason in a few words, for a table."""
    is_asked = True
    """Whether the settings ask for the cache, so that --strict counts the warning."""


class CacheError(CodedError, ValueError, code="E201"):
    """A cache is damaged, foreign, or does not match its use (D24, D30): "PATH: FOUND, expected EXPECTED. REMEDY".

    path: the file or folder. found: the problem. expected: the correct state, "" if `found` implies it.
    remedy: a sentence that says what to do and ends in a command; REBUILD if building from scratch helps.
    code: of codes.txt.
    All are attributes; the message consists of the first four. A path may be the whole message, because torch's
    DataLoader raises an error of a worker process again with its message as the only argument.

    >>> print(CacheError("train_idx.npy", "16 bytes", "24", "Copy it again", code="E203"))
    train_idx.npy: 16 bytes, expected 24. Copy it again
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
        path = shown(path)
        super().__init__(path, found, expected, remedy, code=code)  # the arguments of a pickled copy
        self.path, self.found, self.expected, self._remedy = path, found, expected, remedy
        self._cache = url_of(path) or path  # the folder that stands for a URL may be gone when the error is shown

    @property
    def remedy(self) -> str:
        """The remedy, with the command for REBUILD. Made only when asked for: it reads the record of the last build."""
        own = self.own_remedy
        if own != self._remedy:
            from niels_gpt.storage.remedies import build_again  # of an error that is shown

            own = f"{own} {build_again(self._cache, self.code)}".lstrip()
        return own

    @property
    def problem(self) -> str:
        """The message without path and remedy."""
        return f"{self.found}, expected {self.expected}" if self.expected else self.found

    @property
    def own_remedy(self) -> str:
        """The remedy without the command that builds again, for a caller that knows a better command."""
        return self._remedy.removesuffix(REBUILD).rstrip()

    def __repr__(self) -> str:
        return f"CacheError({str(self)!r})"

    def __str__(self) -> str:
        if not self.found:
            return self.path
        text = f"{self.path}: {self.problem}"
        return f"{text}. {self.remedy}" if self.remedy else text
