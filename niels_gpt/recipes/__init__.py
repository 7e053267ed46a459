"""Recipes: source + tokenizer + builder -> a committed folder. The commands and the Dagster assets call them.

plan.py              which recipes there are; what a run would do (--dry-run); whether a source has changed
home_recipes.py      what a package that may be deleted adds to the recipes
token_caches.py      build_token_cache: which builder a source goes to, and with which arguments
run_recipe.py        runs a recipe, or skips it if its fingerprint is unchanged; meta.json's `source`; records each run
rebuilt.py           what is said of a cache that replaces another version: documents in another split, exclusions
records.py           which caches are in a folder, and which runs made them
resolve.py           what a source is under the current settings: dataset, files or revision, licence, fingerprint
sources.py           opens a source of the table as an iterable for a builder, without what --exclude lists
user_sources.py      which user-defined sources there are, by the settings and sources.toml
tokenizer.py         which tokenizer a cache is encoded with: the installed one, a copy of a named one, or a trained one
training.py          a tokenizer trained on the sources: their texts, its settings, versions of earlier runs
templates.py         the chat template of sft caches, and what a fingerprint has of it and of other settings
snapshot.py          how many rows of a hub source a snapshot keeps; data/files/snapshot.py writes them
disk.py              how much disk a build needs, and when it is refused
gc.py                runs `gc` over all caches of a folder; which versions are old is decided in storage/versions.py
unit_plans.py        which plan of units the settings have, without reading the text again; how others differ
units.py             a cache in units: which plan the settings have; builds one or all, and seals them
documents.py         documents -> the builder of a whole cache, or of one unit
dask.py              build_on_dask: which worker of a Dask cluster builds which unit, and what follows a death
shared.py            what the machines must share: the same versions, and a folder whose file system keeps its promises
partitions/          the earlier names of units.py, for one release
rollouts/            recorded rollouts -> rollouts/NAME, message trees -> trees/oasst1
eagle3/              chats + target model -> eagle3/targets
exchange/            folders of other tools <-> caches

The settings that decide a cache's bytes are `SourceSpec.settings` of its row in niels_gpt/data/sources.py. With the
tokenizer's sha256, the source's fingerprint and the format version they make the recipe's fingerprint: a cache whose
recorded fingerprint is equal, and whose files have the right sizes, is not built again (D12).
"""
