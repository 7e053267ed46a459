"""Which tokenizer a cache is encoded with (D19): the installed one, a copy of a named one, or one trained here."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.chat.backends import has_tool_template
from niels_gpt.engine.meta import content_sha256
from niels_gpt.hub import models as hub
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes.resolve import ResolvedSource, asked_revisions
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Measurement, Outcome, cache_root, finish, run_recipe
from niels_gpt.recipes.tokenizers.change import log_unseen_source, warn_of_older_caches
from niels_gpt.recipes.tokenizers.earlier import meta_or_none, records_of, trained_earlier, undamaged
from niels_gpt.recipes.tokenizers.templates import opened_template
from niels_gpt.recipes.tokenizers.texts import ASKING, asked, has_new_sources, has_values, train
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError, LeftOut, TokenizerNotFound
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import checked_sha256, file_records, meta_bytes, parse_object
from niels_gpt.storage.remedies import build_command, with_recorded_tokenizer
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_end, document_start
from niels_gpt.tokenizers.files import (
    COMPANIONS,
    TOKENIZER_JSON,
    TOOL_TEMPLATE_NAME,
    UPSTREAM_MODELS,
    check_model,
    tokenizer_file,
    tokenizer_files,
)
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.tokenizers.roundtrip import roundtrip
from niels_gpt.tokenizers.sentinels import folder_of_copy

logger = logging.getLogger(__name__)

_MOST_NAMES = 10  # of what lies beside a path where nothing is


def ensure_tokenizer(settings: Settings, *, user_sources_only: bool = False, from_scratch: bool = False) -> Outcome:
    """Return <cache>/tokenizer, its files and meta.json; it is made and installed first if necessary.

    One that was trained without a source that failed is trained again when that source has changed.
    Arguments and errors: see `stage_tokenizer`.
    """
    installed = meta_or_none(cache_root(settings) / TOKENIZER_KEY)
    if installed is not None and has_new_sources(settings, installed):
        settings = replace(settings, retrain_tokenizer=settings.tokenizer is None)
    staged = stage_tokenizer(settings, user_sources_only=user_sources_only, from_scratch=from_scratch)
    install_tokenizer(settings, staged)
    return replace(staged, path=cache_root(settings) / TOKENIZER_KEY)


def install_tokenizer(settings: Settings, staged: Outcome) -> None:
    """Make <cache>/tokenizer the tokenizer that `stage_tokenizer` returned, unless it already is."""
    path = cache_root(settings) / TOKENIZER_KEY
    if staged.path != path:
        with versions.build_lock(path, wait=True):
            versions.publish(staged.path, path)


def build_with_tokenizer(settings: Settings, source: ResolvedSource, key: str, **how: Any) -> Outcome:
    """Build a cache with the tokenizer of its folder, and install a new tokenizer when that has succeeded.

    So a build that is refused leaves the tokenizer, and every cache that was built with it, unchanged.
    key, how: of the cache, and the other arguments of `run_recipe`.
    Raises: NoSentinels for chats and a tokenizer without sentinels; as `stage_tokenizer` and `run_recipe`.
    """
    refresh = bool(how.get("refresh"))
    staged = stage_tokenizer(settings, user_sources_only=source.user is not None, refresh=refresh)
    tokenizer = tokenizer_for(settings, key, source, staged.path)
    outcome = run_recipe(settings, key, source=source, tokenizer=tokenizer, tokenizer_folder=staged.path, **how)
    install_tokenizer(settings, staged)
    if not outcome.reused:
        log_unseen_source(settings, staged.meta, outcome.key)
    return outcome


def stage_tokenizer(
    settings: Settings,
    *,
    user_sources_only: bool = False,
    announce: bool = False,
    refresh: bool = False,
    from_scratch: bool = False,
) -> Outcome:
    """Return the tokenizer of the settings. One that would replace another is checked and made, but not installed.

    Its `path` is <cache>/tokenizer, or the folder of a version for `install_tokenizer`. A tokenizer that is trained
    where there is none is installed.
    user_sources_only: train a missing one on user-defined sources alone, so that their caches need no network.
    announce: warn of the caches that a new one makes unreadable even if an earlier call made it.
    refresh: ask the hub for the newest revision of a tokenizer that is named by its id; else the recorded one counts.
    from_scratch: train it, or copy it, whatever there is. The installed one stays readable until then.

    The one that is there stays, unless the settings ask for another one: a named tokenizer (`tokenizer`) replaces
    another one; settings that decide a trained one, where their value is neither the default nor the recorded one; and
    `retrain_tokenizer`. A change of the text does not count.
    Raises: FileNotFoundError for a named tokenizer that is absent; CacheError for one that cannot be used: of no known
        kind, damaged, or trained on the sample where the text is not; ConnectionError for a hub that cannot be reached:
        a tokenizer outlives an outage; ValueError where there is no text to train on, and for what the hub refuses.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    path = folder = cache_root(settings) / TOKENIZER_KEY
    with Measurement() as measurement:
        meta = None if from_scratch else _installed_for(settings, path, refresh)
        reused = meta is not None
        if reused:
            versions.clear_leftovers(path)
        if meta is None:
            # Of two caches that are built at once, one makes the tokenizer, and the other waits and finds it.
            with versions.building(path, wait=True) as work:
                meta = None if from_scratch else _installed_for(settings, path, refresh)
                reused = meta is not None
                if meta is None:
                    folder, meta, reused = _make(settings, work, path, user_sources_only, from_scratch)
        if folder != path and (announce or not reused):
            warn_of_older_caches(settings, meta)
    return finish(settings, TOKENIZER_KEY, folder, meta, reused, measurement, str(meta["tokenizer_sha256"]))


