"""A wheel works away from the checkout, and an editable install shows its types."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from support import ROOT, commands

PROGRAM = """
import pathlib, sys, niels_gpt, pipelines.definitions
from niels_gpt.paths import REPO_ROOT
assert REPO_ROOT == pathlib.Path.cwd(), REPO_ROOT
print(niels_gpt.__file__)
"""


TYPED = """
from niels_gpt.cache import PretrainTokenStreamDataset
reveal_type(PretrainTokenStreamDataset.get_batch)
"""


MADE = {".cache", ".git", ".venv", ".peers", ".oldest", ".dagster", ".hypothesis", "artifacts", "build", "dist", "site"}
"""Folders of a checkout that are not tracked, beside what `cache/` holds and caches of tools."""


def copied(folder):
    """Copy the checkout without what is not tracked: setuptools leaves folders whose stale files would be packaged."""

    def untracked(place, names):
        if Path(place) == ROOT / "cache":
            return set(names) - {"README.md"}
        ends = (".egg-info", "_cache", "__pycache__")
        return {name for name in names if name.endswith(ends) or (Path(place) == ROOT and name in MADE)}

    shutil.copytree(ROOT, folder, ignore=untracked)
    return folder


UNTRACKED = [
    *(".env", "secrets.json", "cache/notes.txt", "docs/page.md~", "docs/.DS_Store", "docs/page.html", "tests/run.log"),
    *("tests/.env.local", "tests/old.egg-info/PKG-INFO", "tools/.mypy_cache/3.11/cache.json", "examples/loss.pt"),
    *("niels_gpt/.env", "niels_gpt/notes.txt", "niels_gpt/storage/run.log", "niels_gpt/cache/__pycache__/meta.pyc"),
    *("niels_gpt/data/sample/.env", "niels_gpt/data/sample/roam/Maps.md~", "niels_gpt/data/sample/roam/.DS_Store"),
    *("pipelines/.env", "pipelines/.dagster/run.db", "docs/.ipynb_checkpoints/page.md"),
]
"""Files that may lie in a checkout and belong in no distribution."""


def files_of(folder):
    """Return the paths of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def environment():
    """Return the environment without this checkout's packages."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(*command, cwd=None):
    """Run a command that succeeds; returns what it printed."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, the source distribution that it was built from, and the files of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    copy = copied(folder / "copy")
    files = files_of(copy)
    for name in UNTRACKED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("untracked")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder / "dist", copy)
    (wheel,), (sdist,) = ((folder / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist, files


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin/ of an environment with the wheel. Its dependencies, gigabytes with torch, are this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", built[0])
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout_and_the_wheel_has_both_packages(
    built,
):
    wheel, sdist, files = built
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    assert files - packed == set()
    assert {name for name in packed - files if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    about = {name.partition("/")[2]: content.pop(name) for name in list(content) if ".dist-info/" in name}
    ours = {name for name in files if name.startswith(("niels_gpt/", "pipelines/"))}
    assert set(content) == ours - {"niels_gpt/data/sample/.gitattributes"}
    assert "niels_gpt/py.typed" in content and any(name.startswith("niels_gpt/data/sample/") for name in content)
    assert b"niels-gpt = niels_gpt.commands:start" in about["entry_points.txt"]
    assert about["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", about["METADATA"].decode(), re.MULTILINE))
    assert extras >= {"dagster", "pipelines", "eagle3", "plot", "rl", "all", "docs", "dev", "browser"}


@pytest.mark.slow
def test_the_installed_wheel_builds_the_demo_and_runs_the_readmes_first_python(installed, tmp_path):
    where = run(installed / "python", "-c", PROGRAM, cwd=tmp_path)
    assert where.strip().startswith(str(installed.parent))
    run(installed / "niels-gpt", "demo", "cache", cwd=tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    run(
        installed / "python", "-W", "ignore", "-c", readme.partition("```python\n")[2].partition("```")[0], cwd=tmp_path
    )
    for command in ("list", "verify"):
        run(installed / "niels-gpt", command, "cache/sample", cwd=tmp_path)


def normalized(name):
    """Return the name of a distribution as package indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = ("dagster", "dask", "eagle3", "fast", "grain", "lightning", "plot", "quantized", "rl", "s3")
    needed = [*project["dependencies"], *(line for name in named for line in extras[name])]
    declared = {normalized(re.split(r"[^\w.-]", line)[0]) for line in needed}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert declared - {"niels-gpt"} <= {normalized(line.partition("==")[0]) for line in pins}
    imported = {}
    for path in (path for folder in ("niels_gpt", "pipelines") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            imported |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    ours = {"niels_gpt", "pipelines", *sys.stdlib_module_names, "compression"}  # of the library from Python 3.14 on
    ours |= {"torchtitan", "tyro", "speculators"}  # installed by hand: they ask for other releases than this project
    named = {"PIL": "pillow", "backports": "backports.zstd"}
    distributions = {name: normalized(named.get(name, name)) for name in imported.keys() - ours}
    assert {name: imported[name] for name, found in distributions.items() if found not in declared} == {}


def test_the_version_is_the_same_everywhere():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff")}
    found = {name: re.findall(r'^version(?: =|:) "?([^"\n]+)"?$', text, re.MULTILINE) for name, text in texts.items()}
    assert set(map(tuple, found.values())) == {(commands.niels_gpt("--version").out.split()[-1],)}


def test_every_editable_install_is_one_whose_types_are_seen():
    installs = [
        line
        for name in ("Makefile", ".ci/run", "README.md", "CONTRIBUTING.md")
        for line in (ROOT / name).read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        if "--editable" in line
    ]
    assert len(installs) >= 2 and all("--config-settings editable_mode=compat" in line for line in installs)


@pytest.mark.slow
def test_a_type_checker_in_another_folder_sees_the_types_of_an_editable_install(tmp_path):
    venv.create(tmp_path / "env")
    python, work = tmp_path / "env" / "bin" / "python", tmp_path / "elsewhere"
    work.mkdir()
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = "-m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable"
    run(python, *install.split(), copied(tmp_path / "copy"))
    (work / "uses.py").write_text(TYPED)
    # The types of torch would take a minute, and are not what is looked for.
    (work / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    found = run(python, "-m", "mypy", "--cache-dir", tmp_path / "mypy", "uses.py", cwd=work)
    assert "PretrainTokenStreamDataset, *, B: int, generator: Any) -> tuple[" in found, found


@pytest.mark.slow
def test_a_base_install_takes_no_later_tokenizers_than_it_knows(built, installed, tmp_path):
    python = installed / "python"
    with zipfile.ZipFile(tmp_path / "tokenizers-1.0.0-py3-none-any.whl", "w") as file:  # an index that has 1.0
        about = "Metadata-Version: 2.1\nName: tokenizers\nVersion: 1.0.0\n"
        file.writestr("tokenizers-1.0.0.dist-info/METADATA", about)
        file.writestr(
            "tokenizers-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("tokenizers-1.0.0.dist-info/RECORD", "")
    with zipfile.ZipFile(built[0]) as file:
        (name,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    (asked,) = (line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: tokenizers"))
    for requirement, expected in (("tokenizers", "1.0.0"), (asked, "0.")):
        flags = ["--dry-run", "--ignore-installed", "--no-deps", "--find-links", tmp_path, "--report", tmp_path / "r"]
        run(python, "-m", "pip", "install", "--quiet", *flags, requirement)
        (found,) = json.loads((tmp_path / "r").read_text())["install"]
        assert found["metadata"]["version"].startswith(expected)
