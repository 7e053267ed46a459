"""The kind of EAGLE-3 caches: versions 1 and 2 and the native form, of this project and of other tools.

eagle3/inspect makes the checks and figures; this module answers the questions that every kind is asked.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from niels_gpt.eagle3.format.drafters import rows_text
from niels_gpt.eagle3.inspect.checks import CHECKS, RECOMPUTED
from niels_gpt.kinds.files import Record
from niels_gpt.kinds.kind import CHECK_RECORDS, CHECKED_RECORDS, Cache, Card, Held, Kind, Limits, Page, Rows, Sealed
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import PositionError
from niels_gpt.storage.mounted import MOUNTED
from niels_gpt.work import Progress

if TYPE_CHECKING:
    from niels_gpt.display.sketch import Distributions
    from niels_gpt.engine.units import Looks

_MANIFEST_NAME = "manifest.json"  # as eagle3.format.layout has it, which loads torch
_WATCH_NAME = "watch.json"  # and this, of an unfinished `eagle3 watch`
_PARTS_NAME = ".parts"  # as eagle3.partitions has it, which loads torch too
_DIGEST_BYTES = 16
_FIRST_IDS = 8  # of the draft's vocabulary: a list of 32,000 belongs into a file


def _targets(meta: Mapping[str, Any]) -> Iterator[str]:
    module, name = ("native", "NativeEagle3Dataset") if _is_native(meta) else ("cache", "CachedEagle3Dataset")
    yield from (f"from niels_gpt.eagle3.{module} import {name}", "", f'dataset = {name}("FOLDER")')


def _of_targets(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    manifest, target = meta["manifest"], meta.get("target") or {}
    yield "form", "native" if _is_native(meta) else f"version {manifest['format_version']}"
    yield "target", ", ".join(str(each) for each in (manifest["target_model"], target.get("revision")) if each)
    yield "outputs of the target's blocks", ", ".join(str(int(layer)) for layer in manifest["aux_layer_ids"]) or "none"
    if _is_native(meta):
        yield "targets", rows_text(manifest)  # "target rows" is their number, of the totals
    yield "draft's tokens", f"{int(manifest['draft_vocab_size']):,} of {int(manifest['target_vocab_size']):,}"
    for name, number in sorted(meta["totals"].items()):
        if name != "aux_rows" or manifest["aux_layer_ids"]:  # else they are rows of no block
            yield name.replace("_", " "), f"{int(number):,}"
    if meta.get("kept_mass") is not None:
        yield "probability that the most probable tokens keep", f"{float(meta['kept_mass']):.2%}"
    yield "bytes", f"{int(meta['disk_bytes']):,}"


def _is_native(meta: Mapping[str, Any]) -> bool:
    return str(meta["manifest"]["format_version"]).startswith("native")


class Eagle3Kind(Kind):
    """A target's outputs for each token, in shards."""

    name = "eagle3"
    unit = "sample"
    keys = ("eagle3/targets",)
    checks = tuple(CHECKS.values())
    outside_checks: ClassVar[Mapping[str, str]] = {RECOMPUTED: "niels_gpt.recipes.eagle3.prepare:check_recomputed"}
    counted = "bytes"
    shown = 32
    why_not: ClassVar[Mapping[str, str]] = {
        "formats": "niels-gpt eagle3 export writes the files of speculators; versions 1 and 2 are nemo-automodel's own"
    }
    page = Page(
        "from niels_gpt.eagle3.cache import CachedEagle3Dataset\n\n"
        'data = CachedEagle3Dataset("{path}")\n'
        "sample = data[0]  # the columns by name",
        frozenset({"huggingface", "pytorch"}),
        look="stats",
        columns=(
            ("input_ids", "int64 [S]", "ids of the tokens, shifted by one"),
            ("attention_mask", "int64 [S]", "1 where there is a token, 0 in the padding"),
            ("loss_mask", "int64 [S]", "1 where a token carries loss"),
            ("aux_hidden_states", "float [S, 3H]", "hidden states of some of the target's layers"),
            (
                "position_mask",
                "bool [S, 1]",
                "where a draft learns: with loss, its vocabulary has the likeliest token",
            ),
            ("target_probs", "float [S, D]", "the target's distribution over the draft's vocabulary"),
        ),
    )

    card = Card(
        "A frozen target model's hidden states and distributions over chats, from which a draft is trained without the "
        "target",
        _targets,
        figures=_of_targets,
        check=CHECK_RECORDS,
        checked=CHECKED_RECORDS,
    )
    least_share = 1 << 16

    @property
    def units(self) -> Looks[Any]:
        """Its shards."""
        from niels_gpt.eagle3.shard_units import SHARDS

        return SHARDS

    def content_sha256(self, records: Sequence[Record]) -> str:
        """Return the sha256 over the digests of manifest, weights and receipts."""
        from niels_gpt.eagle3.format.meta import content_sha256

        return content_sha256(records)

    def unnamed(self, meta: Mapping[str, Any], names: Collection[str]) -> str:
        """Return how to add the shards to a meta.json of an earlier build; "" if it lists them."""
        from niels_gpt.eagle3.format.meta import lists_shards

        if lists_shards(meta):
            return ""
        return (
            "Add its shards to it, without running the target: niels-gpt build eagle3/targets, or the folder's "
            "precompute command with --resume. For an imported cache: niels-gpt eagle3 redraft CACHE OUT "
            "--draft-vocab-from CACHE"
        )

    def recognizes(self, folder: Path) -> bool:
        """Return whether there is a manifest.json, which every tool of this format writes, or an unfinished watch."""
        return any(os.path.lexists(folder / name) for name in (_MANIFEST_NAME, _WATCH_NAME))

    def has_unsealed(self, folder: Path) -> bool:
        """Return whether a folder has partitions and its seal has not finished."""
        return (folder / _PARTS_NAME).is_dir()

    def unfinished(self, folder: Path) -> str:
        """Return how far `eagle3 watch` is."""
        if not os.path.lexists(folder / _WATCH_NAME):
            return ""
        from niels_gpt.eagle3.format.watched import unfinished_text

        return unfinished_text(folder)

    def seal(self, folder: Path, progress: Progress | None = None) -> Sealed:
        """Compare every shard with its receipt, and write meta.json."""
        from niels_gpt.eagle3.build import seal

        sealed = seal(folder, progress=progress)
        totals = sealed.meta["totals"]
        done = "sealed" if sealed.is_new else "was sealed already; nothing was written"
        held = f"{totals['shards']:,} shards, {totals['samples']:,} samples, {totals['tokens']:,} tokens"
        return Sealed(
            f"{folder}: {done}; {held}",
            {"folder": str(folder), "totals": totals, "changed": sealed.is_new},
            shlex.join(["niels-gpt", "eagle3", "verify", str(folder)]),
        )

    def is_opened_whole(self, name: str) -> bool:
        """Return whether it is the manifest, or of the folder of receipts and plan."""
        return not name.endswith(".safetensors")

    def lock_of(self, folder: Path) -> Path | None:
        """Return the lock of `niels-gpt eagle3 precompute`."""
        from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR

        return folder / SIDECAR / LOCK_NAME

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Open the cache with its reader, and map every shard. At a URL no sample is read: one has megabytes."""
        from niels_gpt.eagle3.inspect.forms import open_cache

        opened = open_cache(cache.folder)
        if str(cache.folder) in MOUNTED:
            opened.READER(cache.folder)
        else:
            opened.read_each_shard()

    def verdicts(
        self, cache: Cache, names: Collection[str], limits: Limits, progress: Progress | None = None
    ) -> dict[str, Verdict]:
        """Make all checks in one pass over the shards."""
        from niels_gpt.eagle3.inspect.verify import verify

        return verify(cache.path, names=list(names), progress=progress)

    def checks_of_build(self, *, reused: bool, deep: bool) -> list[str]:
        """Return all checks, or only `complete`, which reads little of a shard, for a cache that was up to date."""
        return ["complete"] if reused and not deep else [name for name in CHECKS if name not in self.outside_checks]

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return the numbers of samples and tokens."""
        totals = meta.get("totals") or {}
        counts = {unit: {"": int(totals[f"{unit}s"])} for unit in ("sample", "token")}
        return Held(counts, loss=totals.get("supervised_tokens"))

    def stats(self, cache: Cache, progress: Progress | None = None) -> Rows:
        """Return the cache's origin, lengths, mass, entropy and norms."""
        from niels_gpt.eagle3.inspect.show import summary
        from niels_gpt.eagle3.inspect.stats import stats

        about: Any = [row for row in summary(cache.path) if row[0] != "target rows"]  # the figures have their number
        known = {name for name, _ in about}
        return [*about, *(row for row in stats(cache.path, progress=progress).rows() if row[0] not in known)]

    def stats_data(self, cache: Cache, progress: Progress | None = None) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        from niels_gpt.eagle3.inspect.show import description
        from niels_gpt.eagle3.inspect.stats import stats

        return {**description(cache.path), **stats(cache.path, progress=progress).as_json()}

    def show(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int, color: bool) -> str:
        """Return a sample's slots as a table: id, masks, likeliest draft tokens, norms."""
        from niels_gpt.display.tables import table
        from niels_gpt.eagle3.inspect.show import sample_heading, slot_rows

        _refuse_val(split)
        rows = slot_rows(cache.path, at, tokenizer, slots=tokens)
        return f"{sample_heading(cache.path, at)}\n{table(rows)}"

    def show_data(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int | None) -> dict[str, Any]:
        """Return the same, ready for JSON. tokens: None: all slots."""
        from niels_gpt.eagle3.inspect.show import slot_rows

        _refuse_val(split)
        head, *rows = slot_rows(cache.path, at, tokenizer, slots=2**31 if tokens is None else tokens)
        return {"kind": self.name, "sample": at, "slots": [dict(zip(head, row, strict=True)) for row in rows]}

    def locate(self, cache: Cache, tokenizer: Any, *, split: str, position: int, tokens: int) -> str:
        """Return sample, source and shard of a token, and the slots around it."""
        from niels_gpt.display.tables import table
        from niels_gpt.eagle3.inspect.show import slot_rows

        found = self.locate_data(cache, tokenizer, split=split, position=position, tokens=tokens)
        rows = [
            ("token", f"{position:,} of {found['tokens']:,} of {cache.shown}"),
            ("sample", f"{found['sample']:,} of {found['samples']:,}"),
            ("source id", found["source_id"] or "not recorded"),
            ("offset in it", f"{found['offset_tokens']:,} tokens"),
            ("file", found["file"]),
        ]
        begin = max(0, found["offset_tokens"] - tokens // 2)
        slots = table(slot_rows(cache.path, found["sample"], tokenizer, begin=begin, slots=tokens))
        return "\n".join([*(f"{label + ':':14}{value}" for label, value in rows), "", slots])

    def locate_data(
        self, cache: Cache, tokenizer: Any, *, split: str, position: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the same without the slots, ready for JSON. position: counts the tokens of all samples."""
        from niels_gpt.eagle3.format.layout import shard_path

        _refuse_val(split)
        sizes, names, shards = _lengths(cache)
        total = sum(sizes)
        if not 0 <= position < total:
            raise PositionError(
                f"position {position:,}: {cache.shown} has {total:,} tokens, expected 0 to {total - 1:,}"
            )
        sample, before = 0, 0
        while before + sizes[sample] <= position:
            before, sample = before + sizes[sample], sample + 1
        about = {"kind": self.name, "position": position, "tokens": total, "sample": sample, "samples": len(sizes)}
        place = {"source_id": names[sample] if names else None, "offset_tokens": position - before}
        return about | place | {"file": os.path.basename(shard_path("", shards[sample]))}

    def sizes(self, cache: Cache) -> dict[str, int]:
        """Return the number of samples."""
        return {"": len(_lengths(cache)[0])}

    def digests(self, cache: Cache, split: str) -> Iterator[bytes]:
        """Yield a hash of each sample's stored ids and loss mask."""
        from niels_gpt.eagle3.inspect.forms import open_cache

        opened = open_cache(cache.folder)
        for shard in opened.shards:
            for row in opened.stored(shard):
                digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
                for part in row.ids_and_loss():
                    digest.update(part.tobytes())
                yield digest.digest()

    def source_ids(self, cache: Cache, split: str) -> Iterator[bytes] | None:
        """Yield the source id of each sample; None without a plan."""
        names = _lengths(cache)[1]
        return (name.encode("unicode_escape") for name in names) if names else None

    def plot(self, cache: Cache, name: str) -> bytes:
        """Return a PNG of lengths, entropy and mass."""
        from niels_gpt.eagle3.inspect.stats import plot, stats

        return plot(stats(cache.path), name)

    def distributions(self, cache: Cache) -> Distributions:
        """Return the lengths. What `plot` has besides needs a look at all hidden states."""
        return {"tokens per sample": {"": np.array(_lengths(cache)[0])}}

    def places(self, cache: Cache) -> list[tuple[str, int]]:
        """Return []: slots are tables of numbers."""
        return []

    def more_results(self, cache: Cache) -> dict[str, Any]:
        """Return the totals and the manifest."""
        from niels_gpt.eagle3.format.manifest import read_manifest

        manifest, meta = read_manifest(cache.folder), cache.meta
        selected = manifest["selected_token_ids"]
        manifest["selected_token_ids"] = {"count": len(selected), "first": selected[:_FIRST_IDS]}
        sizes = {f"token_bytes/{part}": size for part, size in meta.get("token_bytes", {}).items()}
        return {**meta["totals"], **sizes, "sidecar_version": meta["format_version"], **manifest}


def _refuse_val(split: str) -> None:
    if split != "train":
        raise PositionError(f"split {split!r}: an EAGLE-3 cache has no splits; leave it out, or name train")


def _lengths(cache: Cache) -> tuple[list[int], list[str], list[int]]:
    """Return tokens, source id and shard of each sample; no ids without a plan."""
    from niels_gpt.eagle3.inspect.forms import open_cache

    opened = open_cache(cache.folder)
    shards = [shard for shard in opened.shards for _ in range(opened.files.rows_of(shard))]
    if not opened.is_planned:
        return [row.length for shard in opened.shards for row in opened.stored(shard)], [], shards
    samples = opened.samples
    return np.diff(samples.starts).tolist(), list(samples.source_ids), shards


EAGLE3 = Eagle3Kind()
