"""python -m niels_gpt.train_tokenizer: train a tokenizer (PR-01). The code is niels_gpt/commands/train_tokenizer.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
