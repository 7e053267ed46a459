"""Define the kinds of token caches: pretrain, a stream of documents, and sft, examples with a loss mask."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from niels_gpt.cache.documents import (
    bounds,
    id_lines,
    ids_at,
    lengths,
    open_bits,
    supervised_counts,
    tokens_of,
)
from niels_gpt.cache.formats import SPLITS, has_loss_bits, has_no_text_bytes, npy_header, token_dtype_of
from niels_gpt.cache.kind.plot import plot
from niels_gpt.cache.kind.show import example_data, locate, locate_data, show_example, show_window, window_data
from niels_gpt.cache.kind.validity import content_damages, id_damages, supervised_damages, wrong_sums
from niels_gpt.cache.meta import (
    check_tokenizer,
    checked_meta,
    read_meta,
    role_ids,
    sentinel_names,
    special_id,
    split_shards,
    text_bytes,
    tokenizer_above,
)
from niels_gpt.cache.mmap import FetchedItems, check_starts, mmap_tokens
from niels_gpt.display.decoded import decoded_text
from niels_gpt.display.numbers import count_text, many, number_of, share_text, size_text
from niels_gpt.engine.losses import loss_table
from niels_gpt.engine.meta import BUILDER_VERSIONS
from niels_gpt.kinds.checks import BUDGET_REACHED, FILES, TOKENIZER_MATCHES, warnings_of
from niels_gpt.kinds.files import HEADER_BYTES, Damage, FileChecks
from niels_gpt.kinds.kind import Cache, Card, Finding, Held, Kind, Limits, Page, Rows
from niels_gpt.kinds.rows import counted, described, of_loader, of_partitions, spread, warned_of
from niels_gpt.kinds.verify import examined_unit, reader_error, refusal
from niels_gpt.storage.checks import Check, Figures
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import open_regular, path_inside, wrong_value
from niels_gpt.tokenizers.document_tokens import end_of_documents, start_of_documents

if TYPE_CHECKING:
    from niels_gpt.display.sketch import Distributions
    from niels_gpt.engine.units import UnitKind

_CHUNK = 1 << 20  # examples whose first ids are checked at a time
_NUMBERS = 1 << 16  # bounds that are Python numbers at a time
_DIGEST_BYTES = 16
_WORDS_TOKENS, _WORDS_CHARS = 24, 60  # of a document's beginning
Meta = dict[str, Any]


# --- what readers open ------------------------------------------------------------------------------------------------


def _is_empty(meta: Meta, split: str) -> bool:
    """Return whether a split was built without a token, by its total and the sizes of its shards."""
    totals, records = meta.get("totals"), meta.get("shards", {}).get(split, [{}])
    num_tokens = totals.get(f"{split}_tokens") if isinstance(totals, dict) else None
    return not num_tokens and not any(record.get("bytes", 1) for record in records)


def _open_split(folder: Path, meta: Meta, split: str) -> None:
    """Open a pretrain split, each of its files, and its documents, like the streams."""
    from niels_gpt.cache.pretrain_dataset import PretrainSplit

    if not path_inside(folder, split).is_dir():
        raise CacheError(folder / split, "no such folder", remedy=REBUILD, code="E204")
    if not (shards := split_shards(folder, meta, split)):
        raise wrong_value(str(folder / META_NAME), f"shards.{split}", shards, "the files of its tokens")
    PretrainSplit(folder, split=split).open_all()
    if not has_no_text_bytes(meta):
        text_bytes(folder, meta, split)


def _open_examples(folder: Path, meta: Meta, split: str) -> None:
    """Open an sft split, and look at the first token of each example, like batches."""
    from niels_gpt.cache.sft_split import SFTSplit

    opened, tokens = SFTSplit(folder, split), tokens_of(folder, meta, split)
    if isinstance(tokens, FetchedItems):  # at a URL batches look at their own examples
        return
    starts, roles = opened.first_tokens, role_ids(folder, meta)
    bits = open_bits(folder, meta, split, len(tokens)) if has_loss_bits(meta) else None
    paths: Any = {"tokens_path": opened.tokens_path, "idx_path": opened.idx_path}
    for first in range(0, len(starts), _CHUNK):
        some = starts[first : first + _CHUNK]
        if bits is not None:
            bits.check_starts(some, first, opened.idx_path.name)
            continue
        check_starts(tokens[some], some, roles, first=first, **paths)


# --- checks -----------------------------------------------------------------------------------------------------------


def _readers_open(files: FileChecks, limits: Limits, figures: Figures) -> Iterator[Finding]:
    cache = Cache.open(files.folder)
    if (error := reader_error(cache)) is not None:
        yield error
    totals = {split: int(files.meta["totals"][f"{split}_tokens"]) for split in SPLITS}
    opened = [f"{split} ({number_of(count, 'token')})" for split, count in totals.items() if count]
    figures.say(
        f"The readers open {' and '.join(opened)}." if opened else "The readers open it; it holds nothing.",
        splits_opened=len(opened),
    )


def _examples_supervised(files: FileChecks, limits: Limits, figures: Figures) -> Iterator[Finding]:
    examples = supervised = 0
    for split in SPLITS:
        counts = supervised_counts(files.folder, files.meta, split)
        examples, supervised = examples + len(counts), supervised + int(counts.sum())
        yield from supervised_damages(files, split, counts)
    tokens = sum(int(files.meta["totals"][f"{split}_tokens"]) for split in SPLITS)
    share = supervised / max(1, tokens)
    figures.say(
        f"Each of {many(examples, 'example')} has tokens with loss: {supervised:,} of {many(tokens, 'token')}, "
        f"{share_text(share)}.",
        examples=examples,
        supervised_tokens=supervised,
        supervised_share=share,
    )


_TOKENS = (
    FILES,
    Check(
        "ids_below_vocab_size",
        "Every token is an id of the tokenizer's vocabulary; a larger one would be outside a model's embedding.",
        rule=lambda files, limits, figures: id_damages(files, figures),
    ),
    TOKENIZER_MATCHES,
    Check(
        "readers_open",
        "Every reader opens the cache: meta.json is as they need it, and tokens and offsets belong together.",
        rule=_readers_open,
    ),
)


# --- the kinds --------------------------------------------------------------------------------------------------------


class Tokens(Kind, ABC):
    """Base of pretrain and sft: token files, an index of offsets, source ids."""

    needs_tokenizer = True

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Open every split that has tokens."""
        folder, meta = cache.folder, cache.meta
        checked_meta(meta, str(folder / META_NAME))
        check_tokenizer(folder, meta)
        self._check_sentinels(folder, meta)
        for split in SPLITS:
            if not _is_empty(meta, split):
                self._open(folder, meta, split)

    def _check_sentinels(self, folder: Path, meta: Meta) -> None:
        """Raise CacheError if the readers need a sentinel that is unknown."""

    @abstractmethod
    def _open(self, folder: Path, meta: Meta, split: str) -> None:
        """Open a split as its reader does."""

    def wrong_sums(self, cache: Cache) -> Iterator[tuple[str, str]]:
        """Compare totals, sizes and counts."""
        return wrong_sums(cache)

    def headers(self, files: FileChecks) -> Iterator[Damage]:
        """Yield the offsets files without the header of an int64 array of their length."""
        for record in files.meta.get("index", {}).values():
            name, entries = record["name"], record["entries"]
            if name not in files.readable:
                continue
            expected = npy_header(entries)
            with open(open_regular(files.folder / name), "rb") as file:
                header = file.read(HEADER_BYTES)
            if header != expected:
                place = next(i for i, byte in enumerate(expected) if header[i : i + 1] != bytes([byte]))
                problem = f"not the header of a .npy file of int64 [{entries}], from this byte on"
                yield Damage(name, place, HEADER_BYTES, problem)

    def contents(self, files: FileChecks) -> Iterator[Damage]:
        """Scan ids, sentinels, offsets, source ids and loss."""
        return content_damages(files)

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return documents or examples, and tokens."""
        totals = meta.get("totals") or {}
        loss = meta.get("supervised_tokens")
        tokens = {split: int(totals.get(f"{split}_tokens", 0)) for split in SPLITS}
        counts = {self.unit: self._items(meta), "token": tokens}
        return Held(counts, loss=sum(loss.values()) if isinstance(loss, dict) else None)

    @abstractmethod
    def _items(self, meta: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of documents or examples of each split."""

    def stats(self, cache: Cache, progress: Any = None) -> Rows:
        """Return lengths, drops, source and licence."""
        return _rows(cache, self.unit)

    def stats_data(self, cache: Cache, progress: Any = None) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        sizes = {split: spread(lengths(cache.folder, cache.meta, split)) for split in SPLITS}
        return {"refused": refusal(cache.folder), "document_tokens": sizes, **described(cache.meta)}

    def locate(self, cache: Cache, tokenizer: Any, *, split: str, position: int, tokens: int) -> str:
        """Return the document or example at a token."""
        return locate(cache, tokenizer, split=split, position=position, tokens=tokens)

    def locate_data(
        self, cache: Cache, tokenizer: Any, *, split: str, position: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        return locate_data(cache, tokenizer, split=split, position=position, tokens=tokens)

    def sizes(self, cache: Cache) -> dict[str, int]:
        """Return the number of documents of each split."""
        return {split: len(bounds(cache.folder, cache.meta, split)) - 1 for split in SPLITS}

    def digests(self, cache: Cache, split: str) -> Iterator[bytes]:
        """Yield a hash of the ids of each document."""
        folder, meta = cache.folder, cache.meta
        ends = _numbers(bounds(folder, meta, split)[1:])
        digest, end, position = hashlib.blake2b(digest_size=_DIGEST_BYTES), next(ends, None), 0
        dtype = token_dtype_of(meta, folder / META_NAME)
        for record in meta["shards"][split]:
            if not record["bytes"]:
                continue
            tokens = mmap_tokens(path_inside(folder, record["name"]), expected_bytes=record["bytes"], dtype=dtype)
            content, first, last = tokens.data, position, position + len(tokens)
            while end is not None and end <= last:
                digest.update(content[position - first : end - first])
                yield digest.digest()
                digest, position, end = hashlib.blake2b(digest_size=_DIGEST_BYTES), end, next(ends, None)
            digest.update(content[position - first :])  # the document continues in the next shard
            position = last
        if position != (total := meta["totals"][f"{split}_tokens"]):
            problem = f"its shards of {split} hold {position} tokens, its totals say {total}"
            raise CacheError(folder / META_NAME, problem, remedy=REBUILD, code="E202")

    def source_ids(self, cache: Cache, split: str) -> Iterator[bytes] | None:
        """Yield the source id of each document."""
        return _all_ids(cache, split) if split in cache.meta.get("ids", {}) else None

    def words(self, cache: Cache, tokenizer: Any, split: str, number: int) -> str | None:
        """Return the beginning of a document on one line."""
        if tokenizer is None:
            return None
        start, end = bounds(cache.folder, cache.meta, split)[number : number + 2].tolist()
        ids = ids_at(cache.folder, cache.meta, split, start, min(end, start + _WORDS_TOKENS))
        text = decoded_text(ids, sentinel_names(cache.folder, cache.meta), tokenizer)
        return " ".join(text.split())[:_WORDS_CHARS]

    def plot(self, cache: Cache, name: str) -> bytes:
        """Return a PNG of the lengths, and of the share with loss."""
        return plot(cache, name)

    def distributions(self, cache: Cache) -> Distributions:
        """Return the lengths."""
        sizes = {split: found for split in SPLITS if len(found := lengths(cache.folder, cache.meta, split))}
        return {f"tokens per {self.unit}": sizes} if sizes else {}


def _opened(module: str, name: str, how: str) -> Callable[[Mapping[str, Any]], Iterator[str]]:
    """Return a function that yields lines of Python: they open a token cache as a stream, and a token file with numpy.

    how: arguments, with {split} for a split that has tokens.
    """

    def lines(meta: Mapping[str, Any]) -> Iterator[str]:
        split = next((split for split in SPLITS if meta["shards"][split]), SPLITS[0])
        yield from (f"from {module} import {name}", "", f"stream = {name}({how.format(split=split)})")
        dtype = "<u4" if str(meta.get("token_dtype")).startswith("uint32") else "<u2"
        yield from ("", "# without this library", "import json", "", "import numpy as np", "")
        yield f'file = json.load(open("FOLDER/meta.json"))["shards"]["{split}"][0]["name"]'
        yield f'ids = np.memmap("FOLDER/" + file, dtype="{dtype}", mode="r")'

    return lines


class PretrainKind(Tokens):
    """Documents in token files, read as windows."""

    name = "pretrain"
    formats = frozenset({"datatrove", "hf", "litdata", "megatron", "modded-nanogpt", "nanogpt", "olmo"})
    has_parts = True
    unit = "document"
    keys = ("pretrain/",)
    families: ClassVar[Mapping[str, str]] = {"pretrain": "niels_gpt.recipes.documents:PRETRAIN"}
    builds_alone = True
    builder_version = BUILDER_VERSIONS["pretrain"]
    checks = (*_TOKENS, BUDGET_REACHED, *warnings_of("documents"))
    page = Page(
        "import torch\nfrom niels_gpt.cache import PretrainTokenStreamDataset\n\n"
        'data = PretrainTokenStreamDataset(\n    "{path}/train", T={T}, device="cpu"\n)\n'
        "x, y = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))",
        frozenset({"numpy", "pytorch"}),
        columns=(
            ("x", "int64 [B, T]", "ids of the tokens"),
            ("y", "int64 [B, T]", "the token after each: y[:, :-1] == x[:, 1:]"),
        ),
    )

    card = Card(
        "A token cache for pretraining: documents as token ids, in files without headers",
        _opened("niels_gpt.sampling", "EpochStream", '"FOLDER/{split}", T=1024, global_batch_size=8, seed=0'),
    )

    @cached_property
    def units(self) -> UnitKind:
        """How to examine partitions, and join them. The engine is loaded here."""
        from niels_gpt.cache import joining
        from niels_gpt.engine.units import UnitKind

        return UnitKind(
            name="pretrain",
            same=joining.SAME,
            examine=partial(examined_unit, joining.check_receipt),
            items=lambda meta: sum(meta["docs"][split] for split in SPLITS),
            read="documents_read",
            join=joining.join,
            warn=joining.warn_of_whole,
            mend=joining.mend,
            units_at=joining.units_at,
        )

    def _open(self, folder: Path, meta: Meta, split: str) -> None:
        _open_split(folder, meta, split)

    def _items(self, meta: Mapping[str, Any]) -> dict[str, int]:
        return {split: int(number) for split, number in (meta.get("docs") or {}).items()}  # a stub counts none

    def show(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int, color: bool) -> str:
        """Return the text from a token on."""
        return show_window(cache, tokenizer, split, at, tokens, color)

    def show_data(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int | None) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        about = {"kind": self.name, "split": split}
        return about | window_data(cache, tokenizer, split, at, tokens)

    def places(self, cache: Cache) -> list[tuple[str, int]]:
        """Return where some documents begin."""
        starts = {split: bounds(cache.folder, cache.meta, split) for split in SPLITS}
        return [(split, int(starts[split][number])) for split, number in super().places(cache)]


class SftKind(Tokens):
    """Examples of chats with a loss mask."""

    name = "sft"
    formats = frozenset({"datatrove", "hf", "olmo"})
    has_loss = True
    unit = "example"
    keys = ("sft/",)
    families: ClassVar[Mapping[str, str]] = {"sft": "niels_gpt.recipes.chats:SFT"}
    builder_version = BUILDER_VERSIONS["sft"]
    checks = (
        *_TOKENS,
        Check(
            "examples_supervised",
            "Every example has a token that carries loss, and their sum is the one in meta.json.",
            rule=_examples_supervised,
        ),
        *warnings_of("examples"),
    )
    page = Page(
        "import torch\nfrom niels_gpt.cache import SFTExampleDataset\n\n"
        'data = SFTExampleDataset.open("{path}", "train", T=1024)\n'
        "x, y, y_masked = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))",
        PretrainKind.page.icons,
        columns=(*PretrainKind.page.columns, ("y_masked", "int64 [B, T]", "y, but -100 at tokens without loss")),
    )

    card = Card(
        "A token cache of chats, and which of their tokens carry loss",
        _opened("niels_gpt.sampling", "SFTStream", '"FOLDER", split="{split}", T=1024, global_batch_size=8, seed=0'),
    )

    @cached_property
    def units(self) -> UnitKind:
        """How to examine partitions, and join them. The engine is loaded here."""
        from niels_gpt.cache import joining_chats
        from niels_gpt.engine.units import UnitKind

        return UnitKind(
            name="sft",
            same=joining_chats.SAME,
            examine=partial(examined_unit, joining_chats.check_receipt),
            items=lambda meta: sum(meta["totals"][f"{split}_examples"] for split in SPLITS),
            read="examples_read",
            join=joining_chats.join,
            warn=joining_chats.warn_of_whole,
        )

    def distributions(self, cache: Cache) -> Distributions:
        """Return the lengths, and the share with loss."""
        found, shares = super().distributions(cache), dict[str, Any]()
        for sizes in found.values():
            for split, each in sizes.items():
                shares[split] = 100 * supervised_counts(cache.folder, cache.meta, split) / each
        return {**found, "% with loss": shares} if shares else found

    def _check_sentinels(self, folder: Path, meta: Meta) -> None:
        if not has_loss_bits(meta):
            special_id(folder, meta, "asst")

    def _open(self, folder: Path, meta: Meta, split: str) -> None:
        _open_examples(folder, meta, split)

    def _items(self, meta: Mapping[str, Any]) -> dict[str, int]:
        totals = meta.get("totals") or {}
        return {split: int(totals[f"{split}_examples"]) for split in SPLITS}

    def show(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int, color: bool) -> str:
        """Return an example with its loss marked."""
        return show_example(cache, tokenizer, split, at, tokens, color)

    def show_data(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int | None) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        about = {"kind": self.name, "split": split}
        return about | example_data(cache, tokenizer, split, at, tokens)


def _all_ids(cache: Cache, split: str) -> Iterator[bytes]:
    """Yield the source ids of a split. Raises: CacheError unless there is one for each document."""
    number, documents = 0, len(bounds(cache.folder, cache.meta, split)) - 1
    for number, line in enumerate(id_lines(cache.folder, cache.meta, split), 1):
        if number > documents:
            break
        yield line
    if number != documents:
        path, lines = cache.folder / cache.meta["ids"][split]["name"], "more" if number > documents else number
        raise CacheError(path, f"{lines} lines", f"{documents}, one for each document", REBUILD, code="E201")


def _numbers(values: Any) -> Iterator[int]:
    for start in range(0, len(values), _NUMBERS):
        yield from values[start : start + _NUMBERS].tolist()


# --- stats ------------------------------------------------------------------------------------------------------------


def _compared(meta: Mapping[str, Any]) -> Rows:
    """Return how much of a fast engine's work was compared; [] for a cache of an earlier release."""
    compared = meta.get("compared")
    pieces, rate = map(compared.get, ("pieces", "finds_one_in")) if isinstance(compared, Mapping) else (None, None)
    if type(pieces) is not int or type(rate) is not int:
        return []
    return [("ids compared", f"{pieces:,} pieces, which find with 95 % a fault in one of {rate:,}")]


def _rows(cache: Cache, unit: str) -> Rows:
    folder, meta, source, unknown = cache.folder, cache.meta, cache.meta["source"], "not stated"
    reason = refusal(folder)
    rows = [
        ("cache", f"{cache.shown} ({meta['kind']}, {_BUILT[meta['built']]})"),
        *([] if reason is None else [("refused", f"by the readers: {reason}")]),
        ("dataset", " ".join(str(meta[key]) for key in ("dataset_name", "dataset_config") if meta[key]) or unknown),
        ("source", source.get("kind") or unknown),
        ("revision", source.get("revision") or "none"),
        ("licence", source.get("licence") or unknown),
        ("attribution", source.get("attribution") or unknown),
    ]
    for split in SPLITS:
        rows.append((split, _split_line(folder, meta, split, unit)))
    rows += of_partitions(meta)
    rows.append(("dropped", _dropped(meta, unit)))
    rows.append(("duplicates", _duplicates(meta)))
    rows += [*of_loader(meta), *loss_table(meta).items(), *_compared(meta)]
    rows += warned_of(meta)
    if unit == "document" and meta["built"]:
        names = sentinel_names(folder, meta)
        for name, token_of in (("document start", start_of_documents), ("document end", end_of_documents)):
            token = token_of(meta, META_NAME)
            rows.append((name, "none" if token is None else f"{names.get(*token)} (id {token[0]})"))
    if has_loss_bits(meta):
        template = meta["chat_template"]
        how = f"{str(template['sha256'])[:12]}, mask by {template['mask_by']}, loss on {template['loss_on']}"
        rows.append(("chat template", how))
    ids = f"{meta['vocab_size']:,} ids{_asked(folder, meta)}"
    return [*rows, ("tokenizer", f"{str(meta['tokenizer_sha256'])[:12]}, {ids}")]


def _asked(folder: Path, meta: dict[str, Any]) -> str:
    """Return the vocabulary and text sizes requested when the tokenizer beside a cache was trained."""
    about: dict[str, Any] = {}
    with suppress(CacheError, OSError):  # a damaged tokenizer is not this cache's damage
        beside = tokenizer_above(folder)
        about = {} if beside is None else read_meta(str(beside / META_NAME))
    asked, seen = about.get("requested_vocab_size"), about.get("bytes_seen")
    if about.get("tokenizer_sha256") != meta["tokenizer_sha256"] or not isinstance(asked, int):
        return ""
    less = "" if about.get("trained_on") == "sample" else f" of {count_text(asked)} asked for"
    return less + (f", trained on {size_text(seen)}" if isinstance(seen, int) else "")


_BUILT = {True: "built", False: "not built", "partial": "partial"}


def _split_line(folder: Path, meta: dict[str, Any], split: str, unit: str) -> str:
    from niels_gpt.engine.split import asked_share

    tokens, sizes = meta["totals"][f"{split}_tokens"], lengths(folder, meta, split)
    if (of := spread(sizes)) is None:
        return "empty"
    parts = [
        f"{number_of(tokens, 'token')} in {number_of(len(sizes), unit)} "
        f"({of['min']:,.0f} to {of['max']:,.0f}, median {of['median']:,.0f}, 95% below {of['p95']:,.0f})"
    ]
    if "utf8_bytes" in meta:
        parts.append(f"{meta['utf8_bytes'][split] / tokens:.2f} UTF-8 bytes per token")
    if "supervised_tokens" in meta:
        parts.append(f"{meta['supervised_tokens'][split] / tokens:.0%} supervised")
    parts.append(f"{tokens / sum(meta['totals'][f'{name}_tokens'] for name in SPLITS):.1%} of all tokens")
    asked = asked_share(meta) if split == "val" else None
    return ", ".join(parts) + (f" ({float(asked):.1%} asked for)" if asked is not None else "")


def _dropped(meta: dict[str, Any], unit: str) -> str:
    counts = meta.get("dropped", {})
    read = meta.get(f"{unit}s_read", 0)
    share = f" ({sum(counts.values()) / read:.1%} of {read:,} read)" if counts and read else ""
    return counted(counts) + share


def _duplicates(meta: dict[str, Any]) -> str:
    if "duplicates" not in meta:  # as in caches of older builders
        return "not counted"
    return ", ".join(f"{split} {meta['duplicates'][split]:,}" for split in SPLITS)


PRETRAIN, SFT = PretrainKind(), SftKind()
