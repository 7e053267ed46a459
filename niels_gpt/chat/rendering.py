"""Render chat templates in another process, which a template can neither hang nor fill (worker.py).

One such process serves all templates of this process. It starts with the first chat, and again after a template has
exceeded a limit. A text depends only on template, chat and variables, so any process gives the same.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from niels_gpt.chat import worker
from niels_gpt.chat.protocol import Chat
from niels_gpt.storage.errors import TemplateError, WorkerDied

Job = tuple[int, int, dict[str, Any]]
"""Number of the chat, how many of its messages to render, variables of only this job."""
Outcome = tuple[str, str]
"""A kind and a text: text, the rendering; syntax or raised, jinja's error; long, the number of characters."""

# CPU seconds of a request, and for each of its messages and characters: at least ten times the usual.
_SECONDS, _OF_A_MESSAGE, _OF_A_CHARACTER = 2.0, 1e-3, 1e-6
_WALL = 4.0, 10.0  # wall seconds of a request: 4 times its CPU seconds and 10, for a busy machine
_START_S = 120.0
_FRAME = 1 << 24  # characters of the texts in one answer, unless one text alone is longer
_MAX_CHARS = 1 << 22, 16  # characters of a text: four million, or sixteen times the chat


class TemplateLimitError(TemplateError):
    """A template exceeded its time or memory. The message continues the template's name."""


class TemplateProcess:
    """The process, started on demand. Threads may share it; a forked child starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def render(
        self, template: str, variables: Mapping[str, Any], chats: Sequence[Chat], jobs: Sequence[Job]
    ) -> Iterator[Outcome]:
        """Yield the outcome of each job. Only one answer's texts are in memory, however long a template makes them.

        Raises: TemplateLimitError E407 if the template exceeds a limit; WorkerDied E506 if the process does not start.
        """
        sizes = [list(accumulate((len(json.dumps(each)) for each in chat.messages), initial=0)) for chat in chats]
        tools_size = [len(json.dumps(chat.tools)) for chat in chats]
        lengths = [size[-1] + own for size, own in zip(sizes, tools_size, strict=True)]
        request = {
            "template": template,
            "variables": dict(variables),
            "chats": [[dict(message) for message in chat.messages] for chat in chats],
            "tools": [chat.tools for chat in chats],
            "max_chars": [max(_MAX_CHARS[0], _MAX_CHARS[1] * length) for length in lengths],
            "frame_chars": _FRAME,
        }
        expected = [sizes[number][end] + tools_size[number] for number, end, _ in jobs]
        first = 0
        while first < len(jobs):
            last = _frame_end(expected, first)
            messages = sum(end for _, end, _ in jobs[first:last])
            chars = sum(expected[first:last]) + len(template) * (last - first)
            seconds = _SECONDS + _OF_A_MESSAGE * messages + _OF_A_CHARACTER * chars
            with self._lock:
                outcomes = self._answer({**request, "jobs": jobs[first:last], "seconds": seconds}, seconds)
            if any(kind == "memory" for kind, _ in outcomes):
                raise TemplateLimitError(f"takes more than {worker.MEMORY_BYTES >> 20} MiB of memory")
            first += len(outcomes)
            yield from map(tuple, outcomes)

    def stop(self) -> None:
        """End the process, if this process started it."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if self._pid == os.getpid():  # a forked child has copies of the pipes, and must not end its parent's process
            process.kill()
            process.wait()
        else:
            process.returncode = 0  # else its destructor warns

    def _answer(self, request: Any, seconds: float) -> Any:
        if self._process is None or self._pid != os.getpid() or self._process.poll() is not None:
            self.stop()
            self._start()
        process = self._process
        assert process is not None
        try:
            return self._exchange(process, request, _WALL[0] * seconds + _WALL[1])
        except (EOFError, OSError, TimeoutError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if isinstance(error, TimeoutError) else 5)
            code = process.returncode
            self.stop()
            if code == -signal.SIGXCPU or isinstance(error, TimeoutError):
                raise TemplateLimitError(f"did not end within {seconds:.0f} s") from None
            raise TemplateLimitError(f"ended the process that renders it (exit status {code})") from None
        except BaseException:  # an interrupt: the next request must not receive this one's answer
            self.stop()
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(worker.__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._pid = os.getpid()
        try:
            self._exchange(self._process, sys.path, _START_S)
        except (EOFError, OSError, TimeoutError) as error:
            self.stop()
            started = " ".join(command)
            raise WorkerDied(f"the process that renders chat templates did not start ({error!r}): {started}") from error

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: Any, seconds: float) -> Any:
        """Send a request and return its answer. Raises: TimeoutError after `seconds`; EOFError, OSError if it ends."""
        assert process.stdin is not None and process.stdout is not None
        worker.send(process.stdin, request)
        deadline, pipe = time.monotonic() + seconds, process.stdout.fileno()

        # The deadline holds for the whole answer: a process that stalls in the middle of a frame must not hold us up.
        def read(size: int) -> bytes:
            content = bytearray()
            while len(content) < size:
                ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                part = os.read(pipe, min(size - len(content), 1 << 20))
                if not part:
                    raise EOFError
                content += part
            return bytes(content)

        return json.loads(read(int.from_bytes(read(8), "little")))


def _frame_end(sizes: Sequence[int], first: int) -> int:
    """Return the end of the jobs to request in one frame: their expected texts fit the process's memory."""
    held = sizes[first]
    for last in range(first + 1, len(sizes)):
        held += sizes[last]
        if held > _FRAME:
            return last
    return len(sizes)


PROCESS = TemplateProcess()
"""The process that all templates share."""
atexit.register(PROCESS.stop)
