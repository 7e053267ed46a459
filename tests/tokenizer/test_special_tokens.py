"""The sentinels are PR-03's, and the guard finds them in text and in ids."""

import numpy as np
import pytest
from support.errors import refused

from niels_gpt.special_tokens import (
    RESERVED_LITERALS,
    SPECIAL_TOKEN_NAMES,
    SPECIAL_TOKENS,
    find_reserved_literal,
    sentinel_lookup,
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


def test_the_lookup_table_is_true_at_the_sentinels_only():
    table = sentinel_lookup({"sys": 1, "usr": 2, "asst": 4, "eot": 5}, 7)
    assert table.tolist() == [False, True, True, False, True, True, False]
    assert table[np.array([0, 3, 5], dtype=np.uint16)].any()
    assert not table[np.array([0, 3, 6], dtype=np.uint16)].any()


@pytest.mark.parametrize("token_id", [-1, 7])
def test_a_sentinel_outside_the_vocabulary_is_refused(token_id):
    with refused("E102", f"eot={token_id}", "vocab_size=7"):
        sentinel_lookup({"eot": token_id}, 7)
