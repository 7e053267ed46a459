"""`recomputed` without running the target: its head, read from the checkpoint, against the cache's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from niels_gpt.display.numbers import many
from niels_gpt.eagle3.format.layout import DTYPES
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.forms import NativeCache, open_cache
from niels_gpt.eagle3.inspect.recompute import Problems, differing_rows, drawn_numbers, other_weights
from niels_gpt.eagle3.inspect.verify import Report
from niels_gpt.storage.checks import Verdict

_NAMED = 16  # samples whose numbers are printed


def recomputed_by_head(
    path: Path, name: str, *, revision: str | None = None, k: int = 8, seed: int = 0, follow_links: bool = False
) -> Verdict:
    """Compare a native cache's head with a target's checkpoint, and the target rows of `k` samples with their states.

    Loads nothing but the head (`TargetHead.of_checkpoint`). Log-normalizers and most probable tokens are computed from
    the stored last hidden states, one sample at a time; whether the target gives these states is not known then.

    name: of the target. revision: None: the one that the cache was made from. Raises: as `recomputed`; the errors of
        `TargetHead.of_checkpoint`.
    """
    if k < 1:
        raise ValueError(f"k={k}: expected the number of samples to compare, 1 or more")
    cache = open_cache(path, follow_links=follow_links)
    if not isinstance(cache, NativeCache):
        return Verdict([], "cannot be checked by the head alone: the cache stores no last hidden states")
    made_from = cache.plan["target"].get("revision") if cache.is_planned else cache.imported_revision
    dtype = DTYPES[cache.manifest["head"]["compute_dtype"]]
    head = TargetHead.of_checkpoint(name, revision=revision or made_from, dtype=dtype)
    report, numbers = Report(cache), drawn_numbers(cache.num_samples, k, seed)
    report.ask(_differences_by_head, cache, head, numbers)
    drawn = ", ".join(map(str, numbers[:_NAMED])) + ", ..." * (len(numbers) > _NAMED)
    said = (
        f"The target rows of {many(len(numbers), 'sample')} of {cache.num_samples:,}, drawn by seed {seed} ({drawn}), "
        "were computed again from their states by the head in the checkpoint; the target did not run"
    )
    report.measured.say(f"{said}.", samples=len(numbers))
    verdict = report.verdict()
    return verdict if verdict.note or verdict.problems else replace(verdict, figures=f"the head alone. {said}")


def _differences_by_head(cache: NativeCache, head: TargetHead, numbers: Sequence[int]) -> Problems:
    if cache.last_hidden == "post_norm" != head.last_hidden:
        head = head.after_norm()
    yield from other_weights(cache, None, head, is_rounded=not cache.is_planned)
    if (head.vocab_size, head.last_hidden) == (cache.vocab_size, cache.last_hidden):
        for number in numbers:
            row = cache.sample(number)
            if len(row.positions):
                yield from differing_rows(row, head, row.tensors["last_hidden_states"])
