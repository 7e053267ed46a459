"""The earlier place of build_token_cache, for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.recipes.units import build_token_cache
from niels_gpt.storage.codes import CodedWarning

__all__ = ["build_token_cache"]

_SAID = "niels_gpt.recipes.token_caches is niels_gpt.recipes.units now"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
