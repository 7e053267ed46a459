"""Train a tokenizer: on which sources, in which order, on how much text of each, with which settings."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.data.sources import SOURCES
from niels_gpt.engine.meta import content_sha256
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import ResolvedSource, resolve_whole
from niels_gpt.recipes.user_sources import text_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError, TokenizerError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import file_records, resolved
from niels_gpt.tokenizer_training import train_tokenizer
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON, tokenizer_files
from niels_gpt.work import ended_at_once

logger = logging.getLogger(__name__)

TRAINING_SETTINGS = {
    "vocab_size": "requested_vocab_size",
    "model_type": "model_type",
    "normalization": "normalization",
    "character_coverage": "character_coverage",
    "seed": "seed",
    "tokenizer_max_bytes": "max_bytes",
}
"""Settings that decide a trained tokenizer -> keys of its meta.json that record them."""
ASKING = ("tokenizer_kind", *(name for name in TRAINING_SETTINGS if name != "seed"))
"""Settings with which a build asks for another tokenizer than the installed one."""
_OF_SENTENCEPIECE = ("model_type", "normalization", "character_coverage")
_FAILED = "failed"
_LITTLE_TEXT = 1_000_000  # utf-8 bytes: a tokenizer of fewer has hardly a piece longer than a syllable


def training_order() -> list[str]:
    """Return the built-in sources, small ones first: the largest comes last and fills the rest."""
    return sorted(SOURCES, key=lambda name: SOURCES[name].training_rank)


def train(settings: Settings, user_sources_only: bool) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Train a tokenizer on the sources. Returns its files and its meta. Raises: ValueError without text."""
    num_bytes: dict[str, int | str] = {}
    fingerprints: dict[str, str] = {}
    names = [*text_sources(settings), *([] if user_sources_only else training_order())]
    excluded = {} if settings.exclude is None else {"exclude": read_exclusion(settings.exclude).facts}
    logger.info(
        "tokenizer: training %d pieces; some minutes for 100 MB of text. Ctrl-C ends it at once", settings.vocab_size
    )
    kind = settings.source_root if settings.source_root in ("sample", "hub") else "mirror"
    with ended_at_once():
        trained = train_tokenizer(
            _texts(settings, names, num_bytes, fingerprints),
            kind=settings.tokenizer_kind,
            vocab_size=settings.vocab_size,
            seed=settings.seed,
            model_type=settings.model_type,
            normalization=settings.normalization,
            character_coverage=settings.character_coverage,
            trained_on="own" if user_sources_only else kind,
        )
    about = {
        "max_bytes": settings.tokenizer_max_bytes,
        "trained_on_bytes": num_bytes,
        "trained_on_sources": fingerprints,
        "failed_sources": {name: source_state(settings, name) for name, size in num_bytes.items() if size == _FAILED},
        **excluded,
        "origin": "trained",
    }
    if kind == "mirror" and training_order()[-1] in fingerprints:  # a long enough snapshot: the hub's own text
        about["trained_on"] = "hub"
    if kind != "sample" and trained.meta["bytes_seen"] < _LITTLE_TEXT:
        logger.warning(
            "tokenizer: trained on little text, %s bytes of %s, for %s ids; every cache of this folder is encoded with "
            "it. Give the first build more sources, or name a model with --tokenizer",
            f"{trained.meta['bytes_seen']:,}",
            ", ".join(sources_with_text(num_bytes)),
            f"{trained.meta['vocab_size']:,}",
            extra={"code": "W405"},
        )
    name = TOKENIZER_JSON if settings.tokenizer_kind == "bpe" else MODEL_NAME
    return {name: trained.model}, trained.meta | about


def sources_with_text(num_bytes: Mapping[str, Any]) -> list[str]:
    """Return the sources that gave text. num_bytes: `trained_on_bytes` of the tokenizer's meta."""
    return [source for source, size in num_bytes.items() if isinstance(size, int) and size]


# --- which settings, and which version --------------------------------------------------------------------------------


def training_settings(settings: Settings) -> dict[str, Any]:
    """Return the TRAINING_SETTINGS that decide a tokenizer of the settings' kind."""
    read = (name for name in TRAINING_SETTINGS if settings.tokenizer_kind != "bpe" or name not in _OF_SENTENCEPIECE)
    return {name: getattr(settings, name) for name in read}


