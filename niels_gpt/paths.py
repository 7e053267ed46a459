"""Default folders of a checkout or, where the package is installed away from one, of the current directory."""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent

REPO_ROOT: Path = _CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else Path.cwd()
"""The checkout that holds this package; the current directory for an installed wheel (PR-01 asks for the name)."""

DEFAULT_TOKENIZER_PATH: Path = REPO_ROOT / "artifacts" / "tokenizer" / "spm.model"
"""Where `python -m niels_gpt.train_tokenizer` writes, and where `ensure_tokenizer` looks for a model to copy."""
