"""Licence and attribution of the sources that this project knows, for text whose dataset card is out of reach."""

from __future__ import annotations

import os
from typing import NamedTuple

_HUB = "https://huggingface.co/datasets/"


class Credit(NamedTuple):
    """What has to be said of a text."""

    licence: str
    """The licence's usual name."""
    attribution: str
    """Whom to name, and where the text is found."""


CREDITS: dict[str, Credit] = {
    "fineweb_edu": Credit("ODC-BY 1.0", f"FineWeb-Edu by Hugging Face, {_HUB}HuggingFaceFW/fineweb-edu"),
    "wikitext": Credit(
        "CC BY-SA 3.0 and GFDL", f"WikiText by Salesforce, from Wikipedia's authors, {_HUB}Salesforce/wikitext"
    ),
    "roam": Credit("the notes' owner's", "the notes' owner"),
    "gutenberg": Credit("public domain in the United States", "Project Gutenberg, https://www.gutenberg.org"),
    "dolly15k": Credit("CC BY-SA 3.0", f"databricks-dolly-15k by Databricks, {_HUB}databricks/databricks-dolly-15k"),
    "oasst1": Credit("Apache-2.0", f"OpenAssistant Conversations by OpenAssistant, {_HUB}OpenAssistant/oasst1"),
}


def credit_of(source: str, source_root: str | os.PathLike[str]) -> Credit:
    """Return the credit of a source's text; the sample is MIT throughout, written for this project."""
    if source not in CREDITS:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(CREDITS)}")
    return Credit("MIT", "the niels_gpt project") if str(source_root) == "sample" else CREDITS[source]
