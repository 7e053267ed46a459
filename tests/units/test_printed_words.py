"""Numbers, sizes, tables and lists of damages as the commands print them."""

from pathlib import Path

import pytest

from niels_gpt.commands.report import damage_lines, notices
from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.display.tables import WIDTH, escaped_html, folded, html_table, shown, size_of, table
from niels_gpt.kinds.files import Damage
from niels_gpt.kinds.rows import Stats
from niels_gpt.recipes.records import Outcome
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


def test_a_notice_says_what_a_counter_means_and_which_flag_helps():
    meta = {"kind": "sft", "chat_template": {"sha256": "0" * 64, "loss_on": "assistant"}}
    meta["noticed"] = {"turns_without_loss": 1_000, "merged_at_reply_edge": 2, "empty_reply": 3}
    text = " ".join(notices(Outcome("sft/mine", Path("c"), meta, False, 1.0, None, "")).split())
    assert "turns_without_loss 1,000 (" in text and "--loss-on assistant,tool_calls)" in text
    assert "merged_at_reply_edge 2 (" in text and "empty_reply 3," in text


def test_a_table_fits_its_columns_and_cuts_no_word():
    rows = [("name", "train tokens", "what it is for"), ("a/long_name", "1,204", "a sentence of many words " * 4)]
    for columns in (40, 60, 80):
        text = table(rows, columns)
        assert max(map(len, text.splitlines())) <= columns
        assert sorted(text.split()) == sorted(" ".join(" ".join(row) for row in rows).split())
    wide = table([("key", "x"), ("\u6587\u5b57", "y"), ("e\u0301", "z")]).splitlines()
    assert [size_of(line) for line in wide] == [7, 7, 7] and wide[1].endswith("  y")


def test_a_folded_line_keeps_commands_and_colours_whole():
    text = "It is damaged. Build it again: niels-gpt build chats --restart --cache-dir some/folder. Or copy it"
    lines = folded(text, 40, "  ")
    assert "  niels-gpt build chats --restart --cache-dir some/folder." in lines and max(map(len, lines[:1])) <= 40
    text = "If that process has ended: rm -r '/a folder/of some caches/.lock'. Or wait"
    assert folded(text, 30, "  ")[1] == "  rm -r '/a folder/of some caches/.lock'."
    colour = "\x1b[32mgreen\x1b[0m " * 10
    assert [size_of(line) for line in folded(colour, 23)] == [23, 23, 11]
