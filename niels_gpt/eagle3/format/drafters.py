"""The kinds of drafts: which blocks and target rows of a native cache each one reads.

A draft of any kind learns from the same four things: ids, loss mask, outputs of some blocks, and last hidden states.
They differ in the tokens whose last hidden state their loss reads (format/native.py has the rules of `targets`):

    eagle3, peagle   the tokens with loss, and for SpecForge, whose mask is not shifted, the token after each of them
    dflash           the token before each token with loss: the first of a reply is predicted from the prompt's last
    dspark           these, and each token with loss. Its features may include the last block's, after the final norm:
                     that is the last hidden state of every token, so `--for dspark` stores all
    mtp              every token: it reads no block but the last hidden states, with attention over all of them

SpecForge's dflash reads no last hidden state, and learns from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TARGETS = ("loss", "reply", "all")
"""Which target rows a cache stores; each has the rows of the ones before it."""


class Drafter(NamedTuple):
    """What a kind of draft needs."""

    reads: str
    """The fewest target rows that hold every last hidden state of its loss: one of TARGETS."""
    targets: str
    """Target rows of a cache that is made for it: one of TARGETS."""
    layers: str
    """Blocks of a cache that is made for it: a text of `target.parse_aux_layers`."""


DRAFTERS = {
    "eagle3": Drafter("loss", "loss", "eagle3"),
    "peagle": Drafter("loss", "loss", "eagle3"),
    "dflash": Drafter("reply", "reply", "dflash:5"),
    "dspark": Drafter("reply", "all", "dspark:5"),
    "mtp": Drafter("all", "all", "none"),
}
"""Kind of draft -> what it needs; the layers are the defaults of drafts of five layers."""
LISTED = ("dflash", "dspark", "eagle3", "mtp", "peagle")
"""The kinds that `enough_for` of a manifest may list. A kind that is added later is not listed, so that its row changes
no file, no plan and no fingerprint; readers compute it from `targets` and the layers, as they do for these."""


def enough_for(targets: str, layers: Collection[int]) -> list[str]:
    """Return the kinds of drafts for which a cache with these target rows and blocks is enough, sorted.

    >>> enough_for("reply", [1, 15, 28])
    ['dflash', 'dspark', 'eagle3', 'peagle']
    """
    if targets not in TARGETS:
        raise ValueError(f"targets is {targets!r}, expected one of {', '.join(TARGETS)}")
    has = TARGETS.index(targets)
    fitting = (name for name, each in DRAFTERS.items() if TARGETS.index(each.reads) <= has)
    return sorted(name for name in fitting if layers or DRAFTERS[name].layers == "none")


def manifest_keys(targets: str, layers: Collection[int], made_for: str | None = None) -> dict[str, Any]:
    """Return the keys of a native manifest that say which target rows a cache has; none for `loss`, as before.

    made_for: a kind of draft; None: any. Raises: ValueError if no draft, or not this one, finds its states.
    """
    kinds, keys = enough_for(targets, layers), dict[str, Any]()
    if not kinds or made_for not in (None, *kinds):
        found = f"targets {targets!r} and aux_layer_ids {[*layers]} are enough for {', '.join(kinds) or 'no draft'}"
        raise ValueError(found + (f", and made_for is {made_for!r}" if made_for else ""))
    if targets != "loss":
        keys |= {"targets": targets, "enough_for": [kind for kind in kinds if kind in LISTED]}
    if made_for not in (None, "eagle3"):
        keys["made_for"] = made_for
    return keys


def targets_of(manifest: Mapping[str, Any]) -> str:
    """Return which target rows a native cache has: one of TARGETS."""
    targets: str = manifest.get("targets", "loss")
    return targets


def drafters_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the kinds of drafts for which a native cache is enough, sorted."""
    return enough_for(targets_of(manifest), manifest["aux_layer_ids"])


def rows_text(manifest: Mapping[str, Any]) -> str:
    """Return which target rows a native cache has, and for which kinds of drafts they are enough."""
    return f"{targets_of(manifest)}: enough for {', '.join(drafters_of(manifest))}"
