"""Input + target -> the plan of an EAGLE-3 cache, and what a producer needs to carry it out.

    resolved = resolve(options, settings)       which target, which tokenizer, which source; nothing is tokenized yet
    prepared = prepare(resolved)                all samples and the plan; no weights are loaded
    produced = carry_out(prepared, folder)      the cache

Heavy libraries are loaded in functions, so that a command line answers --help at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.chat_template import roles_counted
from niels_gpt.recipes import eagle3_begun
from niels_gpt.recipes.eagle3_manifest import draft_size, frequent_vocab, known_vocab, manifest_of
from niels_gpt.recipes.eagle3_options import Options
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    import torch

    from niels_gpt.eagle3.chats import Row
    from niels_gpt.eagle3.models import TargetFacts
    from niels_gpt.eagle3.plan import Plan
    from niels_gpt.eagle3.producer import Produced, Progress
    from niels_gpt.eagle3.samples import Samples
    from niels_gpt.eagle3.tokenizers import ChatTokenizer

_TOLD_EVERY = 100  # samples


@dataclass(frozen=True)
class Resolved:
    """What the options stand for right now; no sample was tokenized and no weight loaded."""

    options: Options
    settings: Settings
    target: TargetFacts
    tokenizer: ChatTokenizer
    source: dict[str, Any]
    """The facts of the input."""
    run: dict[str, Any]
    """How the target is run: the fields of `plan.Run`."""
    aux_layer_ids: list[int]
    draft_vocab: list[int] | None
    """The ids of --draft-vocab-from."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the cache's bytes, before the input is read: equal identities, equal caches."""
        options = asdict(self.options)
        for name in (
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
        ):
            del options[name]
        return {
            "options": options,
            "target": _target_record(self),
            "tokenizer": _tokenizer_record(self.tokenizer),
            "source": self.source,
            "run": self.run,
            "aux_layer_ids": self.aux_layer_ids,
            "draft_vocab": self.draft_vocab,
        }


@dataclass(frozen=True)
class Prepared:
    """All that is needed to make a cache."""

    resolved: Resolved
    samples: Samples
    plan: Plan
    shown: list[Row] = field(default_factory=list)
    """The first `options.show` samples."""


def resolve(options: Options, settings: Settings, *, begun: Path | None = None) -> Resolved:
    """Look up target, tokenizer and input.

    begun: a folder whose plan says which revisions, device, dtype and threads count where the options do not, whatever
        else stands in it; None: output_dir, where `resume` is set, and then all of its plan must be that of this run.
    Raises: FileNotFoundError, ConnectionError, ImportError, ValueError where one of them is not there or cannot be
        used; CacheError where output_dir cannot be used, where it holds something and `resume` is not set, and where
        it holds another plan.
    """
    from niels_gpt.eagle3.folder import refuse_existing
    from niels_gpt.eagle3.target import checked_aux_layer_ids, target_facts
    from niels_gpt.eagle3.tokenizers import open_tokenizer
    from niels_gpt.recipes.eagle3_input import input_facts

    if options.output_dir is not None:
        eagle3_begun.refuse_unusable(options.output_dir)
        if not options.resume:
            refuse_existing(options.output_dir)
    recorded = eagle3_begun.recorded_plan(options.output_dir if begun is None and options.resume else begun)
    target = target_facts(options.target_model, revision=_revision(options, recorded))
    if target.max_positions is not None and options.seq_length > target.max_positions:
        raise ValueError(
            f"--seq-length is {options.seq_length}, and {options.target_model} has {target.max_positions} positions"
        )
    try:
        layers = checked_aux_layer_ids(options.aux_layer_ids, target.num_layers)
    except ValueError as error:
        raise ValueError(f"--aux-layer-ids: {error}") from error
    tokenizer = open_tokenizer(options.target_model, revision=target.revision, chat_template=options.chat_template)
    facts = input_facts(settings, options.input_data, recorded=recorded.get("source"))
    resolved = Resolved(
        options=options,
        settings=settings,
        target=target,
        tokenizer=tokenizer,
        source={**facts, "limit": options.limit},
        run=run_facts(options, recorded.get("run", {})),
        aux_layer_ids=layers,
        draft_vocab=_given_vocab(options, target.vocab_size),
    )
    return resolved if begun is not None or not recorded else _resumed(resolved, recorded)


def _revision(options: Options, recorded: dict[str, Any]) -> str | None:
    """Return the target's revision: as asked for, or what main was when the folder was begun."""
    begun = recorded.get("target", {})
    same = begun.get("name") == (options.target_name or options.target_model)
    return options.revision or (begun.get("revision") if same else None)


