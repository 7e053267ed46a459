"""Reads a chat template's jinja: does it have marks, does it ask for the date. Rewrites marks as visible characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise

DATE = "strftime_now"
"""The function by which a template asks for the date."""
OPENS, CLOSES = "loss_begins_here", "loss_ends_here"
"""Variables that the template of `marked` writes at the start and the end of marked text."""
_MACRO = "words_that_carry_loss"
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))  # private use: no text needs them


def has_marks(template: str) -> bool:
    """Whether a template has {% generation %} in its code; one in a comment does not count."""
    return any(one[0] == "block_begin" and two == ("name", "generation") for one, two in pairwise(_code(template)))


def asks_for_date(template: str) -> bool:
    """Whether a template uses strftime_now for more than whether it is defined."""
    code = _code(template)
    for at, token in enumerate(code):
        after = [value for _, value in code[at + 1 : at + 4]]
        if token == ("name", DATE) and after[:2] != ["is", "defined"] and after != ["is", "not", "defined"]:
            return True
    return False


def marked(template: str) -> str:
    """Return a template with the same output, but for the variables OPENS and CLOSES around what is marked."""
    # A {% call %} block has the scope of a generation block, and white space around it is treated alike.
    macro = f"{{% macro {_MACRO}() %}}{{{{ {OPENS} }}}}{{{{ caller() }}}}{{{{ {CLOSES} }}}}{{% endmacro %}}\n"
    return macro + _MARK.sub(lambda tag: f"{tag[1]}{'endcall' if tag[2] else f'call {_MACRO}()'}{tag[3]}", template)


def free_characters(texts: Iterable[str], number: int) -> list[str] | None:
    """Return so many private characters that none of the texts contains; None if there are not so many."""
    text = "".join(texts)
    taken = set() if text.isascii() else set(text)
    free = (chr(code) for code in chain(*_PRIVATE) if chr(code) not in taken)
    found = list(islice(free, number))
    return found if len(found) == number else None


def unmarked(text: str, marks: Sequence[str]) -> tuple[str, list[tuple[int, int]]] | None:
    """Return a text without marks, and start and end of each marked part that is not empty.

    None unless marks open and close in turn.
    """
    parts = re.split(f"([{''.join(marks)}])", text)
    if parts[1::2] != list(marks) * (len(parts) // 4):
        return None
    plain, ends = parts[::2], [0]
    for part in plain:
        ends.append(ends[-1] + len(part))
    spans = zip(ends[1::2], ends[2::2], strict=False)
    return "".join(plain), [(start, end) for start, end in spans if start < end]


def _code(template: str) -> list[tuple[str, str]]:
    """Return kind and text of the jinja tokens of a template, without comments; [] for what is no jinja."""
    import jinja2

    try:
        found = [(kind, value) for _, kind, value in jinja2.Environment().lex(template)]
    except jinja2.TemplateSyntaxError:  # reported when it is rendered
        return []
    return [(kind, value) for kind, value in found if kind not in ("whitespace", "data", "comment")]