def has_values(settings: Settings, names: Sequence[str], meta: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer with this meta was trained here with these values of the named settings."""
    kind = "bpe" if meta.get("tokenizer_kind") == "huggingface" else "sentencepiece"
    made_by = {name: meta.get(key) for name, key in TRAINING_SETTINGS.items()} | {"tokenizer_kind": kind}
    return not names or (
        meta.get("origin") == "trained" and all(getattr(settings, name) == made_by[name] for name in names)
    )


def was_trained_by(settings: Settings, meta: Mapping[str, Any]) -> bool:
    """Return whether these settings trained the tokenizer with this meta, and would train the same again."""
    names = ["tokenizer_kind", *training_settings(settings)]
    return has_values(settings, names, meta) and not has_new_sources(settings, meta)


def has_new_sources(settings: Settings, meta: Mapping[str, Any]) -> bool:
    """Return whether a source that failed in the training of this tokenizer has changed."""
    known = {*training_order(), *text_sources(settings)}
    failed = {name: state for name, state in meta.get("failed_sources", {}).items() if name in known}
    return any(source_state(settings, name) != state for name, state in failed.items())


def source_state(settings: Settings, name: str) -> str | None:
    """Return the fingerprint of a source that failed; None if unknown. A change makes training try it again."""
    try:
        return str(_resolved(settings, name).provenance(None, ask_hub=False)["fingerprint"])
    except (OSError, ValueError):
        return None


def records_of(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the records of a tokenizer's files for meta.json."""
    return [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]


def meta_or_none(path: Path) -> dict[str, Any] | None:
    """Return the meta of a tokenizer; None if it is missing or damaged."""
    with contextlib.suppress(CacheError):
        return find_meta(path)
    return None


def undamaged(version: Path) -> dict[str, Any] | None:
    """Return the meta of a version of a tokenizer; None if it or a file is missing or damaged."""
    with contextlib.suppress(CacheError, OSError):
        meta = read_meta(str(version / META_NAME))
        records = records_of(tokenizer_files(version))
        names_model = meta.get("tokenizer_sha256") in {record["sha256"] for record in records}
        is_whole = records == file_records(meta) and content_sha256(records) == meta["content_sha256"]
        return meta if is_whole and names_model else None
    return None


def trained_earlier(settings: Settings, path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return a version that these settings trained after the installed one at `path`, not installed yet."""
    folder = versions.versions_dir(path)
    installed = resolved(path)
    if meta_or_none(path) is None or installed.parent != resolved(folder):
        return None
    candidates = [version for version in folder.glob("[0-9a-f]" * versions.VERSION_DIGITS) if not version.is_symlink()]
    for version in sorted(candidates, key=lambda version: -version.stat().st_mtime_ns):
        if version.stat().st_mtime_ns <= installed.stat().st_mtime_ns:
            break
        meta = undamaged(version)
        if meta is not None and was_trained_by(settings, meta):
            return version, meta
    return None


# --- the texts --------------------------------------------------------------------------------------------------------


def _texts(
    settings: Settings, names: Sequence[str], num_bytes: dict[str, int | str], fingerprints: dict[str, str]
) -> Iterator[str]:
    """Yield at most tokenizer_max_bytes of the sources' texts.

    num_bytes: receives the utf-8 bytes of each source, or "absent" or "failed". fingerprints: receives the fingerprints
        of sources that were read in the hub's order.
    """
    left = settings.tokenizer_max_bytes
    missing: dict[str, list[str]] = {}  # names by the reason
    for position, name in enumerate(names):
        share = left // (len(names) - position)
        used = 0
        try:
            for text in _texts_of(settings, name, fingerprints):
                size = len(text.encode(errors="replace"))
                if used + size > share:
                    break
                used += size
                yield text
            num_bytes[name] = used
        except sources.SnapshotTooShort as error:
            less = "tokenizer: trained on less text than from the hub, so it is another one: %s"
            logger.warning(less, error, extra={"code": "W406"})
            num_bytes[name] = used
            del fingerprints[name]
        except (FileNotFoundError, ValueError) as error:
            missing.setdefault(str(error), []).append(name)
            num_bytes[name] = "absent" if isinstance(error, FileNotFoundError) else _FAILED
        left -= used
    lines = [f"{', '.join(without)}: {reason}" for reason, without in missing.items()]
    if missing and not sources_with_text(num_bytes):
        raise TokenizerError(
            "no tokenizer, and no text to train one on. Name one with --tokenizer, or see to:\n  " + "\n  ".join(lines),
            code="E406",
        )
    for line in lines:
        logger.warning("tokenizer: trained without %s", line, extra={"code": "W406"})


def _texts_of(settings: Settings, name: str, fingerprints: dict[str, str]) -> Iterator[str]:
    source = _resolved(settings, name)
    if source.stub:
        raise FileNotFoundError(f"{name} is a stub here")
    revision = None
    if source.ordered:
        # Asked before the stream is opened, so that a hub that cannot be reached is an error at once. The first cache
        # that is built after this uses the same revision.
        provenance = source.provenance(None)
        revision, fingerprints[name] = provenance["revision"], str(provenance["fingerprint"])
    return sources.training_texts(settings, source, revision)


def _resolved(settings: Settings, name: str) -> ResolvedSource:
    # A tokenizer is trained on whole sources: partitions do not change which one it is.
    return resolve_whole(settings, name)
