"""Chats + target -> eagle3/targets, a versioned EAGLE-3 cache; and the target once more, to check one.

The folder that python -m niels_gpt.eagle3.precompute writes is the version's; here it has a recipe's fingerprint, so a
build is left out where nothing has changed, and a killed one goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt import fileio, versions
from niels_gpt.build.journal import Checkpoint, Journal
from niels_gpt.cache.meta import read_meta
from niels_gpt.fileio import META_NAME, CacheError, canonical_json
from niels_gpt.recipes.eagle3 import Resolved, carry_out, open_target, prepare, resolve, run_facts
from niels_gpt.recipes.eagle3_options import Options
from niels_gpt.recipes.measured import Measured
from niels_gpt.recipes.own import own_sources
from niels_gpt.recipes.pretrain import OWN
from niels_gpt.recipes.produce import Outcome, cache_root, finish, is_current, record_recipe
from niels_gpt.recipes.sft import READS
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.eagle3.producer import Progress
    from niels_gpt.eagle3.recompute import Target
    from niels_gpt.eagle3.verify import Verdict

KEY = "eagle3/targets"
SMALL_TARGET = "small_target"
"""What a manifest calls the small Llama that stands in for a target in the sample."""
_DECIDING = (
    "target",
    "source",
    "max_samples",
    "seq_length",
    "draft_vocab_size",
    "topk",
    "shard_size",
    "dtype",
    "batch_size",
)
_SEQ_LENGTH = {
    False: 2048,
    True: 256,
}  # by whether the target is the small one; the longest of the sample has 129 tokens
_DRAFT_VOCAB_SIZE = {False: 32_000, True: 512}  # the published drafts' size; a quarter of the sample's ids
_TARGETS_DIR = ".small_target"
_DIGITS = 12


def settings_fingerprint(settings: Settings) -> str:
    """Return twelve hex digits of the settings that decide the cache's bytes; no file is looked at."""
    names = [f"eagle3_{name}" for name in _DECIDING]
    names += sorted({*READS.get(settings.eagle3_source, ())} - {*READS[OWN]})  # without those of the sft cache's split
    return _sha256({name: getattr(settings, name) for name in names})[:_DIGITS]


def raw_source(settings: Settings) -> str | None:
    """Return the name of the source that is observed as raw/NAME; None where the chats are files."""
    names = {*(name for name in READS if name != OWN), *own_sources(settings)}
    return settings.eagle3_source if settings.eagle3_source in names else None


def build_targets(settings: Settings, *, observed: str | None = None, progress: Progress | None = None) -> Outcome:
    """Build eagle3/targets, or reuse it.

    observed: the source's fingerprint, where somebody has looked since the cache was built.
    progress: is told the tokens that are done, all tokens, and the bytes written.
    Raises: ImportError without transformers; ValueError where no target is named, but for the sample; as `resolve`,
        `prepare` and `produce` of niels_gpt.eagle3.
    """
    path = cache_root(settings) / KEY
    with Measured() as measured:
        resolved = _resolved(settings, path, observed)
        fingerprint = _fingerprint(resolved)
        reused = is_current(path, fingerprint) and _has_its_shards(path)
        meta = read_meta(str(path / META_NAME)) if reused else _build(resolved, path, fingerprint, progress)
    return finish(settings, KEY, path, meta, reused, measured, fingerprint)


def target_name(settings: Settings) -> str:
    """Return the folder or id of the target; the sample's small Llama is written first, with the cache's tokenizer.

    Raises: ValueError where none is named, but for the sample.
    """
    if settings.eagle3_target is not None:
        return settings.eagle3_target
    if settings.source_root != "sample":
        raise ValueError(
            f"{KEY}: no target is named, and the small random Llama stands in for one in the sample only. Name the "
            "folder or the hub id of a model: the setting eagle3_target, NIELS_GPT_EAGLE3_TARGET"
        )
    from niels_gpt.eagle3.target import write_small_target
    from niels_gpt.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ensure_tokenizer(settings).path)
    folder = cache_root(settings) / "eagle3" / _TARGETS_DIR / tokenizer.sha256[:_DIGITS]
    return str(write_small_target(folder, tokenizer))


def target_of(
    cache: Path, name: str, *, revision: str | None = None, device: str | None = None, follow_links: bool = False
) -> Target:
    """Return a target to compare a cache with, by recompute.recomputed; no weights are loaded yet.

    revision, device: None: as in the cache's plan, but for a GPU that is not here.
    Raises: as `target_facts`; CacheError for a damaged plan.
    """
    import torch

    from niels_gpt.eagle3.models import target_facts
    from niels_gpt.eagle3.plan import read_record
    from niels_gpt.eagle3.recompute import Target

    record = read_record(cache, follow_links=follow_links)
    planned, made_from = ({}, {}) if record is None else (record["run"], record["target"])
    if device is None:
        on_gpu = record is None or planned.get("device") == "cuda"
        device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    facts = target_facts(name, revision=revision or made_from.get("revision"))
    attention = planned.get("attention", "sdpa")
    asked = Options(target_model=name, revision=revision, input_data="", device=device, attention=attention)
    run = run_facts(asked, planned)
    run["compute_dtype"] = planned.get("compute_dtype", run["compute_dtype"])
    load = partial(
        open_target,
        name=name,
        revision=facts.revision,
        compute_dtype=run["compute_dtype"],
        attention=attention,
    )
    return Target(asdict(facts), load, run)


