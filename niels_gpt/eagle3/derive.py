"""Makes another cache from a finished native cache, without the target: another draft vocabulary, or version 1 or 2.

Another vocabulary changes only manifest.json and meta.json of a native cache. The new cache has its own copies of these
two, and hard links to every other file; its bytes equal a cache that precompute writes for that vocabulary.

Version 1 or 2 is for tools that read nothing else, and takes three times the bytes, ten times with padding. The
target's head computes distributions where loss_mask is 1, where a draft is trained. A sample's other slots get a
uniform distribution, as version 1 has after a last token. Hidden states are zeros from the last target row of `loss`
on, also where a cache of all target rows has more: no loss depends on them.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from niels_gpt.eagle3.disk import has_holes
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    INT_FIELDS,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    WEIGHTS_NAME,
    PathLike,
    is_lock,
    open_file,
    refuse_links,
    row_bytes_of,
)
from niels_gpt.eagle3.format.manifest import (
    is_native,
    layout_of,
    manifest_bytes,
    manifest_path,
    read_manifest,
    write_manifest,
)
from niels_gpt.eagle3.format.meta import eagle3_meta, write_meta
from niels_gpt.eagle3.format.native import stored_rows
from niels_gpt.eagle3.format.plan import CONVERTED_FROM, TargetPlan, make_plan, open_plan, read_record
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.torch_files import MAX_INFLATED
from niels_gpt.eagle3.format.weights import read_target_embeddings, write_embeddings, write_target_embeddings
from niels_gpt.eagle3.native import NativeView
from niels_gpt.eagle3.target import NUM_AUX_LAYERS
from niels_gpt.eagle3.totals import Counts, finish
from niels_gpt.eagle3.vocab import build_eagle3_token_mapping
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, make_dir, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.work import Progress

# --- another draft vocabulary -----------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class Redrafted(NamedTuple):
    """A cache with another draft vocabulary."""

    selected_token_ids: list[int]
    counts: Counts
    linked_bytes: int
    """Bytes of files shared with the old cache by hard links."""
    copied_bytes: int
    """Bytes of copied files."""


def redraft(
    cache_dir: PathLike,
    out: PathLike,
    *,
    draft_vocab_size: int | None,
    special_token_ids: Sequence[int | None] = (),
    selected_token_ids: Sequence[int] | None = None,
    copy: bool = False,
    follow_links: bool = False,
) -> Redrafted:
    """Write a native cache with another draft vocabulary. `out` appears complete or not at all.

    draft_vocab_size: tokens to choose from the stored ids and loss masks, by `build_eagle3_token_mapping`.
    special_token_ids: bos, eos, pad and unk, which come first. selected_token_ids: the vocabulary itself, instead of
        both.
    copy: copy the files, for `out` on another file system. follow_links: read files that are symbolic links.
    Raises: CacheError E710 for a cache of version 1 or 2, and for files that cannot be linked; CacheError E702 for an
        unfinished cache; CacheError if `out` exists or lies in the cache; CacheError E709 for a vocabulary from which a
        draft could learn nothing; FileNotFoundError.
    """
    folder, to = Path(cache_dir), Path(out)
    if not follow_links:
        refuse_links(folder)
    meta = _meta_of(folder, follow_links)
    shards = NativeShards.of_cache(folder, follow_links=follow_links)
    selected = [*selected_token_ids] if selected_token_ids is not None else []
    if selected_token_ids is None:
        selected = frequent_tokens(shards, draft_vocab_size, special_token_ids)
    manifest = {**shards.manifest, "draft_vocab_size": len(selected), "selected_token_ids": selected}
    totals = {**meta["totals"], "positions": shards.positions(selected)}
    counts = Counts.of_meta({"totals": totals})
    if counts.problem:
        raise CacheError(to, counts.problem, code="E709")
    with fresh_folder(to, sources=[folder]) as work:
        linked, copied = _take_files(folder, work, out=to, copy=copy, follow_links=follow_links)
        write_bytes(work / MANIFEST_NAME, manifest_bytes(manifest))
        known = [record for record in meta["files"] if record["name"] != MANIFEST_NAME]
        write_meta(work, {**meta, "totals": totals}, known=known)
    if counts.warning:
        logger.warning("%s: %s", to, counts.warning, extra={"code": "W703"})
    return Redrafted(selected, counts, linked, copied)


def _meta_of(folder: Path, follow_links: bool) -> dict[str, Any]:
    """Return meta.json of a finished native cache. Raises: CacheError for another cache."""
    manifest = read_manifest(folder, follow_links=follow_links)
    if not is_native(manifest):
        found = (
            f"a cache of version {manifest['format_version']}: its distributions cover its own draft vocabulary only"
        )
        remedy = "Run precompute with the new --draft-vocab-size. With --format native, later changes need no run"
        raise CacheError(folder, found, "a native cache", remedy, code="E710")
    meta = eagle3_meta(folder, follow_links)
    if meta is None:
        raise CacheError(
            folder / META_NAME,
            "no such file",
            "a finished cache",
            "Run the same precompute command with --resume",
            code="E702",
        )
    return meta


def frequent_tokens(shards: NativeShards, size: int | None, special: Sequence[int | None]) -> list[int]:
    """Choose the draft's tokens by the stored ids and loss masks. size, special: see `redraft`."""

    def batches() -> Iterator[dict[str, Any]]:
        for index in range(shards.num_shards):
            shard = shards.opened(index)
            ids = shard.tensors["input_ids"].numpy()
            yield {"input_ids": ids.astype(np.int64), "loss_mask": shard.loss_mask(0, len(ids))}

    vocab_size = shards.manifest["target_vocab_size"]
    chosen, _ = build_eagle3_token_mapping(
        batches(), target_vocab_size=vocab_size, draft_vocab_size=size, special_token_ids=special
    )
    return [int(number) for number in chosen]


