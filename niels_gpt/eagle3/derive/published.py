"""A native cache as version 1 or 2: for tools that read these, at ten times the bytes.

Distributions are made by the target's head where loss_mask is 1, which is where a draft is trained. The other slots of
a sample have a uniform distribution, as version 1 has it after a last token, and the hidden states after the last slot
with loss are zeros: a native cache has neither, and no loss depends on them.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.eagle3.disk import has_holes
from niels_gpt.eagle3.format.embeddings import read_target_embeddings, write_embeddings, write_target_embeddings
from niels_gpt.eagle3.format.layout import DTYPES, INT_FIELDS, SIDECAR, PathLike, row_bytes_of
from niels_gpt.eagle3.format.manifest import layout_of, manifest_path, write_manifest
from niels_gpt.eagle3.format.plan import Plan, make_plan, open_plan, read_record
from niels_gpt.eagle3.format.run import CONVERTED_FROM
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.format.torch_files import MAX_INFLATED
from niels_gpt.eagle3.native_view import NativeView
from niels_gpt.eagle3.target import NUM_AUX_LAYERS
from niels_gpt.eagle3.totals import finish
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import make_dir, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder


@dataclass(frozen=True)
class Cost:
    """What a conversion takes."""

    apparent_bytes: int
    """Size of the files, padding included."""
    written_bytes: int
    """Without padding where the file system has holes."""
    free_bytes: int
    rounded_from: str | None
    """The dtype of the auxiliary states, where the new cache has another one: they are rounded to it."""


class Published:
    """The conversion of one cache: `cost` first, then `write`."""

    def __init__(
        self,
        cache_dir: PathLike,
        format_version: int,
        *,
        shard_size: int = 256,
        device: str | torch.device | None = None,
        follow_links: bool = False,
    ) -> None:
        """shard_size: samples of a shard. device: of the target's head; None: the CPU.

        Raises: FileNotFoundError; CacheError for a cache that is not native, has other than three layers, or has a
            sample that would be too large.
        """
        self._folder, self._links = Path(cache_dir), follow_links
        self._view = NativeView(cache_dir, follow_links=follow_links, device=device)
        native, layers = self._view.manifest, len(self._view.manifest["aux_layer_ids"])
        if layers != NUM_AUX_LAYERS:
            found = f"{layers} auxiliary layers, and versions 1 and 2 have {NUM_AUX_LAYERS}"
            remedy = "Run precompute with --format 1 or 2, whose layers are those of EAGLE-3"
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
        """Raise CacheError for a sample that would take too much memory: it has few target rows, and gets them all."""
        layout, longest = self._layout, int(self._view.dataset.counts[:, 0].max(initial=0))
        padded = row_bytes_of(layout.fields["aux_hidden_states"])
        if (size := max(padded, longest * layout.token_bytes)) > MAX_INFLATED:
            found = f"a sample of {longest:,} tokens, padded to {layout.seq_length:,}, would have {size:,} bytes"
            words = ["niels-gpt", "eagle3", "redraft", str(self._folder), "OUT", "--draft-vocab-size", "D"]
            remedy = f"Give it a smaller draft vocabulary: {shlex.join(words)}, or make it of shorter samples"
            raise CacheError(self._folder, found, f"{MAX_INFLATED:,} at most", remedy, code="E710")

    def cost(self, out: PathLike) -> Cost:
        """Return what the conversion takes on the file system of a folder, which may be absent."""
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
        """Write the cache, which is there whole or not at all; return meta.json, None where the old one has no plan.

        progress: items are samples, units tokens.
        Raises: CacheError where `out` exists or lies in the cache, or the disk has no room; OSError.
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

    def _plan(self) -> tuple[Plan, Samples] | None:
        """Return the new cache's plan and samples, those of the native cache in shards of another size."""
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
        """Return a sample's fields, [1, S, ...], and its supervised probability within the draft's vocabulary."""
        view = self._view
        sample = view.dataset[index]
        batch = view.collate([sample])
        size, dtype = self.manifest["draft_vocab_size"], DTYPES[self.manifest["dtype"]]
        probs = torch.full((length, size), 1 / size, dtype=dtype)
        slots, normalizers, masses = batch["target_slots"], batch["log_normalizers"], []
        for part, logits in view.head.parts_of_logits(batch["last_hidden_states"], view.manifest["selected_token_ids"]):
            probs[slots[part]] = logits.softmax(-1).to("cpu", dtype)
            masses += (logits.logsumexp(-1).cpu() - normalizers[part]).exp().clamp(max=1).tolist()
        is_finite = np.isfinite([*masses, *map(float, batch["aux_hidden_states"].aminmax())]).all()
        if not is_finite or int(sample.input_ids.max()) >= self.manifest["target_vocab_size"]:
            found = f"sample {index} has states that are not finite, or token ids that the target does not have"
            remedy = f"Find all damage: {shlex.join(['niels-gpt', 'eagle3', 'verify', str(self._folder)])}"
            raise CacheError(self._folder, found, remedy=remedy, code="E701")
        fields = {name: batch[name] for name in (*INT_FIELDS, "position_mask", "aux_hidden_states")}
        return {**fields, "target_probs": probs[None]}, float(np.sum(masses))
