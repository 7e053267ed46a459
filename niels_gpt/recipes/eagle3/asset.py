"""The asset eagle3/targets: chats + target -> a versioned EAGLE-3 cache; and the target again, to check a cache.

Decides when the cache is reused (its recipe's fingerprint), when an unfinished version is resumed, and when states of
the committed one are. A version's folder is what python -m niels_gpt.eagle3.precompute writes.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.cache.meta import read_meta
from niels_gpt.engine.journal import Checkpoint, Journal
from niels_gpt.recipes.eagle3.draft_vocab import commit_draft_vocab, current_draft_vocab
from niels_gpt.recipes.eagle3.of_settings import KEY, fingerprint_of, resolved, sha256, target_name
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.recipes.eagle3.prepare import Resolved, carry_out, is_current_of, open_target, prepare, run_facts
from niels_gpt.recipes.records import Measurement, Outcome, cache_root, finish, record_recipe, recorded_recipe
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import apply_lock_setting, check_lease
from niels_gpt.storage.meta_json import meta_bytes

if TYPE_CHECKING:
    from niels_gpt.eagle3.format.plan import Plan
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.progress import Progress

_NOT_IN_FINGERPRINT = ("eagle3_device", "eagle3_check_samples")  # they never decide a byte
_IN_RECIPE = (
    *("target_name", "input_data", "chat_template", "limit", "seq_length", "draft_vocab_size", "target_probs_topk"),
    *("shard_size", "dtype", "batch_size", "max_batch_tokens", "attention"),
)
"""Options that decide the cache's bytes, and that `_fingerprint` has in no other form."""
_OF_NATIVE = ("format", "shard_bytes", "aux_dtype")


def settings_fingerprint(settings: Settings) -> str:
    """Return twelve hex digits of the settings that decide the cache's bytes; no file is looked at."""
    names = [name for name in vars(settings) if name.startswith("eagle3_") and name not in _NOT_IN_FINGERPRINT]
    return fingerprint_of(settings, names)


