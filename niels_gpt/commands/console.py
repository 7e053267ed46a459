"""What every command shares: exit status and Ctrl-C, log lines, the progress bar, tables, JSON, numbers as text."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from niels_gpt.interrupts import interruptible, say_interrupted
from niels_gpt.progress import Progress
from niels_gpt.settings import UsageError
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.meta_json import printable

ERRORS = (ValueError, OSError, ImportError)
"""What a command reports as one line: a CacheError is a ValueError, a ConnectionError an OSError."""


def exit_status(
    command: Callable[[], int | None],
    *,
    errors: tuple[type[Exception], ...] = ERRORS,
    usage: type[Exception] = UsageError,
    interrupted: int = 130,
    unread: int = 0,
    kept: str = "",
) -> int:
    """Run a command; returns its exit status, where None means 0.

    An error of the given kinds is printed as one line: status 2 for `usage`, 1 for the others. After Ctrl-C, SIGTERM or
    SIGHUP the status is `interrupted`, and `kept` says what stays on disk. Where nobody reads the output any more, as
    behind `| head -1`, the command ends with the status `unread`.
    """
    try:
        with interruptible():
            status = command()
    except errors as error:
        if isinstance(error, BrokenPipeError) and is_unread("\n"):  # of stdout, and not of a connection
            return unread
        logging.getLogger(__name__).debug("", exc_info=True)
        print_error(error)
        return 2 if isinstance(error, usage) else 1
    except KeyboardInterrupt as error:
        say_interrupted(error, kept)
        return interrupted
    is_unread()
    return status or 0


def is_unread(more: str = "") -> bool:
    """Flush stdout with `more` at its end; returns whether its reader is gone."""
    try:
        print(more, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return True
    return False


def print_error(error: BaseException, of: str = "") -> None:
    """Print `error[CODE]: ` and an error to stderr, control characters escaped; of: what stands before it."""
    print(f"error[{code_of(error)}]: {escaped(f'{of}{error}')}", file=sys.stderr)


def print_warning(code: str, message: object) -> None:
    """Print `warning[CODE]: ` and a message to stderr, control characters escaped."""
    print(f"warning[{code}]: {escaped(message)}", file=sys.stderr)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send log records to stderr as plain lines, control characters escaped, without the lines of HTTP clients."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EscapingFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for client in ("httpx", "httpx2"):  # a line for each request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        code = getattr(record, "code", None)  # of this project's warnings, by `extra`
        return escaped(("" if code is None else f"warning[{code}]: ") + super().format(record))


def escaped(message: object) -> str:
    """Return a message with control characters escaped, which a file's name or content may have brought."""
    return "\n".join(map(printable, str(message).split("\n")))


@contextmanager
def progress_bar(title: str, unit: str = "tok", items: str = "") -> Iterator[Progress | None]:
    """Yield a progress callback that draws a bar with speed and time left; None where stderr is no terminal.

    unit: of what the bar counts, "B" for bytes. items: the name of the items that are shown beside it, "" for none.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=title, unit=unit, unit_scale=unit in ("B", "tok"), leave=False) as bar:

        def show(finished: int, done: int, total: int | None) -> None:
            bar.total = total
            if items:
                bar.set_postfix({items: finished}, refresh=False)
            bar.update(done - bar.n)

        yield show


def as_json(value: object) -> str:
    """Return JSON for people and machines, without characters that command a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda char: f"\\u{ord(char.group()):04x}", text)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as aligned columns, two spaces apart; control characters in them are escaped."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def number_of_tokens(text: str) -> int:
    """Parse a number of tokens: 205M, 1.5G, 300_000. Raises: ValueError."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}.get(text[-1:].lower())
    with contextlib.suppress(ValueError, OverflowError):
        number = int(float(text[:-1] if scale else text) * (scale or 1))
        if number > 0:
            return number
    raise ValueError(f"{text!r}: expected a number of tokens above 0, such as 205M")


def token_position(text: str) -> int:
    """Parse the number of a token: 1_000_000, or as it is printed, 1,000,000. Raises: ValueError."""
    with contextlib.suppress(ValueError):
        return int(text.replace(",", ""))
    raise ValueError(f"{text!r}: expected the number of a token, such as 1_000_000")
