"""Export a token cache to a folder of another tool, with a manifest. The folder appears whole or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from niels_gpt.display.numbers import many, size_text
from niels_gpt.exchange.formats import FORMATS, Format
from niels_gpt.exchange.output import MANIFEST_NAME, MANIFEST_VERSION, Modes, Output, TokenCache
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.work import Progress


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: int
    """Files without the manifest."""
    tokens: int
    num_bytes: int
    """Bytes of all files."""
    linked_bytes: int
    """Bytes in hard links, which take no disk space."""
    made: dict[str, int]
    """Number of files by how they were made: link, copy, written."""
    noted: dict[str, int]
    """Counts of what the format could not hold as the cache has it, by reason."""

    def __str__(self) -> str:
        """Return files, tokens and bytes, and a line for each reason of `noted`."""
        linked = f", {size_text(self.linked_bytes)} of them links" if self.linked_bytes else ""
        sizes = f"{many(self.files, 'file')}, {many(self.tokens, 'token')}, {size_text(self.num_bytes)}{linked}"
        return "\n".join([sizes, *(f"  note: {reason}: {count:,}" for reason, count in self.noted.items())])


def export_cache(
    cache: Path, name: str, out: Path, *, mask: str | None = None, progress: Progress | None = None
) -> Exported:
    """Export a cache to a new folder in the format of another tool.

    cache: a pretrain or sft cache. name: a key of FORMATS. out: must not exist, or be an empty folder.
    mask: one of the format's `masks`: a column of 0 and 1 of this name tells which tokens of an sft cache carry loss,
        in place of labels. It is 0 for the first token of each row.
    progress: called with files, bytes of tokens written or linked, and bytes of tokens in all.
    A failed export leaves nothing behind, and restores the modes of the cache's files.
    Raises: ValueError for an unknown format or mask; FileNotFoundError; CacheError E704 if `out` is not empty, E220 if
        the format cannot hold the cache, E203 or E205 for a token file of another size or kind; OSError.
    """
    if name not in FORMATS:
        raise ValueError(f"--to {name}: expected one of {', '.join(FORMATS)}")
    format, source = FORMATS[name], TokenCache(cache)
    _refuse(source, name)
    _check_mask(source, format, mask)
    files = source.checked_files()
    with Modes().restored_on_failure() as modes, fresh_folder(out, sources=[source.folder]) as work:
        output = Output(work, source, sum(int(file.record["bytes"]) for file in files), progress, modes)
        output.mask = mask
        format.write(source, output)
        (work / MANIFEST_NAME).write_bytes(canonical_json(_manifest(name, output)))
    by_how = Counter(str(record["made"]) for record in output.records)
    linked = sum(record["bytes"] for record in output.records if record["made"] == "link")
    num_bytes = sum(record["bytes"] for record in output.records)
    tokens = source.kind.held(source.meta).total("token")
    return Exported(len(output.records), tokens, num_bytes, linked, dict(by_how), output.noted)


def _refuse(cache: TokenCache, name: str) -> None:
    """Raise CacheError E207 for a stub, E220 for a cache that the format cannot hold."""
    if cache.meta.get("built") is False:
        raise CacheError(cache.path / META_NAME, "built is false, so there is nothing to export", code="E207")
    if name not in cache.kind.formats:
        able = ", ".join(each for each in FORMATS if each in cache.kind.formats)
        lacks = "has no place for which tokens carry loss" if cache.kind.has_loss else "cannot hold it"
        found = f"an {cache.kind.name} cache, and {name} {lacks}"
        raise CacheError(cache.path, found, remedy=f"Export it to one of: {able}", code="E220")


def _check_mask(cache: TokenCache, format: Format, mask: str | None) -> None:
    """Raise ValueError for a mask that the format does not have, CacheError E220 for a cache without labels."""
    if mask is None:
        return
    if mask not in format.masks:
        having = [f"--to {each.name} --mask {'|'.join(each.masks)}" for each in FORMATS.values() if each.masks]
        raise ValueError(f"--to {format.name} --mask {mask}: expected {', '.join(having)}")
    if not cache.kind.has_loss or cache.kind.has("rows"):
        found = f"a {cache.kind.name} cache, and --mask {mask} is for the labels of an sft cache"
        raise CacheError(cache.path, found, remedy="Export it without --mask", code="E220")


def _manifest(name: str, output: Output) -> dict[str, object]:
    """Return the manifest: the cache, the format, and every file with its sha256."""
    meta = output.cache.meta
    keys = ("content_sha256", "dataset_name", "kind", "token_dtype", "tokenizer_sha256", "vocab_size", "totals")
    start = meta.get("document_start")
    return {
        "manifest_version": MANIFEST_VERSION,
        "kind": "export",
        "format": name,
        "cache": {
            **{key: meta.get(key) for key in keys},
            **({} if start is None else {"document_start": start}),
            "document_end": meta.get("document_end"),
            "pad_id": meta.get("pad_id", (meta.get("special_token_ids") or {}).get("eot")),
            "source": {key: meta.get("source", {}).get(key) for key in ("kind", "licence", "attribution", "revision")},
        },
        "noted": output.noted,
        "files": output.records,
    }
