"""Show the contents of a cache of any kind: `stats`, `show`, `locate` and `plot`, as text and ready for JSON.

Each function opens the cache once, at a path or a URL, and asks its kind (kinds/kind.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import check_tokenizer, find_meta, tokenizer_above
from niels_gpt.display.pictures import check_matplotlib, check_png
from niels_gpt.kinds.folders import open_cache
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.rows import Stats
from niels_gpt.kinds.urls import at_hand, mounted_whole
from niels_gpt.storage.errors import CacheError, CacheNotFound, TokenizerNotFound
from niels_gpt.storage.fileio import write_bytes
from niels_gpt.storage.meta_json import printable, resolved
from niels_gpt.storage.mounted import MOUNTED, shown
from niels_gpt.storage.versions import public_path
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import check_model
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Cache]:
    """Yield the cache at a path or URL. What a malformed meta.json causes in the block becomes CacheError E202.

    Raises: the errors of `open_cache` and `at_hand`.
    """
    with at_hand(path) as folder:
        cache = open_cache(folder)
        with cache.errors():
            yield cache


def stats(path: str | os.PathLike[str], progress: Progress | None = None) -> Stats:
    """Return contents, source and licence of a cache, as pairs of a name and a printable value.

    path: the public folder, such as cache/sft/oasst1, or a URL. Raises: FileNotFoundError; CacheError for a damaged
        cache.
    """
    with opened(path) as cache:
        return Stats((name, printable(str(value))) for name, value in cache.kind.stats(cache, progress))


def stats_data(path: str | os.PathLike[str], progress: Progress | None = None) -> dict[str, Any]:
    """Return contents, source and licence of a cache, ready for JSON; docs/building.md lists the fields.

    Raises: FileNotFoundError; CacheError for a damaged cache.
    """
    with opened(path) as cache:
        return {"cache": cache.shown, **cache.kind.stats_data(cache, progress)}


def show(
    path: str | os.PathLike[str],
    tokenizer: FullTokenizer | None,
    *,
    split: str,
    position: int,
    num_tokens: int,
    color: bool = False,
) -> str:
    """Return a heading and a piece of a cache: tokens from a position on, or one example, group or sample by number.

    Sentinels have their short names, such as <|eot|>, other special tokens their literals; both are cyan. In an example
    each turn begins a line; supervised tokens are green, the others dim; without color, supervised tokens are in [[ ]].
    num_tokens: most tokens to print.
    Raises: FileNotFoundError; CacheError for a damaged cache; ValueError for a split or position that does not exist.
    """
    _check_arguments(split, num_tokens)
    with opened(path) as cache:
        return cache.kind.show(cache, tokenizer, split=split, at=position, tokens=num_tokens, color=color)


def show_data(
    path: str | os.PathLike[str], tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int | None
) -> dict[str, Any]:
    """Return the content of `show`, ready for JSON: figures, the whole text, and for an example its parts by loss.

    num_tokens: most tokens; None: a whole item, or 200 of a stream. docs/building.md lists the fields.
    Raises: FileNotFoundError; CacheError for a damaged cache; ValueError for a split or position that does not exist.
    """
    _check_arguments(split, num_tokens)
    with opened(path) as cache:
        found = cache.kind.show_data(cache, tokenizer, split=split, at=position, tokens=num_tokens)
        return {"cache": cache.shown, **found}


def locate(
    path: str | os.PathLike[str], tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int
) -> str:
    """Return the text around token `position` of a split, and its origin, as lines.

    tokenizer: of the cache; None: print ids instead of text.
    num_tokens: most tokens of the document to print; a longer document is cut around the position.
    Raises: FileNotFoundError; CacheError for a damaged cache; ValueError for a split or position that does not exist.
    """
    _check_arguments(split, num_tokens)
    with opened(path) as cache:
        return cache.kind.locate(cache, tokenizer, split=split, position=position, tokens=num_tokens)


def locate_data(
    path: str | os.PathLike[str],
    tokenizer: FullTokenizer | None,
    *,
    split: str,
    position: int,
    num_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the content of `locate`, ready for JSON; docs/building.md lists the fields.

    num_tokens: most tokens of the document; None: all.
    Raises: FileNotFoundError; CacheError for a damaged cache; ValueError for a split or position that does not exist.
    """
    _check_arguments(split, num_tokens)
    with opened(path) as cache:
        found = cache.kind.locate_data(cache, tokenizer, split=split, position=position, tokens=num_tokens)
        return {"cache": cache.shown, **found}