def check_targets(settings: Settings, names: Collection[str]) -> dict[str, Verdict]:
    """Make some of the checks of niels_gpt.eagle3.checks.DESCRIPTIONS of eagle3/targets; returns their verdicts.

    Raises: FileNotFoundError and CacheError where there is no such cache; as `target_of`.
    """
    from niels_gpt.eagle3.checks import RECOMPUTED
    from niels_gpt.eagle3.recompute import recomputed
    from niels_gpt.eagle3.verify import Verdict, verify

    path, number = cache_root(settings) / KEY, settings.eagle3_check_samples
    found = verify(path, names=[name for name in names if name != RECOMPUTED])
    if RECOMPUTED in names and number:
        target = target_of(path, target_name(settings), device=settings.eagle3_device)
        found[RECOMPUTED] = recomputed(path, target, k=number, seed=settings.seed)
    elif RECOMPUTED in names:
        found[RECOMPUTED] = Verdict([], "not made: eagle3_check_samples is 0")
    return found


def _resolved(settings: Settings, path: Path, observed: str | None) -> Resolved:
    """Return what the settings stand for; the revision of a hub's source is the observed, or the recorded one (D12)."""
    from niels_gpt.recipes.eagle3_input import input_facts

    target, is_small = target_name(settings), settings.eagle3_target is None
    options = Options(
        target_model=target,
        target_name=_stable_name(settings, target),
        input_data=settings.eagle3_source,
        seq_length=settings.eagle3_seq_length or _SEQ_LENGTH[is_small],
        draft_vocab_size=settings.eagle3_draft_vocab_size or _DRAFT_VOCAB_SIZE[is_small],
        target_probs_topk=settings.eagle3_topk,
        batch_size=settings.eagle3_batch_size,
        shard_size=settings.eagle3_shard_size,
        dtype=settings.eagle3_dtype,
        device=settings.eagle3_device,
        limit=settings.eagle3_max_samples or None,
        threads=1 if is_small else None,  # it is faster so, and the sample's bytes are those of any number of cores
    )
    resolved = resolve(options, settings, begun=_with_a_plan(path))
    known = resolved.source
    dataset, _, revision = (observed or "").rpartition("@")
    if known["kind"] == "hub" and dataset == str(known["fingerprint"]).rpartition("@")[0] and revision != "None":
        newer = {**known, "fingerprint": observed, "revision": revision}
        known = {**known, **input_facts(settings, settings.eagle3_source, recorded=newer)}
    return replace(resolved, source=known)


def _with_a_plan(path: Path) -> Path | None:
    """Return the committed cache, or the unfinished one that was worked at last: its revision and threads count."""
    unfinished = (folder for folder in versions.versions_dir(path).glob(f"{versions.BUILDING}-*") if not folder.suffix)
    newest_first = sorted(unfinished, key=lambda folder: folder.lstat().st_mtime_ns, reverse=True)
    return next((folder for folder in (path, *newest_first) if _has_plan(folder)), None)


def _has_plan(folder: Path) -> bool:
    from niels_gpt.eagle3.plan import read_record

    with contextlib.suppress(CacheError):  # a damaged cache is built anew
        return read_record(folder) is not None
    return False


def _stable_name(settings: Settings, target: str) -> str:
    """Return what stands for the target in the cache: an id of the hub, or a folder's name without where it lies."""
    if settings.eagle3_target is None:
        return SMALL_TARGET
    return Path(target).expanduser().resolve().name if os.path.isdir(os.path.expanduser(target)) else target


def _fingerprint(resolved: Resolved) -> str:
    """Return the sha256 of what makes another cache: not of the versions and the machine that it is made with."""
    from niels_gpt.eagle3.plan import BUILDER_VERSION, SIDECAR_VERSION

    parts = {name: value for name, value in resolved.identity.items() if name not in ("run", "source")}
    about = ("fingerprint", "form", "settings", "limit", "exclude")
    source = {name: resolved.source[name] for name in about if name in resolved.source}
    return _sha256({**parts, "recipe": KEY, "source": source, "versions": [SIDECAR_VERSION, BUILDER_VERSION]})


def _has_its_shards(path: Path) -> bool:
    """Whether every shard has the size of its receipt; meta.json names the receipts and not the shards."""
    from niels_gpt.eagle3.layout import shard_path
    from niels_gpt.eagle3.shards import read_receipt

    try:
        for shard in range(read_meta(str(path / META_NAME))["totals"]["shards"]):
            receipt = read_receipt(path, shard)
            if receipt is None or os.stat(shard_path(path, shard)).st_size != receipt["bytes"]:
                return False
    except (OSError, ValueError):
        return False
    return True


def _build(resolved: Resolved, path: Path, fingerprint: str, progress: Progress | None) -> dict[str, Any]:
    from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR

    prepared = prepare(resolved)
    plan = prepared.plan
    with versions.resumable(path, plan.sha256) as (work, notes):
        journal = Journal(notes, {"plan_sha256": plan.sha256, "source": resolved.source})
        try:
            sealed = journal.last.sealed if journal.last else None
            if sealed is None or work.is_dir():  # else it was killed between two steps of the commit
                if journal.last is None:
                    journal.append(Checkpoint())
                sealed = str(carry_out(prepared, work, resume=True, progress=progress).meta["content_sha256"])
                fileio.remove(work / SIDECAR / LOCK_NAME)
                journal.append(Checkpoint(documents=len(prepared.samples), ended=True, sealed=sealed))
        finally:
            journal.close()
        version = versions.commit(work, path, sealed)
        meta = read_meta(str(version / META_NAME))
        record_recipe(path, fingerprint, resolved.source, meta)
    return meta


def _sha256(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