def _take_files(folder: Path, to: Path, *, out: Path, copy: bool, follow_links: bool) -> tuple[int, int]:
    """Link or copy every file except manifest.json and meta.json; return the bytes linked and copied.

    out: what errors call `to`, which gets that name later.
    """
    fileio.make_dir(to / SIDECAR)
    names = [Path(entry.name) for entry in folder.iterdir() if SHARD_NAME.match(entry.name)]
    names += [Path(SIDECAR, entry.name) for entry in (folder / SIDECAR).iterdir() if not is_lock(entry.name)]
    linked = 0
    total = 0
    for name in sorted([*names, Path(WEIGHTS_NAME)]):
        if name.suffix == ".tmp":
            continue
        os.close(open_file(folder / name, follow_links=follow_links))  # refuses what is no file of the cache
        source = os.path.realpath(folder / name)
        total += os.stat(source).st_size
        if copy:
            shutil.copyfile(source, to / name)
            continue
        try:
            os.link(source, to / name)
        except OSError as error:
            if error.errno not in fileio.CANNOT_LINK:
                raise
            found = f"cannot link the files of {folder} there ({os.strerror(error.errno)})"
            raise CacheError(out, found, "a folder on the same file system", "Pass --copy", code="E710") from error
        linked += os.stat(source).st_size
    return linked, total - linked


# --- version 1 or 2 ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Size of a conversion."""

    apparent_bytes: int
    """Size of the files, padding included."""
    written_bytes: int
    """Without padding where the file system has holes."""
    free_bytes: int
    rounded_from: str | None
    """The dtype of the auxiliary states, where the new cache has another one: they are rounded to it."""


