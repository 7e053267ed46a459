"""niels-gpt doctor: installed packages, disk, and caches with problems. niels-gpt explain: the meaning of a code."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import click

from niels_gpt import __version__
from niels_gpt.commands.console import ExitCode, Result, argument, command, say
from niels_gpt.display.numbers import many, number_of, size_text
from niels_gpt.display.tables import table, width
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import codes
from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.storage.locks import lock_kind
from niels_gpt.storage.locks.mounts import mount_of

EXTRAS = {
    "dagster": ("dagster", "caches as Dagster assets, its UI and schedules"),
    "dask": ("distributed", "partitions of a cache on many machines: build --dask"),
    "eagle3": ("transformers", "models and chat templates of the Hugging Face hub; eagle3 precompute"),
    "quantized": ("torchao", "eagle3 precompute and respond --quantization torchao:SCHEME"),
    "fast": ("gigatoken", "builds many times as fast with BPE tokenizers"),
    "plot": ("matplotlib", "pictures: stats --plot, tree stats --plot"),
    "postgres": ("dagster_postgres", "Dagster's storage in PostgreSQL"),
    "s3": ("s3fs", "buckets of S3"),
    "gs": ("gcsfs", "buckets of Google Cloud Storage"),
    "az": ("adlfs", "containers of Azure"),
    "rl": ("trl", "training by transformers' Trainer and by TRL"),
    "grain": ("grain", "streams in Grain"),
    "lightning": ("lightning", "streams in Lightning"),
}
"""For each extra the package that shows that it is installed, and its purpose."""
DEVELOPERS_EXTRAS = {
    "dev": ("pytest", "tests and checks"),
    "buckets": ("moto", "the tests of buckets"),
    "browser": ("playwright", "the browser tests"),
    "docs": ("zensical", "the site: make docs"),
    "serving": ("fastapi", "the tests of replies from transformers serve"),
}
"""The same for work on niels-gpt itself; only --json has them."""
COMPLETION = {
    "bash": 'eval "$(_NIELS_GPT_COMPLETE=bash_source niels-gpt)"',
    "zsh": 'eval "$(_NIELS_GPT_COMPLETE=zsh_source niels-gpt)"',
    "fish": "_NIELS_GPT_COMPLETE=fish_source niels-gpt | source",
}
"""The line in a shell's start file that completes commands, sources and codes."""


@dataclass(frozen=True)
class Care:
    """A problem of a cache, and the command that helps."""

    cache: str
    problem: str
    command: str
    """"" if no command helps."""
    is_damage: bool = False


@command(
    "doctor",
    "Print what is installed, the free disk space, and caches with problems.",
    examples="niels-gpt doctor\nniels-gpt doctor /data/caches --json",
)
@argument("cache_dir", type=click.Path(path_type=Path), default=Settings().cache_dir, help="folder of the caches")
def doctor(cache_dir: Path) -> Result:
    """Examine the installation and the caches."""
    machine, extras = _machine(cache_dir), _extras()
    say(table(machine))
    say("\nextras")
    say(table([("  " + name, extras[name][0] or "not installed", extras[name][1]) for name in EXTRAS]))
    if missing := [name for name in EXTRAS if not extras[name][0]]:
        say(f"  {'Install it' if len(missing) == 1 else 'Install what you need of them'}: {_install(*missing)}")
    say(f"\ncaches in {cache_dir}")
    tokenizer, caches, cares = _caches(cache_dir)
    problem = None if cache_dir.is_dir() else "not a folder" if cache_dir.exists() else "no such folder"
    if problem:
        say(f"  {problem}")
    else:
        number = len({care.cache for care in cares})
        need = f"{number} in need of care" if number else "none in need of care"
        say(f"  tokenizer: {tokenizer}\n  {number_of(len(caches), 'cache')}; {need}")
    for care in cares:
        say("\n    ".join(filter(None, (f"  {care.cache}: {care.problem}", care.command))))
    line = COMPLETION.get(Path(os.environ.get("SHELL", "")).name, COMPLETION["bash"])
    say(f"\nTo complete commands with Tab, add to the start file of your shell:\n  {line}")
    data = {
        "machine": dict(machine),
        "extras": {
            name: {"version": found, "for": what, "install": command} for name, (found, what, command) in extras.items()
        },
        "tokenizer": tokenizer,
        "problem": problem,
        "caches": [str(cache) for cache in caches],
        "care": [asdict(care) for care in cares],
    }
    if problem and str(cache_dir) != Settings().cache_dir:  # the default folder appears with the first build
        return Result(data, ExitCode.FAILED)
    return Result(data, ExitCode.DAMAGED if any(care.is_damage for care in cares) else ExitCode.GOOD)


