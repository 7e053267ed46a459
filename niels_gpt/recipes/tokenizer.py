"""Choose the tokenizer of a cache (D19): the installed one, a copy of a named one, or one trained here."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.chat.tokenizers import has_tool_template
from niels_gpt.data.sources import SOURCES, TREES
from niels_gpt.engine.meta import content_sha256
from niels_gpt.hub import models as hub
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes.family import family_named, family_names
from niels_gpt.recipes.records import TOKENIZER_KEY, Measurement, Outcome, cache_root, finish
from niels_gpt.recipes.resolve import ResolvedSource, asked_revisions
from niels_gpt.recipes.training import (
    ASKING,
    has_new_sources,
    has_values,
    meta_or_none,
    records_of,
    sources_with_text,
    train,
    trained_earlier,
    undamaged,
)
from niels_gpt.recipes.user_sources import FAMILIES, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError, LeftOut, TokenizerNotFound
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import checked_sha256, file_records, meta_bytes, parse_object
from niels_gpt.storage.remedies import build_command, recorded_settings, source_of, with_recorded_tokenizer
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import (
    COMPANIONS,
    TOKENIZER_JSON,
    TOOL_TEMPLATE_NAME,
    UPSTREAM_MODELS,
    check_model,
    tokenizer_file,
    tokenizer_files,
)
from niels_gpt.tokenizers.probes import roundtrip
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.tokenizers.sentinels import folder_of_copy

logger = logging.getLogger(__name__)

_OF_SAMPLE, _FOR_TEXT = "this tokenizer was trained on the bundled sample", "one that may encode real text"
_MOST_NAMES = 10  # of what lies beside a path where nothing is
_WITH_TOKENIZER = ("document_start", "document_end", "on_special")
"""Settings that suit one tokenizer and not another. The way back takes them from the last build of each cache."""


def ensure_tokenizer(settings: Settings, *, user_sources_only: bool = False, from_scratch: bool = False) -> Outcome:
    """Return the installed tokenizer <cache>/tokenizer. Makes and installs it first if necessary.

    A tokenizer that was trained without a source that failed is trained again once that source has changed.
    user_sources_only, from_scratch: see `stage_tokenizer`. Raises its errors.
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


