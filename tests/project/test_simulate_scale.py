"""tools/simulate_scale.py: a small run of every measurement."""

import json
import subprocess
import sys

import pytest
from support import ROOT

SMALL = ["--shards", "20", "--shard-bytes", "65536", "--documents", "1000", "--checkpoints", "5"]
SMALL += ["--files", "3", "--file-bytes", "100", "--partitions", "3"]


@pytest.mark.slow
def test_a_small_run_measures_everything_and_leaves_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "simulate_scale.py"), *SMALL, "--folder", str(tmp_path), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {each["what"] for each in found} >= {"meta", "open", "batches", "verify", "gc", "seal, deep", "fingerprint"}
    for each in found:
        assert "error" not in each, each
        assert each["seconds"] > 0 and each["peak_bytes"] > each["added_bytes"] >= 0
    assert all(each["damages"] == 0 for each in found if each["what"] == "verify")
    assert not list(tmp_path.iterdir())
