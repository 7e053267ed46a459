"""Where long texts are cut: for the training of a SentencePiece model, and for the reference of an engine."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.tokenizer_training import MAX_PIECE_BYTES, training_pieces
from niels_gpt.tokenizers.engine import ONE_COMPARED_OF, compared_pieces

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
    "text", ["", "a", "ab\n" * 900, "\U0001f98a" * 600, "a\U0001f98a" * 600, "x\n" + "\u20ac" * 999]
)
def test_the_pieces_that_are_compared_are_the_text_cut_between_characters(text):
    raw = text.encode()
    number = -(-len(raw) // 1024)
    pieces = [piece for at in range(number) for piece in compared_pieces(raw, at * ONE_COMPARED_OF, 1)]
    assert b"".join(pieces) == raw
    assert all(1024 - 4 < len(piece) < 1024 + 4 and piece.decode() for piece in pieces[:-1])


def test_several_pieces_of_a_long_text_differ():
    raw = "".join(map(str, range(3000))).encode()
    for count, digest in itertools.product(range(1, 12), (0, 7, 12_345, 1 << 63)):
        assert len(set(compared_pieces(raw, digest, count))) == count
