"""Resolves settings or options to `Resolved`: target, tokenizer, input and manifest of a cache, looked up once.

    found = resolve(options, settings)     precompute: from flags
    found = resolved(settings, ...)        a build of the two assets: from settings

Nothing is tokenized and no weights are loaded. Decides the sample's target and sizes, which revision of chats and
target an asset keeps until a newer one is observed, what a resumed run inherits from the plan in its folder, and what
the fingerprints contain.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.data.exclude import Exclusion
from niels_gpt.data.sources import SOURCES
from niels_gpt.engine.units import plans_of
from niels_gpt.hub.models import is_local
from niels_gpt.recipes.eagle3.options import KEYS, Options, TargetOptions, flag_name
from niels_gpt.recipes.records import (
    cache_root,
    fingerprint_by_list,
    is_current,
    record_recipe,
)
from niels_gpt.recipes.resolve import resolve_whole
from niels_gpt.recipes.tokenizer import ensure_tokenizer, no_sentinels
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError, InputError, LeftOut, TargetError
from niels_gpt.storage.fileio import canonical_json

if TYPE_CHECKING:
    from niels_gpt.chat.protocol import ChatTokenizer
    from niels_gpt.eagle3.models import TargetFacts
    from niels_gpt.eagle3.placement import Placement

VOCAB_KEY, KEY = KEYS
SMALL_TARGET = "small_target"
"""The manifest's name of the small random Llama that is the sample's target."""
WORK_NAME = "cache"
"""The folder of an unfinished version of eagle3/targets, beside its plan.json of units."""
VOCAB_VERSION = 1
"""format_version of meta.json of eagle3/draft_vocab."""
_OF_DEFAULT = (
    *("eagle3_document_start", "eagle3_format", "eagle3_aux_dtype", "eagle3_aux_layers"),
    *("eagle3_made_for", "eagle3_target_rows"),
    *("eagle3_quantization", "eagle3_load_dtype"),
)
"""Settings that fingerprints leave out while they have their defaults: older caches have been made without them."""
_NOT_IN_FINGERPRINT = (
    "eagle3_device",
    "eagle3_device_map",
    "eagle3_max_memory",
    "eagle3_tensor_parallel",
    "eagle3_check_samples",
)  # they decide no byte, or its rounding only
_OF_VOCAB = ("target_model", "input_data", "document_start", "limit", "seq_length", "draft_vocab_size")
"""Options that decide the draft's vocabulary."""
_SIZES = {"draft_vocab_size": 32_000}  # as the published drafts have
_SMALL_SIZES = {"seq_length": 256, "draft_vocab_size": 512, "threads": 1}
"""For the sample's target: its longest chat has 129 tokens, and one thread is fastest and independent of the cores."""
_TARGETS_DIR = ".small_target"
_DIGITS = 12


# --- settings -> the target, and what is configured -------------------------------------------------------------------


class NoTarget(LeftOut, ValueError):
    """No target is named, and only the sample has one by default."""

    code, warning = "E705", "W513"
    found = "no target: name one with --eagle3-target"
    is_asked = False


class NoExtra(LeftOut, ImportError):
    """The extra eagle3, which runs a target, is not installed."""

    code, warning = "E901", "W513"
    found = "pip install 'niels-gpt[eagle3]'"


def why_left_out(settings: Settings) -> NoTarget | NoExtra | None:
    """Return the reason why nothing of eagle3 can be built, as `check_configured` raises it; None if it can."""
    try:
        check_configured(settings)
    except (NoTarget, NoExtra) as error:
        return error
    return None


def has_small_target(settings: Settings) -> bool:
    """Return whether the target is the small random Llama, which has the tokenizer of the caches."""
    return settings.eagle3_target is None and settings.source_root == "sample"


def check_configured(settings: Settings) -> None:
    """Raise NoTarget or NoExtra if nothing of eagle3 can be built. Imports and reads nothing."""
    if settings.eagle3_target is None and not has_small_target(settings):
        raise NoTarget(
            "no target is named: pass --eagle3-target FOLDER_OR_ID (the setting eagle3_target, NIELS_GPT_EAGLE3_TARGET)"
        )
    if importlib.util.find_spec("transformers") is None:
        problem = NoExtra("running a target needs transformers. Install the extra: pip install 'niels-gpt[eagle3]'")
        problem.is_asked = settings.eagle3_target is not None
        raise problem


