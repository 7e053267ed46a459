"""Reads and writes NeMo Automodel's offline cache for DSpark (nemo_automodel 0.7.0, components/datasets/llm).

    manifest.json                  format_version 1; `complete` is true once all other files are there
    target_weights.safetensors     embed_tokens.weight and lm_head.weight, [V, H]
    shard-000000.safetensors ...   `shard_size` samples each, all padded to seq_length, S:
        input_ids, loss_mask       int64 [n, S], of each token itself
        target_hidden_states       [n, S, K * H], the features of `target_layer_ids` side by side
        target_last_hidden_states  [n, S, H], the input of lm_head

The feature of layer i is the output of block i, but of the last block it is the output after the final norm, and of -1
the embedding. So neither is among the auxiliary states here: the one is the last hidden state, the other a row of the
weights. The numbers are of one dtype, of b bytes: a slot takes 16 + (K + 1) * H * b.

No file of Automodel says where a sample ends. Two or more equal ids at the end of a row, after the last token with
loss, are taken for padding, whose states Automodel stores too. An export of this project has zeros there, which are no
token's states, and its manifest has one more key, `padding_id`.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.exchange.foreign import (
    BadSample,
    ForeignFiles,
    ForeignSample,
    checked_sample,
    open_tensors,
    unreadable,
)
from niels_gpt.eagle3.format.layout import (
    DTYPES,
    MANIFEST_NAME,
    SPARSE,
    WITHOUT_HOLES,
    Tensors,
    form_text,
    in_file_order,
    read_file,
    read_tensors_header,
    row_bytes_of,
    shard_path,
    tensors_header,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, is_good
from niels_gpt.eagle3.format.shard_writer import bytes_of, write_tensors
from niels_gpt.eagle3.format.torch_files import MAX_INFLATED
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import SizedFile, write_bytes
from niels_gpt.storage.meta_json import parse_object, shortened

WEIGHTS_NAME = "target_weights.safetensors"
IDS, LOSS, FEATURES, LAST = "input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"
EMBEDDING = -1
"""Layer whose feature is the embedding."""
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
MAX_SAMPLES, MAX_SHARDS = 10_000_000, 1_000_000
"""Of a folder; a shard's name has six digits."""
_AGAIN = "Write the folder again with the tool that made it"
_OTHER = "Name the target that the states were made from: --target"
_ROWS = 4096  # of weights, compared at a time
_MAX_TEXT = 4096  # characters of a text that meta.json takes from a manifest
_KEYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("num_samples", "shard_size"), ("an integer", (1, MAX_SAMPLES))),
    **dict.fromkeys(("seq_length", "hidden_size", "target_last_hidden_dim"), ("an integer", (1, 1 << 24))),
    "num_hidden_layers": ("an integer", (1, 1000)),
    "target_vocab_size": ("an integer", (1, 1 << 31)),
    "target_hidden_dim": ("an integer", (1, 1 << 31)),
    "dtype": ("a text", tuple(DTYPES)),
    "target_layer_ids": ("a list of integers", (EMBEDDING, 999)),
}
"""Key of the manifest that is read -> its type and limits, as in format.manifest."""
_OF_RUN: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("train_data_path", "chat_template_sha256"), ("a text", ())),
    "train_split": ("a text or null", ()),
    "shuffle_seed": ("an integer", (0, 2**63 - 1)),
    **dict.fromkeys(("mask_reasoning_content", "mask_generation_prompt"), ("true or false", ())),
}
"""Keys of the manifest about the text and its loss mask, which Automodel's trainer compares in part."""


