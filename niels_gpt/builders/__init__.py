"""The earlier name of niels_gpt.engine and of the builders in niels_gpt.cache, and for now the home of one package.

partitions/   a pretrain cache in partitions: their plan, their states, and how one cache is made of them

The documented names of its earlier modules stay for one release: who takes one is warned, and gets the same object.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from niels_gpt.storage.codes import CodedWarning

_MOVED = {
    "pretrain": dict.fromkeys(("build_pretrain", "build_stub"), "cache.build_pretrain"),
    "sft": {"build_sft": "cache.build_sft"},
    "meta_keys": {"Source": "engine.meta"},
    "source": {"Seek": "engine.stream"},
    "journal": {"unfinished_builds": "engine.journal"},
    "resume": {"NoTextError": "engine.build"},
}
"""The documented names of each module, and the module that has them now."""


def _moved(name: str, now: dict[str, str]) -> ModuleType:
    """Return a module that gives moved names. The package itself cannot warn: `partitions` is imported through it."""
    module = ModuleType(f"{__name__}.{name}", f"Moved names: {', '.join(now)}.")

    def attribute(asked: str) -> Any:
        if asked not in now:
            raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")
        said = f"{module.__name__}.{asked} is niels_gpt.{now[asked]}.{asked} now: import it from there"
        warnings.warn(CodedWarning("W104", said), stacklevel=2)
        return getattr(import_module(f"niels_gpt.{now[asked]}"), asked)

    module.__dict__["__getattr__"] = attribute
    return module


for _name, _now in _MOVED.items():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _moved(_name, _now)