def settings_fingerprint(settings: Settings, key: str) -> str:
    """Return twelve hex digits of the settings that decide the bytes of a key. Reads no file."""
    from niels_gpt.eagle3.format.drafters import DRAFTERS

    names = [name for name in vars(settings) if name.startswith("eagle3_") and name not in _NOT_IN_FINGERPRINT]
    if key == VOCAB_KEY:
        names = [each.metadata["setting"] for each in fields(Options) if each.name in _OF_VOCAB]
    spec = SOURCES.get(settings.eagle3_source)
    names += spec.own_settings if spec and spec.family == "sft" else ()
    defaults = {name: getattr(Settings, name) for name in _OF_DEFAULT}
    chosen = {name: getattr(settings, name) for name in names}
    if kind := DRAFTERS.get(settings.eagle3_made_for or "eagle3"):  # a default that is named decides the same bytes
        usual = {"eagle3_aux_layers": kind.layers, "eagle3_made_for": "eagle3", "eagle3_target_rows": kind.targets}
        chosen |= {name: None for name, value in usual.items() if chosen.get(name) == value}
    return sha256({name: value for name, value in chosen.items() if defaults.get(name, ...) != value})[:_DIGITS]


def sha256(value: Any) -> str:
    """Return the sha256 of a value as canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def raw_source(settings: Settings) -> str | None:
    """Return the name of the source that is observed as raw/NAME; None if the chats are files."""
    names = {*(spec.name for spec in SOURCES.values() if spec.family == "sft"), *user_sources(settings)}
    return settings.eagle3_source if settings.eagle3_source in names else None


def target_name(settings: Settings) -> str:
    """Return the folder or id of the target; for the sample, write a small Llama with the tokenizer's vocabulary.

    Raises: NoTarget; NoExtra; for the sample NoSentinels if the tokenizer has none.
    """
    check_configured(settings)
    if settings.eagle3_target is not None:
        return settings.eagle3_target
    from niels_gpt.eagle3.target import write_small_target
    from niels_gpt.tokenizer import load_tokenizer

    path = ensure_tokenizer(settings).path
    tokenizer = load_tokenizer(path, follow_links=False)
    if not tokenizer.special_token_ids():
        raise no_sentinels(settings, [KEY], path)
    return str(write_small_target(small_target_folder(settings, tokenizer.sha256), tokenizer))


def small_target_folder(settings: Settings, tokenizer_sha256: str) -> Path:
    """Return the folder of the small Llama of a tokenizer."""
    return cache_root(settings) / "eagle3" / _TARGETS_DIR / tokenizer_sha256[:_DIGITS]


def folder_with_plan(path: Path) -> Path | None:
    """Return the committed cache, else its newest unfinished version, whichever has a plan; None without one."""
    from niels_gpt.eagle3.resume import recorded_plan

    return next((folder for folder in (path, *unfinished_versions(path)) if recorded_plan(folder)), None)


def unfinished_versions(path: Path) -> list[Path]:
    """Return the folders of unfinished versions, newest first, then the ones of earlier releases."""
    earlier = [folder for folder in versions.versions_dir(path).glob(f"{versions.BUILDING}-*") if not folder.suffix]
    earlier.sort(key=lambda folder: folder.lstat().st_mtime_ns, reverse=True)
    return [*(plan.folder / WORK_NAME for plan in plans_of(path)), *earlier]


def stable_name(settings: Settings, target: str) -> str:
    """Return the target's name in the cache: a hub id, or a folder's name without its path."""
    if settings.eagle3_target is None:
        return SMALL_TARGET
    return Path(target).expanduser().resolve().name if os.path.isdir(os.path.expanduser(target)) else target


# --- what was asked for, looked up ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A target, its tokenizer and the input, as the options name them. No chat is read and no weight loaded."""

    settings: Settings
    target: TargetFacts
    tokenizer: ChatTokenizer
    source: dict[str, Any]
    """The facts of the input."""
    run: dict[str, Any]
    """How the target is run: the fields of `format.plan.Run`, and the form of its weights."""
    placement: Placement

    @staticmethod
    def named(
        options: TargetOptions, settings: Settings, recorded: Mapping[str, Any], *, hash_weights: bool = True
    ) -> dict[str, Any]:
        """Look all of it up; return the fields. recorded: of an earlier run, which supplies unset options.

        hash_weights: see target_facts.
        Raises: FileNotFoundError, ConnectionError, ImportError or ValueError if something is missing or unusable.
        """
        from niels_gpt.chat.tokenizers import open_tokenizer
        from niels_gpt.eagle3.models import checkpoint_quantization, target_facts
        from niels_gpt.recipes.eagle3.input import input_facts
        from niels_gpt.recipes.eagle3.running import placement_of, run_facts

        before, name = recorded.get("target", {}), getattr(options, "target_name", None) or options.target_model
        revision = options.revision or (before.get("revision") if before.get("name") == name else None)
        target = target_facts(options.target_model, revision=revision, hash_weights=hash_weights)
        how: dict[str, Any] = {
            "revision": target.revision,
            "chat_template": options.chat_template,
            "start": options.document_start,
        }
        stored = checkpoint_quantization(options.target_model, target.revision)
        run = run_facts(options, recorded.get("run", {}), stored)
        return {
            "settings": settings,
            "target": target,
            "tokenizer": open_tokenizer(options.target_model, **how),
            "source": input_facts(settings, options.input_data, recorded=recorded.get("source")),
            "run": run,
            "placement": placement_of(options, run),
        }


