"""The earlier name of niels_gpt.exchange, kept for one release: importing it warns, and gives the same functions."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType

from niels_gpt.storage.codes import CodedWarning

_MOVED = {
    "exporting": {"export_cache": "exporting", "Exported": "exporting"},
    "importing": {"Imported": "importing"},
    "transfer": {},
    "transfer.push": {"push": "transfer.push"},
    "transfer.described": {"Pushed": "transfer.described"},
    "transfer.fetch": {"pull": "transfer.fetch", "stage": "transfer.fetch", "Fetched": "transfer.fetch"},
    "card": {"card_of": "card"},
}
"""The documented names of each module, and the module of niels_gpt.exchange that has them now; a package first."""

_SAID = "niels_gpt.interop is niels_gpt.exchange now: import the names of docs/api/exchange.md from there"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
for _name, _places in _MOVED.items():
    _module = ModuleType(f"{__name__}.{_name}", f"Names of niels_gpt.exchange: {', '.join(_places)}.")
    for _attribute, _place in _places.items():
        setattr(_module, _attribute, getattr(import_module(f"niels_gpt.exchange.{_place}"), _attribute))
    sys.modules[_module.__name__] = _module
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
