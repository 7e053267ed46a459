"""What settings ask of a cache, as far as it is known without reading its source: Dagster's code version.

Dagster compares it; a build compares the recipe's fingerprint, which has the text that was read too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from niels_gpt.data.exclude import Exclusion, read_exclusion
from niels_gpt.data.sources import SOURCES, TREES
from niels_gpt.hub.models import is_local
from niels_gpt.kinds.kind import has_partitions
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes.eagle3.request import KEY as TARGETS_KEY
from niels_gpt.recipes.family import family_of
from niels_gpt.recipes.plan import HOME_OF, every_key, needs_no_tokenizer
from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root
from niels_gpt.recipes.request import recipe_fingerprint
from niels_gpt.recipes.resolve import asked_revisions, listing_of, resolve_source
from niels_gpt.recipes.sources import named
from niels_gpt.recipes.tokenizer import is_id, named_tokenizer
from niels_gpt.recipes.training import TRAINING_SETTINGS, training_settings
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.tokenizers.files import tokenizer_files
from niels_gpt.tokenizers.protocol import FullTokenizer

_MOST_FILES = 1000  # of a target
_MOST_BYTES = 1 << 24  # of a source's files that are read for what --exclude takes from them
_DIGITS = 12


def code_versions(settings: Settings) -> dict[str, str]:
    """Return the code version of every cache, by its key."""
    asked = _asked_tokenizer(settings)
    return {key: _code_version(settings, key, *asked) for key in every_key(settings)}


def code_version(settings: Settings, key: str) -> str:
    """Return twelve hex digits of the settings and facts that decide whether a run builds a cache."""
    return _code_version(settings, key, *_asked_tokenizer(settings))


def _code_version(settings: Settings, path: str, asked: Any, tokenizer: FullTokenizer | None) -> str:
    """asked, tokenizer: of `_asked_tokenizer`."""
    parts: dict[str, Any] = {"cache_root": os.path.abspath(cache_root(settings))}
    if path == TOKENIZER_KEY:
        return _digits({**parts, "tokenizer": asked})
    if settings.source_root != "hub":  # elsewhere no revision is chosen
        settings = replace(settings, revision=None)
    if takes_tokenizer(settings, path):
        parts["tokenizer"] = asked if tokenizer is None else tokenizer.sha256
    else:
        tokenizer = None
    if path in HOME_OF:
        parts |= {"settings": settings_fingerprint(settings, path), **_of_chats(settings)}
        parts["target"] = _files_of_target(settings, weights=path == TARGETS_KEY)
    else:
        if not is_in_partitions(settings, path):
            settings = replace(settings, partitions=1)
        name = path.rpartition("/")[2]
        parts |= {"settings": settings_fingerprint(settings, path, tokenizer), **_where(settings, name)}
    return _digits({**parts, **_excluded(settings, path)})


def _digits(parts: Any) -> str:
    return sha256(canonical_json(parts)).hexdigest()[:_DIGITS]


def _where(settings: Settings, name: str) -> dict[str, Any]:
    """Return what decides which files of a source are read."""
    return {"place": _place(settings, name), **({"follow_links": True} if settings.follow_links else {})}


def _place(settings: Settings, name: str) -> str:
    """Return where the text of a source lies; of one of your own, what its files are relative to."""
    if user := user_sources(settings).get(name):
        return "" if Path(user.files).expanduser().is_absolute() else str(user.base)
    if name not in SOURCES:  # a pattern of files of chats
        return str(Path(name).expanduser().absolute())
    if SOURCES[name].dataset is None and settings.source_root == "hub":
        return str(Path(settings.roam_dir).expanduser().absolute())
    root = settings.source_root
    return root if root in ("hub", "sample") else str(Path(root).expanduser().absolute())


def _of_chats(settings: Settings) -> dict[str, Any]:
    """Return what else decides which chats the target is run over."""
    name = settings.eagle3_source
    user = user_sources(settings).get(name)
    return {
        **_where(settings, name),
        "source": [user.files, user.licence, user.attribution] if user else asked_revisions(settings).get(name),
        "exclude": None,  # unless `_excluded` finds something
        "max_document_bytes": settings.max_document_bytes,
    }


def _files_of_target(settings: Settings, *, weights: bool) -> list[Any] | None:
    """Return names, sizes and times of the files in the target's folder; None of an id of the hub."""
    name = settings.eagle3_target
    if name is None or not is_local(name):
        return None
    try:
        files = sorted(file for file in Path(name).expanduser().iterdir() if file.is_file())[:_MOST_FILES]
        chosen = [file for file in files if weights or file.suffix not in (".safetensors", ".bin")]
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in chosen]
    except OSError:  # the build reports it
        return None


