"""Which caches are in a folder, by their meta.json, and what the records of runs say of the builds that made them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import listed_meta
from niels_gpt.kinds.kind import kinds
from niels_gpt.paths import FAMILIES
from niels_gpt.recipes.run_recipe import RUNS_DIR, TOKENIZER_KEY, Outcome, runs_file
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_count, open_regular, parse_object, path_inside, resolved
from niels_gpt.storage.remedies import build_command, recorded_settings
from niels_gpt.storage.versions import public_path

_FOLDERS = re.compile(r"(?:(?<=^)|(?<=[=;,:\s]))(?:~|/)[^;,]*/(?=[^;,])")  # of absolute paths in a setting
_RUNS_BYTES = 1 << 20  # read from the end of a file of runs


def recorded_outcomes(root: Path) -> tuple[list[Outcome], dict[str, Exception]]:
    """Return the outcome that built each committed cache in `root`, and by key the error of each damaged meta.json.

    A cache that was copied here has no line in .runs/: its seconds are nan and its fingerprint is empty.
    Raises: FileNotFoundError if there is no cache.
    """
    known = [key.rstrip("/") for kind in kinds() for key in kind.keys if key.endswith("/")]  # of other packages too
    families = [sorted(root.glob(f"{family}/[!.]*")) for family in dict.fromkeys([*FAMILIES, *known])]
    outcomes: list[Outcome] = []
    damaged: dict[str, Exception] = {}
    for path in itertools.chain([root / TOKENIZER_KEY], *families):
        key = path.relative_to(root).as_posix()
        try:
            meta = listed_meta(path)
            if key == TOKENIZER_KEY and meta is not None:
                checked_count(meta.get("vocab_size"), "vocab_size", str(path / META_NAME))
        except CacheError as error:
            damaged[key] = error
            continue
        if meta is not None:
            run = _newest_run(root, key)
            about = (run.get("seconds", math.nan), run.get("peak_bytes"), run.get("fingerprint", ""))
            outcomes.append(Outcome(key, path, meta, False, *about))
    if not outcomes and not damaged:
        raise FileNotFoundError(
            f"{root}: no cache there. Name the folder that holds pretrain/ and sft/, or build the sample's caches: "
            "niels-gpt demo cache"
        )
    return outcomes, damaged


def made_by(cache: Path) -> str | None:
    """Return the command that built a cache, by the record of its last run, without the folders of this machine.

    None: no run is recorded, or that run made another version.
    """
    meta, public = listed_meta(cache), public_path(resolved(cache)) or cache.absolute()
    key = TOKENIZER_KEY if public.name == TOKENIZER_KEY else f"{public.parent.name}/{public.name}"
    root = public.parent if key == TOKENIZER_KEY else public.parent.parent
    if meta is None or _newest_run(root, key).get("content_sha256") != meta.get("content_sha256"):
        return None
    settings = replace(recorded_settings(root, key), cache_dir=Settings.cache_dir)
    texts = {name: _FOLDERS.sub("", text) for name, text in asdict(settings).items() if isinstance(text, str)}
    return build_command(replace(settings, **texts), key)  # type: ignore[arg-type]  # texts of fields that are texts


def _newest_run(root: Path, key: str) -> dict[str, Any]:
    """Return the last whole line of the runs of `key`; {} without one in the last megabyte."""
    try:
        with open(open_regular(path_inside(resolved(root), f"{RUNS_DIR}/{runs_file(root, key).name}")), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _RUNS_BYTES))
            lines = file.read(_RUNS_BYTES).splitlines()
    except (OSError, CacheError):
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # half a line of a killed writer
            run = parse_object(line)
            sound = type(run.get("seconds")) in (int, float) and type(run.get("peak_bytes")) in (int, type(None))
            return run if sound and type(run.get("fingerprint")) is str else {}
    return {}
