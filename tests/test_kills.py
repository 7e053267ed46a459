"""Builds that are killed with SIGKILL at random moments end with the bytes of builds that were not, under a reader.

Run: pytest tests/test_kills.py, and with -m faults for two hundred kills.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def kill_builds(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    program = [sys.executable, str(Path(__file__).with_name("kill_builds.py")), str(folder)]
    arguments = ["--kills", str(kills), "--seed", str(seed)]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_good(found: dict[str, Any], kills: int) -> None:
    """Assert that nothing differed, and that the reader saw whole versions of finished builds only, of both kinds."""
    assert sum(found["kills"].values()) == kills
    assert found["different"] == found["strange"] == found["wrong"] == []
    assert min(found["looks"].values()) > 0 and min(found["versions_seen"].values()) > 0


def test_killed_builds_end_with_the_same_bytes(tmp_path: Path) -> None:
    assert_good(kill_builds(tmp_path, 12, seed=3), 12)


@pytest.mark.faults
def test_two_hundred_kills_over_both_builders(tmp_path: Path) -> None:
    found = kill_builds(tmp_path, 200, seed=0)
    assert_good(found, 200)
    assert min(found["kills"].values()) > 40 and {"while filling", "in the end"} <= set(found["where"])
