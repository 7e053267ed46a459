"""Options -> the plan of an EAGLE-3 cache, and the cache: target, tokenizer, input, draft vocabulary, manifest.

    resolved = resolve(options, settings)       looks everything up; nothing is tokenized, no weights are loaded
    prepared = prepare(resolved)                tokenizes the input and plans; no weights are loaded
    produced = carry_out(prepared, folder)      runs the target and writes the cache

Decides which revision, names, threads, device and dtype a resumed run takes from the plan in its folder, and every
value of manifest.json. Heavy libraries are imported in functions, so that a command line answers --help at once.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import niels_gpt
from niels_gpt.chat_template import roles_counted
from niels_gpt.data.exclude import Exclusion
from niels_gpt.display.numbers import many
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.settings import Settings, usable_cores
from niels_gpt.signals import is_of_kept
from niels_gpt.storage.errors import InputError, TargetError

if TYPE_CHECKING:
    import torch

    from niels_gpt.chat.rows import Row
    from niels_gpt.chat.tokenizers import ChatTokenizer
    from niels_gpt.eagle3.build import Produced
    from niels_gpt.eagle3.format.plan import Plan
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.eagle3.models import TargetFacts
    from niels_gpt.progress import Progress

logger = logging.getLogger(__name__)
_REPORT_EVERY = 100  # samples
_START_FLAG = "--eagle3-document-start"  # of a build


@dataclass(frozen=True)
class Resolved:
    """What the options stand for right now; no sample is tokenized and no weight loaded."""

    options: Options
    settings: Settings
    target: TargetFacts
    tokenizer: ChatTokenizer
    source: dict[str, Any]
    """The facts of the input."""
    run: dict[str, Any]
    """How the target is run: the fields of `run.Run`."""
    aux_layer_ids: list[int]
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
        if self.options.form == "native":  # redraft chooses another draft vocabulary from the plan alone
            names.append("special_token_ids")
        return {name: getattr(self.tokenizer, name) for name in names} | self.start_record

    @property
    def start_record(self) -> dict[str, Any]:
        """`document_start` of the plan's `tokenizer`: id and token; {} where chats have what their template writes."""
        start = self.tokenizer.start
        return {} if start is None else {"document_start": start.record}

    @property
    def known_parts(self) -> dict[str, Any]:
        """The parts of the plan, except for the manifest, that are known before the input is read."""
        return {
            "target": self.target_record,
            "tokenizer": self.tokenizer_record,
            "source": self.source,
            "run": self.run,
            "batch_size": self.options.batch_size,
            "max_batch_tokens": self.options.max_batch_tokens,
        }


@dataclass(frozen=True)
class Prepared:
    """All that is needed to make a cache."""

    resolved: Resolved
    samples: Samples
    plan: Plan
    shown: list[Row] = field(default_factory=list)
    """The first `options.show` samples."""


def is_current_of(found: Resolved, path: Path, fingerprint: Callable[[Resolved], str], reads_hub: bool) -> bool:
    """Whether the committed cache at `path` has the fingerprint of what the options stand for: see
    `fingerprint_by_list`. reads_hub: read chats of the hub, where the list of --exclude has changed, to compare."""
    from niels_gpt.recipes.eagle3.input import named_in_input
    from niels_gpt.recipes.records import fingerprint_by_list, is_current

    def by_list(listed: Exclusion | None) -> str:
        source = {name: fact for name, fact in found.source.items() if name != "exclude"}
        return fingerprint(replace(found, source=source | ({"exclude": listed.facts} if listed else {})))

    raw = found.tokenizer.mask_by != "sentinels"
    named = partial(named_in_input, found.settings, found.source, raw=raw)
    is_read = reads_hub or found.source["kind"] != "hub"
    return is_current(path, fingerprint_by_list(found.settings, path, by_list, named if is_read else None))


# --- options -> Resolved ----------------------------------------------------------------------------------------------


