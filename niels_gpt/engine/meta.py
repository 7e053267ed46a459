"""meta.json: the keys that every cache has, and its content_sha256; the identity under which a build resumes.

The keys of one kind of cache come from its builder: from its settings, and from `described` of its Writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.meta_json import content_sha256 as content_sha256
from niels_gpt.storage.meta_json import file_records, meta_bytes, parse_object
from niels_gpt.tokenizers.protocol import Tokenizer, control_ids, token_dtype_name, tokenizer_identity, tokenizer_sha256

BUILDER_VERSIONS = {"tokenizer": 3, "pretrain": 3, "sft": 5, "rollouts": 5}
"""Version of the builder of each kind: raised when the same input gives other bytes."""
OF_ANOTHER_VERSION = "of another version of this program or of a library, which is not used"
"""The words of messages for an unfinished build that is not `is_of_this_version`."""
_DIGESTS = 5  # raised when the digests, counts or files in a journal are made in another way


@dataclass(frozen=True)
class Source:
    """The origin of a cache's text, for meta.json. Nothing in it may depend on the machine."""

    name: str | None = None
    """dataset_name: the hub's dataset id, or the name of another source."""
    config: str | None = None
    """dataset_config: the hub's config; None if it has none."""
    streaming: bool = False
    """Whether upstream was streamed, so that determinism depends on upstream's order."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The key `source` of meta.json: revision, licence, fingerprint, versions and so on."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Further values that decide the stream, such as a recipe's settings. A build resumes only under the same ones."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """The loader's numbers of dropped and repaired rows, by reason; read when the stream has ended."""
    from_scratch: str | None = None
    """The command that builds from scratch, for messages; None if no recipe builds."""
    position: dict[str, int] | None = None
    """The loader's position in its files, which a resumed build sets (data.reader.Position).

    With it, provenance["fingerprint"] is a hash of the files' names and bytes. If it is None, or {} while the source is
    read, a resumed build reads all documents again."""


def why_unmet(meta: Mapping[str, Any]) -> str:
    """Return why a split of a pretrain cache may have fewer tokens than its budget."""
    if "partitions" in meta:
        return "partitions with too little text leave a part of the budget unused, which is not given to others"
    return "the source ended first"


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of meta.json that the tokenizer decides. Call it before a build: its file may be replaced."""
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "vocab_size": int(tokenizer.vocab_size),
        "token_dtype": token_dtype_name(tokenizer.vocab_size),
        "special_token_ids": dict(tokenizer.special_token_ids()),
    }


def is_of_this_version(identity: Mapping[str, Any]) -> bool:
    """Return whether this version of the program and of its library may resume a build with this identity."""
    from importlib.metadata import version

    theirs = identity.get("versions")
    if not isinstance(theirs, dict):
        return True
    libraries = {name: version(name) for name in ("sentencepiece", "tokenizers") if name in theirs}
    builder = BUILDER_VERSIONS.get(str(identity.get("kind")))
    return theirs == {"format": FORMAT_VERSION, "builder": builder, "digests": _DIGESTS, **libraries}


def build_identity(source: Source, tokenizer: Tokenizer | None, *, kind: str, **settings: Any) -> dict[str, Any]:
    """Return the identity of a build: everything known before it that decides its bytes. Only an equal one resumes.

    tokenizer: None for a cache of ids whose tokenizer is unknown.
    The fingerprint of the source's files is not in it: a resumed build compares the documents instead.
    """
    asked = {key: source.provenance.get(key) for key in ("revision", "asked_revision", "exclude")}
    return {
        "versions": {
            "format": FORMAT_VERSION,
            "builder": BUILDER_VERSIONS[kind],
            "digests": _DIGESTS,
            **({} if tokenizer is None else library_of(tokenizer)),
        },
        "source": {"name": source.name, "config": source.config, "streaming": source.streaming, **asked},
        "recipe": dict(source.recipe),
        "kind": kind,
        **({} if tokenizer is None else _of_tokenizer(tokenizer)),
        **settings,
    }


def _of_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {**vocabulary_of(tokenizer), "tokenizer": tokenizer_identity(tokenizer), **_special(tokenizer)}


def _special(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Return the ids that drop a text, if other files than the one with the recorded sha256 can change them."""
    is_json = getattr(tokenizer, "kind", "") == "huggingface"
    return {"control_ids": sorted(control_ids(tokenizer))} if is_json else {}


def library_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the name and release of the library that computes a tokenizer's ids."""
    from importlib.metadata import version

    name = "tokenizers" if getattr(tokenizer, "kind", "") == "huggingface" else "sentencepiece"
    return {name: version(name)}


def write_description(
    work: Path,
    *,
    vocabulary: Mapping[str, Any],
    source: Source,
    counters: Mapping[str, int],
    seed: int | None,
    shards: dict[str, list[dict[str, Any]]],
    index: dict[str, dict[str, Any]],
    totals: dict[str, int],
    kind: str,
    **keys: Any,
) -> dict[str, Any]:
    """Write meta.json, the last file of a build, and return it.

    counters: the loader's, after the last consumed document. keys: further keys of the kind of cache.
    """
    # The totals are keys of the top level too, because the spec's "totals: train_tokens, val_tokens" can mean either.
    meta = {
        "format_version": FORMAT_VERSION,
        "builder_version": BUILDER_VERSIONS[kind],
        "kind": kind,
        "dataset_name": source.name,
        "dataset_config": source.config,
        "streaming": source.streaming,
        "source": {**source.provenance, "counters": dict(sorted(counters.items()))},
        "seed": seed,
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
