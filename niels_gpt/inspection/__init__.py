"""The earlier name of niels_gpt.kinds, kept for one release: importing it warns, and gives the same functions."""

from __future__ import annotations

from niels_gpt.storage.codes import give_earlier_names

_MOVED = {
    "verify": {"verify": "kinds.verify", "find_damage": "kinds.verify", "Limits": "kinds.kind"},
    "file_checks": {"Damage": "kinds.files"},
    "caches": {"caches_below": "kinds.folders"},
    "show": {"show": "kinds.look", "show_data": "kinds.look", "tokenizer_of": "kinds.look"},
    "stats": {
        "stats": "kinds.look",
        "stats_data": "kinds.look",
        "lengths": "cache.documents",
        "supervised_counts": "cache.documents",
    },
    "diff": {"diff": "kinds.diff"},
    "locate": {"locate": "kinds.look", "locate_data": "kinds.look"},
    "readers": {"refusal": "kinds.verify"},
    "plot": {"plot": "kinds.look"},
}
"""The documented names of each module, and the module that has them now."""

give_earlier_names(
    __name__, _MOVED, "niels_gpt.inspection is niels_gpt.kinds now: import the names of docs/api/kinds.md from there"
)
