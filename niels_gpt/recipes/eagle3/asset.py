"""The asset eagle3/targets: chats + target -> a versioned EAGLE-3 cache; and the target again, to check a cache.

Decides when the cache is reused (its recipe's fingerprint), when an unfinished version is resumed, and the sample's
sizes. A version's folder is what python -m niels_gpt.eagle3.precompute writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.builders.journal import Checkpoint, Journal
from niels_gpt.cache.meta import read_meta
from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.recipes.eagle3.prepare import Resolved, carry_out, open_target, prepare, resolve, run_facts
from niels_gpt.recipes.run_recipe import Measurement, Outcome, cache_root, finish, is_current, record_recipe
from niels_gpt.recipes.tokenizer import ensure_tokenizer, no_sentinels
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.codes import coded
from niels_gpt.storage.fileio import META_NAME, canonical_json

if TYPE_CHECKING:
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.progress import Progress

KEY = "eagle3/targets"
SMALL_TARGET = "small_target"
"""The manifest's name of the small random Llama that is the sample's target."""
_NOT_IN_FINGERPRINT = ("eagle3_device", "eagle3_check_samples")  # they never decide a byte
_SIZES = {"draft_vocab_size": 32_000}  # as the published drafts have
_SMALL_SIZES = {"seq_length": 256, "draft_vocab_size": 512, "threads": 1}
"""For the sample's target: its longest chat has 129 tokens, and one thread is fastest and independent of the cores."""
_NOT_IN_RECIPE = (
    "output_dir",
    "workers",
    "resume",
    "show",
    "target_model",
    "revision",
    "device",
    "compute_dtype",
    "threads",
    "draft_vocab_from",
)
"""Options that do not decide the cache's bytes, or that `_fingerprint` has in another form."""
_TARGETS_DIR = ".small_target"
_DIGITS = 12


def settings_fingerprint(settings: Settings) -> str:
    """Return twelve hex digits of the settings that decide the cache's bytes; no file is looked at."""
    names = [name for name in vars(settings) if name.startswith("eagle3_") and name not in _NOT_IN_FINGERPRINT]
    spec = SOURCES.get(settings.eagle3_source)
    names += spec.own_settings if spec and spec.family == "sft" else ()
    return _sha256({name: getattr(settings, name) for name in names})[:_DIGITS]


def raw_source(settings: Settings) -> str | None:
    """Return the name of the source that is observed as raw/NAME; None where the chats are files."""
    names = {*(spec.name for spec in SOURCES.values() if spec.family == "sft"), *user_sources(settings)}
    return settings.eagle3_source if settings.eagle3_source in names else None


def build_targets(settings: Settings, *, observed: str | None = None, progress: Progress | None = None) -> Outcome:
    """Build eagle3/targets, or reuse it.

    observed: fingerprint of the source from an observation newer than the cache. progress: as `produce`.
    Raises: ImportError without transformers; ValueError where no target is named, except for the sample; as `resolve`,
        `prepare` and `produce`.
    """
    path = cache_root(settings) / KEY
    with Measurement() as measured:
        resolved = _resolved(settings, path, observed)
        fingerprint = _fingerprint(resolved)
        reused = is_current(path, fingerprint) and _has_its_shards(path)
        meta = read_meta(str(path / META_NAME)) if reused else _build(resolved, path, fingerprint, progress)
    return finish(settings, KEY, path, meta, reused, measured, fingerprint)


def target_name(settings: Settings) -> str:
    """Return the folder or id of the target; for the sample, write a small Llama with the tokenizer's vocabulary.

    Raises: ValueError where none is named, except for the sample; NoSentinels there for a tokenizer without them.
    """
    if settings.eagle3_target is not None:
        return settings.eagle3_target
    if settings.source_root != "sample":
        raise coded(
            "E705",
            ValueError(
                f"{KEY}: no target is named, and the small random Llama stands in for one in the sample only. Name the "
                "folder or the hub id of a model: the setting eagle3_target, NIELS_GPT_EAGLE3_TARGET"
            ),
        )
    from niels_gpt.eagle3.target import write_small_target
    from niels_gpt.tokenizer import load_tokenizer

    path = ensure_tokenizer(settings).path
    tokenizer = load_tokenizer(path, follow_links=False)
    if not tokenizer.special_token_ids():
        raise no_sentinels(settings, [KEY], path)
    folder = cache_root(settings) / "eagle3" / _TARGETS_DIR / tokenizer.sha256[:_DIGITS]
    return str(write_small_target(folder, tokenizer))