def _machine(cache_dir: Path) -> list[tuple[str, str]]:
    from niels_gpt.recipes.disk import free_bytes
    from niels_gpt.recipes.records import num_threads

    memory = "not known"
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = size_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return [
        ("niels-gpt", __version__),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("cores", f"{num_threads(Settings())} usable"),
        ("memory", memory),
        ("disk", f"{size_text(free_bytes(cache_dir))} free at {cache_dir}"),
        ("locks", _locks(cache_dir)),
        *((name, _version(name) or "not installed") for name in ("torch", "datasets", "sentencepiece", "tokenizers")),
    ]


def _locks(cache_dir: Path) -> str:
    """Return how a folder of caches is locked, and whether the lock reaches other machines."""
    mount = mount_of(cache_dir)
    on = f"on {mount.kind or 'a file system that is not known'}"
    try:
        if lock_kind(cache_dir) == "lease":
            return f"leases {on}, on all machines that share the folder"
    except (CacheError, OSError) as error:
        return str(error)
    if mount.is_local or not mount.kind:
        return f"flock {on}, of this machine"
    return f"flock {on}, {mount.hidden}: --lock lease" if mount.hidden else f"flock {on}, on all machines that mount it"


def _extras() -> dict[str, tuple[str | None, str, str]]:
    """Return for each extra the installed package with its version, its purpose, and how to install it."""
    found = {}
    for name, (package, what) in (EXTRAS | DEVELOPERS_EXTRAS).items():
        installed = _version(package)
        found[name] = (installed and f"{package} {installed}", what, "" if installed else _install(name))
    return found


def _install(*extras: str) -> str:
    return f"pip install 'niels-gpt[{','.join(extras)}]'"


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


# --- caches -----------------------------------------------------------------------------------------------------------


def _caches(folder: Path) -> tuple[str, list[Path], list[Care]]:
    """Return the tokenizer in a folder of caches, the caches, and their problems."""
    from niels_gpt.kinds.folders import caches_below
    from niels_gpt.recipes.records import TOKENIZER_KEY
    from niels_gpt.storage.versions import versions_below

    try:
        caches = caches_below(folder)
    except (CacheError, FileNotFoundError):  # no such folder, or no cache in it
        caches = []
    cares = [care for cache in caches for care in _of_content(cache)]
    for versions in versions_below(folder) if folder.is_dir() else ():
        cares += _of_versions(folder, versions.parent.parent / versions.name)
    return _tokenizer(caches), [cache for cache in caches if cache.name != TOKENIZER_KEY], cares


def _tokenizer(caches: list[Path]) -> str:
    from niels_gpt.cache.meta import find_meta
    from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
    from niels_gpt.recipes.records import TOKENIZER_KEY

    for cache in caches:
        if cache.name == TOKENIZER_KEY:
            with contextlib.suppress(CacheError, OSError):
                return f"{cache}, {(find_meta(cache) or {}).get('vocab_size')} ids{_engine(cache)}"
            return f"{cache}, damaged"
    if DEFAULT_TOKENIZER_PATH.exists():
        return f"{DEFAULT_TOKENIZER_PATH}, which the next build copies"
    return "none; the first build trains one"


