"""Importing this makes torchtitan 0.3.0 importable, from the folder that NIELS_GPT_PEERS names; or skips the module."""

import os
import sys
from pathlib import Path

FOLDER = "torchtitan-0.3.0"


def _import():
    peers = os.environ.get("NIELS_GPT_PEERS")
    if peers is None:
        import pytest

        pytest.skip(f"set NIELS_GPT_PEERS to a folder with {FOLDER}, see .ci/run", allow_module_level=True)
    folder = Path(peers) / FOLDER
    assert folder.is_dir(), f"{folder} is missing, and NIELS_GPT_PEERS is set"
    sys.path.append(str(folder))  # behind the project's own packages


_import()
