"""Dagster assets over the recipes: one asset for each cache. How a cache is built is decided in niels_gpt/recipes.

definitions.py  Dagster loads it: `defs` of this checkout, and `niels_definitions` for another deployment
component.py    NielsCaches: a deployment by YAML, in a project of `dg`
deployment.py   Deployment: settings of its caches, and their names in Dagster
assets.py       the tokenizer, the sources and their caches
eagle3.py       the draft's vocabulary and the target's outputs
partitions.py   a cache with --partitions: a graph of a plan, a step for each partition, and a seal
exchange/       exports and published caches, downstream of the caches
steps.py        runs the steps: revisions, builds from scratch, turns, logs, errors, materializations
versions.py     what an asset is made from, and the data versions of its inputs
checks.py       the asset checks, made of the rules of niels_gpt.kinds
metadata.py     the entries of a finished asset's page: figures of the kind, meta.json, a picture, decoded examples
describe.py     the page of an asset before it is materialized
automation.py   jobs and sensors; these are off by default
resources.py    niels_gpt.settings as a run's config, and as environment variables

No module here may use `from __future__ import annotations`: Dagster reads the annotations of assets as types.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.component import NielsCaches as NielsCaches


def __getattr__(name: str) -> Any:
    """Import the component when it is asked for, so that `import pipelines` loads no Dagster."""
    if name != "NielsCaches":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipelines.component import NielsCaches

    return NielsCaches


def __dir__() -> list[str]:
    """Return the names of this module with the component, which `dg` looks for here."""
    return [*globals(), "NielsCaches"]
