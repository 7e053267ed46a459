"""The blocks of a page of documentation: found, run in order in one folder, and compared with what the page shows.

    ```console             each line `$ COMMAND` is run by bash (`> ` continues it); the lines below it are its output
    ```python              is run in this process, with the names of the blocks before it; its output is in the ```text
                           that follows
    ```LANGUAGE title="F"  is written to the file F, and not run
    <!-- not run: WHY -->  before a block: its commands are only parsed, its Python only compiled
    <!-- needs: sample caches -->  anywhere: `cache/sample` of `niels-gpt demo cache` is there before the first block

A block of commands is one bash, which starts in the page's folder; that folder is HOME too, and output shows it as
/home/you. A command must succeed, unless the next one is `echo $?`. Output is stdout and stderr together, and is equal
to the page's but for

    ...                    alone on a line: any lines; inside a line: anything
    1.92e-07               any number with a negative exponent: an error of rounding
    1.234                  a number with a decimal point may differ by 2 %: kernels of other processors round otherwise
    12.3 s, 4,567 tokens/s durations and speeds: any number
    several blanks         one is enough: columns move when a number is longer
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support import ROOT

HOME = "/home/you"
TIMEOUT_S = 300
RUN = ("console", "python")

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n\n?)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_DURATION = r"\d[\d,.]*(?= ?(?:s|ms|us|seconds|minutes|tokens/s|[KMG]iB/s)\b)"
_ROUNDING = r"\d(?:\.\d+)?e-\d+"
_DECIMAL = r"(?<![\d.])\d[\d,]*\.\d+(?![\d.]*\d)"
_VARIES = re.compile(
    rf"(?P<duration>{_DURATION})|(?P<rounding>{_ROUNDING})|(?P<decimal>{_DECIMAL})"
    r"|(?P<any>\.\.\.)|(?P<blanks> +)"
)
_PATTERNS = {
    "duration": r"\d[\d,.]*",
    "rounding": rf"(?:{_ROUNDING}|0)",
    "decimal": rf"({_DECIMAL})",
    "any": ".*?",
    "blanks": " +",
}


@dataclass
class Command:
    """A command and the output that the page shows."""

    text: str
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    body: str
    why_not_run: str | None
    start: int
    """Where `body` starts in the page's text."""

    @property
    def commands(self):
        """The commands of a console block."""
        found = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif line.startswith("> ") and found and not found[-1].shown:
                found[-1].text += "\n" + line[2:]
            else:
                assert found, f"{line!r} comes before the first `$ ` of its block"
                found[-1].shown.append(line)
        return found


def blocks_of(text):
    """Return the fenced blocks of a page in their order."""
    return [
        Block(found["language"], found["title"], found["body"], found["why"], found.start("body"))
        for found in _FENCE.finditer(text)
    ]


def lines_to_copy(text):
    """Return the block of docs/trainers.md that holds a text: at most ten lines."""
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = (block.body for block in blocks_of(page) if text in block.body)
    assert len([line for line in code.splitlines() if line]) <= 10
    return code


def difference(shown, real):
    """Return what differs between the output of a page and the real one, by the rules above; "" where nothing does."""
    pattern, expected = "", []
    for line in (line.rstrip() for line in shown):
        if line == "...":
            pattern += r"(?:.*\n)*?"
            continue
        end = 0
        for found in _VARIES.finditer(line):
            pattern += re.escape(line[end : found.start()]) + _PATTERNS[str(found.lastgroup)]
            end = found.end()
            if found.lastgroup == "decimal":
                expected.append(found.group())
        pattern += re.escape(line[end:]) + "\n"
    matched = re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in real))
    if not matched:
        return "\n".join(["the page shows", *shown, "but the output is", *real])
    for before, now in zip(expected, matched.groups(), strict=True):
        a, b = (float(number.replace(",", "")) for number in (before, now))
        last_digit = 10.0 ** -len(before.partition(".")[2])
        if abs(a - b) > 0.02 * abs(a) + (last_digit if a else 0):
            return f"the page shows {before}, the output has {now}: more than 2 % apart"
    return ""


class Page:
    """Runs the blocks of a page in a folder. timeout_s: of a block of commands."""

    def __init__(self, text, folder, timeout_s=TIMEOUT_S):
        self.text, self.folder, self.timeout_s = text, folder, timeout_s
        self.names = {"__name__": "__main__"}
        self.differences = []
        self.rewritten = text
        """The page with the output of this run, where it differs."""

    def run(self):
        """Run every block; what differs is in `differences` afterwards. Raises AssertionError where a command fails."""
        blocks = blocks_of(self.text)
        with contextlib.chdir(self.folder):
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                if block.title:
                    (self.folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / block.title).write_text(block.body, encoding="utf-8")
                elif block.language == "python":
                    self._python(block, following)
                elif block.language == "console" and not block.why_not_run:
                    self._console(block)

    def _python(self, block, following):
        line = self.text.count("\n", 0, block.start)
        code = compile("\n" * line + block.body, "the page", "exec")  # tracebacks have the page's lines
        if block.why_not_run:
            return
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self.names)
        real = self._as_at_home(output.getvalue())
        shown = following if following and following.language == "text" and not following.title else None
        assert shown or not real, f"line {line}: the page does not show what its Python prints:\n" + "\n".join(real)
        if shown:
            self._compare(line, shown.body.splitlines(), real)
            if self.differences:
                self._rewrite(shown.body, real)

    def _console(self, block):
        commands, before = block.commands, len(self.differences)
        marked = "\n".join(f"{each.text}\ncode=$?; printf '\\036%d\\036' $code; (exit $code)" for each in commands)
        done = subprocess.run(
            ["bash", "-c", marked],
            cwd=self.folder,
            env=os.environ
            | {"HOME": str(self.folder), "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
            | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.timeout_s,
        ).stdout
        parts = done.split("\036")  # the output of a command, its exit code, the output of the next one, ...
        body = ""
        for i, command in enumerate(commands):
            real, code = self._as_at_home(parts[2 * i]), parts[2 * i + 1]
            asked = i + 1 < len(commands) and commands[i + 1].text == "echo $?"
            line = self.text.count("\n", 0, block.start)
            assert code == "0" or asked, f"line {line}: {command.text}: exit code {code}\n" + "\n".join(real)
            found = self._compare(line, command.shown, real)
            shown = real if found else command.shown
            body += "\n".join(["$ " + command.text.replace("\n", "\n> "), *shown]) + "\n"
        if len(self.differences) > before:
            self._rewrite(block.body, body.splitlines())

    def _as_at_home(self, output):
        return output.replace(str(self.folder), HOME).splitlines()

    def _compare(self, line, shown, real):
        found = difference(shown, real)
        if found:
            self.differences.append(f"after line {line}: {found}")
        return bool(found)

    def _rewrite(self, before, lines):
        assert before, "an empty block cannot be found again: write ... into it"
        self.rewritten = self.rewritten.replace(
            f"\n{before}```", "\n" + "".join(f"{line}\n" for line in lines) + "```", 1
        )
