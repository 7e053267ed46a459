"""The commands in error messages: the command that builds a cache again, with the flags of its last build."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from niels_gpt.paths import FAMILIES
from niels_gpt.storage.fileio import META_NAME, open_for_reading
from niels_gpt.storage.mounted import shown, url_of

if TYPE_CHECKING:  # its dataclass takes as long as click to load, and few messages need it
    from niels_gpt.settings import Settings

PROGRAM = "niels-gpt"
BUILD_ALL = f"{PROGRAM} build --all"
ANOTHER_COPY = "No build of it is recorded here: take another copy, or build it where it was built"
_ITS_TOKENIZER = "No build of it is recorded here: give it the tokenizer of the cache that it was copied from"
_BY_KEY = ("trees/", "eagle3/")  # named by their key
_EAGLE3 = "eagle3"
_IN_PARTITIONS = ("pretrain/", "sft/", "rollouts/", "eagle3/targets")
_LINES = ("pretrain", "sft", "rollouts", "licence", "attribution")  # settings of several entries, each a flag
_TOKENIZER = "tokenizer"
_OF_TOKENIZER = (
    *(_TOKENIZER, "tokenizer_kind", "vocab_size", "model_type", "normalization", "character_coverage"),
    "tokenizer_max_bytes",
)
"""The settings that decide the tokenizer."""
_VERSIONS_DIR, _RUNS_DIR, _SAMPLE = ".versions", ".runs", "sample"
_MOST_BYTES = 1 << 16  # of the end of a file of run records; a record has about 2 KiB
_RECIPE_NAME, _MOST_RECIPE_BYTES = "recipe.json", 1 << 24
_MOST_TEXT = 4096  # characters of a setting
_PLACES = (*FAMILIES, _SAMPLE, _TOKENIZER)
_MOST_NAMES = 10  # in a message
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+")


def build_command(settings: Settings, keys: str | Sequence[str], *more: str, verb: str = "build") -> str:
    """Return the command that builds the caches `keys` with these settings.

    more: further flags. verb: "build" or "seal".
    For the tokenizer it is `build --all`: every build makes a missing one. Settings with their default value, and
    entries for other sources, are left out.
    """
    from niels_gpt.settings import Settings

    chosen = [keys] if isinstance(keys, str) else list(keys)
    names = [key.rpartition("/")[2] for key in chosen]
    named = [key if key.startswith(_BY_KEY) else name for key, name in zip(chosen, names, strict=True)]
    of_eagle3 = any(key.startswith(_EAGLE3) for key in chosen)
    of_all = names == [_TOKENIZER]
    words = [PROGRAM, verb, *(["--all"] if of_all else named), *more]
    types = get_type_hints(Settings)
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value in (field.default, None) or (field.name.startswith(_EAGLE3) and not (of_eagle3 or of_all)):
            continue
        if field.name == "partitions" and not (of_all or any(key.startswith(_IN_PARTITIONS) for key in chosen)):
            continue  # no command builds other caches in partitions
        flag = "--" + field.name.replace("_", "-")
        if field.name in _LINES:
            lines = (line.strip() for line in value.split(";"))
            wanted = {*names, settings.eagle3_source} if of_eagle3 else {*names}
            words += [word for line in lines if of_all or source_of(line) in wanted for word in (flag, line)]
        elif types[field.name] is bool:
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def rebuild_command(path: str | os.PathLike[str], partition: tuple[int, int] | None = None) -> str:
    """Return the command that builds a cache from scratch. path: any file or folder of the cache.

    partition: number and total; the command then builds this partition only, if the last build had as many.
    The command has the settings of the last recorded build, with the tokenizer that is in the folder of caches now. It
    is `build --all` for a path outside of all folders of caches, and for a cache that was never built.
    """
    if (place := _place_of(path)) is None:
        return BUILD_ALL
    root, key = place
    if (words := _recorded_import(root, key)) is not None:
        return shlex.join([PROGRAM, "import", *words])
    of_sample = root.name == _SAMPLE
    settings = recorded_settings(root, key)
    settings = replace(settings, cache_dir=str(root.parent if of_sample else root))
    if of_sample:
        settings = replace(settings, source_root=_SAMPLE)
    if key == _TOKENIZER:
        return build_command(settings, key)
    there = (root / _TOKENIZER).exists()
    settings = replace(settings, tokenizer=None) if there else with_recorded_tokenizer(settings, root)
    if partition is not None and settings.partitions == partition[1]:
        return build_command(settings, key, "--partition", str(partition[0]), "--restart")
    return build_command(settings, key, "--restart")


def with_recorded_tokenizer(settings: Settings, root: Path) -> Settings:
    """Return settings with the recorded ones of the tokenizer's last build; without a record, unchanged settings."""
    if not _record_of(root, _TOKENIZER).is_file():
        return settings
    recorded = recorded_settings(root, _TOKENIZER)
    return replace(settings, **{name: getattr(recorded, name) for name in _OF_TOKENIZER})