def tokenizer_for(settings: Settings, key: str, source: ResolvedSource, folder: Path) -> FullTokenizer:
    """Return a folder's tokenizer. Raises: CacheError if it is damaged, or of the sample and the text is not."""
    remove = shlex.join(["rm", *([] if folder.is_symlink() else ["-r"]), str(folder)])
    of_now = f"{remove} && {build_command(settings, key)}"
    again = f"{remove} && {build_command(with_recorded_tokenizer(settings, cache_root(settings)), key)}"
    meta = read_meta(str(folder / META_NAME))
    if settings.source_root != "sample" and meta.get("trained_on") == "sample":
        raise CacheError(
            folder / META_NAME,
            "this tokenizer was trained on the bundled sample",
            "one that may encode real text",
            f"Name another one with --tokenizer, or train one: {of_now}",
            code="E405",
        )
    if source.user is None and meta.get("trained_on") == "own":
        logger.warning(
            "%s: trained on user-defined sources only, and used for %s. --retrain-tokenizer trains one on all sources",
            folder,
            source.source,
            extra={"code": "W407"},
        )
    check_model(folder, meta, f"Make another one: {again}")
    tokenizer = opened(Path(os.path.abspath(folder)), content_sha256(file_records(meta)))
    check_tokenizer(settings, key, source, tokenizer, folder)
    return tokenizer


@functools.lru_cache(maxsize=1)
def opened(folder: Path, _content: str) -> FullTokenizer:
    """Open the tokenizer of a folder, once for the caches of a run. _content: content_sha256 of its files."""
    return load_tokenizer(folder, follow_links=False)


def check_tokenizer(
    settings: Settings, key: str, source: ResolvedSource, tokenizer: FullTokenizer, where: Path
) -> None:
    """Raise NoSentinels or another CacheError for a tokenizer that this cache cannot be built with.

    where: the folder or file that it was opened in; messages name the tokenizer as the settings do.
    """
    if needs_sentinels(settings, source.spec.family, tokenizer.special_token_ids()):
        raise no_sentinels(settings, [key], where)
    if source.spec.family == "sft" and settings.chat_template is not None:
        opened_template(settings, tokenizer, where)
    if "document_end" in source.spec.settings:
        try:
            document_start(tokenizer, settings.document_start)
            document_end(tokenizer, settings.document_end)
        except ValueError as error:
            why = str(error).removeprefix(f"{tokenizer.model_path}: ")
            raise CacheError(settings.tokenizer or cache_root(settings) / TOKENIZER_KEY, why, code="E102") from error


class NoSentinels(CacheError, LeftOut):
    """A cache of chats needs the sentinels, and the tokenizer does not have them: see `no_sentinels`."""


def needs_sentinels(settings: Settings, family: str, special_token_ids: Mapping[str, int]) -> bool:
    """Whether the caches of a family cannot be built with a tokenizer: the project's own template has roles as
    sentinels."""
    families = ("sft", "trees") if settings.chat_template is None else ("trees",)
    return family in families and not special_token_ids


