"""Where a cache's tokenizer comes from (D19): it is there, or is copied, or is trained on the sources' texts."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt import versions
from niels_gpt.build.describe import FORMAT_VERSION, content_sha256
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.data import oasst1
from niels_gpt.data.exclude import read_exclusion, remaining
from niels_gpt.data.types import PretrainSample
from niels_gpt.fileio import META_NAME, CacheError, write_bytes
from niels_gpt.interrupts import ended_at_once
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes import sources
from niels_gpt.recipes.measured import Measured
from niels_gpt.recipes.origins import Origin, origin_of
from niels_gpt.recipes.own import own_sources
from niels_gpt.recipes.produce import TOKENIZER_KEY, Outcome, cache_root, finish, produce
from niels_gpt.recipes.replaced import say_unseen, warn_of_little_text, warn_of_older_caches
from niels_gpt.records import checked_sha256, meta_bytes, parse_object
from niels_gpt.roundtrip import roundtrip
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import MODEL_NAME, load_tokenizer, read_model
from niels_gpt.tokenizer_training import MAX_VOCAB_SIZE, train_tokenizer

logger = logging.getLogger(__name__)

TRAINING_ORDER = ("roam", "wikitext", "dolly15k", "oasst1", "gutenberg", "fineweb_edu")
"""Small sources first: each takes at most an equal part of what is left, so the endless one fills the rest."""
FAILED = "failed"
TRAINING_SETTINGS = {
    "vocab_size": "requested_vocab_size",
    "model_type": "model_type",
    "normalization": "normalization",
    "character_coverage": "character_coverage",
    "seed": "seed",
    "tokenizer_max_bytes": "max_bytes",
}
"""The settings that decide a tokenizer trained here, and the keys of its meta.json that record them."""


def ensure_tokenizer(settings: Settings, *, own_only: bool = False) -> Outcome:
    """Return <cache>/tokenizer (spm.model, meta.json), made and installed first if need be.

    The arguments, and Raises: as `stage_tokenizer`.
    """
    staged = stage_tokenizer(settings, own_only=own_only)
    install_tokenizer(settings, staged)
    return replace(staged, path=cache_root(settings) / TOKENIZER_KEY)


def install_tokenizer(settings: Settings, staged: Outcome) -> None:
    """Let <cache>/tokenizer stand for a tokenizer that `stage_tokenizer` has returned, unless it does already."""
    path = cache_root(settings) / TOKENIZER_KEY
    if staged.path != path:
        with versions.build_lock(path, wait=True):
            versions.publish(staged.path, path)


def built_with(settings: Settings, origin: Origin, key: str, **how: Any) -> Outcome:
    """Build a cache with the tokenizer of its folder, and install a new tokenizer when that has succeeded.

    So a build that is refused leaves the tokenizer, and every cache that was built with it, as they were.
    key, how: of the cache, and the other arguments of `produce`.
    """
    staged = stage_tokenizer(settings, own_only=origin.own is not None)
    outcome = produce(settings, key, origin=origin, tokenizer_folder=staged.path, **how)
    install_tokenizer(settings, staged)
    if not outcome.reused:
        say_unseen(settings, staged.meta, outcome.key)
    return outcome


def stage_tokenizer(settings: Settings, *, own_only: bool = False, announce: bool = False) -> Outcome:
    """Return the tokenizer of the settings; one that would replace another is checked and made, but not installed.

    Its `path` is <cache>/tokenizer, or the folder of a version for `install_tokenizer`. One that is trained where there
    is none is installed.
    own_only: train a missing one on the user's own sources alone, so that their caches need no network.
    announce: say which caches a new one makes unreadable, even if it was made by an earlier call; when it is made that
        is said in any case.

    A named model (`tokenizer_model`) replaces another one. A model trained here is trained anew when its settings
    change, or when a source that failed at that time has changed; else a change of the text is no reason.
    Raises: FileNotFoundError for a named model that is absent; CacheError for one that cannot be used: no SentencePiece
        model, without the sentinels, of more than 65,536 ids, or trained on the sample where the text is not;
        ConnectionError for a hub that cannot be reached: a tokenizer outlives an outage; ValueError where there is no
        text to train on.
    """
    path = folder = cache_root(settings) / TOKENIZER_KEY
    with Measured() as measured:
        meta = _reusable(settings, path)
        reused = meta is not None
        if reused:
            versions.clear_leftovers(path)
        if meta is None:
            # Two caches that are built at once both want it: one makes it, the other waits and finds it there.
            with versions.building(path, wait=True) as work:
                meta = _reusable(settings, path)
                reused = meta is not None
                if meta is None:
                    folder, meta, reused = _make(settings, work, path, own_only and _knows_no_other(path))
        if folder != path and (announce or not reused):
            warn_of_older_caches(settings, meta)
    return finish(settings, TOKENIZER_KEY, folder, meta, reused, measured, str(meta["tokenizer_sha256"]))


def tokenizer_state(settings: Settings) -> str:
    """Say what `ensure_tokenizer` would do: "up to date", "copy", "train", or "cannot be used" and why."""
    if _reusable(settings, cache_root(settings) / TOKENIZER_KEY) is not None:
        return "up to date"
    given = _given_model(settings)
    try:
        if given is not None:
            _copied(settings, given)
    except CacheError as error:
        return f"cannot be used: {error}"
    return "copy" if given else "train"


def _knows_no_other(path: Path) -> bool:
    """Whether a tokenizer that is trained anew replaces one of one's own text alone, or none."""
    with contextlib.suppress(CacheError):
        return bool((find_meta(path) or {}).get("trained_on", "own") == "own")
    return True


