"""Recipes: source + tokenizer + builder -> a committed folder. The commands and the Dagster assets call them.

plan.py              which recipes there are; what a run would do (--dry-run); whether a source has changed
home_recipes.py      what a package that may be deleted adds to the recipes
request.py           Request: a cache as the settings ask for it; is it current, and its build as a whole
family.py            what a family of caches says of its builds; the kinds hold the places of theirs
documents.py         the family pretrain: documents -> the builder of a whole cache, or of one unit
chats.py             the family sft: chats, by the project's own template or another one
rebuilt.py           what is said of a cache that replaces another version: documents in another split, exclusions
records.py           which recipe made a cache, and is it current; which caches are in a folder, and their runs
resolve.py           what a source is under the current settings: dataset, files or revision, licence, fingerprint
sources.py           opens a source of the table as an iterable for a builder, without what --exclude lists
user_sources.py      which user-defined sources there are, by the settings and sources.toml
tokenizer.py         which tokenizer a cache is encoded with: the installed one, a copy of a named one, or a trained one
training.py          a tokenizer trained on the sources: their texts, its settings, versions of earlier runs
snapshot.py          how many rows of a hub source a snapshot keeps; data/files/snapshot.py writes them
disk.py              how much disk a build needs, and when it is refused
gc.py                runs `gc` over all caches of a folder; which versions are old is decided in storage/versions.py
unit_plans.py        which plan of units the settings have, without reading the text again; how others differ
units.py             a cache in units: which plan the settings have; builds one or all, seals; build_token_cache
dask.py              build_on_dask: which worker of a Dask cluster builds which unit, and what follows a death
shared.py            what the machines must share: the same versions, and a folder whose file system keeps its promises
run_recipe.py        the earlier names of records.py and request.py, for one release
token_caches.py      the earlier name of build_token_cache in units.py, for one release
partitions/          the earlier names of units.py, for one release
rollouts.py          recorded rollouts -> rollouts/NAME, message trees -> trees/oasst1
eagle3/              chats + target model -> eagle3/targets
exchange/            folders of other tools <-> caches

The settings that decide a cache's bytes are `SourceSpec.settings` of its row (niels_gpt/data/spec.py). With the
tokenizer's sha256, the source's fingerprint and the format version they make the recipe's fingerprint: a cache whose
recorded fingerprint is equal, and whose files have the right sizes, is not built again (D12).
"""