def no_sentinels(settings: Settings, keys: Sequence[str], tokenizer: Path) -> NoSentinels:
    """Return the error of caches of chats, sft or eagle3/targets; its remedy adds the sentinels and builds them.

    tokenizer: the folder or file that is opened; the one of the settings is named if it is a path.
    """
    is_path = settings.tokenizer is not None and not is_id(settings.tokenizer)
    source = str(settings.tokenizer) if is_path else str(tokenizer)
    out, is_there = folder_of_copy(os.path.expanduser(settings.tokenizer or TOKENIZER_KEY), tokenizer)
    links = ["--follow-links"] if settings.follow_links else []
    add = shlex.join(["niels-gpt", "add-sentinels", source, out, *links])
    then = build_command(replace(settings, tokenizer=out), keys)
    if any(key.startswith("eagle3/") for key in keys):  # by the sample's small target
        then = f"{then}. Or name a target of your own for eagle3: the setting eagle3_target"
    mark = "marks the turns of its chats" if len(keys) == 1 else "mark the turns of their chats"
    expected = f"one that has them: {', '.join(keys)} {mark} by them"
    remedy = f"A copy has them: {then}" if is_there else f"Add them: {add} && {then}"
    return NoSentinels(source, "the tokenizer has no sentinels", expected, remedy, code="E404")


def tokenizer_state(settings: Settings) -> str:
    """Return what `ensure_tokenizer` would do: up to date, copy, download, train, or cannot be used and why.

    The hub is not asked.
    """
    if _installed_for(settings, cache_root(settings) / TOKENIZER_KEY, refresh=False) is not None:
        return "up to date"
    name = _name_of(settings)
    if name is None or is_id(name):
        return "train" if name is None else "download"
    try:
        _checked(settings, _find(settings, name))
    except CacheError as error:
        return f"cannot be used: {error}"
    return "copy"


def copied_bytes(settings: Settings) -> int:
    """Return the bytes of the files of the tokenizer that the settings name, which is a file or folder."""
    name = _name_of(settings)
    assert name is not None
    return sum(map(len, _find(settings, name).files().values()))


def usable_tokenizer(settings: Settings) -> FullTokenizer | None:
    """Return the tokenizer that `ensure_tokenizer` would install; None for one to be trained or downloaded.

    Raises: as `stage_tokenizer`.
    """
    path, name = cache_root(settings) / TOKENIZER_KEY, _name_of(settings)
    if _installed_for(settings, path, refresh=False) is not None:
        return load_tokenizer(path, follow_links=False)
    return None if name is None or is_id(name) else _checked(settings, _find(settings, name))


def expected_vocab_size(settings: Settings, tokenizer: FullTokenizer | None) -> int | None:
    """Return the most ids of a build with `usable_tokenizer`; None for a tokenizer that is to be downloaded."""
    if tokenizer is not None:
        return tokenizer.vocab_size
    return settings.vocab_size if _name_of(settings) is None else None


def _installed_for(settings: Settings, path: Path, refresh: bool) -> dict[str, Any] | None:
    """Return the meta of the installed tokenizer if it is the one of these settings, else None."""
    try:
        meta = find_meta(path)
        if meta is not None:
            checked_sha256(meta.get("tokenizer_sha256"), "tokenizer_sha256", str(path / META_NAME))
            there = all((path / record["name"]).is_file() for record in file_records(meta, str(path / META_NAME)))
    except CacheError as error:
        logger.warning("tokenizer: made again: %s", error, extra={"code": "W403"})
        return None
    if meta is None or not there or settings.retrain_tokenizer:
        return None
    if settings.tokenizer is not None:
        if is_id(settings.tokenizer):
            return meta if not refresh and is_of_hub(settings, meta) else None
        files = _find(settings, settings.tokenizer).files()
        return meta if content_sha256(records_of(files)) == meta.get("content_sha256") else None
    return meta if has_values(settings, asked(settings), meta) else None


def with_installed(settings: Settings) -> Settings:
    """Return settings that ask for no other tokenizer than the one that is installed, if one is."""
    if meta_or_none(cache_root(settings) / TOKENIZER_KEY) is None:
        return settings
    defaults = {name: getattr(Settings, name) for name in (*ASKING, "tokenizer", "retrain_tokenizer")}
    return replace(settings, **defaults)


