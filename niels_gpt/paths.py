"""Default folders, of the checkout or of the current directory for an installed package; folders of caches."""

from __future__ import annotations

from pathlib import Path

FAMILIES = ("pretrain", "sft", "imported", "trees", "rollouts", "eagle3")
"""Folders of caches in a folder of caches, in the order in which they are listed."""

_CHECKOUT = Path(__file__).resolve().parent.parent

REPO_ROOT: Path = _CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else Path.cwd()
"""The checkout with this package; the current directory for an installed wheel (a name of PR-01)."""

DEFAULT_TOKENIZER_PATH: Path = REPO_ROOT / "artifacts" / "tokenizer" / "spm.model"
"""The output of `python -m niels_gpt.train_tokenizer`, which `ensure_tokenizer` copies if it exists."""
