"""Reads and writes NeMo Automodel's offline cache for DSpark (nemo_automodel 0.7.0, components/datasets/llm).

    manifest.json                  format_version 1; `complete` is true once all other files are there
    target_weights.safetensors     embed_tokens.weight and lm_head.weight, [V, H]
    shard-000000.safetensors ...   `shard_size` samples each, all padded to seq_length, S:
        input_ids, loss_mask       int64 [n, S], of each token itself
        target_hidden_states       [n, S, K * H], the features of `target_layer_ids` side by side
        target_last_hidden_states  [n, S, H], the input of lm_head

The feature of layer i is the output of block i, but of the last block it is the output after the final norm, and of -1
the embedding. So neither is among the auxiliary states here: the one is the last hidden state, the other a row of the
weights. The numbers are of one dtype. The file says nowhere where a sample ends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignSample, checked_sample, unreadable
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    MANIFEST_NAME,
    SPARSE,
    Tensors,
    form_text,
    in_file_order,
    read_file,
    read_tensors_header,
    row_bytes_of,
    shard_path,
    tensors_header,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, is_good, load_safetensors
from niels_gpt.eagle3.format.shard_writer import bytes_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, write_bytes
from niels_gpt.storage.meta_json import parse_object, shortened

WEIGHTS_NAME = "target_weights.safetensors"
IDS, LOSS, FEATURES, LAST = "input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"
EMBEDDING = -1
"""Layer whose feature is the embedding."""
_AGAIN = "Write the folder again: python -m nemo_automodel.components.speculative.precompute_dspark --resume"
_KEYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("num_samples", "shard_size"), ("an integer", (1, 10_000_000))),
    "seq_length": ("an integer", (1, 1 << 24)),
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "target_last_hidden_dim"), ("an integer", (1, 1 << 24))),
    "target_vocab_size": ("an integer", (1, 1 << 31)),
    "target_hidden_dim": ("an integer", (1, 1 << 31)),
    "dtype": ("a text", tuple(DTYPES)),
    "target_layer_ids": ("a list of integers", (EMBEDDING, 1 << 24)),
}
"""Key of the manifest that is read -> its type and limits, as in format.manifest."""


class AutomodelFiles:
    """A folder of Automodel's DSpark cache."""

    usual_last = "post_norm"

    def __init__(self, folder: Path, hidden_size: int, vocab_size: int, *, follow_links: bool = False) -> None:
        """Raises: CacheError E711 for a cache that is not complete, or that does not fit itself or the target."""
        self._folder, self._follow_links = folder, follow_links
        self.manifest = self._manifest()
        self._sizes = hidden_size, vocab_size
        for key, expected in (("hidden_size", hidden_size), ("target_vocab_size", vocab_size)):
            if self.manifest[key] != expected:
                raise self._refused(f"{key} is {self.manifest[key]}", f"{expected}, as the target has")
        self.count: int = self.manifest["num_samples"]
        self.layers: list[int] = self.manifest["target_layer_ids"]
        shards = -(-self.count // self.manifest["shard_size"])
        if existing_shard_indices(folder) != {*range(shards)}:
            raise self._refused(f"{len(existing_shard_indices(folder))} shards", f"0 to {shards - 1}")

    @cached_property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The blocks whose outputs are among the features, in their order."""
        return tuple(layer for layer in self.layers if layer not in (EMBEDDING, self._last_layer))

    @property
    def _last_layer(self) -> int:
        return int(self.manifest["num_hidden_layers"]) - 1

    def name(self, index: int) -> str:
        """Return a sample's name for messages."""
        return f"sample {index}"

    def read(self, index: int) -> ForeignSample:
        """Return a sample without its padding. Raises: BadSample."""
        name = self.name(index)
        shard, row = divmod(index, self.manifest["shard_size"])
        path = Path(shard_path(self._folder, shard))
        try:
            self._check_header(path, shard)
            with load_safetensors()[1](path, framework="pt") as file:
                ids, loss, features, last = (file.get_slice(key)[row] for key in (IDS, LOSS, FEATURES, LAST))
        except FileNotFoundError as error:
            raise BadSample("missing", name, f"no such file: {path.name}") from error
        except CacheError as error:
            raise unreadable(name, error, path.name) from error
        except (OSError, MemoryError):  # no fault of the file
            raise
        except Exception as error:  # safetensors raises its own error, a direct subclass of Exception
            raise BadSample("unreadable", name, f"{path.name}: safetensors refuses it ({error})") from error
        end = real_length(ids, loss)
        parts = features[:end].view(end, len(self.layers), -1)
        self._refuse_other_ends(name, ids[:end], parts, last[:end])
        blocks = [place for place, layer in enumerate(self.layers) if layer in self.aux_layer_ids]
        return checked_sample(name, ids[:end], loss[:end], parts[:, blocks], last[:end], *self._sizes)

    def _refuse_other_ends(self, name: str, ids: Tensor, features: Tensor, last: Tensor) -> None:
        """Raise BadSample if the feature of the last layer is not the last hidden state, or of -1 not the embedding."""
        wanted = {self._last_layer: last}
        if EMBEDDING in self.layers and 0 <= int(ids.min()) <= int(ids.max()) < self._sizes[1]:
            wanted[EMBEDDING] = self._embeddings[ids]
        for place, layer in enumerate(self.layers):
            if layer in wanted and not torch.equal(features[:, place], wanted[layer]):
                what = "the embedding" if layer == EMBEDDING else "the last hidden state"
                raise BadSample("mismatched", name, f"its feature of layer {layer} is not {what}")

    @cached_property
    def _embeddings(self) -> Tensor:
        path = self._folder / WEIGHTS_NAME
        read_tensors_header(path, follow_links=self._follow_links)
        with load_safetensors()[1](path, framework="pt") as file:
            weight: Tensor = file.get_tensor("embed_tokens.weight")
        if tuple(weight.shape) != (self._sizes[1], self._sizes[0]):
            raise CacheError(path, f"embed_tokens.weight is {list(weight.shape)}", code="E711")
        return weight

    def _check_header(self, path: Path, shard: int) -> None:
        """Raise CacheError unless a shard has the tensors that the manifest states."""
        tensors, _ = read_tensors_header(path, sparse=SPARSE, follow_links=self._follow_links)
        manifest = self.manifest
        rows = min(manifest["shard_size"], self.count - shard * manifest["shard_size"])
        expected = shard_tensors(manifest, rows)
        if tensors != expected:
            found, wanted = (
                ", ".join(f"{shortened(n)} {form_text(f)}" for n, f in each.items()) for each in (tensors, expected)
            )
            raise CacheError(path, found, wanted, _AGAIN, code="E711")

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest = parse_object(read_file(self._folder / MANIFEST_NAME, follow_links=self._follow_links))
        except FileNotFoundError:
            raise self._refused("no such file", "the manifest of a DSpark cache") from None
        except CacheError:
            raise
        except ValueError as error:
            raise self._refused(str(error), "the manifest of a DSpark cache") from error
        if manifest.get("format_version") != 1 or "target_layer_ids" not in manifest:
            found = f"format_version {shortened(manifest.get('format_version'))}"
            found += "" if "target_layer_ids" in manifest else ", without target_layer_ids"
            raise self._refused(found, "1, of Automodel's cache for DSpark")
        if manifest.get("complete", True) is not True:
            raise self._refused("complete is false: its producer was stopped, or still runs", "a complete cache")
        for key, (kind, some) in _KEYS.items():
            if manifest.get(key) is None or not is_good(kind, some, manifest[key]):
                raise self._refused(f"{key} is {shortened(manifest.get(key))}", f"{kind}: {', '.join(map(str, some))}")
        layers, size = manifest["target_layer_ids"], manifest["hidden_size"]
        widths = manifest["target_hidden_dim"], manifest["target_last_hidden_dim"]
        in_order = sorted({*layers}) == layers and bool(layers) and layers[-1] < manifest["num_hidden_layers"]
        if not in_order or widths != (size * len(layers), size):
            found = f"target_layer_ids is {shortened(layers)}, with {widths[0]} and {widths[1]} values a token"
            raise self._refused(found, "rising layers of the target, and its hidden size for each")
        return manifest

    def _refused(self, found: str, expected: str) -> CacheError:
        return CacheError(self._folder / MANIFEST_NAME, found, expected, _AGAIN, code="E711")


def real_length(input_ids: Tensor, loss_mask: Tensor) -> int:
    """Return the tokens of a padded row: input_ids and loss_mask, int64 [S].

    No file says which tokens are padding. Two or more equal ids at the end of a row, after the last token with loss,
    are.
    """
    length = len(input_ids)
    other = (input_ids != input_ids[-1]).nonzero()
    learnt = loss_mask.nonzero()
    end = max(int(each[-1]) + 1 if len(each) else 0 for each in (other, learnt))
    return length if length - end < 2 else max(1, end)


def shard_tensors(manifest: Mapping[str, Any], rows: int) -> Tensors:
    """Return the tensors of a shard of `rows` samples, with whole shapes, in file order."""
    slots, number = manifest["seq_length"], DTYPES[manifest["dtype"]]
    tensors: Tensors = dict.fromkeys((IDS, LOSS), (torch.int64, (rows, slots)))
    tensors[FEATURES] = number, (rows, slots, manifest["target_hidden_dim"])
    tensors[LAST] = number, (rows, slots, manifest["target_last_hidden_dim"])
    return in_file_order(tensors)


class AutomodelWriter:
    """Writes such a folder: samples in order. The slots of padding are zeros, as holes where the disk has them."""

    last_hidden = "post_norm"

    def __init__(self, folder: Path, manifest: Mapping[str, Any], weights: Mapping[str, Tensor], pad_id: int) -> None:
        """manifest: without format_version and complete; `shard_size` fits the samples' number or not.

        weights: embed_tokens.weight and lm_head.weight.
        """
        self._folder, self._manifest, self._pad_id = folder, dict(manifest), pad_id
        self._file: SizedFile | None = None
        self._begins: dict[str, int] = {}
        self._layers: Sequence[int] = manifest["target_layer_ids"]
        dtype = DTYPES[manifest["dtype"]]
        self._embeddings = weights["embed_tokens.weight"].to(dtype)
        save_file, _ = load_safetensors()
        save_file({name: each.to(dtype).contiguous().clone() for name, each in weights.items()}, folder / WEIGHTS_NAME)
        self._describe(is_complete=False)

    def write(self, index: int, sample: ForeignSample) -> int:
        """Write a sample; return the bytes of its states."""
        shard, row = divmod(index, self._manifest["shard_size"])
        if row == 0:
            self._open(shard)
        slots = self._manifest["seq_length"]
        ids = torch.full((slots,), self._pad_id)
        loss = torch.zeros(slots, dtype=torch.int64)
        length = len(sample.input_ids)
        ids[:length], loss[:length] = sample.input_ids, sample.loss_mask
        features = self._features(sample).contiguous()
        assert self._file is not None
        for name, tensor in ((IDS, ids), (LOSS, loss), (FEATURES, features), (LAST, sample.last.contiguous())):
            width = row_bytes_of((tensor.dtype, (slots, *tensor.shape[1:])))
            self._file.write(self._begins[name] + row * width, bytes_of(tensor))
        return features.nbytes + sample.last.nbytes

    def finish(self) -> None:
        """End the last shard; the cache is complete then."""
        self._close()
        self._describe(is_complete=True)

    def _features(self, sample: ForeignSample) -> Tensor:
        """Return [L, K * H]: of the last layer the last hidden state, of -1 the embedding."""
        blocks = iter(sample.aux.unbind(1))
        ends = {self._manifest["num_hidden_layers"] - 1: sample.last}
        if EMBEDDING in self._layers:
            ends[EMBEDDING] = self._embeddings[sample.input_ids]
        return torch.cat([ends[layer] if layer in ends else next(blocks) for layer in self._layers], dim=1)

    def _open(self, shard: int) -> None:
        self._close()
        manifest = self._manifest
        rows = min(manifest["shard_size"], manifest["num_samples"] - shard * manifest["shard_size"])
        tensors = shard_tensors(manifest, rows)
        header = tensors_header(tensors)
        end = len(header)
        for name, tensor in tensors.items():
            self._begins[name], end = end, end + row_bytes_of(tensor)
        self._file = SizedFile(Path(shard_path(self._folder, shard)), end)
        self._file.write(0, header)

    def _close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()

    def _describe(self, *, is_complete: bool) -> None:
        content = {"format_version": 1, **self._manifest, "complete": is_complete}
        write_bytes(os.path.join(self._folder, MANIFEST_NAME), json.dumps(content, indent=2, sort_keys=True).encode())


def template_sha256(template: str | None) -> str:
    """Return the sha256 of a chat template as Automodel records it; of an empty text without one."""
    return template or hashlib.sha256(b"").hexdigest()