def target_of(
    cache: Path, name: str, *, revision: str | None = None, device: str | None = None, follow_links: bool = False
) -> Target:
    """Return a target to compare a cache with (recompute.recomputed); no weights are loaded yet.

    revision, device: None: those of the cache's plan, except for a GPU that this machine lacks.
    Raises: as `target_facts`; CacheError for a damaged plan.
    """
    import torch

    from niels_gpt.eagle3.format.plan import read_record
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.eagle3.targets.loading import target_facts

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
    """Run the named checks of niels_gpt.eagle3.inspect.verify on eagle3/targets; return their verdicts.

    Raises: FileNotFoundError and CacheError where there is no such cache; as `target_of`.
    """
    from niels_gpt.eagle3.inspect.checks import RECOMPUTED
    from niels_gpt.eagle3.inspect.recompute import recomputed
    from niels_gpt.eagle3.inspect.verify import verify

    path, number = cache_root(settings) / KEY, settings.eagle3_check_samples
    found = verify(path, names=[name for name in names if name != RECOMPUTED])
    if RECOMPUTED in names and number:
        target = target_of(path, target_name(settings), device=settings.eagle3_device)
        found[RECOMPUTED] = recomputed(path, target, k=number, seed=settings.seed)
    elif RECOMPUTED in names:
        found[RECOMPUTED] = Verdict([], "not made: eagle3_check_samples is 0")
    return found


def _resolved(settings: Settings, path: Path, observed: str | None) -> Resolved:
    """Return what the settings stand for; a hub source has the observed revision, or the recorded one (D12)."""
    from niels_gpt.recipes.eagle3.input import input_facts

    target = target_name(settings)
    sizes = _SMALL_SIZES if settings.eagle3_target is None else _SIZES
    options = Options.from_settings(settings, target_model=target, target_name=_stable_name(settings, target), **sizes)
    resolved = resolve(options, settings, plan_from=_folder_with_plan(path))
    source = resolved.source
    dataset, _, revision = (observed or "").rpartition("@")
    if source["kind"] == "hub" and dataset == str(source["fingerprint"]).rpartition("@")[0] and revision != "None":
        newer = {**source, "fingerprint": observed, "revision": revision}
        source = {**source, **input_facts(settings, settings.eagle3_source, recorded=newer)}
    return replace(resolved, source=source)


def _folder_with_plan(path: Path) -> Path | None:
    """Return the committed cache, else the unfinished version that was written last, of those that have a plan."""
    from niels_gpt.eagle3.produce.resume_checks import recorded_plan

    unfinished = (folder for folder in versions.versions_dir(path).glob(f"{versions.BUILDING}-*") if not folder.suffix)
    newest_first = sorted(unfinished, key=lambda folder: folder.lstat().st_mtime_ns, reverse=True)
    return next((folder for folder in (path, *newest_first) if recorded_plan(folder)), None)


def _stable_name(settings: Settings, target: str) -> str:
    """Return the target's name in the cache: a hub id, or a folder's name without its path."""
    if settings.eagle3_target is None:
        return SMALL_TARGET
    return Path(target).expanduser().resolve().name if os.path.isdir(os.path.expanduser(target)) else target


def _fingerprint(resolved: Resolved) -> str:
    """Return the sha256 of what decides the cache's bytes, except for the versions and the machine that make it."""
    from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION

    options = {name: value for name, value in asdict(resolved.options).items() if name not in _NOT_IN_RECIPE}
    about = ("fingerprint", "form", "settings", "limit", "exclude")
    parts = {
        "recipe": KEY,
        "options": options,
        "target": resolved.target_record,
        "tokenizer": resolved.tokenizer_record,
        "source": {name: resolved.source[name] for name in about if name in resolved.source},
        "aux_layer_ids": resolved.aux_layer_ids,
        "draft_vocab": resolved.draft_vocab,
        "versions": [SIDECAR_VERSION, BUILDER_VERSION],
    }
    return _sha256(parts)


def _has_its_shards(path: Path) -> bool:
    """Whether every shard has the size that its receipt states; meta.json lists the receipts, not the shards."""
    from niels_gpt.eagle3.format.layout import shard_path
    from niels_gpt.eagle3.format.shard_writer import read_receipt

    try:
        for shard in range(read_meta(str(path / META_NAME))["totals"]["shards"]):
            receipt = read_receipt(path, shard)
            if receipt is None or os.stat(shard_path(path, shard)).st_size != receipt["bytes"]:
                return False
    except (OSError, ValueError):
        return False
    return True


def _build(resolved: Resolved, path: Path, fingerprint: str, progress: Progress | None) -> dict[str, Any]:
    from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR

    prepared = prepare(resolved)
    plan = prepared.plan
    with versions.resumable(path, plan.sha256) as (work, notes):
        journal = Journal(notes, {"plan_sha256": plan.sha256, "source": resolved.source})
        try:
            sealed = journal.last.sealed if journal.last else None
            if sealed is None or work.is_dir():  # else it was killed in the middle of the commit
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
