"""The asset eagle3/draft_vocab: chats + a target's tokenizer -> the tokens that the draft knows, in a file.

Its fingerprint has what decides these tokens, and nothing else of the target: weights, layers and dtypes leave it as it
is. Another size builds it again without the target. eagle3/targets takes its tokens from it, and makes it where it is
not current.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.display.numbers import share_text
from niels_gpt.inspection.stats import Stats, meta_errors
from niels_gpt.pictures import new_figure, plain_axes, png, set_title
from niels_gpt.progress import Progress
from niels_gpt.recipes.eagle3.of_settings import VOCAB_KEY, fingerprint_of, resolved, sha256
from niels_gpt.recipes.eagle3.prepare import Prepared, Resolved, is_current_of, prepare
from niels_gpt.recipes.run_recipe import (
    Measurement,
    Outcome,
    cache_root,
    finish,
    record_recipe,
    recorded_recipe,
)
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.checks import Check, Figures, Verdict, first_problems
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import (
    content_sha256,
    file_records,
    meta_bytes,
    path_inside,
    printable,
    sha256_regular,
    wrong_value,
)
from niels_gpt.storage.meta_json import resolved as resolved_path

KIND = "draft_vocab"
"""`kind` in its meta.json."""
FORMAT_VERSION = 1
CHECK = Check(
    "mapping_fits",
    "The file of tokens has the bytes that meta.json names, and as many distinct ids of the target as it says.",
)
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
        content = content_sha256([record], KIND)
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


def check_draft_vocab(path: Path) -> Verdict:
    """Check a committed file of tokens. Raises: FileNotFoundError and CacheError where meta.json cannot be read."""
    meta = read_meta(str(path / META_NAME))
    figures, problems = Figures(), first_problems(_problems(path, meta))
    if not problems:
        ids, of, coverage = meta["draft_vocab_size"], meta["target_vocab_size"], meta["coverage"]
        figures.say(
            f"The draft knows {ids:,} of the target's {of:,} tokens: {share_text(coverage)} of the supervised ones.",
            tokens=ids,
            coverage=coverage,
        )
    return Verdict.of(problems, figures)


def _problems(path: Path, meta: Mapping[str, Any]) -> Iterator[str]:
    from niels_gpt.eagle3.vocab import load_token_mapping

    try:
        for record in file_records(meta, str(path / META_NAME)):
            file = path_inside(resolved_path(path), record["name"])
            if (sha := sha256_regular(file)) != record["sha256"]:
                yield str(CacheError(path / record["name"], f"sha256 {sha[:12]}", record["sha256"][:12], code="E201"))
                return  # what it holds is not that of meta.json
        for name, kinds in (("target_vocab_size", (int,)), ("draft_vocab_size", (int,)), ("coverage", (int, float))):
            if type(meta.get(name)) not in kinds:
                raise wrong_value(str(path / META_NAME), name, meta.get(name), "a number")
        sizes = {name: meta[name] for name in ("target_vocab_size", "draft_vocab_size")}
        load_token_mapping(path, **sizes)
    except (CacheError, OSError) as error:
        yield str(error)
    except (LookupError, TypeError, ValueError) as error:
        yield f"{path / META_NAME}: not as docs/formats.md describes it ({error!r})"


def read(cache: Path) -> dict[str, Any]:
    """Return meta.json of a committed file of tokens. Raises: FileNotFoundError and CacheError."""
    return read_meta(str(cache / META_NAME))


def stats(cache: Path) -> Stats:
    """Return what a file of tokens holds, and what other sizes would. Raises: as `read`."""
    meta = read(cache)
    with meta_errors(cache):
        totals, source, sizes = meta["totals"], meta["source"], meta["coverage_by_size"]
        shown = [f"{size:,}: {share:.2%}" for size, share in sizes if size >= meta["draft_vocab_size"] / 8]
        rows = [
            ("cache", f"{cache} (draft_vocab, built)"),
            ("target", meta["target_model"]),
            ("tokens", f"{meta['draft_vocab_size']:,} of the target's {meta['target_vocab_size']:,}"),
            ("coverage", f"{meta['coverage']:.2%} of {totals['supervised_tokens']:,} supervised tokens"),
            ("coverage by size", ", ".join(shown)),
            ("samples", f"{totals['samples']:,}, of {totals['tokens']:,} tokens"),
            ("dropped", ", ".join(f"{reason} {number:,}" for reason, number in meta["dropped"].items()) or "none"),
            *((name, source.get(name) or "not stated") for name in ("input_data", "licence", "attribution")),
            ("tokenizer", meta["tokenizer_sha256"][:12]),
        ]
        return Stats((name, printable(str(value))) for name, value in rows)


def picture(meta: Mapping[str, Any], name: str) -> bytes:
    """Return a PNG of the share of supervised tokens that so many ids cover. Raises: ImportError without matplotlib."""
    figure = new_figure(7.2, 2.8, layout="constrained")
    size, coverage = meta["draft_vocab_size"], meta["coverage"]
    of = f"{size:,} of {meta['target_vocab_size']:,} tokens"
    set_title(figure, f"{name}: {of} cover {100 * coverage:.2f} % of the supervised ones")
    axes = figure.subplots()
    numbers, shares = zip(*meta["coverage_by_size"], strict=True)
    axes.semilogx(numbers, [100 * share for share in shares], color="#1d5f9e")
    axes.axvline(size, color="#c2410c", linestyle="--", linewidth=1.2)
    axes.set_xlabel("tokens that the draft knows (dashed: as built)")
    axes.set_ylabel("supervised tokens covered")
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    plain_axes(axes)
    return png(figure, 32)
