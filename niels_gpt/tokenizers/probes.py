"""Texts that a tokenizer is tried with, and the round trip: whether decoding the ids of a text returns the text.

roundtrip(tokenizer)  ->  {"texts": 19, "differ": 0}     of PROBES; meta.json calls differ == 0 lossless
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Protocol

PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; (naive) {code} = [0x7F]!",
    "UPPER lower MiXeD",
    " one space before",
    "one space behind ",
    "two  spaces,   three and    four",
    "a tab\tand\t\ttwo",
    "a line end\nand two\n\nand a last one\n",
    "Windows\r\nline ends\r\n",
    "def f(x):\n    if x:\n\treturn [1,  2]\n",
    "na\u00efve caf\u00e9 \u00dcber stra\u00dfe \u0141\u00f3d\u017a",
    "combining: e\u0301 a\u0308 n\u0303",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03b1",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4 \u4f60\u597d",
    "full width \uff21\uff22\uff43 ligature \ufb01 half \u00bd square \u33a1",
    "no-break\u00a0space, ideographic\u3000space, zero\u200bwidth",
    "emoji \U0001f98a \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea",
    "\u201cquotes\u201d \u2013 dash \u2026 \u2122",
    "a\ufeffb \ufffd",
)
"""Runs of white space, line ends, capitals, combining marks, scripts, emoji, and letters that normalization changes."""

_LITERALS = 64  # tokens whose literals are in the test texts
_SHOWN = 24  # characters of a text around the first difference


class RoundTrip(Protocol):
    """The methods of a tokenizer that this module uses."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids."""


def roundtrip(tokenizer: RoundTrip, texts: Sequence[str] = PROBES) -> dict[str, int]:
    """Encode and decode texts; return their number, and how many of them changed."""
    differ = sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)
    return {"texts": len(texts), "differ": differ}


def first_difference(text: str, back: str) -> str:
    """Describe the first difference of two texts, in ASCII with escapes."""
    same = next((at for at, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    start = max(0, same - _SHOWN // 3)
    return f"at character {same}, {text[start : start + _SHOWN]!a} came back as {back[start : start + _SHOWN]!a}"


def probe_texts(literals: Sequence[str]) -> list[bytes]:
    """Return the texts that test an engine when it is opened, also with the literals of some tokens in them."""
    sides = ((" ", " "), ("a", "b"), ("\n", "  "))
    around = [f"{left}{literal}{right}" for literal in literals[:_LITERALS] for left, right in sides]
    return [text.encode() for text in (*PROBES, *_odd_texts(), *around)]


@functools.cache
def _odd_texts() -> tuple[str, ...]:
    generator = random.Random(0)
    alphabets = (
        " \n\t\r\u00a0\u3000ab1.",
        "'sdtmlrveSDTMLRVE \u2019",
        "0123456789\u0660\u0665\u00bd\u2167,. ",
        "abcde  \u00e9\u00fc\u6f22\u5b57\u304b\u0301\u0308\u200d\U0001f98a\U0001f469\ufe0f\u2581\ufeff\0",
        '(){}[]<>=+-*/_#|;:!?"`~^&%$@.,\\ \nxY',
    )
    texts = ["".join(generator.choices(alphabet, k=40)) for alphabet in alphabets for _ in range(24)]
    for _ in range(60):
        codes = (generator.randrange(0x110000 if generator.random() < 0.2 else 0x3000) for _ in range(40))
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    return (*texts, "a" * 3000, " " * 3000, "ab" * 1500, "\n" * 300, "<unk> <s> </s> <0x41> <|endoftext|> <pad>")