def with_all_asked(settings: Settings, explicit: Sequence[str]) -> Settings:
    """Return settings that ask for another tokenizer also where an explicit value is the default.

    explicit: the settings that the user has written in this run.
    """
    installed = meta_or_none(cache_root(settings) / TOKENIZER_KEY)
    names = [name for name in explicit if name in ASKING]
    if installed is None or settings.tokenizer is not None or has_values(settings, names, installed):
        return settings
    return replace(settings, retrain_tokenizer=True)


def is_of_hub(settings: Settings, meta: Mapping[str, Any]) -> bool:
    """Whether a tokenizer was downloaded by the id of the settings, and at a revision that they allow."""
    asked, known = asked_revisions(settings).get(TOKENIZER_KEY), meta.get("hub")
    if not isinstance(known, dict) or known.get("id") != settings.tokenizer:
        return False
    return asked in (None, known.get("revision"), known.get("asked_revision"))


def _make(
    settings: Settings, work: Path, path: Path, user_sources_only: bool, from_scratch: bool
) -> tuple[Path, dict[str, Any], bool]:
    """Return the folder of a tokenizer, its meta, and whether an earlier run made it."""
    name = _name_of(settings)
    installed = meta_or_none(path)
    if name is not None:
        is_of_these = from_scratch and installed is not None and is_id(name) and is_of_hub(settings, installed)
        found = _find(settings, name, installed["hub"]["revision"] if is_of_these and installed else None)
        files, about = found.files(), _about(settings, found)
        folder = versions.versions_dir(path) / content_sha256(records_of(files))[: versions.VERSION_DIGITS]
        if not from_scratch and (known := undamaged(folder)) is not None and known.get("hub") == about.get("hub"):
            return folder, known, True
    else:
        if not from_scratch and (earlier := trained_earlier(settings, path)) is not None:
            return *earlier, True
        only_user_sources = installed is None or installed.get("trained_on", "own") == "own"
        files, about = train(settings, user_sources_only and only_user_sources)
    meta = _write(files, about, work)
    version = versions.store(work, path, str(meta["content_sha256"]))
    if name is not None or installed is not None:
        return version, meta, False
    versions.publish(version, path)  # it makes no cache unreadable, and training takes minutes
    return path, meta, False


# --- a named one ------------------------------------------------------------------------------------------------------


def named_tokenizer(settings: Settings) -> FullTokenizer:
    """Open the tokenizer that the settings name, where it lies; nothing is installed. Raises: as `stage_tokenizer`."""
    assert settings.tokenizer is not None
    return _checked(settings, _find(settings, settings.tokenizer))


def copy_tokenizer(settings: Settings, path: Path) -> dict[str, Any]:
    """Make the tokenizer that the settings name the cache at `path`, unless it is; returns its meta.

    For a tokenizer of one cache; that of a folder of caches: `ensure_tokenizer`.
    """
    assert settings.tokenizer is not None
    found = _find(settings, settings.tokenizer)
    files = found.files()
    with versions.building(path, wait=True) as work:
        installed = meta_or_none(path)
        if installed is not None and installed.get("content_sha256") == content_sha256(records_of(files)):
            return installed
        meta = _write(files, _about(settings, found), work)
        versions.commit(work, path, str(meta["content_sha256"]))
    return meta


class _Named(NamedTuple):
    """Where a tokenizer lies that the settings name."""

    name: str
    """As in the settings."""
    path: Path
    """The file that decides its ids."""
    follow_links: bool
    hub: dict[str, str] | None = None
    """Of one of the hub: its id and its revision, for meta.json."""

    def files(self) -> dict[str, bytes]:
        """Return its files by their names in a cache. Raises: as `tokenizer_files`."""
        try:
            return tokenizer_files(self.path, follow_links=self.follow_links)
        except OSError as error:
            raise _absent(self.name, error) from None


def _name_of(settings: Settings) -> str | None:
    """Return the path or id of the tokenizer to copy; None if one has to be trained."""
    if settings.tokenizer is not None:
        return settings.tokenizer
    is_default = settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file()
    return str(DEFAULT_TOKENIZER_PATH) if is_default else None


def is_id(name: str) -> bool:
    """Whether a name is an id of the hub: not that of a file or folder, and not written like one."""
    path = os.path.expanduser(name)
    return not (hub.is_local(name) or os.path.lexists(path) or name.endswith((".model", ".json")))


