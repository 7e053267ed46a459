"""Import a folder of another tool: write a version of a cache and commit it like a build."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.kind.tokens import PRETRAIN, SFT
from niels_gpt.display.numbers import many, size_text
from niels_gpt.engine.meta import Source, vocabulary_of
from niels_gpt.exchange.assembling import About, Assembled, assemble
from niels_gpt.exchange.foreign import ForeignFile, ForeignFolder
from niels_gpt.exchange.output import MANIFEST_NAME, Modes
from niels_gpt.exchange.texts import Texts
from niels_gpt.kinds.kind import Kind
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import path_inside, sha256_regular
from niels_gpt.tokenizers.document_tokens import DocumentToken, document_end, start_of_documents
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress

_OF_ROWS = ("hf", "litdata")  # formats whose rows are the documents
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    path: Path
    """Public folder of the cache."""
    meta: dict[str, Any]
    """Content of its meta.json."""
    files: int
    """Token files of the other tool."""
    linked_bytes: int
    """Bytes of tokens in hard links, which take no disk space."""

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(int(self.meta["totals"][f"{split}_tokens"]) for split in SPLITS)

    def __str__(self) -> str:
        """Return the folder, files and tokens, and a line for each reason that was counted."""
        linked = f", {size_text(self.linked_bytes)} of them links" if self.linked_bytes else ""
        lines = [f"{self.path}: {many(self.files, 'file')}, {many(self.tokens, 'token')}{linked}"]
        for reasons in (self.meta.get("dropped"), self.meta.get("noticed")):
            lines += [f"  note: {reason}: {count:,}" for reason, count in sorted((reasons or {}).items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class ImportOptions:
    """Choices of the caller."""

    end: str | None = None
    """Token that ends documents, as in the setting document_end; None: by the manifest or the folder, else "auto"."""
    copy: bool = False
    """Copy files instead of linking them."""
    licence: str | None = None
    attribution: str | None = None
    pad_id: int | None = None
    """Pads rows of an sft cache; None: by the manifest, else the id that ends documents."""
    utf8_bytes: bool = True
    """Count the bytes of the text, for bits per byte."""


def import_folder(
    source: Path,
    folder: ForeignFolder,
    path: Path,
    *,
    format: str,
    tokenizer: FullTokenizer,
    options: ImportOptions,
    before_commit: Callable[[], object] = lambda: None,
    progress: Progress | None = None,
) -> Imported:
    """Import a folder that a format has read, and commit it as the cache at `path`.

    tokenizer: produced the ids. before_commit: called after all files of the cache are written.
    progress: called with files, bytes of tokens read, and bytes of tokens in all.
    Warns W205 if the ids seem to come from another tokenizer.
    Raises: CacheError E222 for an id outside the vocabulary; E221 for a folder without tokens for train, with loss in
        some files only, changed since its export, or a file that its format describes otherwise; E206 for too many
        files. ValueError for an end of documents or pad id that the tokenizer does not have. OSError.
    """
    kind = kind_of(source, folder)
    end = _end_of(folder, tokenizer, options.end)
    about = About(
        kind,
        vocabulary_of(tokenizer),
        _source(folder, path.name, options),
        {
            "format": format,
            "borders": _borders(folder, format, end, options.end),
            "files": len(folder.files),
            "tokenizer": None if folder.tokenizer is None else _name_of(folder.tokenizer),
        },
        end=end,
        noticed=folder.noticed,
        pad_id=_pad_id(source, folder, tokenizer, end, options.pad_id) if kind.has_loss else None,
    )
    linked = []

    def examine(done: Assembled) -> Mapping[str, Any]:
        _compare_with_manifest(source, folder.manifest, folder.files, done)
        linked.append(done.linked_bytes)
        return _examined(done, about, tokenizer, path, folder, options)

    with Modes().restored_on_failure() as modes, versions.building(path) as work:
        links = None if options.copy else modes
        unknown = () if tokenizer.unk_id is None else (tokenizer.unk_id,)
        counted = None if options.utf8_bytes and not kind.has_loss else unknown
        meta = assemble(work, folder.files, about, links, counted=counted, examine=examine, progress=progress)
        before_commit()
        versions.commit(work, path, str(meta["content_sha256"]))
    return Imported(path, meta, len(folder.files), sum(linked))


def _examined(
    done: Assembled, about: About, tokenizer: FullTokenizer, path: Path, folder: ForeignFolder, options: ImportOptions
) -> dict[str, Any]:
    """Return the keys of meta.json that depend on the written tokens. path: named in warnings."""
    start = None if folder.manifest is None else start_of_documents(folder.manifest["cache"], MANIFEST_NAME)
    texts = Texts(done, about.kind, tokenizer, about.end, None if start is None else start[0])
    documents, unknown = sum(done.docs.values()), tokenizer.unk_id
    is_ended = about.end is not None and not about.kind.has_loss
    keys: dict[str, Any] = {
        "roundtrip": texts.roundtrip(path),
        "lossless": None,
        "unknown_ids": 0 if unknown is None else sum(int(each[unknown]) for each in done.id_counts.values()),
        "noticed": {"documents_without_end": documents - sum(done.ended.values()) if is_ended else 0},
    }
    if start is not None and not (bare := documents - sum(texts.with_start.values())):
        keys["document_start"] = DocumentToken(start[1], start[0]).record
    elif start is not None:
        keys["noticed"]["documents_without_start"] = bare
    if not about.kind.has_loss and options.utf8_bytes:
        counts = texts.utf8_bytes()
        if all(count or not any(done.shards[split]) for split, count in counts.items()):
            keys["utf8_bytes"] = counts
    return keys


def _compare_with_manifest(
    source: Path, manifest: Mapping[str, Any] | None, files: Sequence[ForeignFile], done: Assembled
) -> None:
    """Raise CacheError E221 for a file whose sha256 is not the manifest's. Skips files that were removed.

    A token file that became a shard unchanged was hashed already; other files are read once more.
    """
    hashed = {}
    for split in SPLITS:
        of_split = [file for file in files if file.split == split]
        if len(of_split) == len(done.shards[split]):  # of sft, all are one
            for file, record in zip(of_split, done.shards[split], strict=True):
                if file.token_file is not None and file.itemsize == done.dtype.itemsize:
                    hashed[file.name] = str(record["sha256"])
    for record in (manifest or {}).get("files", ()):
        path, expected = path_inside(source, record["name"]), str(record["sha256"])
        if record["name"] not in hashed and not os.path.lexists(path):
            continue
        if (sha256 := hashed.get(record["name"]) or sha256_regular(path)) != expected:
            found, wanted = f"sha256 {sha256[:12]}", f"{expected[:12]}, as it was exported"
            remedy = f"Export the cache again, or remove {MANIFEST_NAME} to import the files as they are"
            raise CacheError(path, found, wanted, remedy, code="E221")


def kind_of(source: Path, folder: ForeignFolder) -> Kind:
    """Return sft if the files say which tokens carry loss, else pretrain.

    Raises: CacheError E221 if only some files have loss, or no file belongs to train.
    """
    with_loss = [file for file in folder.files if file.loss is not None]
    if with_loss and len(with_loss) != len(folder.files):
        without = next(file.name for file in folder.files if file.loss is None)
        raise CacheError(source, f"{without} does not say which tokens carry loss, and other files do", code="E221")
    if not any(file.split == "train" for file in folder.files):
        raise CacheError(
            source, "no tokens for train", "files of train", "Name the files of val: --val PATTERN", code="E221"
        )
    return SFT if with_loss else PRETRAIN


def _end_of(folder: ForeignFolder, tokenizer: FullTokenizer, choice: str | None) -> DocumentToken | None:
    """Return the token that ends documents, by the caller, the manifest, the folder or the tokenizer, in this order.

    Raises: ValueError if borders depend on it and nothing names one.
    """
    if choice is not None:
        return document_end(tokenizer, choice)
    if folder.manifest is not None:
        known = folder.manifest["cache"].get("document_end")
        return None if known is None else DocumentToken(known["token"], known["id"])
    if folder.document_end is not None and folder.document_end < tokenizer.vocab_size:
        return DocumentToken(tokenizer.token(folder.document_end), folder.document_end)
    if any(file.ends is None for file in folder.files):
        return document_end(tokenizer)
    with suppress(ValueError):
        return document_end(tokenizer)
    return None


def _borders(folder: ForeignFolder, format: str, end: DocumentToken | None, choice: str | None) -> str:
    if all(file.ends is not None for file in folder.files):
        return "rows" if format in _OF_ROWS else "index"
    if end is None:
        return "files"
    return "manifest" if folder.manifest is not None and choice is None else "document_end"


def _name_of(tokenizer: str) -> str:
    """Return an id of the hub unchanged, or the last part of a path: meta.json names no folder of a machine."""
    return (tokenizer if _HUB_ID.fullmatch(tokenizer) else PurePath(tokenizer).name)[:200]


def _pad_id(
    source: Path, folder: ForeignFolder, tokenizer: FullTokenizer, end: DocumentToken | None, choice: int | None
) -> int:
    """Return the id that pads rows. Raises: ValueError for an id outside the vocabulary; CacheError E221 if nothing
    names one."""
    known = choice
    if known is None and folder.manifest is not None:
        known = folder.manifest["cache"].get("pad_id")
    if known is None:
        known = tokenizer.eos_id if end is None else end.id
    if known is None:
        raise CacheError(source, "no id is known that fills up a row", remedy="Pass --pad-id ID", code="E221")
    if not 0 <= known < tokenizer.vocab_size:
        raise ValueError(f"--pad-id {known}: expected an id of the tokenizer, 0 to {tokenizer.vocab_size - 1}")
    return int(known)


def _source(folder: ForeignFolder, name: str, options: ImportOptions) -> Source:
    cache = {} if folder.manifest is None else folder.manifest["cache"]
    known = cache.get("source", {})
    provenance = {
        "kind": "imported",
        "revision": known.get("revision"),
        "licence": options.licence or known.get("licence"),
        "attribution": options.attribution or known.get("attribution"),
        "fingerprint": cache.get("content_sha256"),
    }
    return Source(name=cache.get("dataset_name") or name, provenance=provenance)
