"""What is in a cache of any kind: `stats`, `show`, `locate` and `plot`, as text and ready for JSON.

Each opens the cache once and asks its kind (kinds/kind.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import check_tokenizer, find_meta, tokenizer_above
from niels_gpt.display.pictures import check_matplotlib, check_png
from niels_gpt.kinds.folders import open_cache
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.rows import Stats
from niels_gpt.storage.errors import CacheError, TokenizerNotFound
from niels_gpt.storage.fileio import write_bytes
from niels_gpt.storage.meta_json import printable, resolved
from niels_gpt.storage.versions import public_path
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import check_model
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress


def stats(path: str | os.PathLike[str], progress: Progress | None = None) -> Stats:
    """Return what a cache holds, and its source and licence, as pairs of a name and a printable value.

    path: the public folder, such as cache/sft/oasst1. Raises: FileNotFoundError; CacheError where it is damaged.
    """
    cache = open_cache(path)
    with cache.errors():
        return Stats((name, printable(str(value))) for name, value in cache.kind.stats(cache, progress))


def stats_data(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Return what a cache holds, ready for JSON; docs/building.md has the fields. Raises: as `stats`."""
    cache = open_cache(path)
    with cache.errors():
        return {"cache": str(path), **cache.kind.stats_data(cache, progress)}


def show(
    path: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int, color: bool = False
) -> str:
    """Return a heading and a piece of a cache: tokens at a position, or an example, group or sample by its number.

    Sentinels have their short names, such as <|eot|>, and other special tokens their literals; both are cyan. In an
    example each turn begins a line; supervised tokens are green, the others dim; without color, supervised tokens are
    in [[ ]]. num_tokens: the most tokens.
    Raises: FileNotFoundError, CacheError; ValueError for a split or a position that does not exist.
    """
    _check_arguments(split, num_tokens)
    cache = open_cache(path)
    with cache.errors():
        return cache.kind.show(cache, tokenizer, split=split, at=position, tokens=num_tokens, color=color)


def show_data(
    path: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int | None
) -> dict[str, Any]:
    """Return what `show` prints, ready for JSON: its figures, the whole text, and of an example its parts by loss.

    num_tokens: the most tokens; None: all of an item, 200 of a stream. docs/building.md has the fields.
    Raises: as `show`.
    """
    _check_arguments(split, num_tokens)
    cache = open_cache(path)
    with cache.errors():
        found = cache.kind.show_data(cache, tokenizer, split=split, at=position, tokens=num_tokens)
    return {"cache": str(path), **found}


def locate(path: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int) -> str:
    """Return the text around token `position` of a split, and where it came from, as lines.

    tokenizer: of the cache; None: ids are printed instead of text.
    num_tokens: the most tokens of the document that are printed; a longer one is cut around the position.
    Raises: FileNotFoundError, CacheError; ValueError for a split or a position that does not exist.
    """
    _check_arguments(split, num_tokens)
    cache = open_cache(path)
    with cache.errors():
        return cache.kind.locate(cache, tokenizer, split=split, position=position, tokens=num_tokens)


def locate_data(
    path: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int | None = None
) -> dict[str, Any]:
    """Return what `locate` prints, ready for JSON; docs/building.md has the fields.

    num_tokens: as in `locate`; None: all of the document. Raises: as `locate`.
    """
    _check_arguments(split, num_tokens)
    cache = open_cache(path)
    with cache.errors():
        found = cache.kind.locate_data(cache, tokenizer, split=split, position=position, tokens=num_tokens)
    return {"cache": str(path), **found}


def _check_arguments(split: str, num_tokens: int | None) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")


def plot(path: Path) -> bytes:
    """Return a PNG of 720 x 280 pixels, some 10 kB: how long the items of a cache are, and what carries loss.

    Equal caches of one name give equal bytes with one version of matplotlib.
    Raises: FileNotFoundError, CacheError; ImportError without matplotlib, which the extra `plot` installs.
    """
    check_matplotlib()
    cache = open_cache(path)
    with cache.errors():
        return cache.kind.plot(cache, (public_path(path.absolute()) or path.absolute()).name)


def write_plot(path: Path, target: Path) -> None:
    """Write what `plot` returns to a file.

    Raises: as `plot`; ValueError unless the name ends in .png; FileNotFoundError also where its folder does not exist.
    """
    check_png(target)
    write_bytes(target, plot(path))


# --- the tokenizer of a cache's ids -----------------------------------------------------------------------------------


def tokenizer_of(cache: Path, model: str | None = None) -> FullTokenizer:
    """Open a named model, or the one beside or above a cache.

    Raises: FileNotFoundError; CacheError, also for a model that is not the one of its meta.json.
    """
    if model:
        return load_tokenizer(model)
    beside = tokenizer_above(resolved(cache)) or cache.absolute().parent.parent / "tokenizer"
    if about := find_meta(beside):  # refuses a link out of the folder of caches
        check_model(beside, about)
    elif not os.path.lexists(beside):
        raise TokenizerNotFound(f"{beside}: there is no tokenizer. Name the tokenizer of the ids: --tokenizer MODEL")
    return load_tokenizer(beside, follow_links=False)


def tokenizer_for(cache: Cache, model: str | None = None, *, is_needed: bool = False) -> FullTokenizer | None:
    """Return the tokenizer for the text of a cache's ids; None where the ids are printed.

    It is the one beside or above the cache, if it made the ids.
    model: a named one. is_needed: there is no text without one.
    Raises: as `tokenizer_of`, where one is needed or named.
    """
    if model or is_needed:
        return tokenizer_of(cache.path, model)
    if cache.meta.get("tokenizer_sha256") is None:
        return None
    try:
        tokenizer = tokenizer_of(cache.path)
        check_tokenizer(cache.path, cache.meta, tokenizer.sha256)
    except (OSError, CacheError):
        return None
    return tokenizer
