"""python -m niels_gpt.prefix_tree: what folding would save. The code is niels_gpt/commands/prefix_tree.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.prefix_tree import main

if __name__ == "__main__":
    sys.exit(main())