def build_again(path: str | os.PathLike[str], code: str = "") -> str:
    """Return the remedy for a cache: "Build it again: COMMAND", or for a copy to take another one.

    path: any file or folder of the cache. code: of the error; for E402 in a copy, the remedy is another tokenizer.
    """
    text = shown(path)
    is_at_url = _URL.match(text) is not None
    if is_at_url or is_copy(path):
        if code == "E402":
            return _ITS_TOKENIZER
        return push_again(url_of(text) or text.removesuffix(f"/{META_NAME}")) if is_at_url else ANOTHER_COPY
    return f"Build it again: {rebuild_command(path)}"


def push_again(url: str) -> str:
    """Return the remedy for a damaged cache at a URL."""
    return f"Have it sent again from a good copy: {push_command(url)}"


def push_command(url: str) -> str:
    """Return the command that compares every file at a URL, and sends again what differs."""
    return shlex.join([PROGRAM, "push", "CACHE", url, "--check"])


def is_copy(path: str | os.PathLike[str]) -> bool:
    """Return whether a cache was pulled, staged or copied, so that no build recorded here made it.

    No command is known that makes such a cache again. path: any file or folder of the cache.
    """
    if (place := _place_of(path)) is not None:
        root, key = place
        is_built = os.path.lexists(_record_of(root, key)) and not _has_replaced_a_build(root / key)
        return os.path.lexists(root / key) and not (is_built or _recorded_import(root, key) is not None)
    try:
        where = Path(os.path.abspath(path))
    except OSError:
        return False
    is_missing = where.name == META_NAME and where.parent.is_dir()
    return is_missing or any(os.path.lexists(folder / META_NAME) for folder in (where, *where.parents[:2]))


def _has_replaced_a_build(cache: Path) -> bool:
    """Return whether the committed version is not the last build's, as after a pull. No file is trusted."""
    try:
        with open(open_for_reading(cache.parent / _VERSIONS_DIR / cache.name / _RECIPE_NAME), "rb") as file:
            version = json.loads(file.read(_MOST_RECIPE_BYTES)).get("version")
        return isinstance(version, str) and version != Path(os.readlink(cache)).name
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def instead_of(path: str | os.PathLike[str]) -> str:
    """Return the remedy for a path where nothing is: pull a URL, take a name that exists, or build."""
    text = os.fspath(path)
    if (url := _URL.match(text)) is not None:  # a Path has one slash after the colon
        repaired = f"{url[1]}://{'/' * (url[1] == 'file')}{text[url.end() :]}"
        url_text = text if "://" in text else repaired
        return f"It is a URL, and a folder is read. Fetch it first: {shlex.join([PROGRAM, 'pull', url_text, 'FOLDER'])}"
    command = rebuild_command(path)
    if command == BUILD_ALL and (names := _names_near(Path(os.path.abspath(text)))):
        return names
    return build_again(path)


