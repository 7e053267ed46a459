"""The earlier place of records.py and request.py, for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.recipes.records import Outcome, cache_root, is_current
from niels_gpt.recipes.request import restart
from niels_gpt.storage.codes import CodedWarning

__all__ = ["Outcome", "cache_root", "is_current", "restart"]

_SAID = "niels_gpt.recipes.run_recipe is niels_gpt.recipes.records now; restart is in niels_gpt.recipes.request"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