@dataclass(frozen=True)
class Resolved(Target):
    """The resolved options of a cache."""

    options: Options
    aux_layer_ids: list[int]
    targets: str
    """Which target rows a native cache stores: one of format.drafters.TARGETS."""
    draft_vocab: list[int] | None
    """The target's ids that the draft knows; None: the most frequent ones, counted once the input is tokenized."""

    @property
    def target_record(self) -> dict[str, Any]:
        """The plan's `target`."""
        return {**asdict(self.target), "name": self.options.target_name or self.target.name}

    @property
    def tokenizer_record(self) -> dict[str, Any]:
        """The plan's `tokenizer`."""
        names = ["sha256", "template_sha256", "mask_by", "pad_id"]
        if self.options.form == "native":  # redraft chooses another draft vocabulary only from the plan
            names.append("special_token_ids")
        return {name: getattr(self.tokenizer, name) for name in names} | self.start_record

    @property
    def start_record(self) -> dict[str, Any]:
        """`document_start` in the plan's `tokenizer`: id and token; {} if chats begin as their template writes them."""
        start = self.tokenizer.start
        return {} if start is None else {"document_start": start.record}

    @property
    def known_fields(self) -> dict[str, Any]:
        """Fields of the plan, except for the manifest, that are known before the input is read."""
        return {
            "target": self.target_record,
            "tokenizer": self.tokenizer_record,
            "source": self.source,
            "run": self.run,
            "batch_size": self.options.batch_size,
            "max_batch_tokens": self.options.max_batch_tokens,
        }

    @property
    def vocab_size(self) -> int:
        """Size of the draft's vocabulary unless a file states it."""
        return min(self.options.draft_vocab_size or self.target.vocab_size, self.target.vocab_size)

    # --- which cache it is ---

    def fingerprint(self, key: str) -> str:
        """Return the sha256 of everything that decides a cache's bytes, except versions and machine.

        For eagle3/draft_vocab the target's weights, layers and dtypes do not count. For eagle3/targets the draft's
        vocabulary follows from its size and the other parts. The names are the ones of earlier versions, so their
        caches stay current.
        """
        from niels_gpt.eagle3.format.drafters import manifest_keys
        from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION

        options = self.options
        about = ("fingerprint", "form", "settings", "limit", "exclude")
        source = {name: self.source[name] for name in about if name in self.source}
        if key == VOCAB_KEY:
            of_tokenizer = ("sha256", "template_sha256", "mask_by", "special_token_ids")
            parts: dict[str, Any] = {
                "options": {name: getattr(options, name) for name in ("seq_length", "limit", "draft_vocab_size")},
                "target_vocab_size": self.target.vocab_size,
                "tokenizer": {name: getattr(self.tokenizer, name) for name in of_tokenizer} | self.start_record,
                "versions": [VOCAB_VERSION],
            }
        else:
            form: dict[str, Any] = {name: getattr(options, name) for name in ("format", "shard_bytes", "aux_dtype")}
            form |= manifest_keys(self.targets, self.aux_layer_ids, options.made_for)
            if options.form != "native":
                form = {"format_version": options.format and int(options.format), "aux_layer_ids": None}
            parts = {
                "options": options.in_fingerprint | form,
                "target": self.target_record,
                "tokenizer": self.tokenizer_record,
                "aux_layer_ids": self.aux_layer_ids,
                "draft_vocab": None,
                "versions": [SIDECAR_VERSION, BUILDER_VERSION],
            }
        return sha256({"recipe": key, "source": source, **parts})

    def is_current(self, key: str, *, reads_hub: bool = True) -> bool:
        """Return whether the committed cache of a key has this fingerprint; see `fingerprint_by_list`.

        reads_hub: read chats of the hub to compare, if the --exclude list has changed.
        """
        from niels_gpt.recipes.eagle3.input import named_in_input

        def by_list(listed: Exclusion | None) -> str:
            source = {name: fact for name, fact in self.source.items() if name != "exclude"}
            of_list = {"exclude": listed.facts} if listed else {}
            return replace(self, source=source | of_list).fingerprint(key)

        path, raw = cache_root(self.settings) / key, self.tokenizer.mask_by != "sentinels"
        named = partial(named_in_input, self.settings, self.source, raw=raw)
        is_read = reads_hub or self.source["kind"] != "hub"
        return is_current(path, fingerprint_by_list(self.settings, path, by_list, named if is_read else None))

    def record(self, key: str, meta: dict[str, Any], **more: Any) -> None:
        """Record the recipe of the committed version of a key. meta: of that version; more: further keys."""
        record_recipe(self.settings, cache_root(self.settings) / key, self.fingerprint(key), self.source, meta, **more)


