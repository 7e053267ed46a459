"""The table of the built-in sources, and the table of the caches of message trees.

To add a source: write a module beside this one with a loader and a row, as dolly.py, and list its row here.
"""

from __future__ import annotations

import os

from niels_gpt.data import dolly, fineweb_edu, gutenberg, oasst1, roam, wikitext
from niels_gpt.data.spec import Credit, SourceSpec
from niels_gpt.storage.errors import SourceError

_BUILT_IN = (fineweb_edu.SPEC, wikitext.SPEC, roam.SPEC, gutenberg.SPEC, dolly.SPEC, oasst1.SPEC)
SOURCES: dict[str, SourceSpec] = {spec.name: spec for spec in _BUILT_IN}
"""The built-in sources by name, in the order in which build-all builds their caches."""
TREES: dict[str, SourceSpec] = {oasst1.TREES_SPEC.key: oasst1.TREES_SPEC}
"""The caches of message trees, by key."""


def credit_of(source: str, source_root: str | os.PathLike[str]) -> Credit:
    """Return the credit of a built-in source's text. The sample is MIT throughout, written for this project.

    Raises: SourceError E103 for an unknown source.
    """
    if source not in SOURCES:
        raise SourceError(f"unknown source {source!r}; expected one of {', '.join(SOURCES)}", code="E103")
    return Credit("MIT", "the niels_gpt project") if str(source_root) == "sample" else SOURCES[source].credit
