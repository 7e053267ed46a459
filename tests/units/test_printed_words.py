"""Numbers, sizes, tables and lists of damages as the commands print them."""

from pathlib import Path

import pytest

from niels_gpt.commands.report import damage_lines
from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.display.tables import WIDTH, escaped_html, html_table, shown, table
from niels_gpt.kinds.files import Damage
from niels_gpt.kinds.rows import Stats
from niels_gpt.storage.versions import version_name


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (14_225, "14,225"),
        (99_999, "99,999"),
        (123_456, "123k"),
        (999_999, "1M"),
        (205_000_000, "205M"),
        (1.5e9, "1.5B"),
    ],
)
def test_counts_are_exact_until_they_are_long(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (32 << 10, "32 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (73_253_478, "69.9 MiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes_have_a_unit(num_bytes, text):
    assert size_text(num_bytes) == text


def test_the_last_column_of_a_table_is_folded():
    lines = table([("name", "value"), ("a", "word " * 40), ("b", "\x1b[2J")]).splitlines()
    assert max(map(len, lines)) <= WIDTH and lines[2].startswith("      word") and "\x1b" not in lines[-1]
    assert " ".join(" ".join(lines[1:-1]).split()) == "a " + "word " * 39 + "word"


def test_text_with_bidi_controls_is_escaped_and_joined_emoji_are_not():
    text = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029, 0x61C)))
    assert shown(text).isascii() and escaped_html(text).isascii()
    kept = "a\tb\n\u0645\u200c\u0647 \U0001f469\u200d\U0001f680"
    assert shown(kept) == kept
    page = html_table("a\nb", ((name, name) for name in ("x\n\u202e",)))
    assert r"<caption>a\nb</caption><tr><th>x\n\u202e</th><td>x\n\u202e</td></tr>" in page
    assert table([]) == "" and str(Stats()) == repr(Stats()) == "Stats([])" and "<table>" in Stats()._repr_html_()


def test_the_name_of_a_version_is_printable():
    name = version_name(Path("/a\x1b[31m\nb\u202ec\u2028d/sft/.versions/chats/0123456789ab"))
    assert name.isprintable() and name.endswith("/sft/chats (version 0123456789ab)")


def test_damage_without_a_file_has_no_bytes():
    assert damage_lines(Path("c"), [Damage("", 0, 0, "gone"), Damage("a", 0, 2, "bad")]) == (
        "c: 2 damages\n  gone\n  a, bytes 0 to 2: bad"
    )