def resolved(
    settings: Settings,
    *,
    observed: str | None,
    refresh: bool = False,
    hash_weights: bool = True,
    target: Path | None = None,
    plan_from: Path | None = None,
) -> Resolved:
    """Resolve the settings; a hub source gets the observed revision, or the revision of eagle3/targets (D12).

    observed: fingerprint of the source, newer than the asset. refresh: ask the hub for the newest revisions of chats
        and target. hash_weights: see target_facts. target: folder of the small target, if it exists.
    plan_from: folder with the plan that supplies revisions, device and threads; None: see `folder_with_plan`.
    Raises: NoTarget, NoExtra, NoSentinels; ValueError naming the settings that do not fit; the errors of `resolve`.
    """
    from niels_gpt.recipes.eagle3.input import input_facts

    named = target_name(settings) if target is None else str(target)
    sizes: dict[str, Any] = _SMALL_SIZES if settings.eagle3_target is None else _SIZES
    with _named_by_settings():
        name = stable_name(settings, named)
        if refresh:
            observed = _newest_chats(settings) or observed
            sizes = sizes if is_local(named) else {**sizes, "revision": "main"}
        options = Options.from_settings(settings, target_model=named, target_name=name, **sizes)
        folder = plan_from or folder_with_plan(cache_root(settings) / KEY)
        found = resolve(options, settings, plan_from=folder, hash_weights=hash_weights)
    source = found.source
    dataset, _, revision = (observed or "").rpartition("@")
    if source["kind"] == "hub" and dataset == str(source["fingerprint"]).rpartition("@")[0] and revision != "None":
        newer = {**source, "fingerprint": observed, "revision": revision}
        source = {**source, **input_facts(settings, settings.eagle3_source, recorded=newer)}
    return replace(found, source=source)


def _newest_chats(settings: Settings) -> str | None:
    """Return the fingerprint of the newest revision of chats on the hub; None for chats of files."""
    name = raw_source(settings)
    source = None if name is None else resolve_whole(settings, name)
    return None if source is None or source.kind != "hub" else str(source.provenance(None)["fingerprint"])


@contextmanager
def _named_by_settings() -> Iterator[None]:
    """Name settings instead of precompute's flags in a ValueError of the block."""
    settings = {flag_name(each.name): each.metadata["setting"] for each in fields(Options) if each.metadata["setting"]}
    try:
        yield
    except CacheError:  # of a file
        raise
    except ValueError as error:
        if len(error.args) == 1:
            error.args = (re.sub("--[a-z][a-z-]*", lambda flag: settings.get(flag[0], flag[0]), str(error)),)
        raise