def facts_of_run(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a manifest, or of an import's meta.json, about the text and its loss mask: those that fit."""
    fitting = {key: found[key] for key, how in _OF_RUN.items() if key in found and is_good(*how, found[key])}
    return {key: each for key, each in fitting.items() if len(str(each)) <= _MAX_TEXT}


class AutomodelFiles(ForeignFiles):
    """A folder of Automodel's DSpark cache."""

    usual_last = "post_norm"
    count: int
    aux_layer_ids: tuple[int, ...]

    def __init__(self, folder: Path, hidden_size: int, vocab_size: int, *, follow_links: bool = False) -> None:
        """Raises: CacheError E711 for a cache that is not complete, or that does not fit itself or the target."""
        self._folder, self._follow_links = folder, follow_links
        self.manifest = self._manifest()
        self._sizes = hidden_size, vocab_size
        for key, expected in (("hidden_size", hidden_size), ("target_vocab_size", vocab_size)):
            if self.manifest[key] != expected:
                raise self._refused(f"{key} is {self.manifest[key]}", f"{expected}, as the target has")
        self.count = self.manifest["num_samples"]
        self._layers: list[int] = self.manifest["target_layer_ids"]
        self._last_layer = self.manifest["num_hidden_layers"] - 1
        self.aux_layer_ids = tuple(layer for layer in self._layers if layer not in (EMBEDDING, self._last_layer))
        self.made_for = "dspark" if self._last_layer in self._layers and self.aux_layer_ids else None
        shards, there = -(-self.count // self.manifest["shard_size"]), existing_shard_indices(folder)
        if len(there) != shards or max(there, default=0) != shards - 1:
            missing = next((index for index in range(shards) if index not in there), None)
            which = "missing" if missing is not None else "too many"
            name = os.path.basename(shard_path("", min(max(there), MAX_SHARDS - 1) if missing is None else missing))
            raise self._refused(f"{len(there):,} shards; {name} is {which}", f"{shards:,}, for {self.count:,} samples")

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
            with open_tensors(path) as file:
                parts = {key: file.get_slice(key) for key in (IDS, LOSS, FEATURES, LAST)}
                ids, loss = parts[IDS][row], parts[LOSS][row]

                def states(begin: int, end: int) -> tuple[Tensor, Tensor]:
                    return parts[FEATURES][row, begin:end], parts[LAST][row, begin:end]

                begin = run_begin(ids, loss)
                if self.manifest.get("padding_id", int(ids[-1])) != int(ids[-1]):
                    begin = len(ids)
                end = self._end(begin, len(ids), states)
                self._refuse_large(name, end)
                features, last = states(0, end)
        except FileNotFoundError as error:
            raise BadSample("missing", name, f"no such file: {path.name}") from error
        except CacheError as error:
            raise unreadable(name, error, path.name) from error
        except (OSError, BadSample):  # no fault of the file, or said already
            raise
        except Exception as error:  # safetensors raises its own error, a direct subclass of Exception
            raise BadSample("unreadable", name, f"{path.name}: safetensors refuses it ({error})") from error
        layers, first = features.view(end, len(self._layers), -1), int(EMBEDDING in self._layers)
        blocks = layers[:, first : first + len(self.aux_layer_ids)]
        sample = checked_sample(name, ids[:end], loss[:end], blocks, last, *self._sizes)
        self._refuse_other_ends(name, sample.input_ids, layers, last)
        is_sure = begin == len(ids) or (self._has_zeros and bool(last.any(-1).all()))
        return replace(sample, padding=len(ids) - end, is_unsure=not is_sure)

    @property
    def _has_zeros(self) -> bool:
        return "padding_id" in self.manifest

    def _end(self, begin: int, slots: int, states: Callable[[int, int], tuple[Tensor, ...]]) -> int:
        """Return the number of tokens. begin: of the equal ids at the end. states: of the slots [a, b)."""
        if not self._has_zeros:
            return slots if slots - begin < 2 else max(1, begin)
        run = range(begin, slots)
        return max(1, begin + bisect_left(run, True, key=lambda at: not any(bool(x.any()) for x in states(at, at + 1))))

    def _refuse_large(self, name: str, tokens: int) -> None:
        """Raise BadSample before the states of a sample are read that no import can hold."""
        width = self.manifest["target_hidden_dim"] + self.manifest["target_last_hidden_dim"]
        size = row_bytes_of((DTYPES[self.manifest["dtype"]], (tokens, width)))
        if size > MAX_INFLATED:
            found = f"{tokens:,} tokens have {size:,} bytes of states, expected {MAX_INFLATED:,} at most"
            raise BadSample("mismatched", name, found)

    def _refuse_other_ends(self, name: str, ids: Tensor, features: Tensor, last: Tensor) -> None:
        """Raise BadSample if the feature of the last layer is not the last hidden state, or of -1 not the embedding."""
        for place, layer in enumerate(self._layers):
            if layer in self.aux_layer_ids:
                continue
            expected = self._embeddings[ids] if layer == EMBEDDING else last
            if not torch.equal(features[:, place], expected):
                what = "the embedding" if layer == EMBEDDING else "the last hidden state"
                raise BadSample("mismatched", name, f"its feature of layer {layer} is not {what}")

    @cached_property
    def _embeddings(self) -> Tensor:
        with open_tensors(self._folder / WEIGHTS_NAME) as file:
            weight: Tensor = file.get_tensor(EMBED)
        return weight

    def refuse_other_target(self, weights: Mapping[str, Tensor], num_layers: int | None) -> None:
        """Raise CacheError unless embeddings and lm_head are the target's (E706), in a file that fits (E711).

        Arguments: see `ForeignFiles`.
        """
        if num_layers not in (None, self._last_layer + 1):
            raise self._refused(f"num_hidden_layers is {self._last_layer + 1}", f"{num_layers}, as the target has")
        path = self._folder / WEIGHTS_NAME
        own = {EMBED: weights["embeddings"], HEAD: weights.get("lm_head", weights["embeddings"])}
        expected = {name: (DTYPES[self.manifest["dtype"]], tuple(each.shape)) for name, each in own.items()}
        try:
            tensors, _ = read_tensors_header(path, sparse=WITHOUT_HOLES, follow_links=self._follow_links)
        except FileNotFoundError:
            raise CacheError(path, "no such file", "the target's weights", _AGAIN, code="E711") from None
        except CacheError as error:
            if error.code == "E205":  # a link has a remedy of its own
                raise
            raise CacheError(path, error.problem, remedy=_AGAIN, code="E711") from error
        _refuse_other_tensors(path, tensors, expected)
        with open_tensors(path) as file:
            for name, each in own.items():
                theirs = file.get_slice(name)
                for begin in range(0, len(each), _ROWS):
                    if not _are_same(theirs[begin : begin + _ROWS], each[begin : begin + _ROWS].cpu()):
                        found, expected_rows = f"{name} has other rows from {begin:,} on", "the target's"
                        raise CacheError(path, found, expected_rows, _OTHER, code="E706")

    def facts_of_run(self) -> dict[str, Any]:
        """Return the keys of the manifest about the text and its loss mask."""
        return facts_of_run(self.manifest)

    def notes(self, padding: Mapping[str, int]) -> Iterator[str]:
        """Yield which features are not stored twice, and what became of the slots at the ends of samples."""
        if ends := sorted({*self._layers} - {*self.aux_layer_ids}):
            what = " and ".join("the embedding" if layer == EMBEDDING else "the last hidden state" for layer in ends)
            yield f"the features of the layers {ends} are {what} of every token, and are not stored twice"
        slots, out, kept = (padding[name] for name in ("slots", "unsure_left_out", "unsure_kept"))
        if slots:
            yield f"{slots:,} slots at the ends of samples were left out as padding"
        if out:
            yield f"no file says where samples end: of {out:,} the first slot that was left out may be a token"
        if kept:
            yield f"no file says where samples end: of {kept:,} the last token, without loss, may be padding"

    def _check_header(self, path: Path, shard: int) -> None:
        """Raise CacheError unless a shard has the tensors that the manifest states."""
        tensors, _ = read_tensors_header(path, sparse=SPARSE, follow_links=self._follow_links)
        manifest = self.manifest
        rows = min(manifest["shard_size"], self.count - shard * manifest["shard_size"])
        expected = shard_tensors(manifest, rows)
        _refuse_other_tensors(path, tensors, expected)

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
            found, remedy = "complete is false: its producer was stopped, or still runs", "Let it end, or run it again"
            raise CacheError(self._folder / MANIFEST_NAME, found, "true", remedy, code="E711")
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


def run_begin(input_ids: Tensor, loss_mask: Tensor) -> int:
    """Return the first slot of the equal ids at the end of a row, after its last token with loss; S if that is last.

    input_ids, loss_mask: int64 [S].
    """
    other, learnt = (input_ids != input_ids[-1]).nonzero(), loss_mask.nonzero()
    return max(int(each[-1]) + 1 if len(each) else 0 for each in (other, learnt))


def _refuse_other_tensors(path: Path, tensors: Tensors, expected: Tensors) -> None:
    if tensors != expected:
        found, wanted = (", ".join(f"{shortened(n)} {form_text(f)}" for n, f in x.items()) for x in (tensors, expected))
        raise CacheError(path, found or "no tensor", wanted, _AGAIN, code="E711")


def _are_same(theirs: Tensor, ours: Tensor) -> bool:
    """Return whether weights are equal, or, in another dtype, as near as rounding leaves them."""
    if theirs.dtype == ours.dtype:
        return torch.equal(theirs, ours)
    return torch.allclose(theirs.float(), ours.float(), rtol=2**-7, atol=2**-24)


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

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        blocks: Sequence[int],
        pad_id: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        """manifest: without format_version, complete and padding_id. weights: EMBED and HEAD. blocks: of the
        samples' auxiliary states, in their order. notes: for the user.
        """
        self.notes = tuple(notes)
        self.has_aux = not {*manifest["target_layer_ids"]} <= {EMBEDDING, manifest["num_hidden_layers"] - 1}
        self._folder, self._manifest, self._pad_id, self._blocks = folder, dict(manifest), pad_id, list(blocks)
        self._file: SizedFile | None = None
        self._begins: dict[str, int] = {}
        dtype = DTYPES[manifest["dtype"]]
        self._embeddings = weights[EMBED].to(dtype) if EMBEDDING in manifest["target_layer_ids"] else None
        write_tensors(folder / WEIGHTS_NAME, {name: each.to(dtype).contiguous() for name, each in weights.items()})
        self._describe(is_complete=False)

    def write(self, index: int, sample: ForeignSample) -> int:
        """Write a sample; return the bytes of its states."""
        shard, row = divmod(index, self._manifest["shard_size"])
        if row == 0 or self._file is None:
            self._file = self._open(shard)
        slots = self._manifest["seq_length"]
        ids = torch.full((slots,), self._pad_id)
        loss = torch.zeros(slots, dtype=torch.int64)
        length = len(sample.input_ids)
        ids[:length], loss[:length] = sample.input_ids, sample.loss_mask
        features = torch.cat([self._feature(layer, sample) for layer in self._manifest["target_layer_ids"]], dim=1)
        for name, tensor in ((IDS, ids), (LOSS, loss), (FEATURES, features), (LAST, sample.last.contiguous())):
            width = row_bytes_of((tensor.dtype, (slots, *tensor.shape[1:])))
            self._file.write(self._begins[name] + row * width, bytes_of(tensor))
        return features.nbytes + sample.last.nbytes

    def finish(self) -> None:
        """End the last shard; the cache is complete then."""
        self._close()
        self._describe(is_complete=True)

    def _feature(self, layer: int, sample: ForeignSample) -> Tensor:
        """Return [L, H]: of the last layer the last hidden state, of -1 the embedding."""
        if layer == self._manifest["num_hidden_layers"] - 1:
            return sample.last
        if layer == EMBEDDING and self._embeddings is not None:
            return self._embeddings[sample.input_ids]
        return sample.aux[:, self._blocks.index(layer)]

    def _open(self, shard: int) -> SizedFile:
        self._close()
        manifest = self._manifest
        rows = min(manifest["shard_size"], manifest["num_samples"] - shard * manifest["shard_size"])
        tensors = shard_tensors(manifest, rows)
        header = tensors_header(tensors)
        end = len(header)
        for name, tensor in tensors.items():
            self._begins[name], end = end, end + row_bytes_of(tensor)
        file = SizedFile(Path(shard_path(self._folder, shard)), end)
        file.write(0, header)
        return file

    def _close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()

    def _describe(self, *, is_complete: bool) -> None:
        content = {"format_version": 1, **self._manifest, "padding_id": self._pad_id, "complete": is_complete}
        write_bytes(os.path.join(self._folder, MANIFEST_NAME), json.dumps(content, indent=2, sort_keys=True).encode())