def _names_near(path: Path) -> str:
    """Return the names of caches in the nearest existing folder above a path, the likely ones first; "" if none."""
    above = next((folder for folder in path.parents if folder.is_dir()), path.parent)
    wanted = path.relative_to(above).parts[0]
    try:
        names = sorted(entry.name for entry in os.scandir(above) if entry.name in _PLACES or _is_cache(entry))
    except OSError:
        return ""
    shown = list(dict.fromkeys([*_close(wanted, names), *names]))[:_MOST_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"In {above} there is {', '.join(shown)}{more}" if shown else ""


def did_you_mean(wanted: str, names: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return " Did you mean A or B?" of the names like `wanted`, the likeliest first; "" if none is. shown: as text."""
    close = _close(wanted, names)
    return f" Did you mean {' or '.join(map(shown, close))}?" if close else ""


def _close(wanted: str, names: Iterable[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(wanted, list(names), n=3)


def _is_cache(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() or os.path.lexists(os.path.join(entry.path, META_NAME))


def source_of(line: str) -> str:
    """Return the source's name in an entry NAME=VALUE of a setting."""
    return line.partition("=")[0].strip()


def _place_of(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """Return the folder of caches and the key of the cache that contains a path; None outside of a cache."""
    try:
        parts = () if "\n" in os.fspath(path) else Path(os.path.abspath(path)).parts
    except OSError:  # the current folder was removed
        return None
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] == _TOKENIZER and os.path.lexists(Path(*parts[: at + 1])):
            root = Path(*parts[:at])
            return (root.parent if root.name == _VERSIONS_DIR else root), _TOKENIZER
        if parts[at] in FAMILIES:
            below = [part for part in parts[at + 1 :] if part != _VERSIONS_DIR]
            root = Path(*parts[:at])
            places = (root / parts[at], root / parts[at] / _VERSIONS_DIR)
            if parts[at] == _EAGLE3 and not any(os.path.lexists(places[1] / name) for name in below[:1]):
                continue  # a folder of this name that `eagle3 precompute` was given
            if below and below[0].isidentifier() and any(os.path.lexists(place / below[0]) for place in places):
                return root, f"{parts[at]}/{below[0]}"
    return None


def recorded_settings(root: Path, key: str) -> Settings:
    """Return the settings of the last recorded build, or defaults without a record. The record is not trusted."""
    from niels_gpt.settings import Settings

    try:
        found = json.loads(_last_line(_record_of(root, key)))["settings"]
        types, known = get_type_hints(Settings), asdict(Settings())
        if found.get("append_eot") is False:  # an earlier setting
            found["document_end"] = "none"
        good = {name: value for name, value in found.items() if name in known and _is_good(value, types[name])}
        return Settings(**good)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Settings()


def _record_of(root: Path, key: str) -> Path:
    return root / _RUNS_DIR / f"{key.replace('/', '.')}.jsonl"


def _recorded_import(root: Path, key: str) -> list[str] | None:
    """Return the arguments of `import` if it was the last recorded run of a cache. The record is not trusted."""
    try:
        words = json.loads(_last_line(_record_of(root, key))).get("import")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return words if isinstance(words, list) and words and all(_is_good(word, str) for word in words) else None


def _is_good(value: Any, kind: Any) -> bool:
    if isinstance(value, str):
        return kind in (str, str | None) and len(value) <= _MOST_TEXT and value.isprintable()
    return value is None or type(value) is kind


def _last_line(path: Path) -> bytes:
    with open(open_for_reading(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).rstrip(b"\n").rpartition(b"\n")[2]


def make_again(tokenizer: Path) -> str:
    """Return the remedy of a damaged tokenizer."""
    if shown(tokenizer) != os.fspath(tokenizer) or is_copy(tokenizer):
        return build_again(tokenizer)
    return f"Make another one: {remake_command(tokenizer)}"


def remake_command(tokenizer: Path) -> str:
    """Return the command that replaces a damaged tokenizer. It removes it first: a build keeps one that exists."""
    remove = shlex.join(["rm", *([] if tokenizer.is_symlink() else ["-r"]), str(tokenizer)])
    return f"{remove} && {rebuild_command(tokenizer)}"
