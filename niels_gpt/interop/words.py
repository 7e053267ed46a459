"""What each kind of cache says of itself: the words of its card, how it is read and checked, what a bucket needs.

The card and the transfers ask this table, and not for the kind. Values of meta.json are untrusted: whoever prints them
escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.storage.meta_json import LEAST_SHARE

Meta = Mapping[str, Any]
Figures = Iterator[tuple[str, str]]

_BY_NAME = (
    "cd FOLDER && find . -type f ! -name meta.json ! -name README.md ! -path './.*' -printf '%P\\n' "
    "| LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
)
_BY_RECORDS = (
    'cd FOLDER && python3 -c \'import json; [print(file["sha256"], "", file["name"]) '
    'for file in json.load(open("meta.json"))["files"]]\' | sha256sum --check --quiet'
)
_SILENT = "prints nothing where every file is as meta.json says: that of the content_sha256"
_SHARD = re.compile(r"shard-[0-9]{6}\.safetensors")


@dataclass(frozen=True)
class Words:
    """What one kind says."""

    what: str
    """What a cache of it is, as the beginning of a sentence."""
    reader: Callable[[Meta], Iterator[str]]
    """Lines of Python that open the cache in FOLDER."""
    unit: str = ""
    """What is counted in train and val; empty for a kind without splits."""
    figures: Callable[[Meta], Figures] | None = None
    """Name and text of each number of a kind without splits."""
    check: str = _BY_NAME
    """The command that checks the files in FOLDER."""
    checked: str = "prints its content_sha256"
    """What that command does with good files."""
    least_share: int = LEAST_SHARE
    """A file is refused that has less than this part of its bytes on disk: as `refuse_holes`."""
    unnamed: Callable[[Meta, Collection[str]], str] | None = None
    """Takes meta.json and the names in it; says how to add those that an earlier build left out, "" for none."""


# --- how a cache is read ----------------------------------------------------------------------------------------------


def _opened(module: str, name: str, how: str) -> Callable[[Meta], Iterator[str]]:
    """Return what yields the lines that open a token cache with a stream, and a token file with numpy.

    how: arguments, with {split} for one that has tokens.
    """

    def lines(meta: Meta) -> Iterator[str]:
        split = next((split for split in SPLITS if meta["shards"][split]), SPLITS[0])
        yield from (f"from {module} import {name}", "", f"stream = {name}({how.format(split=split)})")
        dtype = "<u4" if str(meta.get("token_dtype")).startswith("uint32") else "<u2"
        yield from ("", "# without this library", "import json", "", "import numpy as np", "")
        yield f'file = json.load(open("FOLDER/meta.json"))["shards"]["{split}"][0]["name"]'
        yield f'ids = np.memmap("FOLDER/" + file, dtype="{dtype}", mode="r")'

    return lines


def _tokenizer(_: Meta) -> Iterator[str]:
    yield from ("from niels_gpt.tokenizer import load_tokenizer", "", 'tokenizer = load_tokenizer("FOLDER")')


def _targets(meta: Meta) -> Iterator[str]:
    module, name = ("native", "NativeEagle3Dataset") if _is_native(meta) else ("cache", "CachedEagle3Dataset")
    yield from (f"from niels_gpt.eagle3.{module} import {name}", "", f'dataset = {name}("FOLDER")')


def _draft_vocab(meta: Meta) -> Iterator[str]:
    sizes = ", ".join(f"{name}={int(meta[name])}" for name in ("target_vocab_size", "draft_vocab_size"))
    yield from ("from niels_gpt.eagle3.vocab import load_token_mapping", "")
    yield f'selected_token_ids, _ = load_token_mapping("FOLDER", {sizes})'
    yield from ("", "# without this library", "import json", "")
    yield from ('with open("FOLDER/draft_vocab.json") as file:', '    ids = json.load(file)["selected_token_ids"]')


# --- what it holds ----------------------------------------------------------------------------------------------------


def _of_targets(meta: Meta) -> Figures:
    manifest, target = meta["manifest"], meta.get("target") or {}
    yield "form", "native" if _is_native(meta) else f"version {manifest['format_version']}"
    yield "target", ", ".join(str(each) for each in (manifest["target_model"], target.get("revision")) if each)
    yield "outputs of the target's blocks", ", ".join(str(int(layer)) for layer in manifest["aux_layer_ids"])
    yield "draft's tokens", f"{int(manifest['draft_vocab_size']):,} of {int(manifest['target_vocab_size']):,}"
    yield from ((name.replace("_", " "), f"{int(number):,}") for name, number in sorted(meta["totals"].items()))
    if meta.get("kept_mass") is not None:
        yield "probability that the most probable tokens keep", f"{float(meta['kept_mass']):.2%}"
    yield "bytes", f"{int(meta['disk_bytes']):,}"


def _of_draft_vocab(meta: Meta) -> Figures:
    yield "target", str(meta["target_model"])
    yield "draft's tokens", f"{int(meta['draft_vocab_size']):,} of {int(meta['target_vocab_size']):,}"
    yield "supervised tokens that are among them", f"{float(meta['coverage']):.2%}"
    yield from ((name.replace("_", " "), f"{int(number):,}") for name, number in sorted(meta["totals"].items()))


def _is_native(meta: Meta) -> bool:
    return str(meta["manifest"]["format_version"]).startswith("native")


def _unnamed_shards(meta: Meta, names: Collection[str]) -> str:
    if sum(_SHARD.fullmatch(name) is not None for name in names) == (meta.get("totals") or {}).get("shards"):
        return ""
    return (
        "Add its shards to it, which runs no target: niels-gpt build eagle3/targets, or the command precompute of the "
        "folder with --resume; of an imported cache: niels-gpt eagle3 redraft CACHE OUT --draft-vocab-from CACHE"
    )


KINDS: dict[str, Words] = {
    "pretrain": Words(
        "A token cache for pretraining: documents as token ids, in files without headers",
        _opened("niels_gpt.sampling", "EpochStream", '"FOLDER/{split}", T=1024, global_batch_size=8, seed=0'),
        "documents",
    ),
    "sft": Words(
        "A token cache of chats, and which of their tokens carry loss",
        _opened("niels_gpt.sampling", "SFTStream", '"FOLDER", split="{split}", T=1024, global_batch_size=8, seed=0'),
        "examples",
    ),
    "rollouts": Words(
        "A cache of groups of sampled sequences, and which of their tokens carry loss",
        _opened("niels_gpt.prefix_tree.rollouts.reader", "RolloutDataset", '"FOLDER"'),
        "groups",
    ),
    "tokenizer": Words("The tokenizer of token caches", _tokenizer),
    "eagle3": Words(
        "A frozen target model's hidden states and distributions over chats, from which an EAGLE-3 draft is trained "
        "without the target",
        _targets,
        figures=_of_targets,
        check=_BY_RECORDS,
        checked=_SILENT,
        least_share=1 << 16,
        unnamed=_unnamed_shards,
    ),
    "draft_vocab": Words(
        "The tokens of a target model that an EAGLE-3 draft knows",
        _draft_vocab,
        figures=_of_draft_vocab,
        check=_BY_RECORDS,
        checked=_SILENT,
    ),
}
"""`kind` in meta.json -> what it says. A cache of another kind has no card and is not transferred."""
