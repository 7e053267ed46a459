"""What is asked of a finished EAGLE-3 cache: its checks, the target once more, its figures and rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def verdicts(cache: Path, **how: Any) -> Any:
    """The verdict of each check by its name. how: names, follow_links and progress."""
    from niels_gpt.eagle3.inspect.verify import verify

    return verify(cache, **how)


def problems_of(cache: Path, **how: Any) -> list[str]:
    """The problems of all checks."""
    return [problem for verdict in verdicts(cache, **how).values() for problem in verdict.problems]


def run_again(cache: Path, facts: Mapping[str, Any], load: Any, run: Mapping[str, Any], **how: Any) -> Any:
    """The verdict on samples that go through a target again. facts, run: as in a plan. how: k, seed, follow_links."""
    from niels_gpt.eagle3.inspect.recompute import Target, recomputed

    return recomputed(cache, Target(facts, load, run), **how)


def summary(cache: Path) -> Any:
    """What `inspect` prints of a cache, as rows."""
    from niels_gpt.eagle3.inspect import show

    return show.summary(cache)


def sample_heading(cache: Path, number: int) -> str:
    """The line above the slots of a sample."""
    from niels_gpt.eagle3.inspect import show

    return show.sample_heading(cache, number)


def slot_rows(cache: Path, number: int, **how: Any) -> Any:
    """The slots of a sample as `inspect --sample` prints them. how: begin and slots."""
    from niels_gpt.eagle3.inspect import show

    return show.slot_rows(cache, number, **how)


def stats_of(cache: Path) -> Any:
    """The figures of a cache."""
    from niels_gpt.eagle3.inspect.stats import stats

    return stats(cache)


def check_names() -> list[str]:
    """The names of all checks, the second run of the target last."""
    from niels_gpt.eagle3.inspect.checks import CHECKS, RECOMPUTED

    assert list(CHECKS)[-1] == RECOMPUTED
    return list(CHECKS)
