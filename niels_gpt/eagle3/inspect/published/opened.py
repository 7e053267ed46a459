"""The shards of a cache of version 1 or 2, and their rows.

Sample i is row i % shard_size of shard i // shard_size; all rows have seq_length slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.format.embeddings import EMBEDDINGS_RECEIPT
from niels_gpt.eagle3.format.layout import (
    DENSE_FIELDS,
    EMBEDDINGS_NAME,
    TOPK_FIELDS,
    Layout,
    read_header,
)
from niels_gpt.eagle3.format.shards import DenseShards, form_text
from niels_gpt.eagle3.inspect.open_cache import OF_THE_PLAN, OpenCache
from niels_gpt.eagle3.produce.positions import Counts
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
    def files(self) -> DenseShards:
        """The files of the shards, one of them mapped at a time."""
        return DenseShards(self.folder, self.manifest, max_open=1, follow_links=self.follow_links, exact=True)

    @property
    def layout(self) -> Layout:
        """The fields of a shard."""
        return self.files.layout

    @property
    def shard_size(self) -> int:
        """Samples of a shard; the last one may have fewer."""
        return self.files.shard_size

    @property
    def num_shards(self) -> int:
        """Shards that the manifest declares."""
        return self.files.num_shards

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has by the manifest."""
        return self.files.rows_of(shard)

    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample in the cache."""
        return shard * self.shard_size

    def tables(self, shard: int) -> dict[str, Tensor]:
        """Return the tensors of a shard, [n, S, ...], as views of its map; nothing is read yet.

        Raises: CacheError if it is missing, or has another form than the manifest says.
        """
        with self.repairable(shard):
            return self.files.opened(shard)[1]

    def wrong_form(self, shard: int) -> Iterator[CacheError]:
        """Yield where a shard's header differs from the manifest."""
        _ = self.layout  # an error of the manifest is none of the shard
        try:
            with self.repairable(shard):
                wrong = list(self.files.wrong_form(shard))
        except CacheError as error:
            wrong = [error]
        yield from map(self.with_remedy, wrong)

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
        """Compare a shard with its receipt."""
        return self.files.damage(shard, self.tick)

    def spans(self, shard: int, row: int) -> list[tuple[int, int]]:
        """Return where the bytes of a sample lie in its shard, one span a field."""
        return self.files.spans(shard, row)

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
