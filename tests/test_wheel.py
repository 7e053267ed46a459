"""A wheel, installed away from the checkout, builds and reads a cache: `pytest tests/test_wheel.py`."""

import os
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
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    # The dependencies (gigabytes of torch) come from this environment; the package itself must come from the wheel.
    (tmp_path / "env" / "lib").glob("*")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "elsewhere"
    work.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", PROGRAM], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "env"))
