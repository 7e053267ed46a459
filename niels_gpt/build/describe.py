"""What meta.json says: the keys that every cache has, and its content sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt import versions
from niels_gpt.build.encode import Tokenizer, tokenizer_identity, tokenizer_sha256
from niels_gpt.build.resume import Build
from niels_gpt.build.split import warn_of_share
from niels_gpt.build.writer import TOKEN_DTYPE_NAME
from niels_gpt.fileio import META_NAME, write_bytes
from niels_gpt.records import file_records, meta_bytes, parse_object

FORMAT_VERSION = 1
BUILDER_VERSION = 3  # raised when the same input gives other bytes


@dataclass(frozen=True)
class Source:
    """Where a cache's text comes from, as its meta.json tells it. Nothing in it may depend on the machine."""

    name: str | None = None
    """dataset_name: the hub's dataset id, or the source's own name."""
    config: str | None = None
    """dataset_config: the hub's config; None where there is none."""
    streaming: bool = False
    """Whether upstream was streamed, so that determinism rests on upstream's order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """revision, licence, fingerprint, versions: whatever else is known."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else decides its stream, as a recipe's settings: a killed build goes on under the same ones only."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """What the loader dropped or repaired, by reason; read when the stream has ended."""
    from_scratch: str | None = None
    """The command that starts this build from scratch, for messages; None where it is no recipe's."""
    position: dict[str, int] | None = None
    """Where a loader of files is, and begins: see data.position. facts["fingerprint"] is then that of the files, names
    and bytes. None, or {} while it is read: a killed build reads such a source again from its beginning."""


def content_sha256(records: list[dict[str, Any]]) -> str:
    """Return the sha256 of the lines `<sha256>  <name>`, sorted by name: `sha256sum` of the files, hashed again."""
    lines = sorted((str(record["name"]), str(record["sha256"])) for record in records)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in lines).encode()).hexdigest()


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of meta.json that tell whose ids a cache holds.

    To be asked before a build, not after: the file behind `model_path` may be replaced in the meantime.
    """
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "vocab_size": int(tokenizer.vocab_size),
        "special_token_ids": dict(tokenizer.special_token_ids()),
    }


def build_identity(source: Source, tokenizer: Tokenizer, **settings: Any) -> dict[str, Any]:
    """Return everything that is known beforehand to decide a cache's bytes: a killed build goes on only as what it was.

    The fingerprint of a source's files is not in it: whether they have changed is told document by document.
    """
    facts = {key: source.facts.get(key) for key in ("revision", "asked_revision", "exclude")}
    return {
        "versions": {"format": FORMAT_VERSION, "builder": BUILDER_VERSION, "sentencepiece": version("sentencepiece")},
        "source": {"name": source.name, "config": source.config, "streaming": source.streaming, **facts},
        "recipe": dict(source.recipe),
        **vocabulary_of(tokenizer),
        "tokenizer": tokenizer_identity(tokenizer),
        **settings,
    }


def write_description(
    work: Path,
    *,
    vocabulary: Mapping[str, Any],
    source: Source,
    counters: Mapping[str, int],
    seed: int,
    shards: dict[str, list[dict[str, Any]]],
    index: dict[str, dict[str, Any]],
    totals: dict[str, int],
    **keys: Any,
) -> dict[str, Any]:
    """Write meta.json, the last file of a build, and return it. `totals` also stand at the top level.

    The spec's sentence "totals: train_tokens, val_tokens" reads both ways, as one key and as two.
    counters: what the loader had left out or repaired when the last document was taken.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "builder_version": BUILDER_VERSION,
        "dataset_name": source.name,
        "dataset_config": source.config,
        "streaming": source.streaming,
        "source": {**source.facts, "counters": dict(sorted(counters.items()))},
        "seed": seed,
        "token_dtype": TOKEN_DTYPE_NAME,
        **vocabulary,
        "shards": shards,
        "index": index,
        "totals": totals,
        **totals,
        **keys,
    }
    meta["content_sha256"] = content_sha256(file_records(meta))
    write_bytes(work / META_NAME, raw := meta_bytes(meta))
    return parse_object(raw)


def described_commit(
    build: Build,
    out_dir: str | os.PathLike[str],
    parts: Callable[[], Mapping[str, Any]],
    committed: Callable[[dict[str, Any]], None] | None,
    **known: Any,
) -> dict[str, Any]:
    """Finish a build's files, describe them, and commit; returns the meta. All of it may be killed and done again.

    parts: finishes the files and returns their part of meta.json; known: the other arguments of `write_description`.
    committed: called with the meta before the build's journal goes.
    """
    meta = build.committed_meta()
    if meta is None:
        meta = write_description(build.work, **known, **parts())
        warn_of_share(out_dir, meta)
    build.seal(str(meta["content_sha256"]))
    versions.commit(build.work, out_dir, str(meta["content_sha256"]))
    if committed is not None:
        committed(meta)
    return meta
