"""The earlier name of niels_gpt.engine and of the builders in niels_gpt.cache, for one release: importing it warns."""

from __future__ import annotations

from niels_gpt.storage.codes import give_earlier_names

_MOVED = {
    "pretrain": dict.fromkeys(("build_pretrain", "build_stub"), "cache.build_pretrain"),
    "sft": {"build_sft": "cache.build_sft"},
    "meta_keys": {"Source": "engine.meta"},
    "source": {"Seek": "engine.stream"},
    "journal": {"unfinished_builds": "engine.journal"},
    "resume": {"NoTextError": "engine.build"},
}
"""The documented names of each module, and the module that has them now."""

give_earlier_names(
    __name__, _MOVED, "niels_gpt.builders is niels_gpt.engine now: import the names of docs/api/engine.md from there"
)