def _make(settings: Settings, work: Path, path: Path, own_only: bool) -> tuple[Path, dict[str, Any], bool]:
    """Return the folder of a tokenizer, its meta, and whether an earlier run had made it."""
    given = _given_model(settings)
    if given is not None:
        model, about = _copied(settings, given)
        version = versions.versions_dir(path) / _content_of(_record(model))[: versions.VERSION_DIGITS]
        known = _sound(version)
    else:
        version, known = _trained_before(settings, path)
    if known is not None:
        return version, known, True
    if given is None:
        model, about = _trained(settings, own_only)
    meta = _write(model, about, work)
    version = versions.store(work, path, str(meta["content_sha256"]))
    if given is not None or _installed(path) is not None:
        return version, meta, False
    versions.publish(version, path)  # nothing is refused because of it, and training it once more would take minutes
    return path, meta, False


def _installed(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(CacheError):
        return find_meta(path)
    return None


def _sound(version: Path) -> dict[str, Any] | None:
    """Return the meta of a version of a tokenizer; None where there is none, or it is damaged."""
    with contextlib.suppress(CacheError, OSError):
        meta = read_meta(str(version / META_NAME))
        model = read_model(version / MODEL_NAME, follow_links=False)
        return meta if hashlib.sha256(model).hexdigest() == meta.get("tokenizer_sha256") else None
    return None


def _trained_before(settings: Settings, path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return a version that these settings have trained after the installed one, and that is not installed yet."""
    folder = versions.versions_dir(path)
    installed = path.resolve()
    if _installed(path) is None or installed.parent != folder.resolve():
        return folder, None
    newer = [version for version in folder.glob("[0-9a-f]" * versions.VERSION_DIGITS) if not version.is_symlink()]
    for version in sorted(newer, key=lambda version: -version.stat().st_mtime_ns):
        if version.stat().st_mtime_ns <= installed.stat().st_mtime_ns:
            break
        meta = _sound(version)
        if meta is not None and meta.get("origin") == "trained" and _is_of(settings, meta):
            return version, meta
    return folder, None


def _reusable(settings: Settings, path: Path) -> dict[str, Any] | None:
    try:
        meta = find_meta(path)
        if meta is not None:
            checked_sha256(meta.get("tokenizer_sha256"), "tokenizer_sha256", str(path / META_NAME))
    except CacheError as error:
        logger.warning("tokenizer: made anew: %s", error)
        return None
    if meta is None or not (path / MODEL_NAME).is_file():
        return None
    if settings.tokenizer_model is not None:
        digest = hashlib.sha256(_bytes_of(settings.tokenizer_model)).hexdigest()
        return meta if digest == meta.get("tokenizer_sha256") else None
    if meta.get("origin") == "trained":
        return meta if _is_of(settings, meta) else None
    return meta


def _is_of(settings: Settings, meta: Mapping[str, Any]) -> bool:
    """Whether a tokenizer that was trained here is the one that these settings would train."""
    same = all(meta.get(key) == getattr(settings, name) for name, key in TRAINING_SETTINGS.items())
    named = {*TRAINING_ORDER, *own_sources(settings)}
    failed = {name: old for name, old in meta.get("failed_sources", {}).items() if name in named}
    return same and all(_fingerprint(settings, name) == old for name, old in failed.items())


def _fingerprint(settings: Settings, source: str) -> str | None:
    """Return what a source that failed would have to change for another attempt; None where it cannot be told."""
    try:
        return str(origin_of(settings, source).facts(None, ask_hub=False)["fingerprint"])
    except (OSError, ValueError):
        return None


def _given_model(settings: Settings) -> Path | None:
    if settings.tokenizer_model is not None:
        return Path(settings.tokenizer_model)
    if settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file():
        return DEFAULT_TOKENIZER_PATH
    return None


def _bytes_of(model: str | Path) -> bytes:
    try:
        return read_model(os.path.expanduser(model))
    except OSError as error:
        raise FileNotFoundError(
            f"{model}: no tokenizer model can be read there ({error.strerror or 'there is none'}). Name a "
            "SentencePiece model, or leave --tokenizer-model out to have one trained"
        ) from None


def _copied(settings: Settings, model: Path) -> tuple[bytes, dict[str, Any]]:
    content = _bytes_of(model)
    tokenizer = load_tokenizer(os.path.expanduser(model))  # refuses a model without the sentinels
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise CacheError(
            f"{model}: a vocabulary of {tokenizer.vocab_size:,} ids, expected at most {MAX_VOCAB_SIZE:,}: a cache has "
            "tokens of 16 bits"
        )
    known: dict[str, Any] = {}
    for name in ("tokenizer_meta.json", META_NAME):
        beside = model.parent / name
        with contextlib.suppress(CacheError, OSError):
            found = read_meta(str(beside))
            if tokenizer.sha256 in (found.get("tokenizer_sha256"), found.get("model_sha256")):
                known = found
    if settings.source_root != "sample" and known.get("trained_on") == "sample":
        raise CacheError(
            f"{model}: this tokenizer was trained on the bundled sample, so it must not encode real text. Name another "
            "one with --tokenizer-model, or leave that out"
        )
    about: dict[str, Any] = {key: known[key] for key in ("trained_on", "normalization", "model_type") if key in known}
    return content, {"trained_on": "unknown", **about, "origin": "copied"}


def _trained(settings: Settings, own_only: bool) -> tuple[bytes, dict[str, Any]]:
    seen: dict[str, int | str] = {}
    looked_at: dict[str, str] = {}
    names = [*own_sources(settings), *([] if own_only else TRAINING_ORDER)]
    excluded = {} if settings.exclude is None else {"exclude": read_exclusion(settings.exclude).facts}
    logger.info(
        "tokenizer: training %d pieces; some minutes for 100 MB of text. Ctrl-C ends it at once", settings.vocab_size
    )
    kind = settings.source_root if settings.source_root in ("sample", "hub") else "mirror"
    with ended_at_once():
        trained = train_tokenizer(
            _training_texts(settings, names, seen, looked_at),
            vocab_size=settings.vocab_size,
            seed=settings.seed,
            model_type=settings.model_type,
            normalization=settings.normalization,
            character_coverage=settings.character_coverage,
            trained_on="own" if own_only else kind,
        )
    if kind == "mirror" and "fineweb_edu" in looked_at:  # a snapshot that was long enough: the hub's own text
        trained.meta["trained_on"] = "hub"
    failed = {name: _fingerprint(settings, name) for name, size in seen.items() if size == FAILED}
    about = {
        "max_bytes": settings.tokenizer_max_bytes,
        "trained_on_bytes": seen,
        "trained_on_sources": looked_at,
        "failed_sources": failed,
        **excluded,
    }
    if kind != "sample":
        warn_of_little_text(trained.meta, seen)
    return trained.model, {**trained.meta, **about, "origin": "trained"}


def _training_texts(
    settings: Settings, names: Sequence[str], seen: dict[str, int | str], looked_at: dict[str, str]
) -> Iterator[str]:
    """Yield at most tokenizer_max_bytes of the sources' texts.

    seen, looked_at: receive the utf-8 bytes that each source gave, and the fingerprint of each that the hub gave.
    """
    left = settings.tokenizer_max_bytes
    missing: list[str] = []
    for position, source in enumerate(names):
        share = left // (len(names) - position)
        taken = 0
        try:
            for text in _texts_of(settings, source, looked_at):
                size = len(text.encode(errors="replace"))
                if taken + size > share:
                    break
                taken += size
                yield text
            seen[source] = taken
        except sources.SnapshotTooShort as error:
            logger.warning("tokenizer: not the one of the hub, for it has seen less text: %s", error)
            seen[source] = taken
            del looked_at[source]
        except (FileNotFoundError, ValueError) as error:
            logger.warning("tokenizer: trained without %s: %s", source, error)
            missing.append(f"{source}: {error}")
            seen[source] = "absent" if isinstance(error, FileNotFoundError) else FAILED
        left -= taken
    if missing and not any(isinstance(size, int) and size for size in seen.values()):
        raise ValueError(
            "no tokenizer, and no text to train one on. Name one with --tokenizer-model, or see to:\n  "
            + "\n  ".join(missing)
        )


def _texts_of(settings: Settings, source: str, looked_at: dict[str, str]) -> Iterator[str]:
    counters: Counter[str] = Counter()  # the builders count; here a loss costs a piece at most
    origin = origin_of(settings, source)
    if origin.stub:
        raise FileNotFoundError(f"{source} is a stub here")
    revision = None
    if origin.ordered:
        # Asked before the stream is opened: a hub that cannot be reached says so at once. A cache that is built first
        # after this takes the same revision.
        facts = origin.facts(None)
        revision, looked_at[source] = facts["revision"], str(facts["fingerprint"])
    if source == "fineweb_edu":
        documents = sources.fineweb_edu_texts(settings, origin, revision, counters)
    elif source == "wikitext":
        documents = sources.wikitext_texts(settings, revision, counters, sources.wikitext_splits(settings, origin))
    elif source == "roam":
        documents = sources.roam_texts(settings, origin, counters)
    elif source == "gutenberg":
        documents = sources.gutenberg_texts(settings, origin, revision, counters)
    elif origin.own is not None and origin.own.family == "pretrain":
        documents = sources.own_texts(settings, origin, counters)
    elif source == "oasst1":
        return _oasst1_messages(settings, revision, counters)
    else:
        chats = sources.chats(settings, origin, revision, counters)
        return (turn["content"] for _, chat in chats for turn in chat)
    return (text for _, text, _ in documents)


def _oasst1_messages(settings: Settings, revision: str | None, counters: Counter[str]) -> Iterator[str]:
    """Yield each message once: threads of one tree share their first messages."""
    trees = oasst1.iter_oasst1_trees(
        split="all",
        source_root=settings.source_root,
        dataset_id=settings.oasst1_dataset,
        revision=revision,
        counters=counters,
    )
    messages = (
        PretrainSample(m["text"], oasst1.SOURCE, {"id": m["message_id"], "message_tree_id": m["message_tree_id"]})
        for m in itertools.chain.from_iterable(trees)
        if m.get("lang") == "en" or not settings.oasst1_english_only
    )
    return (message.text for message in remaining(messages, settings.exclude, counters))


def _record(model: bytes) -> dict[str, Any]:
    return {"name": MODEL_NAME, "bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()}


def _content_of(record: dict[str, Any]) -> str:
    return content_sha256([record])


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
        "content_sha256": _content_of(record),
    }
    write_bytes(work / META_NAME, raw := meta_bytes(meta))
    return parse_object(raw)