def _resumed(resolved: Resolved, recorded: dict[str, Any]) -> Resolved:
    """Return what goes on in output_dir, under the names of its plan. Raises: CacheError where that is another plan."""
    options, folder = resolved.options, resolved.options.output_dir
    assert folder is not None
    if options.target_name is None:
        name = eagle3_begun.recorded_target_name(resolved.target, recorded)
        options = replace(options, target_name=name)
    source = eagle3_begun.under_recorded_name(resolved.source, recorded)
    resolved = replace(resolved, options=options, source=source)
    selected = known_vocab(resolved)
    if selected is None:  # others than those of the plan, whichever they are
        selected = list(range(draft_size(resolved)))
    eagle3_begun.refuse_other_plan(folder, manifest_of(resolved, selected), _decided(resolved))
    return resolved


def _given_vocab(options: Options, vocab_size: int) -> list[int] | None:
    from niels_gpt.eagle3.vocab import load_token_mapping

    if options.draft_vocab_from is None:
        return None
    ids, _ = load_token_mapping(
        options.draft_vocab_from, target_vocab_size=vocab_size, draft_vocab_size=options.draft_vocab_size
    )
    return [int(number) for number in ids]


def run_facts(options: Options, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return how the target is run: the fields of plan.Run, what the options leave open as `recorded` has it.

    Raises: ValueError where cuda is asked for and cannot be used.
    """
    from niels_gpt.eagle3.plan import Run

    device, threads = options.device or recorded.get("device"), options.threads or recorded.get("threads")
    run = Run.here(device, attention=options.attention, threads=threads or len(os.sched_getaffinity(0)))
    begun = recorded.get("compute_dtype") if run.device == recorded.get("device") else None
    return {**asdict(run), "compute_dtype": options.compute_dtype or begun or run.compute_dtype}


def _decided(resolved: Resolved) -> dict[str, Any]:
    """Return the parts of the plan, the manifest aside, that are known before the input is read."""
    return {
        "target": _target_record(resolved),
        "tokenizer": _tokenizer_record(resolved.tokenizer),
        "source": resolved.source,
        "run": resolved.run,
        "batch_size": resolved.options.batch_size,
        "max_batch_tokens": resolved.options.max_batch_tokens,
    }


def _target_record(resolved: Resolved) -> dict[str, Any]:
    return {**asdict(resolved.target), "name": resolved.options.target_name or resolved.target.name}


def _tokenizer_record(tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("sha256", "template_sha256", "mask_by", "pad_id")}


def prepare(resolved: Resolved, *, tokenized: Callable[[int, int], None] | None = None) -> Prepared:
    """Tokenize the input, choose the draft's vocabulary, and plan.

    tokenized: is told samples and tokens, now and then.
    Raises: ValueError and CacheError for an input, a draft vocabulary or a plan that cannot be used.
    """
    from niels_gpt.eagle3.chats import NOT_DROPPED, ROWS
    from niels_gpt.eagle3.plan import make_plan
    from niels_gpt.eagle3.samples import Samples
    from niels_gpt.recipes.eagle3_input import input_rows

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
    samples = Samples.of_rows(_told(islice(rows, options.limit), tokenized, shown, options.show))
    plan = make_plan(
        manifest_of(resolved, known_vocab(resolved) or frequent_vocab(resolved, samples)),
        samples,
        dropped={
            reason: number
            for reason, number in counters.items()
            if reason not in (ROWS, *NOT_DROPPED, *roles_counted(counters))  # unknown_role counts these
        },
        altered={reason: counters[reason] for reason in NOT_DROPPED},
        **_decided(resolved),
    )
    return Prepared(resolved, samples, plan, shown)


def _told(
    rows: Iterable[Row], tokenized: Callable[[int, int], None] | None, shown: list[Row], show: int
) -> Iterator[Row]:
    tokens, number = 0, 0
    for number, row in enumerate(rows, 1):
        tokens += len(row.input_ids)
        if number <= show:
            shown.append(row)
        if tokenized is not None and number % _TOLD_EVERY == 0:
            tokenized(number, tokens)
        yield row
    if tokenized is not None:
        tokenized(number, tokens)


def carry_out(
    prepared: Prepared, folder: str | os.PathLike[str], *, resume: bool = False, progress: Progress | None = None
) -> Produced:
    """Make the cache in a folder, or what is missing of it. Raises: as `produce`."""
    from niels_gpt.eagle3.producer import produce

    options, target = prepared.resolved.options, prepared.resolved.target
    load = partial(
        open_target,
        name=options.target_model,
        revision=target.revision,
        compute_dtype=prepared.resolved.run["compute_dtype"],
        attention=options.attention,
    )
    return produce(
        folder,
        prepared.plan,
        prepared.samples,
        load,
        workers=options.workers,
        resume=resume,
        progress=progress,
    )


def open_target(device: torch.device, *, name: str, revision: str | None, compute_dtype: str, attention: str) -> Any:
    """Load a target on a device, as `produce` calls it in each of its processes. Raises: as `load_target`."""
    from niels_gpt.eagle3.layout import DTYPES
    from niels_gpt.eagle3.target import load_target

    return load_target(name, revision=revision, dtype=DTYPES[compute_dtype], attention=attention, device=device)
