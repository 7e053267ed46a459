"""tools/gpu_checks.py: what it says without a GPU, and every check that a CPU can run, at tiny sizes."""

import json
import subprocess
import sys

import pytest
import torch
from support import ROOT


def gpu_checks(*words):
    command = [sys.executable, str(ROOT / "tools" / "gpu_checks.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_is_no_failure(tmp_path):
    done = gpu_checks("--json", tmp_path / "found.json")
    assert done.returncode == 0 and done.stdout.startswith("No GPU") and "--device cpu" in done.stdout, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == []


@pytest.mark.slow
def test_every_check_runs_on_a_cpu_or_says_why_it_cannot(tmp_path):
    pytest.importorskip("transformers", reason="models to check with need the extra eagle3")
    done = gpu_checks("--device", "cpu", "--json", tmp_path / "found.json", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    names = [line.split()[0] for line in gpu_checks("--list").stdout.splitlines()]
    assert list(dict.fromkeys(row["check"] for row in rows)) == names
    assert {row["verdict"] for row in rows} == {"ok", "skipped", "figure"}
    assert all(row["why"] for row in rows if row["verdict"] == "skipped")
    assert all(row["value"] > 0 for row in rows if row["verdict"] == "figure")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.slow
def test_a_check_that_fails_does_not_stop_the_rest(tmp_path):
    words = ("--device", "cpu", "--limit", 1, "--only", "precompute", "flex", "--json", tmp_path / "found.json")
    done = gpu_checks(*words)
    found = [(row["check"], row["verdict"]) for row in json.loads((tmp_path / "found.json").read_text())["rows"]]
    assert done.returncode == 1 and "1 FAILED" in done.stdout, done.stderr
    assert found[-2:] == [("precompute", "FAILED"), ("flex", "skipped")] and "longer than 1 s" in done.stdout
