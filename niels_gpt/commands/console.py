"""Run a command: --json and --strict, exit codes, Ctrl-C, help, and everything that is printed.

Results go to stdout. Errors, warnings, log lines and progress bars go to stderr; a line stands above the bar.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

import click

from niels_gpt.display import bar
from niels_gpt.display.tables import WIDTH, cut, folded, hints, width
from niels_gpt.kinds.homes import loaded
from niels_gpt.storage.codes import CodedWarning, code_of
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.meta_json import printable
from niels_gpt.storage.mounted import is_url
from niels_gpt.work import Progress, interruptible, say_interrupted

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Item = TypeVar("_Item")

ERRORS = (ValueError, OSError, ImportError)
"""Errors that a command reports as one line. CacheError is a ValueError, ConnectionError an OSError."""


class ExitCode(IntEnum):
    """How a command of niels-gpt ended."""

    GOOD = 0
    FAILED = 1
    """Also: `diff` found a difference; with --strict, there was a warning."""
    USAGE = 2
    DAMAGED = 3
    NOT_INSTALLED = 4
    INTERRUPTED = 130


OF_FACES = {ExitCode.DAMAGED: 1, ExitCode.NOT_INSTALLED: 1}
"""The other exit codes of the `python -m` commands, by the exit code of niels-gpt."""


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    data: object
    """Printed by --json; or a function that returns it."""
    code: ExitCode = ExitCode.GOOD
    next: str = ""
    """The command to run next, printed as the last line; "" for none."""


_DAMAGE = frozenset(
    ["E201", "E202", "E203", "E204", "E205", "E206", "E210", "E211", "E403", "E505", "E611", "E701", "E702", "E708"]
)  # codes of damaged caches


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, UsageError) or code_of(error) == "E101":
        return ExitCode.USAGE
    if isinstance(error, ImportError):
        return ExitCode.NOT_INSTALLED
    return ExitCode.DAMAGED if code_of(error) in _DAMAGE else ExitCode.FAILED


# --- commands ---------------------------------------------------------------------------------------------------------

_HELP: dict[str, Any] = {
    "theme": "default-slim",
    "show_arguments": True,
    "text_markup": None,
    "commands_before_options": True,
    "style_options_table_padding": (0, 1, 0, 0),
    "options_table_help_sections": ["help", "required", "default"],
    "default_string": "\\[{}]",
}
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}


class Option(click.Option):
    """An option. panel: of the help."""

    def __init__(self, *args: Any, panel: str | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.panel = panel


class Argument(click.Argument):
    """An argument. panel: of the help."""

    def __init__(self, *args: Any, panel: str | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.panel = panel


def option(*names: str, **how: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command an `Option`. how: its arguments."""
    return click.option(*names, cls=Option, **how)


def argument(name: str, **how: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command an `Argument`. how: its arguments."""
    return click.argument(name, cls=Argument, **how)


class _Help(click.Command):
    """Prints help in panels by rich_click, which is loaded only then, with examples and a closing text at the end.

    Each line of `examples` is a command, optionally followed by two or more spaces and its purpose.
    """

    examples = ""
    closing = ""
    rows: Mapping[str, Sequence[str]] = {}
    """Panel of the help -> names of a group's commands in it."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help in lines that fit the terminal, without trailing spaces."""
        from rich.text import Text
        from rich_click import RichCommand, RichCommandPanel, RichHelpConfiguration, RichHelpFormatter

        formatter = RichHelpFormatter(
            width=min(width(), WIDTH), config=RichHelpConfiguration.load_from_globals(**_HELP)
        )
        self.panels = [RichCommandPanel(title, commands=list(names)) for title, names in self.rows.items()]
        self.format_usage(ctx, formatter)
        RichCommand.format_help_text(self, ctx, formatter)  # type: ignore[arg-type]  # it needs no more than `panels`
        RichCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]
        if self.examples:
            parts = [line.partition("  ") for line in self.examples.split("\n")]
            shown = hints([(command, why.strip()) for command, _, why in parts], formatter.width)
            text = Text.assemble(("Examples:\n", "bold"), shown, "\n")
            formatter.write(text, soft_wrap=True)  # a command is copied: it stays on one line
        if self.closing:
            formatter.write(Text(f"{self.closing}\n"))
        return "\n".join(line.rstrip() for line in formatter.getvalue().rstrip().split("\n"))


