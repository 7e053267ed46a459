"""The process that renders chat templates, with limits on its memory (on Linux) and on the CPU time of each request.

A template comes with a target, so anybody may have written it. transformers renders it in jinja's sandbox, which keeps
it from files and from Python's internals, but not from `'x' * 4000000000` or from loops within loops.
template_process.py starts this file as a script and talks to it over pipes: a frame is its length, eight bytes, and
JSON. So it imports nothing of this project.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from typing import IO, Any

MEMORY_BYTES = 512 << 20
"""Memory that templates may use beside what the process needs itself."""


def main() -> None:
    """Answer requests until stdin ends.

    The first frame is the sys.path to use; its answer says that everything is loaded. A request has `template`,
    `variables`, `chats`, `jobs` (number of the chat, how many of its messages, more variables), `seconds` of CPU time,
    after which the kernel ends the process, and `max_chars` of a text. The answer has an outcome for each job: its kind
    (text, syntax, raised, memory, long) and a text.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write into the answers
    sys.path[:] = _receive(requests)
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template="{{ messages[0].role }}")
    _limit_memory()
    send(answers, "ready")
    while (request := _receive(requests)) is not None:
        _limit_time(request["seconds"])
        send(answers, [_outcome(render_jinja_template, jinja2.TemplateError, request, job) for job in request["jobs"]])


def _outcome(render: Any, template_error: type[Exception], request: Any, job: Any) -> list[Any]:
    number, end, more = job
    chats = [[dict(message) for message in request["chats"][number][:end]]]
    try:
        options = {**request["variables"], **more}
        text = str(render(conversations=chats, chat_template=request["template"], **options)[0][0])
    except MemoryError:
        return ["memory", ""]
    except template_error as error:
        line = getattr(error, "lineno", None) if type(error).__name__ == "TemplateSyntaxError" else None
        return ["raised", f"{error}"] if line is None else ["syntax", f"line {line}: {error}"]
    except Exception as error:  # from what the template computes
        return ["raised", f"{type(error).__name__}: {error}"]
    return ["text", text] if len(text) <= request["max_chars"] else ["long", f"{len(text):,}"]


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux: there the kernel does not limit memory either
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def _limit_time(seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _receive(requests: IO[bytes]) -> Any:
    """Return the next value; None at the end."""
    head = requests.read(8)
    return json.loads(requests.read(int.from_bytes(head, "little"))) if len(head) == 8 else None


def send(stream: IO[bytes], value: Any) -> None:
    """Write a value as a frame."""
    raw = json.dumps(value, default=str).encode()  # ASCII: a text may hold one half of a surrogate pair
    stream.write(len(raw).to_bytes(8, "little") + raw)
    stream.flush()


if __name__ == "__main__":
    main()
