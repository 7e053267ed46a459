"""Where long texts are cut: for the training of a SentencePiece model, and for the reference of an engine."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.tokenizer_training import MAX_PIECE_BYTES, training_pieces
from niels_gpt.tokenizers.engine import pieces_of

LINE = "\n" + "x" * 999  # four of these are exactly 4,000 bytes


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a\nb\n", ["a\nb\n"]),
        ("", []),
        ("abc" + LINE * 5, ["abc" + LINE * 3, LINE * 2]),  # before the last line feed that fits
        (LINE * 5, [LINE * 4, LINE]),
        ("x" * 3000 + "\r\n" + "y" * 3000, ["x" * 3000, "\r\n" + "y" * 3000]),
        ("\u20ac" * 2000, ["\u20ac" * 1333, "\u20ac" * 667]),  # 3 bytes each; 3,999 fit
        ("a\u2585\u2585b", ["a", "b"]),  # SentencePiece skips pieces that have it
    ],
    ids=lambda value: str(value)[:9],
)
def test_a_text_is_cut_into_pieces_at_line_feeds_and_between_characters(text, pieces):
    assert list(training_pieces(text)) == pieces


@given(st.text(st.sampled_from("a\u20ac\U0001f600\n\r\u2585"), max_size=60), st.integers(1, 400))
def test_pieces_join_to_the_text_and_none_is_too_long(text, times):
    pieces = list(training_pieces(text * times))
    assert "".join(pieces) == (text * times).replace("\u2585", "")
    assert all(0 < len(piece.encode()) <= MAX_PIECE_BYTES for piece in pieces)


@pytest.mark.parametrize(
    "text", ["ab\n" * 900_000, "\U0001f98a" * 600_000, "a\U0001f98a" * 600_000, "x\n" + "y" * 3_000_000]
)
def test_a_long_text_is_cut_at_line_ends_or_between_characters(text):
    raw = text.encode()
    pieces = list(pieces_of(raw))
    assert b"".join(pieces) == raw and len(pieces) < 2 + len(raw) / (1 << 19)
    assert all(0 < len(piece) <= 1 << 20 and piece.decode() for piece in pieces)
    assert all(piece.endswith(b"\n") for piece, after in itertools.pairwise(pieces) if b"\n" in piece)
