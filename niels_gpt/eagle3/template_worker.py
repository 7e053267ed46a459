"""Renders chat templates in a process of its own, with a limit on memory and on the time of each request.

A template comes with a target, so anybody may have written it: transformers runs it in jinja's sandbox, which keeps it
from files and from Python's insides, but not from `'x' * 4000000000` or from loops within loops. template_process.py
starts this file and talks to it over pipes: a frame is its length, eight bytes, and JSON.
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
"""What templates may take beside what the process needs itself."""


def main() -> None:
    """Answer requests until there are no more.

    The first frame is the sys.path to be taken; the answer says that all is loaded. A request has `template`,
    `variables`, `chats`, `jobs` (number of the chat, how many of its messages, more variables), `seconds` of CPU time,
    after which the kernel ends the process, and `max_chars` of a text. The answer has an outcome for each job: its kind
    (text, syntax, raised, memory, long) and what there is to say.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.path[:] = _received(requests)
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template="{{ messages[0].role }}")
    _limit_memory()
    _send(answers, "ready")
    while (request := _received(requests)) is not None:
        _limit_time(request["seconds"])
        _send(answers, [_outcome(render_jinja_template, jinja2.TemplateError, request, job) for job in request["jobs"]])


def _outcome(render: Any, template_error: type[Exception], request: Any, job: Any) -> list[Any]:
    number, end, more = job
    chats = [[dict(turn) for turn in request["chats"][number][:end]]]
    try:
        options = {**request["variables"], **more}
        text = str(render(conversations=chats, chat_template=request["template"], **options)[0][0])
    except MemoryError:
        return ["memory", ""]
    except template_error as error:
        line = getattr(error, "lineno", None) if type(error).__name__ == "TemplateSyntaxError" else None
        return ["raised", f"{error}"] if line is None else ["syntax", f"line {line}: {error}"]
    except Exception as error:  # of what it computes
        return ["raised", f"{type(error).__name__}: {error}"]
    return ["text", text] if len(text) <= request["max_chars"] else ["long", f"{len(text):,}"]


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def _limit_time(seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _received(requests: IO[bytes]) -> Any:
    """Return what was sent; None at the end."""
    head = requests.read(8)
    return json.loads(requests.read(int.from_bytes(head, "little"))) if len(head) == 8 else None


def _send(answers: IO[bytes], value: Any) -> None:
    raw = json.dumps(value).encode()  # ASCII: a text may hold one half of a surrogate pair
    answers.write(len(raw).to_bytes(8, "little") + raw)
    answers.flush()


if __name__ == "__main__":
    main()
