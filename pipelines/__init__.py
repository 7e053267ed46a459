"""Dagster assets over the recipes: one asset for each cache. How a cache is built is decided in niels_gpt/recipes.

definitions.py  what Dagster loads: `defs` of this checkout, and `niels_definitions` for another deployment
assets.py       which assets there are, what each depends on, and which run one at a time or are retried
partitions.py   a pretrain cache with --partitions: a graph of a plan, a step for each partition, and a seal
steps.py        what the steps share: revisions, turns, logs, errors, what they report
checks.py       the asset checks, made of the rules of niels_gpt.inspection and niels_gpt.eagle3.inspect
metadata.py     what the UI shows of a finished asset: meta.json key by key, a picture, decoded examples
resources.py    SettingsResource: niels_gpt.settings as a form, a run's config, environment variables

No module here may use `from __future__ import annotations`: Dagster reads the annotations of assets as types.
"""