def resolve(
    options: Options, settings: Settings, *, plan_from: Path | None = None, hash_weights: bool = True
) -> Resolved:
    """Look up target, tokenizer and input.

    plan_from: folder with a plan that supplies unset options (revisions, device, dtype, threads), even if the plan
        differs otherwise. None: for a resumed run or a partition output_dir, which must then have this run's plan.
    hash_weights: see target_facts.
    Raises: FileNotFoundError, ConnectionError, ImportError or ValueError if something is missing or unusable;
        CacheError if output_dir cannot be used, holds a cache without `resume`, or holds another plan.
    """
    from niels_gpt.eagle3.disk import refuse_unusable
    from niels_gpt.eagle3.models import refuse_other_placement
    from niels_gpt.eagle3.placement import FORM
    from niels_gpt.eagle3.resume import recorded_plan, refuse_existing
    from niels_gpt.recipes.eagle3.input import ROWS

    if options.output_dir is not None:
        refuse_unusable(options.output_dir)
        if not options.may_continue:
            refuse_existing(options.output_dir)
    recorded = recorded_plan(options.output_dir if plan_from is None and options.may_continue else plan_from)
    if plan_from is not None:  # of a setting left out, the fingerprint says that the form is the default one
        recorded = {**recorded, "run": {**recorded.get("run", {}), **dict.fromkeys(FORM)}}
    found = Target.named(options, settings, recorded, hash_weights=hash_weights)
    target, facts = found["target"], found["source"]
    if target.max_positions is not None and options.seq_length > target.max_positions:
        raise TargetError(
            f"--seq-length is {options.seq_length}, and {options.target_model} has {target.max_positions} positions. "
            f"Pass --seq-length {target.max_positions} or less"
        )
    refuse_other_placement(options.target_model, target.revision, found["placement"])
    layers, targets = _states(options, target.num_layers)
    if found["tokenizer"].start is not None and facts["form"] == ROWS:
        raise InputError(
            f"--document-start is {options.document_start}, and {options.input_data} has rows of input_ids, which are "
            "taken as they are: leave it out"
        )
    found["source"] = {**facts, "limit": options.limit}
    draft_vocab = _known_vocab(options, target.vocab_size)
    resolved = Resolved(**found, options=options, aux_layer_ids=layers, targets=targets, draft_vocab=draft_vocab)
    if plan_from is None and recorded:
        resolved = _resumed(resolved, recorded)
    _refuse_other_draft(resolved)
    return resolved


def _states(options: Options, num_layers: int) -> tuple[list[int], str]:
    """Return the blocks and target rows of the cache. Raises: ValueError if its kind of draft lacks one."""
    from niels_gpt.eagle3.format.drafters import DRAFTERS, enough_for
    from niels_gpt.eagle3.target import checked_aux_layer_ids, parse_aux_layers

    usual = DRAFTERS[options.made_for or "eagle3"]
    named = usual.layers if options.aux_layers is None else options.aux_layers
    try:
        layers = parse_aux_layers(named, num_layers)
        if options.form != "native":
            checked_aux_layer_ids(layers, num_layers)
    except ValueError as error:
        raise ValueError(f"--aux-layers {named}: {error}") from error
    targets = options.targets or usual.targets
    if not (fitting := enough_for(targets, layers)):
        remedy = "Pass --targets all" if options.made_for in (None, "mtp") else "Leave --aux-layers and --targets out"
        raise ValueError(f"--aux-layers {named} with --targets {targets}: no draft reads such a cache. {remedy}")
    if options.made_for not in (None, *fitting):
        raise ValueError(
            f"--for {options.made_for} with --aux-layers {named} and --targets {targets}: its loss reads more than "
            f"this cache has, which is enough for {', '.join(fitting)}. Leave --aux-layers and --targets out"
        )
    return layers, targets


