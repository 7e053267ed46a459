"""The earlier place of hold_version, for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.locks import hold_version

__all__ = ["hold_version"]

_SAID = "niels_gpt.storage.locks.readers is niels_gpt.storage.locks now"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