def _engine(folder: Path) -> str:
    from niels_gpt.tokenizer import load_tokenizer
    from niels_gpt.tokenizers.engine import engine_name

    with contextlib.suppress(ValueError, OSError):  # a damaged one is listed as a problem
        return f", encoded by {engine_name(load_tokenizer(folder, sentinels='optional'))}"
    return ""


def _of_content(cache: Path) -> Iterator[Care]:
    from niels_gpt.cache.meta import find_meta
    from niels_gpt.kinds.folders import kind_at
    from niels_gpt.kinds.verify import find_damage, refusal
    from niels_gpt.storage.remedies import is_copy, rebuild_command

    reason = refusal(cache)
    if reason is not None:
        yield Care(str(cache), f"readers refuse it: {reason}", shlex.join(["niels-gpt", "verify", str(cache)]), True)
        return
    meta: dict[str, Any] = find_meta(cache) or {}
    for damage in find_damage(cache, deep=False)[:1]:
        yield Care(str(cache), damage.problem, shlex.join(["niels-gpt", "verify", str(cache)]), True)
        return
    kind = kind_at(cache)
    if kind is not None and meta.get("builder_version", 0) < kind.builder_version:
        command = "" if is_copy(cache) else rebuild_command(cache)
        yield Care(str(cache), f"made by builder version {meta.get('builder_version')}", command)


def _of_versions(folder: Path, cache: Path) -> Iterator[Care]:
    """Yield the unfinished builds of a cache, and the pieces that gc would remove."""
    from niels_gpt.engine.journal import unfinished_builds
    from niels_gpt.engine.meta import is_of_this_version
    from niels_gpt.kinds.kind import kind_names
    from niels_gpt.recipes.gc import wanted_plan
    from niels_gpt.storage.versions import refuse_if_building, removable

    gc = shlex.join(["niels-gpt", "gc", str(folder)])
    try:
        refuse_if_building(cache)
        unfinished, kept = unfinished_builds(cache), wanted_plan(cache)
        pieces = [piece for piece, _ in removable(cache, kind_names()) if piece != kept]
    except (CacheError, OSError):  # it is being built
        return
    if kept is not None:
        yield Care(str(cache), "its partitions are not sealed yet; build the others, or seal them", "")
    if unfinished:
        resumes = any(map(is_of_this_version, unfinished))
        what = "the same build command resumes it" if resumes else "another version of niels-gpt began it; not used"
        yield Care(str(cache), f"an unfinished build: {what}. To remove it:", gc)
    elif pieces:
        yield Care(str(cache), f"{many(len(pieces), 'old version or leftover')}. To remove:", gc)


# --- explain ----------------------------------------------------------------------------------------------------------


def _codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[click.shell_completion.CompletionItem]:
    found = [row for row in codes().values() if row.code.startswith(incomplete.upper())]
    return [click.shell_completion.CompletionItem(row.code, help=row.name) for row in found]


def explained(code: str, columns: int = 100) -> str:
    """Return the meaning, remedy and example of a code in lines of at most `columns` characters.

    Raises: UsageError for an unknown code.
    """
    row = codes().get(code.upper())
    if row is None:
        subject = [known for known in codes() if known[:2] == code[:2].upper()]
        raise UsageError(f"no code is called {code!r}, expected one of {', '.join(subject or codes())}")
    kind = "error" if row.code.startswith("E") else "warning"
    parts = [f"{row.code} {row.name}", row.meaning, f"What to do: {row.remedy}"]
    parts = [fill(part, columns, break_long_words=False, break_on_hyphens=False) for part in parts]
    if row.example:
        shown = wrap(f"{kind}[{row.code}]: {row.example}", columns - 4, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join(["For example:", "", *(f"    {line}" for line in shown)]))
    return "\n\n".join(parts)


@command("explain", "Explain the code of an error or a warning.", examples="niels-gpt explain E203")
@argument("code", shell_complete=_codes, help="as in error[E203]")
def explain(code: str) -> Result:
    """Explain a code."""
    text = explained(code, width())
    say(text)
    return Result(asdict(codes()[code.upper()]))
