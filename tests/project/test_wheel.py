"""A wheel works away from the checkout, and an editable install shows its types."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

PROGRAM = """
import sys, torch, niels_gpt
from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.commands.cache import main
from niels_gpt.paths import REPO_ROOT
import pathlib
assert REPO_ROOT == pathlib.Path.cwd(), REPO_ROOT
assert main(["build", "roam", "--source-root", "sample", "--cache-dir", "c", "--vocab-size", "600"]) == 0
data = PretrainTokenStreamDataset("c/sample/pretrain/roam/train", T=16, device="cpu")
x, y = data.get_batch(B=2, generator=torch.Generator().manual_seed(0))
assert x.shape == y.shape == (2, 16)
print(niels_gpt.__file__)
"""


TYPED = """
from niels_gpt.cache import PretrainTokenStreamDataset
reveal_type(PretrainTokenStreamDataset.get_batch)
"""


def copied(folder: Path) -> Path:
    """Copy what is packaged: setuptools leaves folders behind, whose stale files would go into the next wheel."""
    shutil.copytree(ROOT / "niels_gpt", folder / "niels_gpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_builds_and_reads_a_cache(tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path / "dist", copy)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    # The dependencies (gigabytes of torch) come from this environment; the package itself must come from the wheel.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "elsewhere"
    work.mkdir()
    how: dict[str, Any] = {"cwd": work, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([python, "-c", PROGRAM], check=False, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "env"))


def test_every_editable_install_is_one_whose_types_are_seen() -> None:
    installs = [
        line
        for name in ("Makefile", ".ci/run", "README.md", "CONTRIBUTING.md")
        for line in (ROOT / name).read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        if "--editable" in line
    ]
    assert len(installs) >= 2 and all("--config-settings editable_mode=compat" in line for line in installs)


@pytest.mark.slow
def test_a_type_checker_in_another_folder_sees_the_types_of_an_editable_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    python, work = tmp_path / "env" / "bin" / "python", tmp_path / "elsewhere"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    work.mkdir()
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = "-m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable"
    run(python, *install.split(), copied(tmp_path / "copy"))
    (work / "uses.py").write_text(TYPED)
    # The types of torch would take a minute, and are not what is looked for.
    (work / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    found = run(python, "-m", "mypy", "--cache-dir", tmp_path / "mypy", "uses.py")
    assert "PretrainTokenStreamDataset, *, B: int, generator: Any) -> tuple[" in found, found