def stage_tokenizer(
    settings: Settings,
    *,
    user_sources_only: bool = False,
    announce: bool = False,
    refresh: bool = False,
    from_scratch: bool = False,
) -> Outcome:
    """Return the tokenizer of the settings. A tokenizer that would replace another is checked and made, but not
    installed.

    Its `path` is <cache>/tokenizer, or the folder of a version for `install_tokenizer`. The first tokenizer of a folder
    is installed once it is trained.
    user_sources_only: train a missing one only on user-defined sources, so that their caches need no network.
    announce: warn of the caches that a new one makes unreadable, even if an earlier call made it.
    refresh: ask the hub for the newest revision of a tokenizer named by its id, instead of the recorded one.
    from_scratch: train or copy it again. The installed one stays readable until then.

    The installed tokenizer stays unless the settings ask for another: by a named tokenizer (`tokenizer`), by training
    settings that are neither default nor recorded, or by `retrain_tokenizer`. A change of the text does not count.
    Raises: FileNotFoundError for a missing named tokenizer; CacheError for a tokenizer of unknown kind, a damaged one,
        or one trained on the sample for other text; ConnectionError if the hub cannot be reached,
        because a tokenizer trained without its text would outlast the outage; ValueError without text to train on, and
        for a refusal of the hub.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    path = folder = cache_root(settings) / TOKENIZER_KEY
    with Measurement() as measurement:
        meta, reused = None if from_scratch else _installed_for(settings, path, refresh), True
        if meta is not None:
            versions.clear_leftovers(path)
        else:
            # Of two caches that are built at once, one makes the tokenizer, and the other waits and finds it.
            with versions.building(path, wait=True) as work:
                meta = None if from_scratch else _installed_for(settings, path, refresh)
                if meta is None:
                    folder, meta, reused = _make(settings, work, path, user_sources_only, from_scratch)
        if folder != path and (announce or not reused):
            _warn_of_older_caches(settings, meta)
    return finish(settings, TOKENIZER_KEY, folder, meta, reused, measurement, str(meta["tokenizer_sha256"]))


def tokenizer_for(settings: Settings, source: ResolvedSource, folder: Path) -> FullTokenizer:
    """Open the tokenizer in a folder, and check that the source's cache can be built with it.

    Raises: CacheError E405 if it was trained on the sample and the text is other; E204 or E403 if it is damaged; the
        errors of `check_tokenizer`.
    """
    key = source.spec.key
    remove = shlex.join(["rm", *([] if folder.is_symlink() else ["-r"]), str(folder)])
    meta = read_meta(str(folder / META_NAME))
    if settings.source_root != "sample" and meta.get("trained_on") == "sample":
        again = f"Name another one with --tokenizer, or train one: {remove} && {build_command(settings, key)}"
        raise CacheError(folder / META_NAME, _OF_SAMPLE, _FOR_TEXT, again, code="E405")
    if source.user is None and meta.get("trained_on") == "own":
        logger.warning(
            "%s: trained on user-defined sources only, and used for %s. --retrain-tokenizer trains one on all sources",
            folder,
            source.source,
            extra={"code": "W407"},
        )
    recorded = with_recorded_tokenizer(settings, cache_root(settings))
    check_model(folder, meta, f"Make another one: {remove} && {build_command(recorded, key)}")
    tokenizer = opened(Path(os.path.abspath(folder)), content_sha256(file_records(meta)))
    check_tokenizer(settings, source, tokenizer, folder)
    return tokenizer


@functools.lru_cache(maxsize=1)
def opened(path: Path, _content: str, follow_links: bool = False) -> FullTokenizer:
    """Open a tokenizer by its folder or file, once for all caches of a run. _content: content_sha256 of its files."""
    return load_tokenizer(path, follow_links=follow_links)


def check_tokenizer(settings: Settings, source: ResolvedSource, tokenizer: FullTokenizer, where: Path) -> None:
    """Raise NoSentinels (E404) or another CacheError if the source's cache cannot be built with the tokenizer.

    where: folder or file of the tokenizer; messages name it as the settings do.
    """
    if source.family.needs_sentinels(settings) and not tokenizer.special_token_ids():
        raise no_sentinels(settings, [source.spec.key], where)
    source.family.check_tokenizer(settings, source.spec, tokenizer, where)


class NoSentinels(CacheError, LeftOut):
    """A cache of chats needs sentinels that the tokenizer lacks: see `no_sentinels`."""


def needs_sentinels(settings: Settings, family: str, special_token_ids: Mapping[str, int]) -> bool:
    """Return whether the caches of a family need sentinels that the tokenizer lacks."""
    found = family_named(family)
    return found is not None and found.needs_sentinels(settings) and not special_token_ids


def no_sentinels(settings: Settings, keys: Sequence[str], tokenizer: Path) -> NoSentinels:
    """Return the error for caches of chats, sft or eagle3/targets; its remedy adds the sentinels and builds them.

    tokenizer: folder or file; the message names the settings' one if that is a path.
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
    """Return the action of `ensure_tokenizer`: up to date, copy, download, train, or cannot be used and why.

    Does not ask the hub.
    """
    if _installed_for(settings, cache_root(settings) / TOKENIZER_KEY, refresh=False) is not None:
        return "up to date"
    name = _name_of(settings)
    if name is None or is_id(name):
        return "train" if name is None else "download"
    try:
        _checked(settings, name)
    except CacheError as error:
        return f"cannot be used: {error}"
    return "copy"


def copied_bytes(settings: Settings) -> int:
    """Return the bytes in the files of the named tokenizer, a file or folder."""
    name = _name_of(settings)
    assert name is not None
    return sum(map(len, _find(settings, name).files.values()))


