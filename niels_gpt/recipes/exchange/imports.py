"""Choose the place and the tokenizer of an imported cache; niels_gpt/exchange/importing.py writes it.

All caches in pretrain/ and sft/ share the tokenizer of their folder. A cache in imported/ may have another, which lies
with its versions, in imported/.versions/NAME/tokenizer, where readers look first.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from niels_gpt.cache.meta import find_meta
from niels_gpt.exchange.foreign import not_ours, read_manifest
from niels_gpt.exchange.formats import FORMATS
from niels_gpt.exchange.importing import Imported, ImportOptions, import_folder, kind_of
from niels_gpt.recipes.records import TOKENIZER_KEY, append_run, recorded_outcomes
from niels_gpt.recipes.tokenizer import copy_tokenizer, ensure_tokenizer, named_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.versions import versions_dir
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress

IMPORTED = "imported"
"""Folder for caches that no build makes."""
_NAME = re.compile(r"(?:(pretrain|sft|imported)/)?(?!tokenizer$)([A-Za-z][A-Za-z0-9_]{0,99})")


def import_cache(
    source: Path,
    name: str,
    *,
    format: str,
    cache_dir: Path,
    tokenizer: str | None = None,
    val: str | None = None,
    document_end: str | None = None,
    copy: bool = False,
    licence: str | None = None,
    attribution: str | None = None,
    pad_id: int | None = None,
    utf8_bytes: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Import a folder of another tool as a cache of `cache_dir`.

    name: NAME, which means imported/NAME; or imported/NAME, pretrain/NAME, sft/NAME. format: a key of FORMATS.
    tokenizer: path or id of the hub, as in the setting; None: the folder is an export of this project, made with the
        tokenizer of `cache_dir`. val: pattern for files of val; None: by their names.
    Takes the other choices of `ImportOptions`. progress: called with files, bytes of tokens read, and bytes in all.
    Raises: ValueError for a wrong argument; FileNotFoundError; CacheError E221 for a folder of another format, E222 for
        an id outside the vocabulary, E223 for an unknown tokenizer, or another one than the other caches have; OSError.
    """
    if format not in FORMATS:
        raise ValueError(f"--from {format}: expected one of {', '.join(FORMATS)}")
    key, cache_dir = key_of(name), Path(cache_dir)
    is_free = key.startswith(f"{IMPORTED}/")  # its tokenizer encodes nothing here, so one of the sample will do
    settings = Settings(cache_dir=str(cache_dir), tokenizer=tokenizer)
    settings = replace(settings, source_root="sample") if is_free else settings
    apply_lock_setting(cache_dir, settings.lock)
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    manifest = read_manifest(source, format)
    opened = _opened(source, settings, None if manifest is None else manifest["cache"].get("tokenizer_sha256"))
    install = _place(cache_dir, key, opened, settings)
    try:
        folder = FORMATS[format].read(source, val_glob=val, vocab_size=opened.vocab_size)
    except CacheError as error:
        raise not_ours(error) from error
    if (kind := kind_of(source, folder).name) != key.partition("/")[0] and not is_free:
        raise CacheError(source, f"becomes a cache of kind {kind}", f"one for {key}", "Pass another name", code="E221")
    begin = time.perf_counter()
    done = import_folder(
        source,
        folder,
        cache_dir / key,
        format=format,
        tokenizer=opened,
        options=ImportOptions(document_end, copy, licence, attribution, pad_id, utf8_bytes),
        before_commit=install,
        progress=progress,
    )
    flags: dict[str, object] = {"--from": format, "--cache-dir": cache_dir, "--tokenizer": tokenizer, "--val": val}
    flags |= {"--document-end": document_end, "--licence": licence, "--attribution": attribution, "--pad-id": pad_id}
    flags |= {"--copy": copy, "--no-utf8-bytes": not utf8_bytes}
    _record(source, cache_dir, key, flags, time.perf_counter() - begin)
    return done