class Command(_Help):
    """A command with --json and --strict. Its callback returns a `Result`, and `invoke` the exit code.

    errors: exceptions that are reported as one line. kept: printed after "interrupted". unread: the exit code if the
    reader of stdout is gone. level: the lowest level of log lines on stderr. examples: see `_Help`.
    """

    def __init__(
        self,
        *args: Any,
        errors: tuple[type[Exception], ...] = ERRORS,
        kept: str = "",
        unread: int = 0,
        level: int = logging.INFO,
        examples: str = "",
        **how: Any,
    ) -> None:
        super().__init__(*args, **{"context_settings": _SETTINGS, **how})
        self.examples = examples
        self._errors, self._kept, self._unread, self._level = errors, kept, unread, level
        self.params += [
            Option(["--json"], is_flag=True, help="print one JSON object instead of text", panel="Options"),
            Option(["--strict"], is_flag=True, help="exit with 1 if there was a warning", panel="Options"),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Flags may have underscores: --input_glob is --input-glob."""
        return super().parse_args(ctx, [re.sub("^--[^=]+", _with_hyphens, each) for each in args])

    def invoke(self, ctx: click.Context) -> ExitCode:
        """Run the command and return its exit code."""
        log_to_stderr(self._level)
        is_strict, found = ctx.params.pop("strict"), ctx.params.pop("json")
        ctx.meta[_JSON] = found
        with _counted_warnings(ctx, max(self._level, logging.WARNING)):
            code = self._status(ctx)
        if code is ExitCode.INTERRUPTED and found:
            print(_error_as_json(None, "interrupted"))
        count = ctx.meta[_WARNINGS]
        if not is_strict or not count or code is not ExitCode.GOOD:
            return code
        tell(f"--strict: {count} warning{'' if count == 1 else 's'}, so the exit code is 1")
        return ExitCode.FAILED

    def _status(self, ctx: click.Context) -> ExitCode:
        """Call the callback and return the exit code. Prints an expected error or an interruption as one line."""
        try:
            with interruptible():
                code = self._finish(ctx)
        except self._errors as error:
            if isinstance(error, BrokenPipeError) and is_unread("\n"):  # of stdout, not of a connection
                return ExitCode(self._unread)
            logging.getLogger(__name__).debug("", exc_info=True)
            print_error(error)
            return exit_code_of(error)
        except KeyboardInterrupt as error:
            say_interrupted(error, self._kept)
            return ExitCode.INTERRUPTED
        is_unread()
        return code

    def _finish(self, ctx: click.Context) -> ExitCode:
        """Call the callback, print its JSON or the next command, and return the exit code."""
        try:
            result: Result = super().invoke(ctx)
            if ctx.meta[_JSON]:
                print(as_json(result.data() if callable(result.data) else result.data))
            elif result.next:
                print(f"next: {printable(result.next)}")
        except self._errors as error:
            if ctx.meta[_JSON] and not isinstance(error, BrokenPipeError):
                print(_error_as_json(code_of(error), str(error)))
            raise
        return result.code


def _with_hyphens(flag: re.Match[str]) -> str:
    return flag[0].replace("_", "-")


def _error_as_json(code: str | None, message: str) -> str:
    return as_json({"error": {"code": code, "message": message}})


class Group(_Help, click.Group):
    """A group of commands.

    commands: of the same module. places: of other modules, loaded when they are run or explained: panel of the help ->
    name -> place, as module:name.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[click.Command] = (),
        places: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        *,
        examples: str = "",
        closing: str = "",
        **how: Any,
    ) -> None:
        super().__init__(name, {str(each.name): each for each in commands}, context_settings=_SETTINGS, **how)
        self.examples, self.closing = examples, closing
        self.rows = {title: list(found) for title, found in places.items()} or {"Commands": list(self.commands)}
        self._places = {name: place for found in places.values() for name, place in found.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands. Loads none."""
        return sorted({*self.commands, *self._places})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, loaded now; None for an unknown name, after all were loaded: click suggests one."""
        for each in [name] if name in self._places else self._places:
            if each not in self.commands:
                self.commands[each] = loaded(self._places[each])
        return super().get_command(ctx, name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Without any, print the help and exit with ExitCode.USAGE."""
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(ExitCode.USAGE)
        return super().parse_args(ctx, args)


def command(name: str, text: str, **how: Any) -> Callable[[Callable[..., Result]], Command]:
    """Return a decorator that turns a function into a `Command`. text: its help. how: arguments of `Command`."""
    decorated: Callable[[Callable[..., Result]], Command] = click.command(name, cls=Command, help=text, **how)
    return decorated


def run(
    command: click.Command, argv: Sequence[str] | None, program: str, codes: Mapping[ExitCode, int] = OF_FACES
) -> int:
    """Run a command or group and return the exit status.

    argv: default sys.argv. program: its name in the help. codes: exit codes to replace by other numbers.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # builds start --threads threads
    try:
        code = command.main(words, program, standalone_mode=False)
    except click.UsageError as error:
        if "--json" in words:
            print(_error_as_json("E101", error.format_message()))
        print_error(UsageError(error.format_message()))
        if error.ctx is not None:
            tell(f"{error.ctx.get_usage().strip()}\nhelp: {error.ctx.command_path} --help")
        code = ExitCode.USAGE
    except click.Abort:
        code = ExitCode.INTERRUPTED
    except SystemExit:  # click raises it if the reader of the help is gone
        code = ExitCode.GOOD
    return codes.get(code, int(code))


def is_color_wanted() -> bool:
    """Return whether results may have colours: on a terminal, without --json, NO_COLOR and TERM=dumb."""
    context = click.get_current_context(silent=True)
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain and not (context and context.meta.get(_JSON))


def say(text: object, *, is_safe: bool = False) -> None:
    """Print a part of the result with control characters escaped; nothing with --json.

    On a terminal, lines that are too wide are folded at spaces. text: str(text) is printed; a function is called first.
    is_safe: the text has colours, and its control characters are escaped already.
    """
    if not click.get_current_context().meta[_JSON]:
        text = text() if callable(text) else text
        with bar.above_bars():
            print(_fitting(str(text) if is_safe else escaped(text), sys.stdout), flush=True)


def tell(text: str) -> None:
    """Print a message to stderr, above a progress bar. Escape its control characters first."""
    with bar.above_bars():
        print(_fitting(text, sys.stderr), file=sys.stderr, flush=True)


def _fitting(text: str, stream: TextIO) -> str:
    """Return a text with lines that fit the stream's terminal; the same text for a pipe or a file."""
    if not stream.isatty():
        return text
    columns = width(stream)
    return "\n".join(part for line in text.split("\n") for part in folded(line, columns, _indent_of(line)))


def _indent_of(line: str) -> str:
    """Return the indent of a folded line's continuation: "" for a line that is not indented, else two spaces more."""
    start = len(line) - len(line.lstrip(" "))
    return " " * (start + 2) if start else ""


_JSON, _WARNINGS = "niels_gpt.json", "niels_gpt.warnings"
_MOST_OF_LINE = 50_000  # characters: `table` cuts cells at 4,000, and an escape takes up to ten
_REMEDY = 1_000  # characters that are kept of a message's end: the end says what to do


@contextmanager
def _counted_warnings(context: click.Context, level: int) -> Iterator[None]:
    """Count warnings for --strict: this package's log records and Python's warnings; print the latter as one line.

    level: the lowest level of log records that are printed. Others do not count.
    """
    context.meta[_WARNINGS] = 0
    counter = _Counter(context.meta, level)
    counter.addFilter(_Once())
    ours = logging.getLogger("niels_gpt")
    ours.addHandler(counter)
    before = warnings.showwarning
    warnings.showwarning = _print_python_warning
    try:
        yield
    finally:
        warnings.showwarning = before
        ours.removeHandler(counter)


def _print_python_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if isinstance(message, CodedWarning):
        print_warning(message.code, message.text)
    else:
        print_warning("", message)


class _Once(logging.Filter):
    """Lets each warning with a code through once: two passes over a source warn of the same things."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str | None, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is new."""
        key = getattr(record, "code", None), record.getMessage()
        is_new = key[0] is None or key not in self._seen
        self._seen.add(key)
        return is_new


class _Counter(logging.Handler):
    def __init__(self, counts: dict[str, Any], level: int) -> None:
        super().__init__(level)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        self._counts[_WARNINGS] += 1


def parsed(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return an argument type for click that parses text by `parse` and reports its ValueError; keeps a default."""

    def convert(text: str | int) -> int:
        try:
            return parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return convert


class _PathOrUrl(click.ParamType[Path | str]):
    """A path, as a Path; or a URL as text, because a Path would lose one of its slashes."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if isinstance(value, Path) or not is_url(value):
            return Path(value)
        from niels_gpt.buckets.bucket import scheme_of

        try:
            scheme_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


PATH_OR_URL = _PathOrUrl()

# --- printing ---------------------------------------------------------------------------------------------------------


def is_unread(more: str = "") -> bool:
    """Print `more`, flush stdout, and return whether its reader is gone."""
    try:
        print(more, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return True
    return False


def print_error(error: BaseException, of: str = "") -> None:
    """Print `error[CODE]: ` and an error to stderr, control characters escaped. of: a prefix of its message."""
    tell(f"error[{code_of(error)}]: {escaped(cut(f'{of}{error}', end=_REMEDY))}")


def print_failures(failures: Mapping[str, Exception]) -> ExitCode:
    """Print a line for each failed cache, and return the exit code."""
    for key, failure in failures.items():
        is_own = isinstance(getattr(failure, "code", None), str)  # its message needs no class name
        print_error(failure, of=f"{key}: " if is_own else f"{key}: {type(failure).__name__}: ")
    return max(map(exit_code_of, failures.values()), default=ExitCode.GOOD)


def print_warning(code: str, message: object, *, is_counted: bool = True) -> None:
    """Print `warning[CODE]: ` and a message to stderr, control characters escaped. is_counted: for --strict."""
    context = click.get_current_context(silent=True)
    if context is not None and is_counted:
        context.meta[_WARNINGS] = context.meta.get(_WARNINGS, 0) + 1
    text = escaped(cut(str(message), end=_REMEDY, where=""))
    tell(f"warning[{code}]: {text}" if code else f"warning: {text}")


def log_to_stderr(level: int = logging.INFO) -> None:
    """Print log records to stderr as plain lines, control characters escaped, without the chatter of libraries."""
    handler = _Lines()
    handler.setFormatter(_EscapingFormatter("%(message)s"))
    handler.addFilter(_Once())
    logging.basicConfig(level=level, handlers=[handler])
    for library in ("httpx", "httpx2", "matplotlib", "botocore", "aiobotocore"):  # they log every request
        logging.getLogger(library).setLevel(logging.WARNING)


class _Lines(logging.Handler):
    """Prints each record above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell(self.format(record))
        except Exception:  # like every handler: a line that cannot be printed ends no build
            self.handleError(record)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        code = getattr(record, "code", None)  # this project's warnings pass it by `extra`
        text = ("" if code is None else f"warning[{code}]: ") + super().format(record)
        return escaped(cut(text, end=_REMEDY, where=""))


def escaped(message: object) -> str:
    """Return a message with control characters escaped: a file's name or content may bring some."""
    return "\n".join(printable(cut(line, _MOST_OF_LINE)) for line in str(message).split("\n"))


@contextmanager
def progress_bar(title: str, unit: str = "tok", items: str = "") -> Iterator[Progress]:
    """Yield a progress callback: it draws a bar on a terminal, and prints a line every ten seconds elsewhere.

    unit, items: see `display.bar.progress_bar`.
    """
    if sys.stderr.isatty():
        with bar.progress_bar(title, unit, items) as progress:
            yield progress
    else:
        yield bar.progress_lines(
            lambda line: print(f"{escaped(title)}: {line}", file=sys.stderr, flush=True), unit, items
        )


def with_progress(items: Iterable[_Item], title: str, unit: str, total: int) -> Iterator[_Item]:
    """Yield the items under a `progress_bar` that counts those that are done. total: how many there are."""
    with progress_bar(title, unit) as progress:
        progress(0, 0, total)
        for done, item in enumerate(items, start=1):
            yield item
            progress(0, done, total)


def as_json(value: object) -> str:
    """Return indented JSON without characters that control a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\ud800-\udfff]", lambda char: f"\\u{ord(char.group()):04x}", text)


def number_of_tokens(text: str) -> int:
    """Parse a number of tokens: 205M, 1.5G, 300_000. Raises: ValueError."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}.get(text[-1:].lower())
    with contextlib.suppress(ValueError, OverflowError):
        number = int(float(text[:-1] if scale else text) * (scale or 1))
        if number > 0:
            return number
    raise ValueError(f"{text!r}: expected a number of tokens above 0, such as 205M")


def token_position(text: str) -> int:
    """Parse the number of a token: 1_000_000 or 1,000,000. Raises: ValueError."""
    with contextlib.suppress(ValueError):
        return int(text.replace(",", ""))
    raise ValueError(f"{text!r}: expected the number of a token, such as 1_000_000")