class DenseConversion:
    """The conversion of a native cache to version 1 or 2: `cost` first, then `write`."""

    def __init__(
        self,
        cache_dir: PathLike,
        format_version: int,
        *,
        shard_size: int = 256,
        device: str | torch.device | None = None,
        follow_links: bool = False,
    ) -> None:
        """shard_size: samples in a shard. device: of the target's head; None: the CPU.

        Raises: FileNotFoundError; CacheError E208 for a cache that is not native; CacheError E710 for another number of
            layers than three, or a sample that would get too large.
        """
        self._folder, self._links = Path(cache_dir), follow_links
        self._view = NativeView(cache_dir, follow_links=follow_links, device=device)
        native, layers = self._view.manifest, len(self._view.manifest["aux_layer_ids"])
        if layers != NUM_AUX_LAYERS:
            found = f"{layers} auxiliary layers; versions 1 and 2 have {NUM_AUX_LAYERS}"
            words = ["niels-gpt", "eagle3", "precompute", "--format", str(format_version)]
            words += ["--target-model", "MODEL", "--input-data", "SOURCE", "--output-dir", "OUT"]
            words += ["--seq-length", str(native["seq_length"]), "--draft-vocab-from", str(cache_dir)]
            remedy = f"Run the target for the layers of EAGLE-3: {shlex.join(words)}"
            raise CacheError(manifest_path(cache_dir), found, remedy=remedy, code="E710")
        kept = ("target_model", "target_vocab_size", "draft_vocab_size", "seq_length", "dtype", "aux_layer_ids")
        sizes = {"shard_size": shard_size, "aux_hidden_dim": NUM_AUX_LAYERS * native["hidden_size"]}
        self.manifest: dict[str, Any] = {
            "format_version": format_version,
            **{key: native[key] for key in kept},
            **sizes,
        }
        self.manifest |= {"selected_token_ids": native["selected_token_ids"], "num_samples": len(self._view.dataset)}
        if format_version == 2:
            self.manifest["target_probs_topk"] = 0
            self.manifest |= {key: native[key] for key in ("input_data", "split", "shuffle_seed") if key in native}
        self._layout = layout_of(self.manifest, cache_dir)
        self._refuse_large()

    def _refuse_large(self) -> None:
        """Raise CacheError for a sample that would take too much memory: it gets a distribution for every slot."""
        layout, longest = self._layout, int(self._view.dataset.counts[:, 0].max(initial=0))
        padded = row_bytes_of(layout.fields["aux_hidden_states"])
        if (size := max(padded, longest * layout.slot_bytes)) > MAX_INFLATED:
            found = f"a sample of {longest:,} tokens, padded to {layout.seq_length:,}, would have {size:,} bytes"
            words = ["niels-gpt", "eagle3", "redraft", str(self._folder), "OUT", "--draft-vocab-size", "D"]
            remedy = f"Run precompute with a smaller --seq-length, or redraft the cache: {shlex.join(words)}"
            raise CacheError(self._folder, found, f"{MAX_INFLATED:,} at most", remedy, code="E710")

    def cost(self, out: PathLike) -> Cost:
        """Return the size of the conversion on the file system of a folder, which may be absent."""
        above = next(path for path in (Path(out).absolute(), *Path(out).absolute().parents) if path.is_dir())
        layout, counts = self._layout, self._view.dataset.counts
        embeddings = 4 * self.manifest["target_vocab_size"] * self._view.manifest["hidden_size"]
        whole = sum(row_bytes_of(field) for name, field in layout.fields.items() if name in INT_FIELDS)
        slots = (layout.row_bytes - whole) // layout.seq_length * int(counts[:, 0].sum())
        apparent = layout.row_bytes * len(counts) + embeddings
        written = whole * len(counts) + slots + embeddings if has_holes(above) else apparent
        native = self._view.manifest
        rounded = native["aux_dtype"] if native["aux_dtype"] != native["dtype"] else None
        return Cost(apparent, written, shutil.disk_usage(above).free, rounded)

    def write(self, out: PathLike, *, progress: Progress | None = None) -> dict[str, Any] | None:
        """Write the cache, which appears complete or not at all. Returns meta.json, or None for a cache without a plan.

        progress: called with samples, tokens and all tokens.
        Raises: CacheError if `out` exists or lies in the cache; CacheError E501 if the disk has no room; OSError.
        """
        cost = self.cost(out)
        if cost.written_bytes > cost.free_bytes:
            found = f"this writes {cost.written_bytes:,} bytes, and {cost.free_bytes:,} are free there"
            raise CacheError(out, found, remedy="Make room, or name another --output-dir", code="E501")
        planned = self._plan()
        with fresh_folder(Path(out), sources=[self._folder]) as work:
            make_dir(work / SIDECAR)
            if planned is not None:
                plan, samples = planned
                for name, content in {**plan.sidecar_files(), **samples.files()}.items():
                    write_bytes(work / SIDECAR / name, content)
            write_manifest(work, self.manifest)
            # A receipt of the embeddings is a file of the producer, which stands for a plan.
            write = write_target_embeddings if planned is None else write_embeddings
            write(work, read_target_embeddings(self._folder, follow_links=self._links))
            self._write_shards(work, {} if planned is None else {"plan": planned[0].sha256}, progress)
            return None if planned is None else finish(work, planned[0])

    def _plan(self) -> tuple[TargetPlan, Samples] | None:
        """Return the native cache's plan and samples, cut into shards of the new size; None without a plan."""
        if read_record(self._folder, follow_links=self._links) is None:
            return None
        old = open_plan(self._folder, follow_links=self._links)
        samples = Samples.open(self._folder / SIDECAR, follow_links=self._links)
        manifest = {key: value for key, value in self.manifest.items() if key != "num_samples"}
        parts = ("target", "tokenizer", "source", "dropped", "altered", "batch_size", "max_batch_tokens")
        run = {**old.run, CONVERTED_FROM: self._view.manifest["aux_dtype"]}
        return make_plan(manifest, samples, run=run, **{name: getattr(old, name) for name in parts}), samples

    def _write_shards(self, work: Path, facts: Mapping[str, Any], progress: Progress | None) -> None:
        size, lengths = self.manifest["shard_size"], self._view.dataset.counts[:, 0].tolist()
        done, total = 0, sum(lengths)
        for shard, first in enumerate(range(0, len(lengths), size)):
            rows = lengths[first : first + size]
            writer = ShardWriter(work, shard, self._layout.fields, len(rows))
            sums = {"tokens": sum(rows), "supervised": 0, "positions": 0, "kept_mass": None, "draft_mass": 0.0}
            try:
                for row, length in enumerate(rows):
                    tensors, mass = self._row(first + row, length)
                    sums["supervised"] += int(tensors["loss_mask"].sum())
                    sums["positions"] += int(tensors["position_mask"].sum())
                    sums["draft_mass"] += mass
                    writer.write([row], [length], tensors)
                    done += length
                    if progress is not None:
                        progress(first + row + 1, done, total)
                writer.commit({**facts, **sums})
            finally:
                writer.discard()

    @torch.no_grad()
    def _row(self, index: int, length: int) -> tuple[dict[str, Tensor], float]:
        """Return a sample's fields, [1, S, ...], and its supervised probability inside the draft's vocabulary."""
        view = self._view
        sample = view.dataset[index]
        batch = view.collate([sample])
        batch["aux_hidden_states"][0, stored_rows(sample.loss_mask)[0] :] = 0
        size, dtype = self.manifest["draft_vocab_size"], DTYPES[self.manifest["dtype"]]
        probs = torch.full((length, size), 1 / size, dtype=dtype)
        slots, normalizers, masses = batch["target_slots"], batch["log_normalizers"], []
        for part, logits in view.head.parts_of_logits(batch["last_hidden_states"], view.manifest["selected_token_ids"]):
            probs[slots[part]] = logits.softmax(-1).to("cpu", dtype)
            masses += (logits.logsumexp(-1).cpu() - normalizers[part]).exp().clamp(max=1).tolist()
        is_finite = np.isfinite([*masses, *map(float, batch["aux_hidden_states"].aminmax())]).all()
        if not is_finite or int(sample.input_ids.max()) >= self.manifest["target_vocab_size"]:
            found = f"sample {index} has states that are not finite, or token ids beyond the target's vocabulary"
            remedy = f"Find all damage: {shlex.join(['niels-gpt', 'eagle3', 'verify', str(self._folder)])}"
            raise CacheError(self._folder, found, remedy=remedy, code="E701")
        fields = {name: batch[name] for name in (*INT_FIELDS, "position_mask", "aux_hidden_states")}
        return {**fields, "target_probs": probs[None]}, float(np.sum(masses))
