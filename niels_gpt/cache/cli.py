"""python -m niels_gpt.cache.cli: build token caches and look into them. The code is niels_gpt/commands/cache.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.cache import main

if __name__ == "__main__":
    sys.exit(main())
