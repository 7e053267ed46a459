"""Rows of statistics that several kinds share: of meta.json, the loader, lengths and loss."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import Ids
from niels_gpt.display.decoded import Decoder, decoded_text, runs
from niels_gpt.display.tables import html_table, table
from niels_gpt.signals import REPAIRED_TEXTS, above, is_of_kept

FILE_KEYS = frozenset({"shards", "index", "ids", "loss_bits", "checksums", "files"})
"""Keys of meta.json that list files."""


class Stats(list[tuple[str, str]]):
    """Pairs of a name and a value, printed as a small table, in notebooks as HTML. dict(...) looks a name up."""

    def __str__(self) -> str:
        return table(self) if self else "Stats([])"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("", self)


def described(meta: dict[str, Any]) -> dict[str, Any]:
    """Return meta.json without its lists of files, and with the signals that a build warns of."""
    found = [
        {"counter": each.signal.counter.rstrip(":"), "number": each.number, "of": each.total, "text": str(each)}
        for each in above(meta)
    ]
    return {key: value for key, value in meta.items() if key not in FILE_KEYS} | {"warned_of": found}


def spread(sizes: NDArray[np.int64]) -> dict[str, float] | None:
    """Return min, median, p95 and max of sizes; None for no sizes."""
    names = ("min", "median", "p95", "max")
    return dict(zip(names, np.percentile(sizes, [0, 50, 95, 100]).tolist(), strict=True)) if len(sizes) else None


def of_loader(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of counts: texts that the loader left out, repaired or noticed."""
    kinds: dict[str, dict[str, int]] = {"left out": {}, "repaired": {}, "noticed": {}}
    for counter, number in meta["source"].get("counters", {}).items():
        is_left_out = counter not in REPAIRED_TEXTS and not is_of_kept(counter)
        kind = "left out" if is_left_out else "repaired" if counter in REPAIRED_TEXTS else "noticed"
        kinds[kind][counter] = number
    return [(f"{kind} by the loader", counted(counts)) for kind, counts in kinds.items()]


def of_partitions(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows about the partitions of a cache; [] if it was built whole."""
    rows, accepted = list[tuple[str, str]](), meta["source"].get("accepted_code")
    if "partitions" in meta:
        rows.append(("partitions", f"{meta['partitions']['total']:,}: {meta['partitions']['rule']}"))
    if accepted:
        told = (f"{name} {there} and {here}" for name, (there, here) in sorted(accepted.items()))
        rows.append(("accepted code", f"partitions were built with {', '.join(told)}"))
    return rows


def warned_of(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row of the signals that a build warns of; [] without any."""
    found = "; ".join(map(str, above(meta)))
    return [("warned of", found)] if found else []


def counted(counts: dict[str, int]) -> str:
    """Return counts by name on one line; "none" without any."""
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items())) or "none"


def parts_by_loss(
    ids: Ids, mask: NDArray[np.bool_], names: dict[int, str], tokenizer: Decoder
) -> list[dict[str, str | bool]]:
    """Return the text of tokens in parts, each with whether it is supervised."""
    return [
        {"supervised": bool(mask[start]), "text": decoded_text(ids[start:end], names, tokenizer)}
        for start, end in runs(mask)
        if start < end
    ]