def resolve(
    options: Options, settings: Settings, *, plan_from: Path | None = None, hash_weights: bool = True
) -> Resolved:
    """Look up target, tokenizer and input.

    plan_from: folder whose plan supplies unset options (revisions, device, dtype, threads), even if the plan differs
        otherwise. None: with `resume` or `part` output_dir, whose plan must then be that of this run.
    hash_weights: as of target_facts.
    Raises: FileNotFoundError, ConnectionError, ImportError, ValueError where one of them is missing or unusable;
        CacheError where output_dir cannot be used, holds a cache and `resume` is not set, or holds another plan.
    """
    from niels_gpt.chat.tokenizers import open_tokenizer
    from niels_gpt.eagle3.disk import refuse_unusable
    from niels_gpt.eagle3.resume import recorded_plan, refuse_existing
    from niels_gpt.eagle3.target import checked_aux_layer_ids, parse_aux_layers, target_facts
    from niels_gpt.recipes.eagle3.input import ROWS, input_facts

    if options.output_dir is not None:
        refuse_unusable(options.output_dir)
        if not options.may_continue:
            refuse_existing(options.output_dir)
    recorded = recorded_plan(options.output_dir if plan_from is None and options.may_continue else plan_from)
    revision = _revision(options, recorded.get("target", {}))
    target = target_facts(options.target_model, revision=revision, hash_weights=hash_weights)
    if target.max_positions is not None and options.seq_length > target.max_positions:
        raise TargetError(
            f"--seq-length is {options.seq_length}, and {options.target_model} has {target.max_positions} positions"
        )
    try:
        layers = parse_aux_layers(options.aux_layers, target.num_layers)
        if options.form != "native":
            checked_aux_layer_ids(layers, target.num_layers)
    except ValueError as error:
        raise ValueError(f"--aux-layers {options.aux_layers}: {error}") from error
    tokenizer = open_tokenizer(
        options.target_model,
        revision=target.revision,
        chat_template=options.chat_template,
        start=options.document_start,
    )
    facts = input_facts(settings, options.input_data, recorded=recorded.get("source"))
    if tokenizer.start is not None and facts["form"] == ROWS:
        raise InputError(
            f"--document-start is {options.document_start}, and {options.input_data} has rows of input_ids, which are "
            "taken as they are: leave it out"
        )
    resolved = Resolved(
        options=options,
        settings=settings,
        target=target,
        tokenizer=tokenizer,
        source={**facts, "limit": options.limit},
        run=run_facts(options, recorded.get("run", {})),
        aux_layer_ids=layers,
        draft_vocab=_known_vocab(options, target.vocab_size),
    )
    if plan_from is None and recorded:
        resolved = _resumed(resolved, recorded)
    _refuse_other_draft(resolved)
    return resolved


def _revision(options: Options, recorded: dict[str, Any]) -> str | None:
    """Return the target's revision: the option's, else that of the plan if it has a target of this name."""
    same = recorded.get("name") == (options.target_name or options.target_model)
    return options.revision or (recorded.get("revision") if same else None)


def _resumed(resolved: Resolved, recorded: dict[str, Any]) -> Resolved:
    """Return a resumed run, with the plan's names of equal files. Raises: CacheError if the plan is another one."""
    from niels_gpt.eagle3.resume import refuse_other_plan

    options, target, source = resolved.options, recorded.get("target", {}), recorded.get("source", {})
    assert options.output_dir is not None
    hashes = [(target.get(name), getattr(resolved.target, name)) for name in ("weights_sha256", "config_sha256")]
    if options.target_name is None and None not in hashes[0] and all(theirs == ours for theirs, ours in hashes):
        resolved = replace(resolved, options=replace(options, target_name=target.get("name")))
    if resolved.source["kind"] == "own" and all(source.get(n) == resolved.source[n] for n in ("kind", "fingerprint")):
        resolved = replace(resolved, source={**resolved.source, "input_data": source.get("input_data")})
    size = _draft_size(options, resolved.target.vocab_size)
    selected = resolved.draft_vocab or list(range(size))  # of another size than the plan's, so the plans differ
    refuse_other_plan(options.output_dir, manifest_of(resolved, selected), resolved.known_parts, options.part_numbers)
    return resolved


def _refuse_other_draft(resolved: Resolved) -> None:
    """Raise CacheError where --resume would give a native cache another draft vocabulary that nobody has asked for."""
    from niels_gpt.eagle3.resume import refuse_other_draft

    options = resolved.options
    if options.may_continue and options.output_dir is not None and options.form == "native":
        is_stated = options.draft_vocab_size is not None or options.draft_vocab_from is not None
        is_stated = is_stated and options.partition is None  # other partitions have the first one
        size = len(resolved.draft_vocab or ()) or _draft_size(options, resolved.target.vocab_size)
        refuse_other_draft(options.output_dir, resolved.draft_vocab, size, is_stated=is_stated)


