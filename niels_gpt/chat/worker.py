"""Render chat templates as a script, with limits on memory (on Linux) and on the CPU time of each request.

rendering.py starts this file and talks to it over pipes. A frame is its length in eight bytes, little-endian, and JSON.
The script imports nothing of this project, so that it starts fast and holds little that a template could reach.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any

MEMORY_BYTES = 512 << 20
"""Memory for templates, beside the process's own."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_COMPILED = 64  # compiled templates to keep
_MAX_ERROR = 300  # characters of an error: a template may raise one of any length


def main() -> None:
    """Answer requests until stdin ends.

    The first frame is the sys.path to use; its answer says that everything is loaded. A request has `template`,
    `variables`, `chats`, `tools` of each chat, `jobs` (number of the chat, how many of its messages, more variables),
    `seconds` of CPU time until the kernel ends the process, `max_chars` of each chat's texts, and `frame_chars`. The
    answer has a kind (text, syntax, raised, memory, long) and a text for each job. It stops early once the texts
    together have `frame_chars` characters; the caller requests the other jobs again.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a library that prints does not write into the answers
    sys.path[:] = _receive(requests)
    environment = _environment()
    environment.from_string("{{ messages | tojson }}").render(messages=[{"role": "user"}])
    _limit_memory()
    send(answers, "ready")
    compiled: dict[str, Any] = {}
    while (request := _receive(requests)) is not None:
        _limit_time(request["seconds"])
        send(answers, list(_outcomes(environment, compiled, request)))


def _environment() -> Any:
    """Return jinja's sandbox with the functions, filters and tags that transformers gives to chat templates."""
    # A template comes with a target, so anybody may have written it. The sandbox keeps it from files and from Python's
    # internals. It does not keep it from `'x' * 4000000000` or loops within loops: the limits of the process do.
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %}: the text within it, unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that begin with an underscore, which could lead to Python's internals."""

        def __init__(*args: Any, **attributes: Any) -> None:
            own, *given = args  # an attribute may have any name, `self` too
            values = dict(*given, **attributes)
            for name in values:
                check(name)
            jinja2.utils.Namespace.__init__(own, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=Namespace
    )
    return environment


class _Dict:
    """`dict` as a function, without the attributes of Python's class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _outcomes(environment: Any, compiled: dict[str, Any], request: Any) -> Iterator[list[Any]]:
    num_chars = 0
    for job in request["jobs"]:
        kind, text = _outcome(environment, compiled, request, job)
        yield [kind, text]
        num_chars += len(text)
        if num_chars >= request["frame_chars"]:
            return


def _outcome(environment: Any, compiled: dict[str, Any], request: Any, job: Any) -> list[Any]:
    import jinja2

    number, end, more = job
    text = request["template"]
    try:
        if text not in compiled:
            if len(compiled) >= _MAX_COMPILED:
                compiled.clear()
            compiled[text] = environment.from_string(text)
        messages = [_with_reasoning(message) for message in request["chats"][number][:end]]
        tools = request["tools"][number]
        usual = {"documents": None, "tools": tools, "add_generation_prompt": False}
        variables = {**usual, **request["variables"], **more}
        rendered = compiled[text].render(messages=messages, **variables)
        rendered.isascii() or rendered.encode()  # raises for half a surrogate pair
    except MemoryError:
        return ["memory", ""]
    except UnicodeEncodeError as error:  # the chats have none
        half = error.object[error.start]
        return ["raised", f"the template writes {half!a}, half of a surrogate pair, which no text in UTF-8 has"]
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None) if type(error).__name__ == "TemplateSyntaxError" else None
        return ["raised", _begin(error)] if line is None else ["syntax", f"line {line}: {_begin(error)}"]
    except Exception as error:  # from what the template computes
        return ["raised", f"{type(error).__name__}: {_begin(error)}"]
    return ["text", rendered] if len(rendered) <= request["max_chars"][number] else ["long", f"{len(rendered):,}"]


def _begin(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers does: without null fields, its reasoning under the names that templates read."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux; elsewhere the kernel does not enforce this limit
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
    raw = json.dumps(value, default=str).encode()  # ASCII: a text may hold half a surrogate pair
    stream.write(len(raw).to_bytes(8, "little") + raw)
    stream.flush()


if __name__ == "__main__":
    main()
