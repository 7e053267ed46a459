"""The earlier name of niels_gpt.kinds, kept for one release: importing it warns, and gives the same functions."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType

from niels_gpt.storage.codes import CodedWarning

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

_SAID = "niels_gpt.inspection is niels_gpt.kinds now: import the names of docs/api/kinds.md from there"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
for _name, _places in _MOVED.items():
    _module = ModuleType(f"{__name__}.{_name}", f"Names of niels_gpt.kinds: {', '.join(_places)}.")
    for _attribute, _place in _places.items():
        setattr(_module, _attribute, getattr(import_module(f"niels_gpt.{_place}"), _attribute))
    globals()[_name] = sys.modules[_module.__name__] = _module