def _record(source: Path, cache_dir: Path, key: str, flags: Mapping[str, object], seconds: float) -> None:
    """Append the import to the runs of the cache. Errors take the command from there that makes the cache again."""
    words = [str(source.absolute()), key]
    for flag, value in flags.items():
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    line = {"time": time.time(), "key": key, "seconds": round(seconds, 3), "peak_bytes": None, "fingerprint": ""}
    append_run(cache_dir, key, {**line, "import": words, "settings": {}})


def key_of(name: str) -> str:
    """Return the key of an imported cache: imported/wiki for wiki. Raises: ValueError for a malformed name."""
    found = _NAME.fullmatch(name)
    if found is None:
        expected = "up to 100 letters, digits and _, a letter first, alone or behind imported/, pretrain/ or sft/, "
        expected += "and not tokenizer"
        raise ValueError(f"NAME {name!r}: expected {expected}")
    return f"{found[1] or IMPORTED}/{found[2]}"


def _opened(source: Path, settings: Settings, of_manifest: str | None) -> FullTokenizer:
    """Return the tokenizer of the ids: the named one, or the folder's if the manifest has its sha256."""
    shared = Path(settings.cache_dir) / TOKENIZER_KEY
    if settings.tokenizer is not None:
        tokenizer = named_tokenizer(settings)
    elif of_manifest is None or (find_meta(shared) or {}).get("tokenizer_sha256") != of_manifest:
        found = "does not say which tokenizer made its ids"
        if of_manifest is not None:
            found = f"ids of tokenizer {of_manifest[:12]}, and {shared} has another one"
        remedy = "Name the tokenizer: --tokenizer with its folder, its file or its id of the hub"
        raise CacheError(source, found, remedy=remedy, code="E223")
    else:
        tokenizer = load_tokenizer(shared, follow_links=False)
    if of_manifest not in (None, tokenizer.sha256):
        found, expected = f"tokenizer {tokenizer.sha256[:12]}", f"{str(of_manifest)[:12]}, which made the ids"
        raise CacheError(tokenizer.model_path, found, expected, f"{source} was exported with that one", code="E223")
    return tokenizer


def _place(cache_dir: Path, key: str, tokenizer: FullTokenizer, settings: Settings) -> Callable[[], object]:
    """Return a function that installs the tokenizer where readers of this cache find it, and readers of no other.

    Raises: CacheError E223 in pretrain/ or sft/ if the caches there have another tokenizer.
    """
    folder = cache_dir / TOKENIZER_KEY
    shared = (find_meta(folder) or {}).get("tokenizer_sha256") if folder.is_dir() else None
    if key.startswith(f"{IMPORTED}/"):
        own = versions_dir(cache_dir / key) / TOKENIZER_KEY
        if shared == tokenizer.sha256 and not own.is_symlink():
            return lambda: None
        if settings.tokenizer is None:  # that of the folder, and an earlier import left another one here
            settings = replace(settings, tokenizer=str(folder))
        return lambda: copy_tokenizer(settings, own)
    others = {shared}
    if shared is None:
        with contextlib.suppress(FileNotFoundError):  # no cache is there
            outcomes, _ = recorded_outcomes(cache_dir)
            of_builds = (each.meta for each in outcomes if not each.key.startswith(f"{IMPORTED}/"))
            others |= {meta.get("tokenizer_sha256") for meta in of_builds}
    if other := next((each for each in others if each not in (None, tokenizer.sha256)), None):
        found, expected = f"ids of tokenizer {tokenizer.sha256[:12]}", f"tokenizer {other[:12]}, as in the other caches"
        remedy = f"Import it as {IMPORTED}/{key.partition('/')[2]}, or into another --cache-dir"
        raise CacheError(cache_dir / key, found, expected, remedy, code="E223")
    return lambda: None if shared is not None else ensure_tokenizer(settings)
