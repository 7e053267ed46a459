"""Pieces of the formats of other tools that no folder shows whole."""

import pytest
from support.errors import refused

from niels_gpt.exchange.formats import FORMATS
from niels_gpt.exchange.formats.datatrove import _metric
from niels_gpt.exchange.names import FORMAT_NAMES
from niels_gpt.kinds.kind import kinds
from niels_gpt.recipes.exchange.imports import key_of


def test_the_names_that_help_has_without_numpy_are_those_of_the_formats():
    assert set(FORMAT_NAMES) == set(FORMATS)


def test_the_kinds_name_no_other_formats():
    assert set().union(*(kind.formats for kind in kinds())) == set(FORMATS)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(1, "1.00 T"), (999, "999 T"), (1000, "1.00 kT"), (9999, "10.0 kT"), (999_600, "1.00 MT"), (5**18, "3.81 TT")],
)
def test_datatrove_counts_in_three_digits(tokens, said):
    assert _metric(tokens) == said


def test_names_of_imported_caches():
    assert key_of("wiki") == "imported/wiki" and key_of("sft/chats") == "sft/chats"
    for name in ("../wiki", "tokenizer/a", "a/b/c", "", ".wiki", "imported/", "tokenizer", "x" * 101):
        with refused("E102", "NAME", repr(name)):
            key_of(name)
