"""What must hold of a cache's files: all are there, in the form that the manifest says, with the sums of their making.

`Opened` is what every check is given. Caches that other tools wrote have no sidecar: a check that needs one raises
`NotChecked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from niels_gpt.eagle3.convert import content_sha256
from niels_gpt.eagle3.layout import SIDECAR, Layout, read_header, shard_path
from niels_gpt.eagle3.manifest import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    existing_shard_indices,
    layout_of,
    load_safetensors,
    number_in,
    read_manifest,
)
from niels_gpt.eagle3.plan import PLAN_NAME, read_record
from niels_gpt.eagle3.row_checks import Row
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.shards import receipt_path, shard_damage
from niels_gpt.fileio import META_NAME, CacheError, sha256_file
from niels_gpt.records import file_records, meta_crc32, parse_object, path_inside, read_regular, shortened

AGAIN = "Remove it, then run python -m niels_gpt.eagle3.precompute --resume, or materialize eagle3/targets again"
FOREIGN = "cannot be checked: no sidecar, as in caches that other tools wrote"
_MAX_NAMED = 10  # shards, in one sentence


class NotChecked(Exception):
    """A check cannot be made of this cache, which is no damage; the text says why."""


@dataclass(frozen=True)
class Opened:
    """A cache whose manifest can be read. What is worked out from it raises CacheError where the manifest is wrong."""

    folder: Path
    """Without links, so that all checks look at one version."""
    manifest: dict[str, Any]
    tick: Callable[[int], None] = field(repr=False)
    """Is told bytes that were looked at."""

    @cached_property
    def layout(self) -> Layout:
        """The form of the shards."""
        return layout_of(self.manifest, self.folder)

    @cached_property
    def num_samples(self) -> int:
        """Of the whole cache."""
        return number_in(self.manifest, "num_samples", self.folder)

    @cached_property
    def shard_size(self) -> int:
        """Samples of a shard; the last one may have fewer."""
        return number_in(self.manifest, "shard_size", self.folder, 1)

    @property
    def num_shards(self) -> int:
        """As there should be."""
        return -(-self.num_samples // self.shard_size)

    @cached_property
    def shards(self) -> list[int]:
        """The shards that there should be and are."""
        return sorted(index for index in existing_shard_indices(self.folder) if index < self.num_shards)

    @cached_property
    def is_planned(self) -> bool:
        """Whether this project's producer made the cache."""
        return (self.folder / SIDECAR / PLAN_NAME).is_file()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What plan.json says. Raises: NotChecked in a foreign cache."""
        record = read_record(self.folder)
        if record is None:
            raise NotChecked(FOREIGN)
        return record

    @cached_property
    def samples(self) -> Samples:
        """The source's rows. Raises: NotChecked in a foreign cache."""
        if not self.is_planned:
            raise NotChecked(FOREIGN)
        try:
            return Samples.open(self.folder / SIDECAR)
        except FileNotFoundError as error:
            raise CacheError(f"{error.filename}: no such file. {AGAIN}") from error

    def rows_of(self, shard: int) -> int:
        """Return how many samples a shard has to have."""
        return min(self.shard_size, self.num_samples - shard * self.shard_size)

    def name(self, number: int) -> str:
        """Return what to call sample `number` of the cache: that, and its source's name for it where it is known."""
        try:
            return f"sample {number} ({shortened(self.samples.source_ids[number])})"
        except (NotChecked, CacheError, IndexError):
            return f"sample {number}"

    def row(self, number: int, tables: Mapping[str, torch.Tensor]) -> Row:
        """Return sample `number` of the cache, of its shard's tables."""
        shard, row = divmod(number, self.shard_size)
        return Row(
            number,
            f"{shard_path(self.folder, shard)}: {self.name(number)}",
            {name: table[row] for name, table in tables.items()},
            tuple(self.manifest.get("aux_layer_ids") or ()),
            self.layout.draft_vocab_size,
            padding_is_zero=self.is_planned,
        )


def open_cache(cache: Path, tick: Callable[[int], None] = lambda _: None) -> Opened:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = cache.resolve()
    return Opened(folder, read_manifest(folder), tick)


@contextmanager
def described_by(cache: Path) -> Iterator[None]:
    """Make a CacheError of what a malformed manifest, plan or receipt leads to in the block."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # the last one is torch's
        raise CacheError(
            f"{cache}: not as docs/formats.md describes it ({error!r}). Look at it: python -m niels_gpt.eagle3 verify "
            f"{cache}"
        ) from error


def tables_of(cache: Opened, shard: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard, [n, S, ...], as views of its map; nothing is read yet.

    Raises: FileNotFoundError; CacheError unless they are as the manifest says.
    """
    path = shard_path(cache.folder, shard)
    for wrong in _wrong_form(cache, shard):
        raise CacheError(wrong)
    _, safe_open = load_safetensors()
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in cache.layout.fields}
    except OSError:
        raise
    except Exception as error:  # safetensors' own, which is no more than an Exception
        raise CacheError(f"{path}: safetensors refuses it ({error}). {AGAIN}") from error


# --- complete ---------------------------------------------------------------------------------------------------------


