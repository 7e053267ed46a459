"""python -m niels_gpt.eagle3.precompute: build an EAGLE-3 cache. The code is commands/eagle3/precompute.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.eagle3.precompute import main

if __name__ == "__main__":
    sys.exit(main())