def _excluded(settings: Settings, path: str) -> dict[str, Any]:
    """Return what the list of --exclude takes from the text of a cache; {} for nothing, and where the build reports it.

    It is the whole list where the build compares that, and where a code location that loads cannot read the text.
    """
    try:
        listed = None if settings.exclude is None else read_exclusion(settings.exclude)
    except (OSError, ValueError):
        listed = None
    if listed is None:
        return {}
    taken: Any = listed.facts["sha256"]
    name = HOME_OF[path].source(settings) if path in HOME_OF else path
    is_whole = settings.partitions > 1 and path not in HOME_OF and has_partitions(path)
    with suppress(OSError, ValueError):  # such as no files
        source = None if name is None or is_whole else resolve_source(settings, name)
        listing = listing_of(source) if source and source.has_samples else None
        if source and listing and sum(file.stat().st_size for file in source.files) <= _MOST_BYTES:
            taken = _taken(settings, path, source.spec.key, listed, listing)
    return {"exclude": taken} if taken else {}


@lru_cache(maxsize=64)
def _taken(settings: Settings, path: str, key: str, listed: Exclusion, _listing: str) -> list[str]:
    """Read a source for the entries that name something in it. path: of the cache; key: of the one of the source."""
    raw = path in HOME_OF and not HOME_OF[path].takes_tokenizer(settings)
    return sorted({*named(settings, resolve_source(settings, key), None, listed, raw=raw)})


def _asked_tokenizer(settings: Settings) -> tuple[Any, FullTokenizer | None]:
    """Return what decides which tokenizer a run installs, the content of a named one or how one is trained; and a named
    one itself, if it has files beside the one of its ids: of these recipes compare some facts, and not the bytes."""
    name = settings.tokenizer
    if name is None:
        if settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file():
            return str(DEFAULT_TOKENIZER_PATH), None  # copied where there is none, and kept
        return {"kind": settings.tokenizer_kind, **training_settings(settings)}, None
    if is_id(name):
        return [name, asked_revisions(settings).get(TOKENIZER_KEY)], None
    path = Path(name).expanduser().absolute()
    try:
        found = tokenizer_files(path, follow_links=settings.follow_links or not path.is_dir())
    except (OSError, ValueError):  # the build reports it
        return str(path), None
    asked = {file: sha256(content).hexdigest() for file, content in found.items()}
    return asked, _opened(settings, _digits(asked)) if len(found) > 1 else None


@lru_cache(maxsize=2)
def _opened(settings: Settings, _content: str) -> FullTokenizer | None:
    """Open the tokenizer that settings name, once for a deployment and its runs; None if it is damaged."""
    try:
        return named_tokenizer(settings)
    except (OSError, ValueError):  # the build reports it
        return None


def takes_tokenizer(settings: Settings, key: str) -> bool:
    """Whether a cache is built with the folder's tokenizer, if these settings can build it at all."""
    return settings.eagle3_target is None if key in HOME_OF else not needs_no_tokenizer(key)


def is_in_partitions(settings: Settings, path: str) -> bool:
    """Whether a run with these settings builds a cache in partitions. path: FAMILY/NAME, or tokenizer.

    No file of a source is looked for, so that definitions load at once.
    """
    name = path.rpartition("/")[2]
    if settings.partitions == 1 or not name or not has_partitions(path):  # the root of chats has no name
        return False
    if path in HOME_OF:
        return HOME_OF[path].left_out(settings) is None
    if name not in SOURCES or SOURCES[name].from_hub is None:
        return True
    try:
        return resolve_source(settings, name).is_partitioned(settings)
    except (OSError, ValueError):  # the step says what is wrong
        return True


def settings_fingerprint(settings: Settings, key: str, tokenizer: FullTokenizer | None = None) -> str:
    """Return twelve hex digits of the settings that decide the bytes of `key`, and of the builder's version.

    Covers the parts of `recipe_fingerprint` that are known without reading a source, except --exclude. tokenizer: None
    if unknown too. A chat template that cannot be read counts as none: the build reports it.
    """
    if key in HOME_OF:
        return HOME_OF[key].settings_fingerprint(settings, key)
    name = key.rpartition("/")[2]
    user = user_sources(settings).get(name)
    if user:
        source = repr((user.files, user.field, user.licence, user.attribution))
    else:
        source = asked_revisions(settings).get(name, "")
    try:
        return _fingerprint(settings, key, tokenizer, source)
    except (OSError, ValueError):
        unread = replace(settings, chat_template=None, loss_on=Settings.loss_on)
        return _fingerprint(unread, key, None, source)


def _fingerprint(settings: Settings, key: str, tokenizer: FullTokenizer | None, source: str) -> str:
    if key == TOKENIZER_KEY:  # under the name of before, and without the kind that was the only one
        recipe = {name: getattr(settings, name) for name in ("tokenizer", "tokenizer_kind", *TRAINING_SETTINGS)}
        recipe["tokenizer_model"] = recipe.pop("tokenizer")
        if recipe["tokenizer_kind"] == Settings.tokenizer_kind:
            del recipe["tokenizer_kind"]
    else:
        recipe = family_of(key).recipe(settings, _reads(settings, key), tokenizer)
    return recipe_fingerprint(settings, key, recipe, tokenizer, source)[:12]


def _reads(settings: Settings, key: str) -> tuple[str, ...]:
    """Return the names of the settings that decide the bytes of `key`."""
    if key in TREES:
        return TREES[key].settings
    name = key.rpartition("/")[2]
    return SOURCES[name].settings if name in SOURCES else user_sources(settings)[name].spec.settings