def _find(settings: Settings, name: str, revision: str | None = None) -> _Named:
    """Return where a named tokenizer lies; of one of the hub, its files are downloaded first.

    revision: of the hub; None: the one of the settings, else the newest.
    Links in a named folder are followed by `follow_links` only: it may be from strangers, and its files are copied.
    Raises: FileNotFoundError, CacheError; as `hub_tokenizer_file`.
    """
    if is_id(name):
        asked = asked_revisions(settings).get(TOKENIZER_KEY)
        if "/" not in name:  # as likely a path with a slip
            logger.info("tokenizer: no file or folder %s; asking the hub", name)
        one_of = (TOKENIZER_JSON, *UPSTREAM_MODELS)
        path = hub.hub_tokenizer_file(name, revision or asked, one_of=one_of, beside=(*COMPANIONS, TOOL_TEMPLATE_NAME))
        facts = {"id": name, "revision": path.parent.name, **({"asked_revision": asked} if asked else {})}
        return _Named(name, path, True, facts)
    path = Path(os.path.expanduser(name))
    try:
        return _Named(name, tokenizer_file(path)[0], settings.follow_links or not path.is_dir())
    except OSError as error:
        raise _absent(name, error) from None


def _absent(name: str, error: OSError) -> FileNotFoundError:
    path = Path(os.path.expanduser(name))
    why = error.strerror or ("there is none" if not path.is_dir() else str(error))
    beside = sorted(each.name for each in path.parent.iterdir())[:_MOST_NAMES] if path.parent.is_dir() else []
    there = f" In {path.parent} there is {', '.join(beside)}." if beside and not path.exists() else ""
    return TokenizerNotFound(
        f"{name}: no tokenizer can be read there ({why}).{there} Name a SentencePiece model, a tokenizer.json, a "
        "folder with one of them or an id of the hub, or leave --tokenizer out to have one trained"
    )


def _checked(settings: Settings, found: _Named) -> FullTokenizer:
    """Open a named tokenizer. Raises: CacheError if it cannot be used, or was trained on the sample and the text is
    not."""
    found.files()
    tokenizer = load_tokenizer(found.path, follow_links=found.follow_links)
    _about(settings, found, tokenizer)
    return tokenizer


def _about(settings: Settings, found: _Named, tokenizer: FullTokenizer | None = None) -> dict[str, Any]:
    """Return what meta.json says of a named tokenizer, also from the meta beside it. Raises: as `_checked`."""
    if tokenizer is None:
        tokenizer = load_tokenizer(found.path, follow_links=found.follow_links)
    known: dict[str, Any] = {}
    for name in ("tokenizer_meta.json", META_NAME):
        with contextlib.suppress(CacheError, OSError):
            beside = read_meta(str(found.path.parent / name))
            if tokenizer.sha256 in (beside.get("tokenizer_sha256"), beside.get("model_sha256")):
                known = beside
    if settings.source_root != "sample" and known.get("trained_on") == "sample":
        raise CacheError(
            found.name,
            "this tokenizer was trained on the bundled sample",
            "one that may encode real text",
            "Name another one with --tokenizer, or leave that out",
            code="E405",
        )
    tools = {"tool_template": True} if has_tool_template(found.path) else {}
    about: dict[str, Any] = {key: known[key] for key in ("trained_on", "normalization", "model_type") if key in known}
    return {"trained_on": "unknown", **about, "origin": "copied", **tools, **({"hub": found.hub} if found.hub else {})}


# --- its folder -------------------------------------------------------------------------------------------------------


def _write(files: Mapping[str, bytes], about: dict[str, Any], work: Path) -> dict[str, Any]:
    """Write all files of a tokenizer; returns its meta."""
    for name, content in files.items():
        write_bytes(work / name, content)
    tokenizer = load_tokenizer(work, follow_links=False)
    records, trip = records_of(files), roundtrip(tokenizer)
    eos = None if tokenizer.eos_id is None else {"id": tokenizer.eos_id, "token": tokenizer.token(tokenizer.eos_id)}
    meta = {
        **{key: value for key, value in about.items() if key != "model_sha256"},
        "lossless": trip["differ"] == 0,
        "roundtrip": trip,
        "format_version": FORMAT_VERSION,
        "kind": "tokenizer",
        "built": True,
        "tokenizer_kind": tokenizer.kind,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "special_token_ids": tokenizer.special_token_ids(),
        "control_ids": sorted(tokenizer.control_ids),
        "eos": eos,
        "files": records,
        "content_sha256": content_sha256(records),
    }
    write_bytes(work / META_NAME, raw := meta_bytes(meta))
    return parse_object(raw)
