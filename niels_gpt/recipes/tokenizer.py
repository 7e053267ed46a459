"""Which tokenizer a cache is encoded with (D19): the installed one, a copy of a named model, or one trained here."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.builders.meta_keys import FORMAT_VERSION, content_sha256
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Measurement, Outcome, cache_root, finish, run_recipe
from niels_gpt.recipes.tokenizer_change import log_unseen_source, warn_of_older_caches
from niels_gpt.recipes.tokenizer_texts import train, was_trained_by
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.codes import coded
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.meta_json import checked_sha256, meta_bytes, parse_object, resolved
from niels_gpt.tokenizer import MODEL_NAME, load_tokenizer, read_model
from niels_gpt.tokenizer_training import MAX_VOCAB_SIZE
from niels_gpt.tokenizers.roundtrip import roundtrip

logger = logging.getLogger(__name__)


def ensure_tokenizer(settings: Settings, *, user_sources_only: bool = False) -> Outcome:
    """Return <cache>/tokenizer (spm.model, meta.json); it is made and installed first if necessary.

    Arguments and errors: see `stage_tokenizer`.
    """
    staged = stage_tokenizer(settings, user_sources_only=user_sources_only)
    install_tokenizer(settings, staged)
    return replace(staged, path=cache_root(settings) / TOKENIZER_KEY)


def install_tokenizer(settings: Settings, staged: Outcome) -> None:
    """Make <cache>/tokenizer the tokenizer that `stage_tokenizer` returned, unless it already is."""
    path = cache_root(settings) / TOKENIZER_KEY
    if staged.path != path:
        with versions.build_lock(path, wait=True):
            versions.publish(staged.path, path)


def build_with_tokenizer(settings: Settings, source: ResolvedSource, key: str, **how: Any) -> Outcome:
    """Build a cache with the tokenizer of its folder, and install a new tokenizer when that has succeeded.

    So a build that is refused leaves the tokenizer, and every cache that was built with it, unchanged.
    key, how: of the cache, and the other arguments of `run_recipe`.
    """
    staged = stage_tokenizer(settings, user_sources_only=source.user is not None)
    outcome = run_recipe(settings, key, source=source, tokenizer_folder=staged.path, **how)
    install_tokenizer(settings, staged)
    if not outcome.reused:
        log_unseen_source(settings, staged.meta, outcome.key)
    return outcome


def stage_tokenizer(settings: Settings, *, user_sources_only: bool = False, announce: bool = False) -> Outcome:
    """Return the tokenizer of the settings. One that would replace another is checked and made, but not installed.

    Its `path` is <cache>/tokenizer, or the folder of a version for `install_tokenizer`. A tokenizer that is trained
    where there is none is installed.
    user_sources_only: train a missing one on user-defined sources alone, so that their caches need no network.
    announce: warn of the caches that a new one makes unreadable even if an earlier call made it.

    A named model (`tokenizer`) replaces another one. A model trained here is trained again when its settings
    change, or when a source that failed at that time has changed; other changes of the text do not count.
    Raises: FileNotFoundError for a named model that is absent; CacheError for one that cannot be used: no SentencePiece
        model, without the sentinels, of more than 65,536 ids, or trained on the sample where the text is not;
        ConnectionError for a hub that cannot be reached: a tokenizer outlives an outage; ValueError where there is no
        text to train on.
    """
    path = folder = cache_root(settings) / TOKENIZER_KEY
    with Measurement() as measurement:
        meta = _installed_for(settings, path)
        reused = meta is not None
        if reused:
            versions.clear_leftovers(path)
        if meta is None:
            # Of two caches that are built at once, one makes the tokenizer, and the other waits and finds it.
            with versions.building(path, wait=True) as work:
                meta = _installed_for(settings, path)
                reused = meta is not None
                if meta is None:
                    folder, meta, reused = _make(settings, work, path, user_sources_only)
        if folder != path and (announce or not reused):
            warn_of_older_caches(settings, meta)
    return finish(settings, TOKENIZER_KEY, folder, meta, reused, measurement, str(meta["tokenizer_sha256"]))


def tokenizer_state(settings: Settings) -> str:
    """Return what `ensure_tokenizer` would do: "up to date", "copy", "train", or "cannot be used" and why."""
    if _installed_for(settings, cache_root(settings) / TOKENIZER_KEY) is not None:
        return "up to date"
    model = _model_to_copy(settings)
    try:
        if model is not None:
            _copy(settings, model)
    except CacheError as error:
        return f"cannot be used: {error}"
    return "copy" if model else "train"


def _installed_for(settings: Settings, path: Path) -> dict[str, Any] | None:
    """Return the meta of the installed tokenizer if it is the one of these settings, else None."""
    try:
        meta = find_meta(path)
        if meta is not None:
            checked_sha256(meta.get("tokenizer_sha256"), "tokenizer_sha256", str(path / META_NAME))
    except CacheError as error:
        logger.warning("tokenizer: made again: %s", error, extra={"code": "W403"})
        return None
    if meta is None or not (path / MODEL_NAME).is_file():
        return None
    if settings.tokenizer is not None:
        digest = hashlib.sha256(_read_named(settings.tokenizer)).hexdigest()
        return meta if digest == meta.get("tokenizer_sha256") else None
    if meta.get("origin") == "trained":
        return meta if was_trained_by(settings, meta) else None
    return meta


def _make(settings: Settings, work: Path, path: Path, user_sources_only: bool) -> tuple[Path, dict[str, Any], bool]:
    """Return the folder of a tokenizer, its meta, and whether an earlier run made it."""
    model_path = _model_to_copy(settings)
    installed = _meta_or_none(path)
    if model_path is not None:
        model, about = _copy(settings, model_path)
        folder = versions.versions_dir(path) / content_sha256([_record(model)])[: versions.VERSION_DIGITS]
        if (known := _undamaged(folder)) is not None:
            return folder, known, True
    else:
        if (earlier := _trained_earlier(settings, path)) is not None:
            return *earlier, True
        only_user_sources = installed is None or installed.get("trained_on", "own") == "own"
        model, about = train(settings, user_sources_only and only_user_sources)
    meta = _write(model, about, work)
    version = versions.store(work, path, str(meta["content_sha256"]))
    if model_path is not None or installed is not None:
        return version, meta, False
    versions.publish(version, path)  # it makes no cache unreadable, and training takes minutes
    return path, meta, False


def _meta_or_none(path: Path) -> dict[str, Any] | None:
    """Return the meta of a tokenizer; None without one, or if it is damaged."""
    with contextlib.suppress(CacheError):
        return find_meta(path)
    return None


def _undamaged(version: Path) -> dict[str, Any] | None:
    """Return the meta of a version of a tokenizer; None without one, or if it is damaged."""
    with contextlib.suppress(CacheError, OSError):
        meta = read_meta(str(version / META_NAME))
        model = read_model(version / MODEL_NAME, follow_links=False)
        return meta if hashlib.sha256(model).hexdigest() == meta.get("tokenizer_sha256") else None
    return None


def _trained_earlier(settings: Settings, path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return a version that these settings trained after the installed one, and that is not installed yet."""
    folder = versions.versions_dir(path)
    installed = resolved(path)
    if _meta_or_none(path) is None or installed.parent != resolved(folder):
        return None
    candidates = [version for version in folder.glob("[0-9a-f]" * versions.VERSION_DIGITS) if not version.is_symlink()]
    for version in sorted(candidates, key=lambda version: -version.stat().st_mtime_ns):
        if version.stat().st_mtime_ns <= installed.stat().st_mtime_ns:
            break
        meta = _undamaged(version)
        if meta is not None and meta.get("origin") == "trained" and was_trained_by(settings, meta):
            return version, meta
    return None


