"""Recipes: source + tokenizer + builder -> a committed folder. The commands and the Dagster assets call them.

Which caches there are, and whether they are current:

plan.py              lists the recipes; says what a run would do (--dry-run); finds out whether a source has changed
asked.py             what settings ask of a cache, without reading its source: Dagster's code version
home_recipes.py      recipes of packages that may be deleted; finds the units of any cache
request.py           describes a cache as the settings request it; builds it as a whole, or reuses it
records.py           records which recipe made a cache, and its runs; decides whether a cache is current
rebuilt.py           warns when a new version moves documents to val, or ends an exclusion

Sources and tokenizer:

resolve.py           resolves a source under the current settings: dataset, files or revision, licence, fingerprint
sources.py           streams a source to a builder, without the entries of --exclude
user_sources.py      finds the user-defined sources in the settings and in sources.toml
snapshot.py          decides how many rows of a hub source a snapshot keeps; data/files/snapshot.py writes them
tokenizer.py         chooses the tokenizer of a cache: the installed one, a copy of a named one, or a trained one
training.py          trains a tokenizer on the sources

Families of caches, each with its builder:

family.py            Family: the parts of a build that differ between families of caches
documents.py         the family pretrain: builds documents
chats.py             the family sft: builds chats, by the project's own template or another one
rollouts.py          the families rollouts and trees: builds recorded rollouts and message trees
eagle3/              builds eagle3/targets from chats and a target model
exchange/            imports and exports caches

Partitions, which the engine calls units:

units.py             writes the plan, refuses another plan or program (E511), builds one unit or all, seals
unit_plans.py        finds the plan of the settings without reading the text again
dask.py              build_on_dask: gives units to workers of a Dask cluster, and survives their deaths
shared.py            checks what machines must share: program versions, and a reliable file system

The disk:

disk.py              bounds the disk space of a build, and refuses one without room
gc.py                runs `gc` over all caches of a folder; storage/versions.py decides which versions are old

Earlier names, for one release:

run_recipe.py        of records.py and request.py
token_caches.py      of build_token_cache, in units.py
partitions/          of units.py

The settings that decide a cache's bytes are `SourceSpec.settings` of its row (niels_gpt/data/spec.py). With the
tokenizer's sha256, the source's fingerprint and the format version they make the recipe's fingerprint. A cache is
stale, and built again, unless its recorded fingerprint is equal and its files have the right sizes (D12; records.py).
"""
