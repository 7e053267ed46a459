"""The asset eagle3/draft_vocab: chats + a target's tokenizer -> the tokens that the draft knows, in a file.

Its fingerprint has what decides these tokens, and nothing else of the target: weights, layers and dtypes leave it as it
is. Another size builds it again without the target. eagle3/targets takes its tokens from it, and makes it where it is
not current.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.eagle3.draft_kind import DRAFT_VOCAB
from niels_gpt.progress import Progress
from niels_gpt.recipes.eagle3.of_settings import VOCAB_KEY, fingerprint_of, resolved, sha256
from niels_gpt.recipes.eagle3.prepare import Prepared, Resolved, is_current_of, prepare
from niels_gpt.recipes.records import Measurement, Outcome, cache_root, finish, record_recipe, recorded_recipe
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import meta_bytes

KIND = "draft_vocab"
"""`kind` in its meta.json."""
FORMAT_VERSION = 1
_OF_SETTINGS = (
    "eagle3_target",
    "eagle3_source",
    "eagle3_document_start",
    "eagle3_max_samples",
    "eagle3_seq_length",
    "eagle3_draft_vocab_size",
)
_OF_TOKENIZER = ("sha256", "template_sha256", "mask_by", "special_token_ids")
_MOST_SIZES = 48  # in coverage_by_size


def settings_fingerprint(settings: Settings) -> str:
    """Return twelve hex digits of the settings that decide the file's bytes; no file is looked at."""
    return fingerprint_of(settings, _OF_SETTINGS)


def build_draft_vocab(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build eagle3/draft_vocab, or reuse it. No weights are read.

    refresh, observed, Raises: as `asset.build_targets`. progress: called with samples, tokens and None.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    path = cache_root(settings) / VOCAB_KEY
    with Measurement() as measured:
        found = resolved_for_vocab(settings, observed=observed, refresh=refresh)
        reused = current_draft_vocab(found) is not None
        if reused:
            meta = read_meta(str(path / META_NAME))
        else:
            tokenized = None if progress is None else partial(_tokenized, progress)
            meta = commit_draft_vocab(prepare(found, tokenized=tokenized))
    return finish(settings, VOCAB_KEY, path, meta, reused, measured, _fingerprint(found))


def _tokenized(progress: Progress, samples: int, tokens: int) -> None:
    progress(samples, tokens, None)


def resolved_for_vocab(
    settings: Settings, *, observed: str | None = None, refresh: bool = False, target: Path | None = None
) -> Resolved:
    """Return what the settings stand for; chats of the hub have the revision of the committed file at least."""
    newest = observed or (recorded_recipe(cache_root(settings) / VOCAB_KEY).get("source") or {}).get("fingerprint")
    return resolved(settings, observed=newest, refresh=refresh, hash_weights=False, target=target)


def committed_content(settings: Settings) -> str | None:
    """Return content_sha256 of the committed file; None without one."""
    meta = find_meta(cache_root(settings) / VOCAB_KEY)
    return None if meta is None else str(meta.get("content_sha256"))


def current_draft_vocab(found: Resolved, *, reads_hub: bool = True) -> list[int] | None:
    """Return the target's id of each token of the draft, of the committed file; None where that is not current.

    reads_hub: see `is_current_of`.
    """
    from niels_gpt.eagle3.vocab import load_token_mapping

    path = cache_root(found.settings) / VOCAB_KEY
    if not is_current_of(found, path, _fingerprint, reads_hub):
        return None
    ids, _ = load_token_mapping(path, target_vocab_size=found.target.vocab_size, draft_vocab_size=None)
    return [int(number) for number in ids]


def commit_draft_vocab(prepared: Prepared) -> dict[str, Any]:
    """Commit the draft's vocabulary of a plan, counted from its samples; returns meta.json."""
    from niels_gpt.eagle3.vocab import MAPPING_NAME

    found, selected = prepared.resolved, prepared.plan.manifest["selected_token_ids"]
    path, size = cache_root(found.settings) / VOCAB_KEY, found.target.vocab_size
    with versions.building(path) as work:
        raw = canonical_json({"selected_token_ids": selected, "target_vocab_size": size})
        write_bytes(work / MAPPING_NAME, raw)
        record = {"name": MAPPING_NAME, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        supervised, coverage = _coverage(prepared, selected)
        content = DRAFT_VOCAB.content_sha256([record])
        meta: dict[str, Any] = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "built": True,
            "content_sha256": content,
            "target_model": found.options.target_name or found.options.target_model,
            "target_vocab_size": size,
            "draft_vocab_size": len(selected),
            "totals": {"samples": len(prepared.samples), "tokens": len(prepared.samples.ids)}
            | {"supervised_tokens": supervised},
            "coverage": next(share for number, share in coverage if number == len(selected)),
            "coverage_by_size": coverage,
            "dropped": prepared.plan.dropped,
            "source": prepared.plan.source,
            "tokenizer_sha256": found.tokenizer.sha256,
            "files": [record],
        }
        write_bytes(work / META_NAME, meta_bytes(meta))
        version = versions.commit(work, path, content)
        made = read_meta(str(version / META_NAME))
        record_recipe(found.settings, path, _fingerprint(found), found.source, made)
    return made


def _coverage(prepared: Prepared, selected: list[int]) -> tuple[int, list[tuple[int, float]]]:
    """Return the number of supervised tokens; and sizes, each with the share of these that so many ids would cover."""
    import numpy as np

    from niels_gpt.eagle3.vocab import build_eagle3_token_mapping

    found, samples = prepared.resolved, prepared.samples
    size, supervised = found.target.vocab_size, samples.ids[samples.loss_mask == 1]
    order, _ = build_eagle3_token_mapping(
        [{"input_ids": samples.ids, "loss_mask": samples.loss_mask}],
        target_vocab_size=size,
        draft_vocab_size=max(1, size - 1),  # all ids would come in their own order
        special_token_ids=found.tokenizer.special_token_ids,
    )
    covered = np.cumsum(np.bincount(supervised, minlength=size)[order.numpy()])
    sizes = {len(selected), size, *np.geomspace(1, size, _MOST_SIZES).astype(int).tolist()}
    shares = ((number, 1.0 if number >= size else int(covered[number - 1]) / len(supervised)) for number in sizes)
    return len(supervised), sorted(shares)


def _fingerprint(found: Resolved) -> str:
    options = {name: getattr(found.options, name) for name in ("seq_length", "limit", "draft_vocab_size")}
    about = ("fingerprint", "form", "settings", "limit", "exclude")
    parts = {
        "recipe": VOCAB_KEY,
        "options": options,
        "target_vocab_size": found.target.vocab_size,
        "tokenizer": {name: getattr(found.tokenizer, name) for name in _OF_TOKENIZER} | found.start_record,
        "source": {name: found.source[name] for name in about if name in found.source},
        "versions": [FORMAT_VERSION],
    }
    return sha256(parts)
