"""Chat templates rendered by a process that a template can neither hang nor fill: see template_worker.py.

One such process serves all templates of this process. It is started when the first chat is rendered, and again after a
template has run into a limit. A text depends on template, chat and variables alone, so it does not matter which.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.eagle3 import template_worker

Turns = Sequence[Mapping[str, str]]
Job = tuple[int, int, dict[str, Any]]
"""Number of the chat, how many of its messages are rendered, variables beside those of all jobs."""
Outcome = tuple[str, str]
"""text and the text; syntax or raised and what jinja says; long and the number of characters."""

_SECONDS, _OF_A_MESSAGE, _OF_A_CHARACTER = 2.0, 1e-3, 1e-6  # CPU time of a request: ten times what it takes, or more
_WALL = 4.0, 10.0  # of the time on the clock: by the CPU time, and added, for a machine that has other work too
_START_S = 120.0
_MAX_CHARS = 1 << 22, 16  # of a text: four million, or sixteen times the chat and the template


class TemplateLimitError(ValueError):
    """A template took more time or memory than it may; the message follows its name."""


class TemplateProcess:
    """The process, started where there is none. Threads may share it, and a forked child starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def render(
        self, template: str, variables: Mapping[str, Any], chats: Sequence[Turns], jobs: Sequence[Job]
    ) -> list[Outcome]:
        """Return the outcome of each job. Raises: TemplateLimitError; RuntimeError where it cannot be started."""
        sizes = [[len(turn["content"]) for turn in chat] for chat in chats]
        messages = sum(end for _, end, _ in jobs)
        chars = sum(sum(sizes[number][:end]) + len(template) for number, end, _ in jobs)
        seconds = _SECONDS + _OF_A_MESSAGE * messages + _OF_A_CHARACTER * chars
        longest = max((sum(size) for size in sizes), default=0)
        request = {
            "template": template,
            "variables": dict(variables),
            "chats": [[dict(turn) for turn in chat] for chat in chats],
            "jobs": jobs,
            "seconds": seconds,
            "max_chars": max(_MAX_CHARS[0], _MAX_CHARS[1] * (longest + len(template))),
        }
        with self._lock:
            found = self._asked(request, seconds)
        for kind, _ in found:
            if kind == "memory":
                raise TemplateLimitError(f"takes more than {template_worker.MEMORY_BYTES >> 20} MiB of memory")
        return [(kind, said) for kind, said in found]

    def stop(self) -> None:
        """End the process, where there is one of this process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if self._pid == os.getpid():  # a forked child has copies of the pipes, and must not end its parent's
            process.kill()
            process.wait()
        else:
            process.returncode = 0  # else its destructor warns

    def _asked(self, request: Any, seconds: float) -> Any:
        if self._process is None or self._pid != os.getpid() or self._process.poll() is not None:
            self.stop()
            self._start()
        try:
            self._send(request)
            return self._received(time.monotonic() + _WALL[0] * seconds + _WALL[1])
        except (EOFError, OSError, TimeoutError) as error:
            process = self._process
            assert process is not None
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if isinstance(error, TimeoutError) else 5)
            code = process.returncode
            self.stop()
            if code == -signal.SIGXCPU or isinstance(error, TimeoutError):
                raise TemplateLimitError(f"did not end within {seconds:.0f} s") from None
            raise TemplateLimitError(f"ended the process that renders it (exit status {code})") from None
        except BaseException:  # an interrupt: an answer that nobody waited for must not be the next one's
            self.stop()
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(template_worker.__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._pid = os.getpid()
        try:
            self._send(sys.path)
            self._received(time.monotonic() + _START_S)
        except (EOFError, OSError, TimeoutError) as error:
            self.stop()
            raise RuntimeError(
                f"the process that renders chat templates did not start ({error!r}): {' '.join(command)}"
            ) from error

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        raw = json.dumps(value, default=str).encode()
        self._process.stdin.write(len(raw).to_bytes(8, "little") + raw)
        self._process.stdin.flush()

    def _received(self, deadline: float) -> Any:
        size = int.from_bytes(self._read(8, deadline), "little")
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe, found = self._process.stdout.fileno(), bytearray()
        while len(found) < size:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            some = os.read(pipe, min(size - len(found), 1 << 20))
            if not some:
                raise EOFError
            found += some
        return bytes(found)


PROCESS = TemplateProcess()
"""The one of this process."""
atexit.register(PROCESS.stop)
