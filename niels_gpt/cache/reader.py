"""What every reader of a cache does alike: it opens one version, holds it, checks whose it is, and can be pickled.

Decides how a cache and a split of it are named: CACHE with `split=`, or CACHE/SPLIT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from niels_gpt.cache.checksums import BlockSums, Check
from niels_gpt.cache.formats import SPLITS, TokenDtype
from niels_gpt.cache.meta import check_expected, check_tokenizer, existing_cache, fingerprint, reader_meta
from niels_gpt.cache.mmap import IO
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import printable, resolved
from niels_gpt.storage.mounted import is_url, shown
from niels_gpt.storage.versions import version_name


class AtURL(TypedDict, total=False):
    """Keyword arguments of every reader, for a cache at a URL."""

    local: str | os.PathLike[str] | None
    """Of a cache at a URL: a folder here for what is fetched, which processes share. See docs/buckets.md."""
    max_bytes: int | str | None
    """Of a cache at a URL: most bytes in `local`, such as "50 GiB"; None: as this process has it open, else 10 GiB."""
    max_ahead: int | str | None
    """Of a cache at a URL: bytes that each process fetches ahead of its reading, at most a quarter of max_bytes; None:
    as this process has it open, else 256 MiB."""


class Opening(AtURL, total=False):
    """How a cache is opened: keyword arguments of every reader and stream."""

    tokenizer_sha256: str | None
    """Raise CacheError unless the cache was built with this model."""
    expect: Mapping[str, Any] | None
    """An earlier `fingerprint`: raise CacheError unless the split still has it."""
    check: Check
    """Compare the checksums of each file's ends once a process, the default; or with "blocks" of each block at its
    first read, which makes that read slower. For caches without checksums only sizes are compared; `repr` says so."""


class OpeningTokens(Opening, total=False):
    """How a cache of token files is opened."""

    io: IO
    """ "mmap", the default, or "pread" for network file systems."""
    dtype: TokenDtype | None
    """ "uint16" or "uint32", of token files without a meta.json; None: uint16. It must agree with a meta.json."""


def local_path(path: str | os.PathLike[str], opening: AtURL) -> Path:
    """Return a path; of a URL the folder that stands for it. Takes what a URL needs out of `opening`.

    Raises: UsageError for `local` and others of a path; the errors of `niels_gpt.cache.mounts.mounted`.
    """
    where: dict[str, Any] = {
        "local": opening.pop("local", None),
        "max_bytes": opening.pop("max_bytes", None),
        "max_ahead": opening.pop("max_ahead", None),
    }
    text = os.fspath(path)
    if is_url(text):
        from niels_gpt.cache.mounts import mounted

        return mounted(text, **where)
    if given := [name for name, value in where.items() if value is not None]:
        raise UsageError(f"{text}: {', '.join(given)} of a folder on this machine, expected a URL")
    return Path(os.path.expanduser(path))


class Reader:
    """One split of one version of a cache: the base of its readers. Not an ABC, because isinstance of one is slow.

    The public name is resolved to a version once: a rebuild does not change an open split, and gc keeps its version.
    Safe to fork and to pickle: a copy maps the files again, and raises CacheError if they were replaced. Never writes,
    and opens no file outside that version but the meta.json of the tokenizer beside the cache.
    """

    kind: ClassVar[str]
    """`kind` in meta.json."""
    _not_copied: ClassVar[tuple[str, ...]] = ()
    """Attributes that are not pickled: a copy opens its own."""
    cache: Path
    """The version's folder."""
    split: str
    """`train` or `val`; of another tool's files what their names say."""
    meta: dict[str, Any] | None
    vocab_size: int | None
    num_tokens: int

    def _open_version(self, cache: Path, split: str, **opening: Any) -> None:
        """cache: the version's folder, resolved. Raises: FileNotFoundError, CacheError, ValueError."""
        if unknown := opening.keys() - Opening.__annotations__.keys():
            raise TypeError(f"{type(self).__name__}: no argument {sorted(unknown)[0]!r}")
        self.cache, self.split = cache, split
        self._hold = hold_version(cache)
        self.meta = reader_meta(cache, self.kind)
        check_tokenizer(cache, self.meta, opening.get("tokenizer_sha256"))
        self.vocab_size = (self.meta or {}).get("vocab_size")
        self._sums = BlockSums(cache, self.meta, opening.get("check", "ends"))
        self._prepare()
        self._open()
        check_expected(self.fingerprint(), opening.get("expect"), str(self._where))

    def _prepare(self) -> None:
        """Check what a copy need not check again."""

    def _open(self) -> None:
        """Open the files and check their sizes; a copy calls it too. Sets `num_tokens`."""
        raise NotImplementedError

    def _sizes(self) -> str:
        """Return the sizes of the split, for `repr`."""
        raise NotImplementedError

    @property
    def is_fetched(self) -> bool:
        """Whether the cache is at a URL."""
        return self._sums.mount is not None

    @property
    def local_bytes(self) -> int | None:
        """Most bytes of a cache at a URL that are kept here; None of a cache here."""
        return None if self._sums.mount is None else self._sums.mount.max_bytes

    @property
    def folder(self) -> Path:
        """The version's folder; of a pretrain cache the split's folder in it."""
        return self.cache

    @property
    def _where(self) -> Path:
        """The path that the error for unexpected content names."""
        return self.folder

    def _identity(self) -> dict[str, Any]:
        """Return the facts that a copy must find again."""
        return self.fingerprint()

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of these tokens for a checkpoint: see `niels_gpt.cache.meta.fingerprint`."""
        return fingerprint(self.cache, self.meta, split=self.split, tokens=self.num_tokens)

    def __repr__(self) -> str:
        """Name the cache: `SFTSplit(cache/sft/oasst1 (version 0123456789ab), train: 49 examples, 5,100 tokens)`."""
        checks = "" if self._sums else ", checksums: none"
        name = f"{version_name(self.cache)}, {printable(self.split)}"
        return f"{type(self).__name__}({name}: {self._sizes()}{checks})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        before = self._identity()
        if self.meta is not None:  # a real folder may have been replaced since
            self.meta = reader_meta(self.cache, self.kind)
        check_expected(self.fingerprint(), before, str(self._where))
        self._open()
        check_expected(self._identity(), before, str(self._where))


def named_split(path: str | os.PathLike[str], split: str | None) -> tuple[Path, str | None]:
    """Return a cache and the name of a split of it, by its path and `split`, or only by CACHE/SPLIT.

    path: ~ is the home folder. The name is None where nothing says it: `path` is then a cache, or a split's folder of
    another name, as other tools make it.
    Raises: ValueError for another split, and for one that contradicts the path.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
    path = Path(os.path.expanduser(path))
    name, above = path.name, path.parent
    is_split = name in SPLITS and not os.path.lexists(path / META_NAME) and not (path / (split or META_NAME)).is_dir()
    if not is_split or not any(map(os.path.lexists, (path, above / META_NAME, above / f"{name}_tokens.bin"))):
        return path, split
    if split not in (None, name):
        expected = "the same split or the cache's folder"
        raise ValueError(f"split={split!r}: {shown(path)} is the split {name}, expected {expected}")
    return above, name


def named_cache(path: str | os.PathLike[str], split: str | None) -> tuple[Path, str]:
    """Return the version's folder of a cache and the name of a split, as `named_split`; "train" if nothing names one.

    Raises: ValueError for a split that `named_split` refuses; FileNotFoundError without such a cache.
    """
    cache, name = named_split(path, split)
    return existing_cache(resolved(cache), path), name or SPLITS[0]
