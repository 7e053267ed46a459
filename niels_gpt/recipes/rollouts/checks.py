"""The earlier place of the checks of rollout caches, kept for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.storage.codes import CodedWarning

__all__ = ["find_damage", "verify"]

_SAID = "niels_gpt.recipes.rollouts.checks is niels_gpt.kinds.verify now, which takes every kind of cache"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