def run_facts(options: Options, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return how the target is run: the fields of run.Run. `recorded` supplies unset options.

    Raises: ValueError where cuda is asked for and cannot be used.
    """
    from niels_gpt.eagle3.format.run import Run

    device, threads = options.device or recorded.get("device"), options.threads or recorded.get("threads")
    run = Run.here(device, attention=options.attention, threads=threads or usable_cores())
    dtype = recorded.get("compute_dtype") if run.device == recorded.get("device") else None
    return {**asdict(run), "compute_dtype": options.compute_dtype or dtype or run.compute_dtype}


# --- the draft's vocabulary, and the manifest -------------------------------------------------------------------------


def _draft_size(options: Options, vocab_size: int) -> int:
    """Return the tokens of the draft's vocabulary where no file states them."""
    return min(options.draft_vocab_size or vocab_size, vocab_size)


def _known_vocab(options: Options, vocab_size: int) -> list[int] | None:
    """Return the ids of --draft-vocab-from, or of the manifest that --resume finds if its sizes are this run's."""
    from niels_gpt.eagle3.format.manifest import manifest_path, read_manifest
    from niels_gpt.eagle3.vocab import load_token_mapping

    folder, source = options.output_dir, options.draft_vocab_from
    if source is not None:
        ids, _ = load_token_mapping(source, target_vocab_size=vocab_size, draft_vocab_size=options.draft_vocab_size)
        return [int(number) for number in ids]
    if options.may_continue and folder is not None and os.path.exists(manifest_path(folder)):
        manifest = read_manifest(folder)
        sizes = manifest.get("target_vocab_size"), manifest.get("draft_vocab_size")
        if sizes == (vocab_size, _draft_size(options, vocab_size)):
            return list(manifest["selected_token_ids"])
    return None


def _frequent_vocab(resolved: Resolved, samples: Samples) -> list[int]:
    """Return the ids that are supervised most often, the special ones among them."""
    from niels_gpt.eagle3.vocab import build_eagle3_token_mapping

    ids, _ = build_eagle3_token_mapping(
        [{"input_ids": samples.ids, "loss_mask": samples.loss_mask}],
        target_vocab_size=resolved.target.vocab_size,
        draft_vocab_size=resolved.options.draft_vocab_size,
        special_token_ids=resolved.tokenizer.special_token_ids,
    )
    return [int(number) for number in ids]


def manifest_of(resolved: Resolved, selected: list[int]) -> dict[str, Any]:
    """Return manifest.json's keys, except those that `make_plan` and the target add.

    Versions 1 and 2 have those of their published contract, and no others.
    selected: the target's id of each token of the draft.
    """
    from niels_gpt.eagle3.format.manifest import NATIVE_VERSION, is_compressed
    from niels_gpt.eagle3.format.native.layout import DEFAULT_SHARD_BYTES

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


# --- Resolved -> Prepared -> the cache --------------------------------------------------------------------------------


def prepare(resolved: Resolved, *, tokenized: Callable[[int, int], None] | None = None) -> Prepared:
    """Tokenize the input, choose the draft's vocabulary, and plan.

    tokenized: called with samples and tokens after every 100 samples and at the end.
    Raises: ValueError and CacheError for an input, a draft vocabulary or a plan that cannot be used.
    """
    from niels_gpt.chat.rows import NOT_DROPPED, ROWS
    from niels_gpt.eagle3.format.plan import make_plan
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.recipes.eagle3.input import input_rows

    options, counters = resolved.options, Counter[str]()
    shown: list[Row] = []
    rows = input_rows(
        resolved.settings,
        options.input_data,
        resolved.tokenizer,
        seq_length=options.seq_length,
        counters=counters,
        vocab_size=resolved.target.vocab_size,
        facts=resolved.source,
    )
    samples = Samples.of_rows(_reported(islice(rows, options.limit), tokenized, shown, options.show))
    selected = resolved.draft_vocab or _frequent_vocab(resolved, samples)
    altered = {reason: counters[reason] for reason in (*NOT_DROPPED, *filter(is_of_kept, counters))}
    not_dropped = {ROWS, *altered, *roles_counted(counters)}  # the roles are counted in unknown_role too
    plan = make_plan(
        manifest_of(resolved, selected),
        samples,
        dropped={reason: number for reason, number in counters.items() if reason not in not_dropped},
        altered=altered,
        **resolved.known_parts,
    )
    return Prepared(resolved, samples, plan, shown)


def prepared_before(resolved: Resolved, folder: Path) -> Prepared | None:
    """Return what a folder's sidecar has of these options, the draft's vocabulary known; None: it is not theirs, or not
    whole. Its samples are read, and not tokenized again."""
    from niels_gpt.eagle3.format.layout import SIDECAR
    from niels_gpt.eagle3.format.plan import make_plan, read_record
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.storage.fileio import canonical_json

    with suppress(OSError, ValueError, LookupError, TypeError):
        record, samples = read_record(folder), Samples.open(folder / SIDECAR)
        if record is not None and resolved.draft_vocab is not None:
            manifest, counts = manifest_of(resolved, resolved.draft_vocab), (record["dropped"], record["altered"])
            plan = make_plan(manifest, samples, dropped=counts[0], altered=counts[1], **resolved.known_parts)
            return Prepared(resolved, samples, plan) if canonical_json(record) == canonical_json(plan.record) else None
    return None


def _reported(
    rows: Iterable[Row], tokenized: Callable[[int, int], None] | None, shown: list[Row], show: int
) -> Iterator[Row]:
    """Yield the rows; the first `show` are added to `shown`."""
    tokens, number = 0, 0
    for number, row in enumerate(rows, 1):
        tokens += len(row.input_ids)
        if number <= show:
            shown.append(row)
        if tokenized is not None and number % _REPORT_EVERY == 0:
            tokenized(number, tokens)
        yield row
    if tokenized is not None:
        tokenized(number, tokens)


def carry_out(
    prepared: Prepared,
    folder: str | os.PathLike[str],
    *,
    named: Path | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    claimed: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: Progress | None = None,
) -> Produced:
    """Make the cache in a folder, or what is missing of it. Arguments and errors: of `TargetRun`.

    Of an unfinished version of an asset, which is `named`, the caller has checked the file system.
    """
    from niels_gpt.eagle3.build import TargetRun
    from niels_gpt.recipes.shared import check_shared_folder, code_identity
    from niels_gpt.storage.locks import apply_lock_setting

    options, run, code = prepared.resolved.options, prepared.resolved.run, None
    if options.lock != "auto":
        apply_lock_setting(Path(folder), options.lock)
    if options.partition is not None:
        code = {"version": niels_gpt.__version__, **code_identity()}
        if named is None:
            check_shared_folder(Path(folder), "--output-dir")
    load = partial(
        open_target,
        name=options.target_model,
        revision=prepared.resolved.target.revision,
        compute_dtype=run["compute_dtype"],
        attention=options.attention,
    )
    run_of_target = TargetRun(
        Path(folder),
        prepared.plan,
        prepared.samples,
        load,
        named=named,
        workers=options.workers,
        resume=resume,
        part=options.part_numbers,
        code=code or {},
        command=command,
        claimed=claimed,
        progress=progress,
    )
    produced = run_of_target.make()
    warn_of_missing_start(prepared, named or Path(folder), "--document-start" if named is None else _START_FLAG)
    return produced


def warn_of_missing_start(prepared: Prepared, cache: Path, flag: str = "--document-start") -> None:
    """Log a warning where no chat begins with what the target's tokenizer writes before a text, and no option says how
    they begin. flag: the option, for the message."""
    from niels_gpt.recipes.eagle3.input import ROWS
    from niels_gpt.tokenizers.document_tokens import missing_start_text

    resolved, samples = prepared.resolved, prepared.samples
    starts, is_stated = resolved.tokenizer.usual_starts, resolved.options.document_start is not None
    if is_stated or not starts or resolved.source["form"] == ROWS or not len(samples):
        return
    if not (samples.ids[samples.starts[:-1]] == starts[0].id).any():
        text = missing_start_text(many(len(samples), "chat"), starts, flag)
        logger.warning("%s: %s", cache, text, extra={"code": "W414"})


def open_target(device: torch.device, *, name: str, revision: str | None, compute_dtype: str, attention: str) -> Any:
    """Load a target on a device, as `TargetRun` calls it in each of its processes. Raises: as `load_target`."""
    from niels_gpt.eagle3.format.layout import DTYPES
    from niels_gpt.eagle3.target import load_target

    return load_target(name, revision=revision, dtype=DTYPES[compute_dtype], attention=attention, device=device)