def _check_arguments(split: str, num_tokens: int | None) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")


def plot(path: str | os.PathLike[str]) -> bytes:
    """Return a PNG of 720 x 280 pixels, about 10 kB: lengths of the items of a cache, and the share with loss.

    Equal caches of one name give equal bytes with one version of matplotlib.
    Raises: FileNotFoundError; CacheError for a damaged cache; ImportError without matplotlib, which the extra `plot`
        installs.
    """
    check_matplotlib()
    with opened(path) as cache:
        public = public_path(cache.path.absolute()) or cache.path.absolute()
        return cache.kind.plot(cache, Path(shown(public)).name)


def write_plot(path: str | os.PathLike[str], target: Path) -> None:
    """Write the PNG of `plot` to a file.

    Raises: ValueError unless the name ends in .png; FileNotFoundError, also if its folder does not exist; CacheError
        for a damaged cache; ImportError without matplotlib.
    """
    check_png(target)
    write_bytes(target, plot(path))


# --- the tokenizer of a cache's ids -----------------------------------------------------------------------------------


def tokenizer_of(cache: Path, model: str | None = None) -> FullTokenizer:
    """Open a named model, or the tokenizer beside or above the cache.

    Raises: FileNotFoundError; CacheError for damage, or a model that did not produce the ids.
    """
    if model:
        return load_tokenizer(model)
    mount = MOUNTED.get(str(cache))
    if mount is not None:
        beside = _tokenizer_at(mount)
    else:
        beside = tokenizer_above(resolved(cache)) or cache.absolute().parent.parent / "tokenizer"
    if about := find_meta(beside):  # refuses a link out of the folder of caches
        check_model(beside, about)
    elif not os.path.lexists(beside):
        raise TokenizerNotFound(f"{beside}: there is no tokenizer. Name the tokenizer of the ids: --tokenizer MODEL")
    return load_tokenizer(beside, follow_links=False)


def _tokenizer_at(mount: Any) -> Path:
    """Return the folder that stands for the tokenizer in a bucket, beside a cache or one folder above it.

    Raises: TokenizerNotFound if there is none; CacheError for a damaged one.
    """
    above, places, why = mount.url, list[str](), ""
    for _ in range(2):
        above = above.rpartition("/")[0]
        if above.endswith((":", "/")):
            break
        places.append(f"{above}/tokenizer")
        try:
            return mounted_whole(places[-1], local=mount.store.path, max_bytes=mount.store.max_bytes)
        except CacheNotFound:
            continue
        except CacheError as error:
            if error.code != "E612":  # a user who may read the cache need not be allowed to look there
                raise
            why = f" ({error.problem})"
        except ValueError:  # above the bucket
            places.pop()
    found = f"there is no tokenizer at {' or '.join(map(printable, places)) or 'a place beside it'}"
    raise TokenizerNotFound(f"{printable(mount.url)}: {found}{why}. Name the tokenizer of the ids: --tokenizer MODEL")


def tokenizer_for(cache: Cache, model: str | None = None, *, is_needed: bool = False) -> FullTokenizer | None:
    """Return the tokenizer for the text of a cache's ids, the named one or the one beside or above the cache. None:
    print ids.

    is_needed: there is no text without a tokenizer.
    Raises: FileNotFoundError or CacheError if it is needed or named, and missing, damaged, or did not produce the ids.
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
