"""The shards of a cache of version 1 or 2, and their rows.

Sample i is row i % shard_size of shard i // shard_size; all rows have seq_length slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.format.embeddings import EMBEDDINGS_RECEIPT
from niels_gpt.eagle3.format.layout import (
    DENSE_FIELDS,
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    TOPK_FIELDS,
    Layout,
    read_header,
    row_bytes_of,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import layout_of, load_safetensors, number_in
from niels_gpt.eagle3.format.shard_writer import shard_damage
from niels_gpt.eagle3.inspect.open_cache import OF_THE_PLAN, OpenCache, form_text
from niels_gpt.eagle3.totals import Counts
from niels_gpt.storage.errors import CacheError

AUX, PROBS, VALUES, INDICES = "aux_hidden_states", *DENSE_FIELDS, *TOPK_FIELDS


@dataclass(frozen=True)
class PublishedCache(OpenCache):
    """A cache of version 1 or 2."""

    WEIGHTS = EMBEDDINGS_NAME
    WEIGHTS_RECEIPT = EMBEDDINGS_RECEIPT
    PROOFS = (*OF_THE_PLAN, EMBEDDINGS_RECEIPT)
    WHAT_WEIGHTS = "the target's input embeddings"

    @cached_property
    def layout(self) -> Layout:
        """The fields of a shard."""
        return layout_of(self.manifest, self.folder)

    @cached_property
    def shard_size(self) -> int:
        """Samples of a shard; the last one may have fewer."""
        return number_in(self.manifest, "shard_size", self.folder, 1)

    @property
    def num_shards(self) -> int:
        """Shards that the manifest declares."""
        return -(-self.num_samples // self.shard_size)

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has by the manifest."""
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample in the cache."""
        return shard * self.shard_size

    def tables(self, shard: int) -> dict[str, Tensor]:
        """Return the tensors of a shard, [n, S, ...], as views of its map; nothing is read yet.

        Raises: CacheError if it is missing, or has another form than the manifest says.
        """
        for wrong in self.wrong_form(shard):
            raise wrong
        path = shard_path(self.folder, shard)
        _, safe_open = load_safetensors()
        try:
            with safe_open(path, framework="pt") as handle:
                return {name: handle.get_tensor(name) for name in self.layout.fields}
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own error, a direct subclass of Exception
            raise CacheError(path, f"safetensors refuses it ({error})", "", self.remedy(), code="E701") from error

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield where a shard's header differs from the manifest."""
        path = shard_path(self.folder, shard)
        try:
            fields, rows, _ = read_header(path, follow_links=self.follow_links)
        except FileNotFoundError:
            yield self.missing(Path(path), f"shard {shard} of {self.num_shards:,}")
            return
        except CacheError as error:
            yield error
            return
        if rows != self.rows_of(shard):
            expected = f"{self.rows_of(shard)} of the manifest's {self.num_samples}"
            yield CacheError(path, f"{rows} samples", expected, self.remedy(), code="E701")
        declared = self.layout.fields
        for name in sorted({*fields, *declared}):
            if fields.get(name) != declared.get(name):
                found, expected = form_text(fields.get(name)), form_text(declared.get(name))
                yield CacheError(
                    path, f"{name} is {found}", f"{expected} by {MANIFEST_NAME}", self.remedy(), code="E701"
                )

    @cached_property
    def counts(self) -> Counts:
        """The slots of all shards. Raises: as `tables`."""
        counts = torch.zeros(3, dtype=torch.int64)
        for shard in range(self.num_shards):
            tables = self.tables(shard)
            inner = torch.zeros_like(tables["loss_mask"], dtype=torch.bool)  # a last token has no next one to learn
            inner[:, :-1] = tables["attention_mask"][:, 1:] == 1
            masks = (tables["attention_mask"] == 1, (tables["loss_mask"] == 1) & inner, tables["position_mask"])
            counts += torch.stack([mask.sum() for mask in masks])
        return Counts(*counts.tolist())

    def stored(self, shard: int) -> Iterable[Row]:
        """Return the rows of a shard. Raises: as `tables`."""
        tables, first = self.tables(shard), self.first_of(shard)
        return (self.row(number, tables) for number in range(first, first + self.rows_of(shard)))

    def damage(self, shard: int) -> list[tuple[int | None, str]]:
        """Compare a shard with its receipt, as `shard_damage`."""
        return shard_damage(self.folder, shard, self.tick, follow_links=self.follow_links)

    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Return where the bytes of a sample lie in its shard, one span a field."""
        fields, rows, header = read_header(shard_path(self.folder, shard), follow_links=self.follow_links)
        sizes = [row_bytes_of(field) for field in fields.values()]
        begins = [len(header) + rows * before for before in accumulate(sizes, initial=0)]
        return [(begin + row * size, begin + (row + 1) * size) for begin, size in zip(begins, sizes, strict=False)]

    def wrong_manifest(self) -> Iterator[CacheError]:
        """Yield where the embeddings have another form than the manifest says."""
        if missing := self.weights_missing():
            yield missing
            return
        path, vocab = self.folder / EMBEDDINGS_NAME, self.manifest.get("target_vocab_size")
        fields, rows, _ = read_header(path, follow_links=self.follow_links)
        weight = (torch.float32, (self.layout.aux_hidden_dim // 3,))
        if fields != {"weight": weight} or rows != vocab:
            found = ", ".join(f"{name} {form_text(form)}" for name, form in fields.items())
            expected = f"{vocab} rows of weight {form_text(weight)}"
            yield CacheError(path, f"{rows:,} rows of {found}", expected, code="E701")

    def row(self, number: int, tables: Mapping[str, Tensor] | None = None) -> Row:
        """Return a sample by its number in the cache. tables: of its shard, where the caller has them."""
        shard, row = divmod(number, self.shard_size)
        tables = self.tables(shard) if tables is None else tables
        return Row(self, number, {name: table[row] for name, table in tables.items()})


@dataclass(frozen=True)
class Row:
    """One stored sample."""

    cache: PublishedCache
    number: int
    """In the cache."""
    fields: Mapping[str, Tensor]
    """Name -> [S, ...]: a row of the mapped shard."""

    def problem(self, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number and its id."""
        return self.cache.problem(self.number // self.cache.shard_size, self.number, found, expected)

    @property
    def nbytes(self) -> int:
        """Bytes of the row, its padding included."""
        return self.cache.layout.row_bytes

    @property
    def length(self) -> int:
        """Slots up to the last one where attention_mask is set; those after it are padding."""
        attended = self.fields["attention_mask"].nonzero()
        return int(attended[-1]) + 1 if len(attended) else 0

    def layer(self, field: str, column: int) -> str:
        """Return what a column of a field is called in messages: a block's hidden states, or the field itself."""
        blocks = self.cache.aux_layer_ids
        width = self.fields[AUX].shape[-1] // max(1, len(blocks))
        return f"{AUX} of block {blocks[column // width]}" if field == AUX and blocks and width else field


def comparable_probs(fields: Mapping[str, Tensor], draft_vocab_size: int) -> Tensor:
    """Return the stored distribution as float32 [slots, draft_vocab_size], top-k ones with the k-th value elsewhere.

    Which of two tokens that are nearly as likely is the k-th may change between two runs; so the tokens that are left
    out are compared as if each had the k-th probability.
    """
    if VALUES not in fields:
        return fields[PROBS].float()
    values = fields[VALUES].float()
    whole = reconstruct_target_probs(values, fields[INDICES], draft_vocab_size)
    return torch.maximum(whole, values.amin(dim=-1, keepdim=True))