def build_targets(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build eagle3/targets, or reuse it.

    refresh: ask the hub for the newest revisions of chats and target. observed: fingerprint of the source from an
    observation newer than the cache. progress: as `produce`.
    Raises: LeftOut where no target is named, except for the sample, and without the extra eagle3; as `resolved`,
        `prepare` and `produce`.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    path = cache_root(settings) / KEY
    with Measurement() as measured:
        found = resolved(settings, observed=observed, refresh=refresh)
        fingerprint = _fingerprint(found)
        reused = are_current_targets(found)
        if reused and current_draft_vocab(found) is None:  # removed, or of an earlier version
            commit_draft_vocab(prepare(found))
        meta = _with_all_files(found, path, fingerprint) if reused else _build(found, path, fingerprint, progress)
    return finish(settings, KEY, path, meta, reused, measured, fingerprint)


def are_current_targets(found: Resolved, *, reads_hub: bool = True) -> bool:
    """Whether the committed eagle3/targets is what was asked for, and has its shards. reads_hub: of `is_current_of`."""
    path = cache_root(found.settings) / KEY
    return is_current_of(found, path, _fingerprint, reads_hub) and _has_its_shards(path)


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


def check_recomputed(settings: Settings) -> Verdict:
    """Run samples of eagle3/targets through the target again.

    Raises: FileNotFoundError and CacheError where there is no such cache; as `target_of`.
    """
    from niels_gpt.eagle3.inspect.recompute import recomputed

    number = settings.eagle3_check_samples
    if not number:
        return Verdict([], "not made: eagle3_check_samples is 0")
    path = cache_root(settings) / KEY
    target = target_of(path, target_name(settings), device=settings.eagle3_device)
    return recomputed(path, target, k=number, seed=settings.seed)


def _fingerprint(resolved: Resolved) -> str:
    """Return the sha256 of what decides the cache's bytes, except for the versions and the machine that make it.

    The draft's vocabulary follows from its size and the other parts. The names are
    those of earlier versions, whose caches stay current.
    """
    from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION

    options = resolved.options
    if options.form == "native":
        form = {name: getattr(options, name) for name in _OF_NATIVE}
    else:
        form = {"format_version": None if options.format is None else int(options.format), "aux_layer_ids": None}
    about = ("fingerprint", "form", "settings", "limit", "exclude")
    parts = {
        "recipe": KEY,
        "options": {name: getattr(options, name) for name in _IN_RECIPE} | form,
        "target": resolved.target_record,
        "tokenizer": resolved.tokenizer_record,
        "source": {name: resolved.source[name] for name in about if name in resolved.source},
        "aux_layer_ids": resolved.aux_layer_ids,
        "draft_vocab": None,
        "versions": [SIDECAR_VERSION, BUILDER_VERSION],
    }
    return sha256(parts)


def _has_its_shards(path: Path) -> bool:
    """Whether every shard has the size that its receipt states; meta.json of an earlier build lists no shards."""
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


def _with_all_files(found: Resolved, path: Path, fingerprint: str) -> dict[str, Any]:
    """Return meta.json of the committed cache; one of an earlier build, which names no shard, gets their records."""
    from niels_gpt.eagle3.format.meta import lists_shards, meta_of

    if lists_shards(meta := read_meta(str(path / META_NAME))):
        return meta
    with versions.build_lock(path) as folder:
        file = path.resolve() / META_NAME
        meta = read_meta(str(file))
        listed = meta_of(file.parent, meta, known=meta["files"])
        check_lease(folder / versions.LOCK_NAME)
        # A run that is killed between these writes leaves a cache that is current.
        upcoming = hashlib.sha256(meta_bytes(listed)).hexdigest()
        record_recipe(found.settings, path, fingerprint, found.source, meta, next_meta_sha256=upcoming)
        fileio.write_bytes(file, meta_bytes(listed))
        record_recipe(found.settings, path, fingerprint, found.source, listed)
    return listed


def _build(found: Resolved, path: Path, fingerprint: str, progress: Progress | None) -> dict[str, Any]:
    from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR

    known = current_draft_vocab(found)
    prepared = prepare(found if known is None else replace(found, draft_vocab=known))
    if known is None:  # from the same samples, so they are not tokenized twice
        commit_draft_vocab(prepared)
    plan = prepared.plan
    with versions.resumable(path, _build_key(plan)) as (work, notes):
        journal = Journal(notes, {"plan_sha256": plan.sha256, "source": found.source})
        try:
            sealed = journal.last.sealed if journal.last else None
            if sealed is None or work.is_dir():  # else it was killed in the middle of the commit
                if journal.last is None:
                    _link_states(path, work, plan)
                    journal.append(Checkpoint())
                sealed = str(
                    carry_out(prepared, work, named=path, resume=True, progress=progress).meta["content_sha256"]
                )
                fileio.remove(work / SIDECAR / LOCK_NAME)
                journal.append(Checkpoint(documents=len(prepared.samples), ended=True, sealed=sealed))
        finally:
            journal.close()
        version = versions.commit(work, path, sealed)
        meta = read_meta(str(version / META_NAME))
        record_recipe(found.settings, path, fingerprint, found.source, meta)
    return meta


def _build_key(plan: Plan) -> str:
    """Return what identifies a build: the plan, and the draft's vocabulary, which a native one leaves out."""
    return sha256([plan.sha256, plan.manifest["selected_token_ids"]]) if plan.is_native else plan.sha256


def _link_states(path: Path, work: Path, plan: Plan) -> None:
    """Link the files of a committed native cache of the same plan into a folder; copy what cannot be linked.

    Another draft vocabulary then writes manifest.json and meta.json alone. The target is not loaded, for its head is
    known from a finished cache: hence meta.json too. Producers replace files, they change none, so the committed
    version stays as it is.
    """
    if not plan.is_native or not recorded_recipe(path).get("fingerprint"):  # without one it is to be built from scratch
        return
    version = path.resolve()
    if read_meta(str(version / META_NAME)).get("plan_sha256") != plan.sha256 or not _has_its_shards(version):
        return
    fileio.remove(work)  # what a run left that was killed before its first checkpoint
    is_linked = True
    for file in sorted(version.rglob("*")):
        copy = work / file.relative_to(version)
        if file.is_file() and not file.is_symlink():
            fileio.make_dir(copy.parent)
            is_linked = fileio.link_or_copy(file, copy) and is_linked
    if not is_linked:  # a shard of the right size counts as finished, so copies are durable before the journal says so
        fileio.sync_tree(work)
