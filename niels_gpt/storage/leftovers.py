"""The earlier place of removable, for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.versions import removable

__all__ = ["removable"]

_SAID = "niels_gpt.storage.leftovers is niels_gpt.storage.versions now"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
