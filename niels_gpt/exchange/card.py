"""Write the card of a cache, README.md of a dataset repository on the hub, using only its meta.json.

Licences, names and reasons come from strangers: the text escapes them for Markdown, and the YAML at the top takes only
letters, digits, hyphens and dots from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta, tokenizer_above
from niels_gpt.display.numbers import many
from niels_gpt.kinds.folders import open_cache
from niels_gpt.kinds.kind import Card, Kind
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import printable
from niels_gpt.storage.versions import public_path

_LICENCES = {
    **{name: name for name in ("mit", "apache-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0")},
    **{name: name for name in ("cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc0-1.0", "odc-by", "odbl", "pddl", "unlicense")},
    **{name: name for name in ("gpl-3.0", "agpl-3.0", "lgpl-3.0", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gfdl")},
    "odc-by-1.0": "odc-by",
    "apache-license-2.0": "apache-2.0",
    "cc0": "cc0-1.0",
    "not-stated": "unknown",
}
"""Licences as they are written here, in lower case with hyphens, and their ids on the hub."""
_SIZES = (
    *((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M")),
    *((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B")),
)
_URL = "hf://datasets/OWNER/NAME"
_MOST_TEXT, _MOST_REASONS = 1000, 50
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~#!&])")
_ADDRESS = re.compile(r"https?://[A-Za-z0-9./:%?=_~-]+[A-Za-z0-9/]")


def card_of(cache: Path, *, command: str | None = None, url: str | None = None) -> str:
    """Return README.md of a cache as a dataset repository of the hub: YAML, then Markdown.

    command: built the cache, by the record of its run; None if unknown. url: where the repository will be; None: the
        text shows OWNER/NAME.
    Raises: FileNotFoundError; CacheError for a stub, another kind, or a malformed meta.json.
    """
    opened = open_cache(cache)
    folder, meta, kind = opened.folder, opened.meta, opened.kind
    if kind.card is None:
        raise kind.lacks("card", opened)
    with opened.errors():
        name = (public_path(folder) or folder).name
        body = _body(name, meta, kind, kind.card, _kind_of_tokenizer(folder, meta), command, url or _URL)
        return "\n".join(["---", *_front_matter(meta, kind), "---", "", *body, ""])


# --- YAML -------------------------------------------------------------------------------------------------------------


def _front_matter(meta: Mapping[str, Any], kind: Kind) -> Iterator[str]:
    licence = _slug((meta.get("source") or {}).get("licence") or "not stated")
    yield f"license: {_LICENCES.get(licence, 'other')}"
    if licence not in _LICENCES:
        yield f'license_name: "{licence or "other"}"'
    yield from ("tags:", "- niels-gpt", f"- {meta['kind']}", *(["- tokenized"] if "shards" in meta else []))
    if rows := _rows(meta, kind):
        yield from ("size_categories:", "- " + next((text for most, text in _SIZES if rows < most), "100B<n<1T"))
    yield "viewer: false"  # the hub has no table of token files


def _slug(text: object) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", str(text)[:_MOST_TEXT].lower()).strip("-.")[:80]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def _body(
    name: str, meta: Mapping[str, Any], kind: Kind, words: Card, of_tokenizer: str | None, command: str | None, url: str
) -> Iterator[str]:
    """Yield the lines below the YAML. of_tokenizer: kind of the tokenizer; None if unknown."""
    by_split = "" not in kind.held(meta).counts.get(kind.unit, {"": 0})
    yield f"# {_text(name)}"
    yield ""
    yield words.what + (", imported from files of another tool." if "imported" in meta else ".")
    if by_split:
        yield from ("", *_splits(meta, kind))
    if words.figures:
        figures = ((_text(figure), _text(value)) for figure, value in words.figures(meta))
        yield from ("", "## What it holds", "", *_listed(figures))
    yield from ("", "## Origin", "", *_listed(_origin(meta)))
    if by_split or words.figures:
        yield from ("", "## What was left out or changed", "", *_listed(_changes(meta, by_split)))
    yield from ("", "## Tokenizer", "", *_listed(_tokenizer(meta, of_tokenizer)))
    yield from ("", "## How it was made", "")
    yield from (_code("console", command) if command else ["The command that made it is not recorded."])
    yield from ("", "## How to check it", "", *_code("console", words.check), "")
    yield f"{words.checked} `{_hex(meta['content_sha256'])}`."
    yield "`niels-gpt verify FOLDER --deep` reads every file and names every damage."
    yield from ("", "## How to read it", "", *_code("console", f"niels-gpt pull {url} FOLDER"), "")
    yield from _code("python", *words.reader(meta))


def _splits(meta: Mapping[str, Any], kind: Kind) -> Iterator[str]:
    loss = meta.get("supervised_tokens") or meta.get("loss_tokens")
    seen = ["bytes of text"] if "utf8_bytes" in meta else []
    columns = [
        "split",
        "tokens",
        *(["tokens with loss"] if loss else []),
        f"{kind.unit}s",
        *seen,
        "token files",
        "their bytes",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---" + "|---:" * (len(columns) - 1) + "|"
    for split in SPLITS:
        files = meta["shards"][split]
        numbers = [
            int(meta["totals"][f"{split}_tokens"]),
            *([int(loss[split])] if loss else []),
            _rows(meta, kind, split),
        ]
        numbers += [int(meta["utf8_bytes"][split])] if seen else []
        numbers += [len(files), sum(int(file["bytes"]) for file in files)]
        yield f"| {split} | {' | '.join(f'{number:,}' for number in numbers)} |"


def _rows(meta: Mapping[str, Any], kind: Kind, split: str | None = None) -> int:
    """Return the number of items in a split, or in all."""
    counts = kind.held(meta).counts.get(kind.unit, {})
    return sum(counts.values()) if split is None else counts.get(split, 0)


def _origin(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    source = meta.get("source") or {}
    # A file's path would name this machine.
    chats = source.get("input_data") if source.get("kind") == "hub" else None
    names = (meta.get("dataset_name", chats), meta.get("dataset_config"))
    yield "dataset", ", ".join(_text(name) for name in names if name) or "unknown"
    for key in ("licence", "attribution", "revision"):
        yield key, _text(source[key]) if source.get(key) else "unknown"
    if "files" in source:
        yield "files read", f"{int(source['files']):,}" if isinstance(source["files"], int) else _text(source["files"])
    if "origin" in meta:
        yield "origin", _text(meta["origin"])
    if "trained_on_bytes" in meta:
        yield "trained on", f"bytes of each source: {_counted(meta['trained_on_bytes'])}"
    if imported := meta.get("imported"):
        yield "imported", _text(f"format {imported.get('format')}, borders by {imported.get('borders')}")


def _changes(meta: Mapping[str, Any], by_split: bool) -> Iterator[tuple[str, str]]:
    source = meta.get("source") or {}
    if by_split:
        yield "split", _text(meta.get("split_rule", "unknown"))
        yield "seed", str(meta.get("seed")) if meta.get("seed") is not None else "none"
    yield "dropped", _counted(meta.get("dropped"))
    yield "left out, repaired or noticed while reading", _counted(source.get("counters"))
    yield "noticed", _counted(meta.get("noticed"))
    if "altered" in meta:
        yield "altered", _counted(meta["altered"])
    yield "duplicates kept", _counted(meta.get("duplicates"))
    if meta.get("cut"):
        yield "cut at the budget", _counted(meta["cut"])
    if source.get("exclude"):
        yield "list of what is left out", _text(source["exclude"])


def _tokenizer(meta: Mapping[str, Any], kind: str | None) -> Iterator[tuple[str, str]]:
    sha256 = meta.get("tokenizer_sha256")
    yield "sha256", f"`{_hex(sha256)}`" if sha256 else "unknown"
    size = meta.get("vocab_size", {**(meta.get("manifest") or {}), **meta}.get("target_vocab_size"))
    yield "ids", f"{int(size):,}" if size is not None else "unknown"
    yield "kind", _text(kind or "unknown")
    if "token_dtype" in meta:
        yield "dtype", _text(meta["token_dtype"])
    yield "special ids", _counted(meta.get("special_token_ids"), " = ")
    if "docs" in meta:
        if start := meta.get("document_start"):
            yield "before each document", _text(f"{start['token']} (id {start['id']})")
        end = meta.get("document_end")
        yield "after each document", _text(f"{end['token']} (id {end['id']})") if end else "nothing"


def _kind_of_tokenizer(folder: Path, meta: Mapping[str, Any]) -> str | None:
    """Return the kind of the tokenizer, by itself or by the copy beside the cache; None if unknown."""
    about: Mapping[str, Any] = meta
    if "tokenizer_kind" not in meta:  # it is not a tokenizer itself
        with suppress(CacheError, OSError):  # a damaged tokenizer is not this cache's damage
            beside = tokenizer_above(folder)
            about = {} if beside is None else read_meta(str(beside / META_NAME))
    same = about.get("tokenizer_sha256") == meta.get("tokenizer_sha256")
    return about.get("tokenizer_kind") if same else None


# --- untrusted texts --------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    """Return an untrusted value on one line, escaped so that Markdown shows it unchanged; addresses stay links."""
    text = printable(" ".join(str(value)[:_MOST_TEXT].split()))
    words = (word if _ADDRESS.fullmatch(word) else _MARKDOWN.sub(r"\\\1", word) for word in text.split(" "))
    return " ".join(words)


def _hex(value: object) -> str:
    return re.sub("[^0-9a-f]", "", str(value))[:64]


def _counted(counts: Mapping[str, Any] | None, between: str = " ") -> str:
    if counts is None:
        return "not counted"
    found = [f"{_text(reason)}{between}{count:,}" for reason, count in sorted(counts.items())]
    rest = [f"{many(len(found) - _MOST_REASONS, 'more reason')}"] if len(found) > _MOST_REASONS else []
    return ", ".join([*found[:_MOST_REASONS], *rest]) or "none"


def _listed(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"- **{name}**: {text}" for name, text in rows)


def _code(language: str, *lines: str) -> list[str]:
    """Return a code block that no line of the text can end."""
    fence = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall("`+", line)), default=0))
    return [f"{fence}{language}", *map(printable, lines), fence]
