"""The names that --help has without numpy are those of the formats."""

from niels_gpt.interop.formats import FORMATS
from niels_gpt.interop.names import FORMAT_NAMES


def test_the_names_are_those_of_the_formats() -> None:
    assert set(FORMAT_NAMES) == set(FORMATS)