def usable_tokenizer(settings: Settings) -> FullTokenizer | None:
    """Return the tokenizer that `ensure_tokenizer` would install; None if it must be trained or downloaded.

    Raises: FileNotFoundError for a missing named tokenizer; CacheError for one that cannot be used.
    """
    path, name = cache_root(settings) / TOKENIZER_KEY, _name_of(settings)
    if _installed_for(settings, path, refresh=False) is not None:
        return load_tokenizer(path, follow_links=False)
    return None if name is None or is_id(name) else _checked(settings, name)


def expected_vocab_size(settings: Settings, tokenizer: FullTokenizer | None) -> int | None:
    """Return the largest vocabulary that a build may have; None for a tokenizer to be downloaded."""
    if tokenizer is not None:
        return tokenizer.vocab_size
    return settings.vocab_size if _name_of(settings) is None else None


def _installed_for(settings: Settings, path: Path, refresh: bool) -> dict[str, Any] | None:
    """Return the meta of the installed tokenizer if the settings ask for no other, else None."""
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
        return meta if _find(settings, settings.tokenizer).content == meta.get("content_sha256") else None
    asked = [name for name in ASKING if getattr(settings, name) != getattr(Settings, name)]
    return meta if has_values(settings, asked, meta) else None


def with_installed(settings: Settings) -> Settings:
    """Return settings that keep the installed tokenizer, if there is one."""
    if meta_or_none(cache_root(settings) / TOKENIZER_KEY) is None:
        return settings
    defaults = {name: getattr(Settings, name) for name in (*ASKING, "tokenizer", "retrain_tokenizer")}
    return replace(settings, **defaults)


def with_all_asked(settings: Settings, explicit: Sequence[str]) -> Settings:
    """Return settings that ask for another tokenizer even where an explicit value is the default.

    explicit: settings that the user has written in this run.
    """
    installed = meta_or_none(cache_root(settings) / TOKENIZER_KEY)
    names = [name for name in explicit if name in ASKING]
    if installed is None or settings.tokenizer is not None or has_values(settings, names, installed):
        return settings
    return replace(settings, retrain_tokenizer=True)


