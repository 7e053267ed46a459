"""python -m niels_gpt.eagle3: look into EAGLE-3 caches. The code is commands/eagle3/tools.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.eagle3.tools import main

if __name__ == "__main__":
    sys.exit(main())