def _resumed(resolved: Resolved, recorded: dict[str, Any]) -> Resolved:
    """Return a resumed run, with the plan's names for equal files. Raises: CacheError for another plan."""
    from niels_gpt.eagle3.resume import refuse_other_plan

    options, target, source = resolved.options, recorded.get("target", {}), recorded.get("source", {})
    assert options.output_dir is not None
    hashes = [(target.get(name), getattr(resolved.target, name)) for name in ("weights_sha256", "config_sha256")]
    if options.target_name is None and None not in hashes[0] and all(theirs == ours for theirs, ours in hashes):
        resolved = replace(resolved, options=replace(options, target_name=target.get("name")))
    if resolved.source["kind"] == "own" and all(source.get(n) == resolved.source[n] for n in ("kind", "fingerprint")):
        resolved = replace(resolved, source={**resolved.source, "input_data": source.get("input_data")})
    size = resolved.vocab_size
    selected = resolved.draft_vocab or list(range(size))  # of another size than the plan's, so the plans differ
    refuse_other_plan(options.output_dir, manifest_of(resolved, selected), resolved.known_fields, options.part_numbers)
    return resolved


def _refuse_other_draft(resolved: Resolved) -> None:
    """Raise CacheError if --resume would give a native cache a draft vocabulary that nobody asked for."""
    from niels_gpt.eagle3.resume import refuse_other_draft

    options = resolved.options
    if options.may_continue and options.output_dir is not None and options.form == "native":
        is_stated = options.draft_vocab_size is not None or options.draft_vocab_from is not None
        is_stated = is_stated and options.partition is None  # other partitions have the first one
        size = len(resolved.draft_vocab or ()) or resolved.vocab_size
        refuse_other_draft(options.output_dir, resolved.draft_vocab, size, is_stated=is_stated)


def _known_vocab(options: Options, vocab_size: int) -> list[int] | None:
    """Return the ids of --draft-vocab-from, or of the manifest that --resume finds, if its sizes are this run's."""
    from niels_gpt.eagle3.format.manifest import manifest_path, read_manifest
    from niels_gpt.eagle3.vocab import load_token_mapping

    folder, source = options.output_dir, options.draft_vocab_from
    if source is not None:
        ids, _ = load_token_mapping(source, target_vocab_size=vocab_size, draft_vocab_size=options.draft_vocab_size)
        return [int(number) for number in ids]
    if options.may_continue and folder is not None and os.path.exists(manifest_path(folder)):
        manifest = read_manifest(folder)
        sizes = manifest.get("target_vocab_size"), manifest.get("draft_vocab_size")
        if sizes == (vocab_size, min(options.draft_vocab_size or vocab_size, vocab_size)):
            return list(manifest["selected_token_ids"])
    return None


def manifest_of(resolved: Resolved, selected: list[int]) -> dict[str, Any]:
    """Return manifest.json's keys, except those that `make_plan` and the target add.

    Versions 1 and 2 have exactly NeMo Automodel's keys.

    selected: the target's id of each draft token.
    """
    from niels_gpt.eagle3.format.drafters import manifest_keys
    from niels_gpt.eagle3.format.manifest import NATIVE_VERSION, is_compressed
    from niels_gpt.eagle3.format.native import DEFAULT_SHARD_BYTES

    options, target = resolved.options, resolved.target
    common = {
        "target_model": options.target_name or options.target_model,
        "target_vocab_size": target.vocab_size,
        "draft_vocab_size": len(selected),
        "seq_length": options.seq_length,
        "dtype": options.dtype,
        "aux_layer_ids": resolved.aux_layer_ids,
        "selected_token_ids": selected,
    }
    source = {"input_data": resolved.source["input_data"], "split": None, "shuffle_seed": 0}
    if options.form == "native":
        return {
            "format_version": NATIVE_VERSION,
            **common,
            "hidden_size": target.hidden_size,
            "aux_dtype": options.aux_dtype or options.dtype,
            "shard_bytes": options.shard_bytes or DEFAULT_SHARD_BYTES,
            **source,
            **manifest_keys(resolved.targets, resolved.aux_layer_ids, options.made_for),
        }
    compressed = is_compressed(options.target_probs_topk, len(selected))
    version = 2 if options.format == "2" or (options.format is None and compressed) else 1
    sizes = {"shard_size": options.shard_size, "aux_hidden_dim": target.hidden_size * len(resolved.aux_layer_ids)}
    if version == 1:
        return {"format_version": 1, **common, **sizes}
    return {
        "format_version": 2,
        **common,
        **sizes,
        "target_probs_topk": options.target_probs_topk,
        **source,
        "mask_reasoning_content": False,
        "mask_generation_prompt": True,  # the role header carries no loss
    }
