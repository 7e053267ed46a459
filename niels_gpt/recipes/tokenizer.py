"""Where a cache's tokenizer comes from (D19): it is there, or is copied, or is trained on the sources' texts."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from niels_gpt import versions
from niels_gpt.build.describe import FORMAT_VERSION, content_sha256
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.data import oasst1
from niels_gpt.data.exclude import read_exclusion, remaining
from niels_gpt.data.types import PretrainSample
from niels_gpt.fileio import META_NAME, CacheError, sha256_file, write_bytes
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes import sources
from niels_gpt.recipes.measured import Measured
from niels_gpt.recipes.origins import origin_of
from niels_gpt.recipes.own import own_sources
from niels_gpt.recipes.produce import TOKENIZER_KEY, Outcome, cache_root, finish
from niels_gpt.records import checked_sha256, meta_bytes, parse_object
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import MODEL_NAME, load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer

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
    """Return <cache>/tokenizer (spm.model, meta.json), made first if need be.

    own_only: train a missing one on the user's own sources alone, so that their caches need no network.

    A named model (`tokenizer_model`) replaces another one. A model trained here is trained anew when its settings
    change, or when a source that failed at that time has changed; else a change of the text is no reason.
    Raises: FileNotFoundError for a named model that is absent; ConnectionError for a hub that cannot be reached: a
        tokenizer outlives an outage; ValueError where there is no text to train on.
    """
    path = cache_root(settings) / TOKENIZER_KEY
    with Measured() as measured:
        meta = _reusable(settings, path)
        reused = meta is not None
        if meta is None:
            # Two caches that are built at once both want it: one makes it, the other waits and finds it there.
            with versions.building(path, wait=True) as work:
                meta = _reusable(settings, path)
                reused = meta is not None
                if meta is None:
                    meta = _make(settings, work, path, own_only and _knows_no_other(path))
    return finish(settings, TOKENIZER_KEY, path, meta, reused, measured, str(meta["tokenizer_sha256"]))


def tokenizer_state(settings: Settings) -> str:
    """Say what `ensure_tokenizer` would do: "up to date", "copy" or "train"."""
    if _reusable(settings, cache_root(settings) / TOKENIZER_KEY) is not None:
        return "up to date"
    return "copy" if _given_model(settings) else "train"


def _knows_no_other(path: Path) -> bool:
    """Whether a tokenizer that is trained anew replaces one of one's own text alone, or none."""
    with contextlib.suppress(CacheError):
        return bool((find_meta(path) or {}).get("trained_on", "own") == "own")
    return True


def _make(settings: Settings, work: Path, path: Path, own_only: bool) -> dict[str, Any]:
    given = _given_model(settings)
    model, about = _copied(given) if given else _trained(settings, own_only)
    meta = _commit(model, about, work, path)
    _warn_of_older_caches(path.parent, str(meta["tokenizer_sha256"]))
    return meta


def _warn_of_older_caches(root: Path, sha256: str) -> None:
    for folder in sorted(path for kind in ("pretrain", "sft") for path in (root / kind).glob("[!.]*")):
        with contextlib.suppress(CacheError):  # whoever reads a damaged cache is told
            if (find_meta(folder) or {}).get("tokenizer_sha256") not in (None, sha256):
                logger.warning("%s: has ids of the tokenizer before; readers refuse it until it is built again", folder)


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
        return meta if _sha256_of(settings.tokenizer_model) == meta.get("tokenizer_sha256") else None
    if meta.get("origin") == "trained":
        same = all(meta.get(key) == getattr(settings, name) for name, key in TRAINING_SETTINGS.items())
        named = {*TRAINING_ORDER, *own_sources(settings)}
        failed = {name: old for name, old in meta.get("failed_sources", {}).items() if name in named}
        return meta if same and all(_fingerprint(settings, name) == old for name, old in failed.items()) else None
    return meta


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


def _sha256_of(model: str) -> str:
    try:
        return sha256_file(model)
    except OSError as error:
        raise FileNotFoundError(
            f"{model}: no tokenizer model can be read there ({error.strerror}). Name a SentencePiece model, or leave "
            "--tokenizer-model out to have one trained"
        ) from None


def _copied(model: Path) -> tuple[bytes, dict[str, Any]]:
    digest = _sha256_of(str(model))
    logger.info("tokenizer: copying %s", model)
    known: dict[str, Any] = {}
    for name in ("tokenizer_meta.json", META_NAME):
        beside = model.parent / name
        if beside.is_file() and digest in beside.read_text(encoding="utf-8"):
            known = read_meta(str(beside))
    about: dict[str, Any] = {
        key: known[key] for key in ("trained_on", "lossless", "normalization", "model_type") if key in known
    }
    return model.read_bytes(), {"trained_on": "unknown", **about, "origin": "copied"}


def _trained(settings: Settings, own_only: bool) -> tuple[bytes, dict[str, Any]]:
    seen: dict[str, int | str] = {}
    looked_at: dict[str, str] = {}
    names = [*own_sources(settings), *([] if own_only else TRAINING_ORDER)]
    excluded = {} if settings.exclude is None else {"exclude": read_exclusion(settings.exclude).facts}
    logger.info("tokenizer: training %d pieces; some minutes for 100 MB of text", settings.vocab_size)
    kind = settings.source_root if settings.source_root in ("sample", "hub") else "mirror"
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


def _commit(model: bytes, about: dict[str, Any], work: Path, path: Path) -> dict[str, Any]:
    write_bytes(work / MODEL_NAME, model)
    tokenizer = load_tokenizer(work / MODEL_NAME)  # refuses a model without the sentinels, before it is committed
    record = {"name": MODEL_NAME, "bytes": len(model), "sha256": tokenizer.sha256}
    meta = {
        **{key: value for key, value in about.items() if key != "model_sha256"},
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
    versions.commit(work, path, str(meta["content_sha256"]))
    return parse_object(raw)
