"""python -m niels_gpt.eagle3.respond: the target's own replies to chats. The code is commands/eagle3/respond.py."""

from __future__ import annotations

import sys

from niels_gpt.commands.eagle3.respond import main

if __name__ == "__main__":
    sys.exit(main())