def incomplete(cache: Opened) -> Iterator[str]:
    """Yield what is missing, interrupted, too much, or of another form than the manifest says."""
    folder = cache.folder
    if cache.is_planned and not (folder / META_NAME).is_file():
        yield f"{folder / META_NAME}: no such file: production has not finished. Go on with it: precompute --resume"
    found, wanted = existing_shard_indices(folder), set(range(cache.num_shards))
    if found != wanted:
        yield (
            f"{folder}: declares {cache.num_samples} samples ({cache.num_shards} shards) but found {len(found)} shard "
            f"files; missing: {_some(wanted - found)}; too many: {_some(found - wanted)}"
        )
    for shard in cache.shards:
        yield from _wrong_form(cache, shard)
    yield from _wrong_vocabulary(cache)
    yield from _wrong_embeddings(cache)
    if cache.is_planned and len(cache.samples) != cache.num_samples:
        yield f"{folder / SIDECAR}: {len(cache.samples)} samples, expected {cache.num_samples} by {MANIFEST_NAME}"


def _wrong_form(cache: Opened, shard: int) -> Iterator[str]:
    path = shard_path(cache.folder, shard)
    try:
        fields, rows, _ = read_header(path)
    except CacheError as error:
        yield str(error)
        return
    if rows != cache.rows_of(shard):
        yield f"{path}: {rows} samples, expected {cache.rows_of(shard)} of the manifest's {cache.num_samples}. {AGAIN}"
    wanted = cache.layout.fields
    for name in sorted({*fields, *wanted}):
        if fields.get(name) != wanted.get(name):
            forms = _shown(fields.get(name)), _shown(wanted.get(name))
            yield f"{path}: {name} is {forms[0]}, expected {forms[1]} by {MANIFEST_NAME}. {AGAIN}"


def _wrong_vocabulary(cache: Opened) -> Iterator[str]:
    where, selected = cache.folder / MANIFEST_NAME, cache.manifest.get("selected_token_ids")
    size, vocab = cache.layout.draft_vocab_size, number_in(cache.manifest, "target_vocab_size", cache.folder, 1)
    if not isinstance(selected, list) or not all(type(token) is int for token in selected):
        yield f"{where}: selected_token_ids is {shortened(selected)}, expected a list of {size:,} token ids"
        return
    outside = [token for token in selected if not 0 <= token < vocab]
    if len(selected) != size or len(set(selected)) != size or outside:
        yield (
            f"{where}: selected_token_ids has {len(selected):,} ids, {len(set(selected)):,} different ones and "
            f"{len(outside):,} beyond the target's {vocab:,}, expected {size:,} different ones"
        )


def _wrong_embeddings(cache: Opened) -> Iterator[str]:
    path, vocab = cache.folder / EMBEDDINGS_NAME, cache.manifest.get("target_vocab_size")
    fields, rows, _ = read_header(path)
    wanted = (torch.float32, (cache.layout.aux_hidden_dim // 3,))
    if fields != {"weight": wanted} or rows != vocab:
        found = ", ".join(f"{name} {_shown(form)}" for name, form in fields.items())
        yield f"{path}: {rows:,} rows of {found}, expected {vocab} rows of weight {_shown(wanted)}"


def _shown(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"


def _some(shards: set[int]) -> str:
    named = ", ".join(map(str, sorted(shards)[:_MAX_NAMED]))
    return (named or "none") + (f" and {len(shards) - _MAX_NAMED} more" if len(shards) > _MAX_NAMED else "")


# --- checksums --------------------------------------------------------------------------------------------------------


def wrong_sums(cache: Opened) -> Iterator[str]:
    """Yield what is wrong with meta.json and with each file that it names; the shards have `wrong_shard_sums`."""
    if not cache.is_planned and not any(receipt_path(cache.folder, shard).is_file() for shard in cache.shards):
        raise NotChecked(FOREIGN)
    path = cache.folder / META_NAME
    if not path.is_file():
        return  # `incomplete` tells
    raw = read_regular(path)
    said, found = meta_crc32(raw)
    if said != found:
        yield f"{path}: its meta_crc32 is not that of its content: it was changed. {AGAIN}"
    meta = parse_object(raw)
    for record in file_records(meta, str(path)):
        file = path_inside(cache.folder, record["name"])
        if not file.is_file():
            yield f"{file}: no such file, expected one of {record['bytes']:,} bytes by {META_NAME}. {AGAIN}"
        elif file.stat().st_size != record["bytes"]:
            yield f"{file}: {file.stat().st_size:,} bytes, expected {record['bytes']:,} by {META_NAME}. {AGAIN}"
        elif (sha256 := sha256_file(file)) != record["sha256"]:
            yield f"{file}: sha256 {sha256[:12]}, expected {record['sha256'][:12]} by {META_NAME}. {AGAIN}"
    if (content := content_sha256(cache.folder)) != meta.get("content_sha256"):
        yield (
            f"{path}: content_sha256 is {shortened(meta.get('content_sha256'))[:14]}, but the files give {content[:12]}"
        )


def wrong_shard_sums(cache: Opened, shard: int) -> Iterator[str]:
    """Yield the damage of a shard, by its receipt: which sample's bytes are not those that were written."""
    for row, said in shard_damage(cache.folder, shard, cache.tick):
        number = None if row is None else shard * cache.shard_size + row
        yield said if number is None else f"{said}. It is {cache.name(number)}. {AGAIN}"
