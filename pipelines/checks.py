"""Dagster's asset checks: the checks of each kind of cache (niels_gpt.kinds)."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from niels_gpt.kinds.homes import loaded
from niels_gpt.kinds.kind import Kind, Limits, kind_of_key
from niels_gpt.kinds.verify import verify
from niels_gpt.recipes.records import cache_root
from niels_gpt.settings import Settings
from niels_gpt.storage.checks import Check, Value, Verdict
from niels_gpt.storage.errors import CacheError, LeftOut
from niels_gpt.storage.remedies import build_again
from niels_gpt.storage.versions import committed_version, failed_checks, note_check
from pipelines.deployment import Deployment
from pipelines.versions import PARTITIONS, forced, has_static_partitions

_DIGITS = 6  # of a share
CAUSED_ELSEWHERE = frozenset({"tokenizer_matches", "positions"})
"""Checks whose failure a rebuild of the asset does not repair; their problems name the remedy."""
NOT_THERE = "not_there"
"""Entry of a check that failed for a missing file: no reason to build from scratch."""
_SHOWN_PROBLEMS = 3  # in the text of a check; an entry has all of them


def rules_of(path: str) -> Mapping[str, Check]:
    """Return the checks of a cache's asset by name."""
    return {check.name: check for check in _kind(path).checks}


def _kind(path: str) -> Kind:
    kind = kind_of_key(path)
    assert kind is not None, path
    return kind


def checks_of(deployment: Deployment, path: str) -> dg.AssetChecksDefinition:
    """Return the checks of one cache as one step. Each can be run by itself.

    A failed blocking check is an error and stops the assets downstream; any other is a warning.
    """
    key, rules = deployment.key(path), rules_of(path)
    specs = [
        dg.AssetCheckSpec(check.name, asset=key, description=check.description, blocking=check.blocking)
        for check in rules.values()
    ]

    @dg.multi_asset_check(
        specs=specs,
        name=f"check_{deployment.name(path)}",
        can_subset=True,
        required_resource_keys={deployment.resource},
    )
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        names = {selected.name for selected in context.selected_asset_check_keys}
        settings = deployment.settings_of(context)
        cache, outside = cache_root(settings) / path, _kind(path).outside_checks.keys()
        version = committed_version(cache)
        # These need more than the cache: if that is missing, no other check fails.
        for some in filter(None, (names - outside, names & outside)):
            for name, verdict in _verdicts(settings, path, some).items():
                if _is_of_build(rules[name], verdict):
                    try:
                        note_check(cache, version, name, has_failed=bool(verdict.problems))
                    except (CacheError, OSError) as error:
                        context.log.warning(f"{path}: no build will know that {name} was checked: {error}")
                for problem in verdict.problems[:1]:  # an event of a check is not on the console
                    context.log.log("ERROR" if rules[name].blocking else "WARNING", f"{path}: {name}: {problem}")
                yield _result(deployment, key, rules[name], verdict)

    return check


def _verdicts(settings: Settings, path: str, names: set[str]) -> Mapping[str, Verdict]:
    """Run some checks of an asset. All of them fail if there is no cache, or its meta.json cannot be read."""
    cache, outside = cache_root(settings) / path, _kind(path).outside_checks
    limits = Limits(deep=settings.deep_checks, max_dropped_share=settings.max_dropped_share)
    try:
        if names & outside.keys():
            return {name: loaded(outside[name])(settings) for name in names}
        return verify(cache, limits, names=names)
    except (FileNotFoundError, CacheError, LeftOut) as error:
        is_damage = isinstance(error, CacheError) and cache.exists() and not names & outside.keys()
        values: dict[str, Value] = {} if is_damage else {NOT_THERE: "yes"}
        return {name: Verdict([str(error)], values=values) for name in names}


def _is_of_build(rule: Check, verdict: Verdict) -> bool:
    """Whether a build from scratch may repair what a check finds."""
    return rule.blocking and rule.name not in CAUSED_ELSEWHERE and NOT_THERE not in verdict.values


def _result(deployment: Deployment, key: dg.AssetKey, rule: Check, verdict: Verdict) -> dg.AssetCheckResult:
    """Return a verdict for Dagster: a sentence, and the measured values as entries, which it plots."""
    found = verdict.problems
    passed = " ".join(filter(None, [verdict.note or verdict.sentence, *verdict.remarks]))
    metadata: dict[str, Any] = {
        name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in verdict.values.items()
    }
    metadata["problems"] = len(found)
    if len(found) > _SHOWN_PROBLEMS:
        metadata["all_problems"] = found
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=rule.name,
        passed=not found,
        severity=dg.AssetCheckSeverity.ERROR if rule.blocking else dg.AssetCheckSeverity.WARN,
        description=(_failed(deployment, key, rule, verdict) if found else passed) or None,
        metadata=metadata,
    )


def _failed(deployment: Deployment, key: dg.AssetKey, rule: Check, verdict: Verdict) -> str:
    """Return what is wrong, and in a second line what to do if materializing the asset repairs it."""
    path = deployment.path_of(key)
    cache = cache_root(deployment.settings) / path
    problems, command = verdict.problems, f". {build_again(cache)}"
    is_missing = NOT_THERE in verdict.values and all(problem.endswith(command) for problem in problems)
    repairs = is_missing or _is_of_build(rule, verdict)
    rest = len(problems) - _SHOWN_PROBLEMS
    shown = [problem.removesuffix(command) if repairs else problem for problem in problems[:_SHOWN_PROBLEMS]]
    said = "; ".join([*shown, *([f"and {rest} more in all_problems"] if rest > 0 else [])])
    if not repairs:
        return said
    asset, config = key.to_user_string(), f"with the run config `{forced(deployment, path)}`"
    if has_static_partitions(deployment, path):
        parts = deployment.key(PARTITIONS + path).to_user_string()
        return f"{said}\n\nMaterialize all of `{parts}`{'' if is_missing else f' {config}'}, then `{asset}`"
    # Otherwise it could not be recorded, or a rebuild of the same content did not help.
    is_known = rule.name in failed_checks(cache).repairable
    scratch = f", which repairs it. From scratch, at any time: {config}" if is_known else f" {config}"
    return f"{said}\n\nMaterialize `{asset}`{'' if is_missing else scratch}"