def _model_to_copy(settings: Settings) -> Path | None:
    if settings.tokenizer is not None:
        return Path(settings.tokenizer)
    if settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file():
        return DEFAULT_TOKENIZER_PATH
    return None


def _read_named(model: str | Path) -> bytes:
    try:
        return read_model(os.path.expanduser(model))
    except OSError as error:
        raise coded(
            "E401",
            FileNotFoundError(
                f"{model}: no tokenizer model can be read there ({error.strerror or 'there is none'}). Name a "
                "SentencePiece model, or leave --tokenizer out to have one trained"
            ),
        ) from None


def _copy(settings: Settings, model: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a model's bytes and its part of meta.json, also from the meta beside it."""
    content = _read_named(model)
    tokenizer = load_tokenizer(os.path.expanduser(model), sentinels="required")  # refuses a model without the sentinels
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise CacheError(
            model,
            f"a vocabulary of {tokenizer.vocab_size:,} ids",
            f"at most {MAX_VOCAB_SIZE:,}: a cache has tokens of 16 bits",
            code="E409",
        )
    known: dict[str, Any] = {}
    for name in ("tokenizer_meta.json", META_NAME):
        with contextlib.suppress(CacheError, OSError):
            beside = read_meta(str(model.parent / name))
            if tokenizer.sha256 in (beside.get("tokenizer_sha256"), beside.get("model_sha256")):
                known = beside
    if settings.source_root != "sample" and known.get("trained_on") == "sample":
        raise CacheError(
            model,
            "this tokenizer was trained on the bundled sample",
            "one that may encode real text",
            "Name another one with --tokenizer, or leave that out",
            code="E405",
        )
    about: dict[str, Any] = {key: known[key] for key in ("trained_on", "normalization", "model_type") if key in known}
    return content, {"trained_on": "unknown", **about, "origin": "copied"}


def _record(model: bytes) -> dict[str, Any]:
    return {"name": MODEL_NAME, "bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()}


def _write(model: bytes, about: dict[str, Any], work: Path) -> dict[str, Any]:
    """Write both files of a tokenizer; returns its meta."""
    write_bytes(work / MODEL_NAME, model)
    tokenizer = load_tokenizer(work / MODEL_NAME)
    record, trip = _record(model), roundtrip(tokenizer)
    meta = {
        **{key: value for key, value in about.items() if key != "model_sha256"},
        "lossless": trip["differ"] == 0,
        "roundtrip": trip,
        "format_version": FORMAT_VERSION,
        "kind": "tokenizer",
        "built": True,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "special_token_ids": tokenizer.special_token_ids(),
        "files": [record],
        "content_sha256": content_sha256([record]),
    }
    write_bytes(work / META_NAME, raw := meta_bytes(meta))
    return parse_object(raw)