def is_of_hub(settings: Settings, meta: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer was downloaded by the id in the settings, at a revision that they allow."""
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
        again = from_scratch and installed is not None and is_id(name) and is_of_hub(settings, installed)
        found = _find(settings, name, installed["hub"]["revision"] if again and installed else None)
        files, about = found.files, found.about(settings)
        folder = versions.versions_dir(path) / found.content[: versions.VERSION_DIGITS]
        if not from_scratch and (known := undamaged(folder)) is not None and known.get("hub") == about.get("hub"):
            return folder, known, True
        tokenizer = found.opened()
    else:
        if not from_scratch and (earlier := trained_earlier(settings, path)) is not None:
            return *earlier, True
        only_user_sources = installed is None or installed.get("trained_on", "own") == "own"
        files, about = train(settings, user_sources_only and only_user_sources)
        tokenizer = None
    meta = _write(files, about, work, tokenizer)
    version = versions.store(work, path, str(meta["content_sha256"]))
    if name is not None or installed is not None:
        return version, meta, False
    versions.publish(version, path)  # it makes no cache unreadable, and training takes minutes
    return path, meta, False


# --- a named one ------------------------------------------------------------------------------------------------------


def named_tokenizer(settings: Settings) -> FullTokenizer:
    """Open the named tokenizer in its own place. Installs nothing.

    Raises: FileNotFoundError if it is missing; CacheError if it cannot be used; ConnectionError without the hub.
    """
    assert settings.tokenizer is not None
    return _checked(settings, settings.tokenizer)


def copy_tokenizer(settings: Settings, path: Path) -> dict[str, Any]:
    """Copy the named tokenizer to the cache at `path`, unless it is there. Returns its meta.

    For a tokenizer of one cache; `ensure_tokenizer` makes the tokenizer of a folder of caches.
    """
    assert settings.tokenizer is not None
    found = _find(settings, settings.tokenizer)
    with versions.building(path, wait=True) as work:
        installed = meta_or_none(path)
        if installed is not None and installed.get("content_sha256") == found.content:
            return installed
        meta = _write(found.files, found.about(settings), work)
        versions.commit(work, path, str(meta["content_sha256"]))
    return meta


@dataclass(frozen=True)
class _Named:
    """A named tokenizer in its own place, read and opened once."""

    name: str
    """As in the settings."""
    path: Path
    """File that decides its ids."""
    follow_links: bool
    hub: dict[str, str] | None = None
    """Id and revision on the hub, for meta.json; None for a file."""

    @functools.cached_property
    def files(self) -> dict[str, bytes]:
        """Files by their names in a cache. Raises: FileNotFoundError; CacheError."""
        try:
            return tokenizer_files(self.path, follow_links=self.follow_links)
        except OSError as error:
            raise _absent(self.name, error) from None

    @functools.cached_property
    def content(self) -> str:
        """The content_sha256 of its files."""
        return content_sha256(records_of(self.files))

    def opened(self) -> FullTokenizer:
        """Open it. Raises: CacheError for a file that is not a tokenizer."""
        return opened(self.path, self.content, self.follow_links)

    def about(self, settings: Settings) -> dict[str, Any]:
        """Return its facts for meta.json, also from a meta.json beside it.

        Raises: CacheError for a file that is not a tokenizer, or one trained on the sample for other text.
        """
        sha256, known = self.opened().sha256, dict[str, Any]()
        for name in ("tokenizer_meta.json", META_NAME):
            with contextlib.suppress(CacheError, OSError):
                beside = read_meta(str(self.path.parent / name))
                if sha256 in (beside.get("tokenizer_sha256"), beside.get("model_sha256")):
                    known = beside
        if settings.source_root != "sample" and known.get("trained_on") == "sample":
            raise CacheError(
                self.name, _OF_SAMPLE, _FOR_TEXT, "Name another one with --tokenizer, or leave that out", code="E405"
            )
        found: dict[str, Any] = {k: known[k] for k in ("trained_on", "normalization", "model_type") if k in known}
        more = {"tool_template": True} if has_tool_template(self.path) else {}
        return {"trained_on": "unknown", **found, "origin": "copied", **more} | ({"hub": self.hub} if self.hub else {})


def _name_of(settings: Settings) -> str | None:
    """Return the path or id of the tokenizer to copy; None if one must be trained."""
    if settings.tokenizer is not None:
        return settings.tokenizer
    is_default = settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file()
    return str(DEFAULT_TOKENIZER_PATH) if is_default else None


def is_id(name: str) -> bool:
    """Return whether a name is an id of the hub: no file or folder has it, and it is not written like a path."""
    path = os.path.expanduser(name)
    return not (hub.is_local(name) or os.path.lexists(path) or name.endswith((".model", ".json")))


def _find(settings: Settings, name: str, revision: str | None = None) -> _Named:
    """Return the place of a named tokenizer. Downloads its files first if it is on the hub.

    revision: of the hub; None: by the settings, else the newest.
    Links in a named folder are followed only with `follow_links`: strangers may have made it, and its files are copied.
    Raises: FileNotFoundError; CacheError; ConnectionError without the hub.
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


def _checked(settings: Settings, name: str) -> FullTokenizer:
    """Open a named tokenizer. Raises: FileNotFoundError; CacheError if the settings' text cannot be built with it."""
    found = _find(settings, name)
    found.about(settings)
    return found.opened()


# --- its folder -------------------------------------------------------------------------------------------------------


def _write(
    files: Mapping[str, bytes], about: dict[str, Any], work: Path, tokenizer: FullTokenizer | None = None
) -> dict[str, Any]:
    """Write all files of a tokenizer. Returns its meta. tokenizer: opened with these files; None opens it."""
    for name, content in files.items():
        write_bytes(work / name, content)
    tokenizer = tokenizer or load_tokenizer(work, follow_links=False)
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


# --- a new one, and caches that are there -----------------------------------------------------------------------------


def ended_caches(settings: Settings, chosen: Sequence[str]) -> list[str]:
    """Return finished caches of the installed tokenizer that a build of `chosen` does not build again."""
    root = cache_root(settings)
    installed = (find_meta(root / TOKENIZER_KEY) or {}).get("tokenizer_sha256")
    return [key for key, sha256 in _tokenizers_in_use(root).items() if sha256 == installed and key not in chosen]


def log_unseen_source(settings: Settings, meta: Mapping[str, Any], key: str) -> None:
    """Log that a tokenizer was not trained on the source of a cache, and how to train one on it."""
    num_bytes, name = meta.get("trained_on_bytes"), key.rpartition("/")[2]
    if meta.get("origin") != "trained" or not isinstance(num_bytes, Mapping):
        return
    trained_on = sources_with_text(num_bytes)
    if name in trained_on:
        return
    again = replace(with_recorded_tokenizer(settings, cache_root(settings)), retrain_tokenizer=True)
    logger.info(
        "%s: the tokenizer has not seen this source: it was trained on %s bytes of %s. To train one that has, and "
        "build with it: %s",
        key,
        f"{meta.get('bytes_seen', 0):,}",
        ", ".join(trained_on),
        _command(again, [*(source for source in trained_on if source not in SOURCES), key]),
    )


def _warn_of_older_caches(settings: Settings, meta: Mapping[str, Any]) -> None:
    """Warn of caches that become unreadable once the tokenizer with this meta is installed, and say how to go back."""
    root, new = cache_root(settings), str(meta["tokenizer_sha256"])
    older = {key: sha256 for key, sha256 in _tokenizers_in_use(root).items() if sha256 != new}
    if not older:
        return
    installed = find_meta(root / TOKENIZER_KEY) or {}
    before = str(installed.get("tokenizer_sha256"))
    logger.warning(
        "tokenizer %s is about to replace %s. Readers then refuse %s until they are built again: %s",
        new[:12],
        before[:12],
        ", ".join(older),
        _command(settings, list(older)),
        extra={"code": "W404"},
    )
    back = versions.versions_dir(root / TOKENIZER_KEY) / str(installed.get("content_sha256"))[: versions.VERSION_DIGITS]
    groups: dict[Settings, list[str]] = {}  # keys by the settings that build them as before
    for key in (key for key, sha256 in older.items() if sha256 == before):
        recorded = recorded_settings(root, key)
        suited = {name: getattr(recorded, name) for name in _WITH_TOKENIZER}
        groups.setdefault(replace(settings, tokenizer=str(back), **suited), []).append(key)
    if groups:
        commands = (_command(settings, keys) + " --yes" * (len(groups) > 1) for settings, keys in groups.items())
        logger.warning("for the old one: %s", " && ".join(commands), extra={"code": "W404"})


def _tokenizers_in_use(root: Path) -> dict[str, str]:
    """Return the sha256 of the tokenizer of each cache that has one, by key."""
    found: dict[str, str] = {}
    for folder in sorted(path for family in family_names() for path in (root / family).glob("[!.]*")):
        with contextlib.suppress(CacheError):  # the reader of a damaged cache reports it
            if (sha256 := (find_meta(folder) or {}).get("tokenizer_sha256")) is not None:
                found[folder.relative_to(root).as_posix()] = str(sha256)
    return found


def _command(settings: Settings, keys: Sequence[str]) -> str:
    """Return the command that builds caches, given by key or name, under these settings.

    A user-defined source that the settings lack gets the line of its last recorded run; without one it is left out.
    """
    chosen = []
    for name in dict.fromkeys(key if key in TREES else key.rpartition("/")[2] for key in keys):
        if name not in (*SOURCES, *TREES) and name not in user_sources(settings):
            lines = _recorded_line(settings, name)
            if not lines:
                continue
            settings = replace(settings, **lines)
        chosen.append(name)
    return build_command(settings, chosen)


def _recorded_line(settings: Settings, name: str) -> dict[str, Any]:
    """Return the settings' line with the line that defined a user source in its last run; {} without a record."""
    for family in FAMILIES:
        recorded = getattr(recorded_settings(cache_root(settings), f"{family}/{name}"), family) or ""
        if lines := [line for line in recorded.split(";") if source_of(line) == name]:
            return {family: ";".join(filter(None, [getattr(settings, family), *lines]))}
    return {}
