"""The sentinels are PR-03's, and the guard finds them in text and in ids."""

import pytest

from niels_gpt.special_tokens import (
    RESERVED_LITERALS,
    SPECIAL_TOKEN_NAMES,
    SPECIAL_TOKENS,
    find_reserved_literal,
)


def test_the_sentinels_are_those_of_the_spec_in_its_order():
    suffix = "84a5023f67d74cf29cc4001becde983c"
    assert SPECIAL_TOKEN_NAMES == ("sys", "usr", "asst", "eot")
    assert tuple(f"<|ngpt_{name}_{suffix}|>" for name in SPECIAL_TOKEN_NAMES) == SPECIAL_TOKENS
    assert list(RESERVED_LITERALS) == [*SPECIAL_TOKENS, "<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>"]


@pytest.mark.parametrize("literal", RESERVED_LITERALS)
def test_each_reserved_literal_is_found_inside_a_text(literal):
    assert find_reserved_literal(f"before{literal}after<|sys|>") == literal  # the first of two


@pytest.mark.parametrize("text", ["", "plain", "a <| b", "<|user|>", "<|ngpt_eot_84a5|>", "<|EOT|>", "< |eot|>"])
def test_near_misses_are_plain_text(text):
    assert find_reserved_literal(text) is None
