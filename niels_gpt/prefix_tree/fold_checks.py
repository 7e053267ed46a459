"""The earlier place of FoldReport, kept for one release: importing it warns."""

from __future__ import annotations

import warnings

from niels_gpt.prefix_tree.verify import FoldReport
from niels_gpt.storage.codes import CodedWarning

__all__ = ["FoldReport"]

_SAID = "niels_gpt.prefix_tree.fold_checks is niels_gpt.prefix_tree.verify now: import FoldReport from there"
warnings.warn(CodedWarning("W104", _SAID), stacklevel=2)
