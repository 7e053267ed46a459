"""Tokenizes the input, chooses the draft's vocabulary, plans a cache, and builds it.

prepared = prepare(found)                   tokenizes the input and plans; loads no weights
produced = carry_out(prepared, folder)      runs the target and writes the cache
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import niels_gpt
from niels_gpt.chat_template import roles_counted
from niels_gpt.display.numbers import many
from niels_gpt.eagle3.placement import Placement
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.recipes.eagle3.request import KEY, Resolved, manifest_of, target_name
from niels_gpt.recipes.records import cache_root
from niels_gpt.settings import Settings
from niels_gpt.signals import Found, is_of_kept
from niels_gpt.storage.checks import Verdict

if TYPE_CHECKING:
    import torch

    from niels_gpt.chat.rows import Row
    from niels_gpt.eagle3.build import Produced
    from niels_gpt.eagle3.format.plan import TargetPlan
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.work import Progress

logger = logging.getLogger(__name__)
_REPORT_EVERY = 100  # samples
_START_FLAG = "--eagle3-document-start"  # of a build


@dataclass(frozen=True)
class Prepared:
    """Everything needed to build a cache."""

    resolved: Resolved
    samples: Samples
    plan: TargetPlan
    shown: list[Row] = field(default_factory=list)
    """The first `options.show` samples."""
    repeated: Found | None = None
    """Samples with a reply that ends in repetition; None where the samples were read from a sidecar."""


def prepare(resolved: Resolved, *, tokenized: Callable[[int, int], None] | None = None) -> Prepared:
    """Tokenize the input, choose the draft's vocabulary, and plan.

    tokenized: called with samples and tokens after every 100 samples and at the end.
    Raises: ValueError and CacheError for an input, a draft vocabulary or a plan that cannot be used.
    """
    from niels_gpt.chat.rows import NOT_DROPPED, ROWS
    from niels_gpt.eagle3.degenerate import Repeated
    from niels_gpt.eagle3.format.plan import make_plan
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.recipes.eagle3.input import input_rows

    options, counters = resolved.options, Counter[str]()
    shown: list[Row] = []
    repeated = Repeated()
    rows = input_rows(
        resolved.settings,
        options.input_data,
        resolved.tokenizer,
        seq_length=options.seq_length,
        counters=counters,
        vocab_size=resolved.target.vocab_size,
        facts=resolved.source,
    )
    rows = repeated.counted(islice(rows, options.limit))
    samples = Samples.of_rows(_reported(rows, tokenized, shown, options.show))
    if (found := repeated.found(len(samples))).is_above:
        logger.warning("%s: %s", options.input_data, found, extra={"code": "W705"})
    selected = resolved.draft_vocab or _frequent_vocab(resolved, samples)
    altered = {reason: counters[reason] for reason in (*NOT_DROPPED, *filter(is_of_kept, counters))}
    not_dropped = {ROWS, *altered, *roles_counted(counters)}  # the roles are counted in unknown_role too
    plan = make_plan(
        manifest_of(resolved, selected),
        samples,
        dropped={reason: number for reason, number in counters.items() if reason not in not_dropped},
        altered=altered,
        **resolved.known_fields,
    )
    return Prepared(resolved, samples, plan, shown, found)


def _frequent_vocab(resolved: Resolved, samples: Samples) -> list[int]:
    """Return the most frequently supervised ids, special ones included."""
    from niels_gpt.eagle3.vocab import build_eagle3_token_mapping

    ids, _ = build_eagle3_token_mapping(
        [{"input_ids": samples.ids, "loss_mask": samples.loss_mask}],
        target_vocab_size=resolved.target.vocab_size,
        draft_vocab_size=resolved.options.draft_vocab_size,
        special_token_ids=resolved.tokenizer.special_token_ids,
    )
    return [int(number) for number in ids]


def prepared_before(resolved: Resolved, folder: Path) -> Prepared | None:
    """Return the plan and samples of a folder's sidecar, read instead of tokenized again.

    Returns None unless they are complete and belong to these options, whose draft vocabulary must be known.
    """
    from niels_gpt.eagle3.format.layout import SIDECAR
    from niels_gpt.eagle3.format.plan import make_plan, read_record
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.storage.fileio import canonical_json

    with suppress(OSError, ValueError, LookupError, TypeError):
        record, samples = read_record(folder), Samples.open(folder / SIDECAR)
        if record is not None and resolved.draft_vocab is not None:
            manifest, counts = manifest_of(resolved, resolved.draft_vocab), (record["dropped"], record["altered"])
            plan = make_plan(manifest, samples, dropped=counts[0], altered=counts[1], **resolved.known_fields)
            return Prepared(resolved, samples, plan) if canonical_json(record) == canonical_json(plan.record) else None
    return None


def _reported(
    rows: Iterable[Row], tokenized: Callable[[int, int], None] | None, shown: list[Row], show: int
) -> Iterator[Row]:
    """Yield the rows; append the first `show` of them to `shown`."""
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
    """Build the cache in a folder, or its missing files. Arguments and errors: see `TargetRun`.

    named: public path of an asset; its unfinished version's file system has been checked by the caller.
    """
    from niels_gpt.eagle3.build import TargetRun
    from niels_gpt.recipes.shared import check_shared_folder, code_identity
    from niels_gpt.storage.locks import apply_lock_setting

    options, run, code = prepared.resolved.options, prepared.resolved.run, dict[str, Any]()
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
        placement=prepared.resolved.placement,
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
        code=code,
        command=command,
        claimed=claimed,
        progress=progress,
    )
    produced = run_of_target.make()
    warn_of_missing_start(prepared, named or Path(folder), "--document-start" if named is None else _START_FLAG)
    return produced


def warn_of_missing_start(prepared: Prepared, cache: Path, flag: str = "--document-start") -> None:
    """Log a warning if chats lack the token that the target's tokenizer writes before a text.

    No warning if an option says how chats begin. flag: that option, for the message.
    """
    from niels_gpt.recipes.eagle3.input import ROWS
    from niels_gpt.tokenizers.document_tokens import missing_start_text

    resolved, samples = prepared.resolved, prepared.samples
    starts, is_stated = resolved.tokenizer.usual_starts, resolved.options.document_start is not None
    if is_stated or not starts or resolved.source["form"] == ROWS or not len(samples):
        return
    if not (samples.ids[samples.starts[:-1]] == starts[0].id).any():
        text = missing_start_text(many(len(samples), "chat"), starts, flag)
        logger.warning("%s: %s", cache, text, extra={"code": "W414"})


def open_target(
    device: torch.device,
    *,
    name: str,
    revision: str | None,
    compute_dtype: str,
    attention: str,
    placement: Placement = Placement(),  # noqa: B008  it is frozen
) -> Any:
    """Load a target on a device; `TargetRun` calls this in each of its processes.

    Raises: FileNotFoundError, ConnectionError, ImportError or ValueError for a model that cannot be a target.
    """
    from niels_gpt.eagle3.format.layout import DTYPES
    from niels_gpt.eagle3.target import load_target

    how: dict[str, Any] = {"dtype": DTYPES[compute_dtype], "attention": attention, "placement": placement}
    return load_target(name, revision=revision, device=device, **how)


# --- the target again -------------------------------------------------------------------------------------------------


def target_of(
    cache: Path,
    name: str,
    *,
    revision: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    max_memory: str | None = None,
    follow_links: bool = False,
) -> Target:
    """Return a target to compare a cache with (recompute.recomputed), in the form of the plan; loads no weights yet.

    revision, device: None: as in the cache's plan, or an import's meta.json, but the CPU if this machine lacks the GPU.
    device_map, max_memory: as the options of the same names.
    Raises: FileNotFoundError, ConnectionError, ImportError or ValueError for a model that cannot be a target;
        CacheError for a damaged plan.
    """
    import torch

    from niels_gpt.eagle3.format.plan import read_record
    from niels_gpt.eagle3.inspect.forms import open_cache
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.eagle3.models import checkpoint_quantization, target_facts
    from niels_gpt.recipes.eagle3.running import placement_of, run_facts

    record = read_record(cache, follow_links=follow_links)
    planned = {} if record is None else record["run"]
    if device is None:
        on_gpu = record is None or planned.get("device") == "cuda"
        device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    if record is None:
        made_from = open_cache(cache, follow_links=follow_links).imported_revision
    else:
        made_from = record["target"].get("revision")
    facts = target_facts(name, revision=revision or made_from)
    attention = planned.get("attention", "sdpa")
    asked = Options(
        target_model=name,
        revision=revision,
        input_data="",
        device=device,
        compute_dtype=planned.get("compute_dtype"),
        attention=attention,
        device_map=device_map,
        max_memory=max_memory,
        tensor_parallel=1,  # in one process: the rounding of several ranks is another environment
    )
    run = run_facts(asked, planned, checkpoint_quantization(name, facts.revision))
    load = partial(
        open_target,
        name=name,
        revision=facts.revision,
        compute_dtype=run["compute_dtype"],
        attention=attention,
        placement=placement_of(asked, run),
    )
    return Target(asdict(facts), load, run)


def check_recomputed(settings: Settings) -> Verdict:
    """Run samples of eagle3/targets through the target again.

    Raises: FileNotFoundError and CacheError if there is no such cache; the errors of `target_of`.
    """
    from niels_gpt.eagle3.inspect.recompute import recomputed

    number = settings.eagle3_check_samples
    if not number:
        return Verdict([], "not made: eagle3_check_samples is 0")
    path = cache_root(settings) / KEY
    target = target_of(
        path,
        target_name(settings),
        device=settings.eagle3_device,
        device_map=settings.eagle3_device_map or ("auto" if settings.eagle3_tensor_parallel > 1 else None),
        max_memory=settings.eagle3_max_memory,
    )
    return recomputed(path, target, k=number, seed=settings.seed)
