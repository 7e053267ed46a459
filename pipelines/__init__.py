"""Dagster assets over the recipes: one asset for each cache. How a cache is built is decided in niels_gpt/recipes.

definitions.py  what Dagster loads: `defs` of this checkout, and `niels_definitions` for another deployment
deployment.py   Deployment: its settings, its names in Dagster, and what a run asks for
assets.py       the tokenizer, the sources and their caches: what each depends on, and which run one at a time
eagle3.py       the draft's vocabulary and the target's outputs
partitions.py   a cache with --partitions: a graph of a plan, a step for each partition, and a seal
exchange/       exports and published caches, downstream of the caches
steps.py        what the steps share: revisions, turns, logs, errors, what they report
versions.py     the versions that Dagster compares: of an asset's code, and of what it was made from
checks.py       the asset checks, made of the rules of niels_gpt.kinds
metadata.py     what the UI shows of a finished asset: meta.json key by key, a picture, decoded examples
describe.py     what an asset's page says before it is materialized
automation.py   jobs, the schedule of observations, and the sensors; all off by default
resources.py    niels_gpt.settings as a run's config, and as environment variables

No module here may use `from __future__ import annotations`: Dagster reads the annotations of assets as types.
"""
