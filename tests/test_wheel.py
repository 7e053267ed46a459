"""A wheel, installed away from the checkout, builds and reads a cache: `pytest tests/test_wheel.py`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys, torch, niels_gpt
from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.cache.cli import main
from niels_gpt.paths import REPO_ROOT
import pathlib
assert REPO_ROOT == pathlib.Path.cwd(), REPO_ROOT
assert main(["build", "roam", "--source-root", "sample", "--cache-dir", "c", "--vocab-size", "600"]) == 0
data = PretrainTokenStreamDataset("c/sample/pretrain/roam/train", T=16, device="cpu")
x, y = data.get_batch(B=2, generator=torch.Generator().manual_seed(0))
assert x.shape == y.shape == (2, 16)
print(niels_gpt.__file__)
"""


def test_a_wheel_in_an_empty_environment_builds_and_reads_a_cache(tmp_path: Path) -> None:
    # From a copy: setuptools leaves a build/ folder behind, whose stale files would go into the next wheel.
    shutil.copytree(ROOT / "niels_gpt", tmp_path / "copy" / "niels_gpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / "copy" / name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path / "dist", tmp_path / "copy")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    # The dependencies (gigabytes of torch) come from this environment; the package itself must come from the wheel.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "elsewhere"
    work.mkdir()
    done = subprocess.run(
        [python, "-c", PROGRAM], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "env"))
