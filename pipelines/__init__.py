"""Dagster over the recipes: every cache is an asset. Nothing here knows how a cache is built.

    definitions.py   the table of contents: `defs` of this checkout, `niels_definitions` for another deployment
    assets.py        the tokenizer, the caches, and what is observed before them
    checks.py        is a cache good: one factory, made of niels_gpt.inspection.verify
    metadata.py      an outcome as a MaterializeResult: meta.json key by key, a picture, decoded examples
    resources.py     SettingsResource: niels_gpt.settings as a form

No module here may say `from __future__ import annotations`: Dagster reads the annotations of assets as types.
"""
