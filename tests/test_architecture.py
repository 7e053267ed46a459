"""Imports go one way, light modules stay light, public names stay: `pytest tests/test_architecture.py`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "niels_gpt").rglob("*.py")) + sorted((ROOT / "pipelines").rglob("*.py"))
ENTRY_POINTS = {
    "niels_gpt.cache.cli",
    "niels_gpt.data.sample.generate",
    "niels_gpt.eagle3.__main__",
    "niels_gpt.eagle3.precompute",
    "niels_gpt.prefix_tree.__main__",
    "niels_gpt.prefix_tree.demo",
    "niels_gpt.train_tokenizer",
}
CACHE_FILES = "__init__ build_cache cli formats meta mmap pretrain_dataset sft_dataset"
# Inside level 2: who may import whom; each may always import itself.
LEVEL_2 = {
    "build": set(),
    "cache": {"build"},
    "inspection": {"build", "cache"},
    "sampling": {"build", "cache"},
    "eagle3": {"build"},
    "prefix_tree": {"build"},
}
LEVEL_0 = {"settings", "fileio", "filemaps", "interrupts", "locks", "paths", "records", "remedies", "versions"}
HEAVY = {"torch", "datasets", "transformers", "matplotlib", "pyarrow"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(module: str) -> int:
    if module in ENTRY_POINTS or module.startswith("pipelines"):
        return 4
    top = module.split(".")[1] if "." in module else ""
    return 0 if top in LEVEL_0 or not top else 3 if top == "recipes" else 2 if top in LEVEL_2 else 1


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, inside functions too, but not under `if TYPE_CHECKING`."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = str(node.module)
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("niels_gpt", "pipelines")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_imports_a_higher_level(path: Path) -> None:
    too_high = {name for name in ours(path) if level(name) > level(name_of(path))}
    assert not too_high, f"{name_of(path)} (level {level(name_of(path))}) imports {too_high}"


@pytest.mark.parametrize("path", [path for path in MODULES if level(name_of(path)) == 2], ids=name_of)
def test_packages_of_level_2_import_only_downwards_and_never_data(path: Path) -> None:
    package = name_of(path).split(".")[1]
    others = {name.split(".")[1] for name in ours(path) if name.count(".")} - {package}
    assert not {name for name in others if name in LEVEL_2} - LEVEL_2[package]
    assert "data" not in others


@pytest.mark.parametrize("path", [path for path in MODULES if level(name_of(path)) == 0], ids=name_of)
def test_level_0_needs_only_the_standard_library(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {"niels_gpt"}
    assert not foreign


@pytest.mark.parametrize("path", [path for path in MODULES if level(name_of(path)) < 4], ids=name_of)
def test_only_entry_points_read_argv_and_the_environment(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not [word for word in ("sys.argv", "os.environ", "os.getenv", "argparse") if word in source]


def test_the_core_never_imports_dagster() -> None:
    for path in MODULES:
        if name_of(path).startswith("niels_gpt"):
            assert not {name for name in imports(path) if name.split(".")[0] in ("dagster", "pipelines")}


@pytest.mark.parametrize(
    "module",
    [
        "niels_gpt",
        "niels_gpt.cache",
        "niels_gpt.recipes",
        "niels_gpt.sampling",
        "niels_gpt.cache.cli",
        "pipelines.definitions",
    ],
)
def test_light_modules_load_no_heavy_library(module: str) -> None:
    program = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_cache_package_has_exactly_the_files_of_the_spec() -> None:
    assert sorted(path.stem for path in (ROOT / "niels_gpt" / "cache").glob("*.py")) == CACHE_FILES.split()


def test_the_public_names_of_the_cache_package_are_pinned() -> None:
    import niels_gpt.cache

    assert niels_gpt.cache.__all__ == [
        "CacheError",
        "PretrainTokenStreamDataset",
        "SFTExampleDataset",
        "build_pretrain_cache",
        "build_sft_cache",
        "read_meta",
        "sha256_file",
        "write_meta",
    ]
    assert all(getattr(niels_gpt.cache, name) for name in niels_gpt.cache.__all__)


def test_the_public_names_of_the_sampling_package_are_pinned() -> None:
    import niels_gpt.sampling

    assert niels_gpt.sampling.__all__ == ["Batch", "EpochStream", "MixtureStream", "bits_per_byte", "iter_eval"]
    assert all(getattr(niels_gpt.sampling, name) for name in niels_gpt.sampling.__all__)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_stay_small(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 450
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"


def test_git_ignores_the_caches_but_not_the_cache_package() -> None:
    ask = ["git", "check-ignore", "cache/meta.json", "artifacts/x", "niels_gpt/cache/mmap.py", "niels_gpt/build/sft.py"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no ignore rule to ask")
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["cache/meta.json", "artifacts/x"]
