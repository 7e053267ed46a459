"""The plan of the code holds, light modules stay light, public names stay."""

import subprocess
import sys

import pytest
from support import ROOT

from tools import structure

CACHE_FILES = """
__init__ build_cache build_pretrain build_sft build_templated checksums cli documents formats joining joining_chats
loss_bits meta mmap mounts pretrain_dataset reader sft_counts sft_dataset sft_split shards
"""
HEAVY = {"torch", "datasets", "transformers", "matplotlib", "pyarrow"}


@pytest.fixture(scope="module")
def modules():
    """The modules of this checkout, which take two seconds to read."""
    return structure.read_modules(ROOT)


def made(folder, files):
    """Return the modules of a project that is written below `folder`."""
    for name, source in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return structure.read_modules(folder)


@pytest.mark.parametrize(
    "rule",
    [
        structure.back_arrows,
        structure.circles,
        structure.long_functions,
        structure.missing_in_maps,
        structure.forbidden_switches,
        structure.names_of_homes,
    ],
)
def test_the_plan_holds(rule, modules):
    assert list(rule(modules)) == []


def test_a_function_of_more_than_sixty_lines_is_named(tmp_path):
    sixty = "def kept():\n" + "    x = 1\n" * 59
    modules = made(tmp_path, {"niels_gpt/paths": sixty + sixty.replace("kept", "cut") + "    x = 1\n"})
    assert ["cut has 61 lines" in line for line in structure.long_functions(modules)] == [True]


def test_imports_in_functions_and_for_type_checkers_count(tmp_path):
    modules = made(
        tmp_path,
        {
            "niels_gpt/settings": "def f():\n    from niels_gpt.recipes import plan\n",
            "niels_gpt/recipes/plan": "if TYPE_CHECKING:\n    import niels_gpt.settings\n",
            "niels_gpt/sampling/epochs": "from niels_gpt.kinds.look import x\nfrom niels_gpt.data import types\n",
            "niels_gpt/kinds/look": "x = 1\n",
            "niels_gpt/data/types": "",
        },
    )
    assert structure.back_arrows(modules) == [
        ("niels_gpt.sampling.epochs", "niels_gpt.data.types"),
        ("niels_gpt.sampling.epochs", "niels_gpt.kinds.look"),
        ("niels_gpt.settings", "niels_gpt.recipes.plan"),
    ]
    assert structure.circles(modules) == [["niels_gpt.recipes.plan", "niels_gpt.settings"]]


def test_a_map_lacks_a_module_or_names_one_that_is_not_there(tmp_path):
    files = {
        "niels_gpt/data/__init__": '"""Loaders.\n\nroam.py   notes\ngone.py   nothing\n"""',
        "niels_gpt/data/roam": "",
    }
    assert ["roam" in line or "gone" in line for line in structure.missing_in_maps(made(tmp_path, files))] == [True]
    files = {"niels_gpt/data/__init__": '"""Loaders.\n\nroam.py\n"""'}
    assert len(list(structure.missing_in_maps(made(tmp_path, files)))) == 1, "a name without a purpose is no map"


@pytest.mark.parametrize(
    "code",
    [
        'if name == "pretrain": x()',
        'if family in ("trees", "rollouts"): x()',
        'if "eagle3" != name: x()',
        'match name:\n    case "sft" | "trees": x()',
        'x = {"sft": 1, "draft_vocab": 2}',
        'x = TABLE[meta["kind"]]',
        'x = TABLE.get(str(cache.meta.get("kind")), 0)',
        "x = isinstance(kind, RolloutsKind)",
        "x = isinstance(kind, (int, RolloutsKind))",
    ],
)
def test_a_switch_on_the_kind_is_counted_and_named_where_there_may_be_none(code, tmp_path):
    files = {
        "niels_gpt/kinds/look": code,
        "niels_gpt/cache/look": code,
        "niels_gpt/prefix_tree/kind": "class RolloutsKind(Kind):\n    pass\n",
    }
    modules = made(tmp_path, files)
    line = 2 if code.startswith("match") else 1
    places = {"kinds": [("niels_gpt.kinds.look", line)], "cache": [("niels_gpt.cache.look", line)]}
    assert structure.switches_by_package(modules) == places
    assert [f"kinds/look.py:{line}:" in text for text in structure.forbidden_switches(modules)] == [True]


@pytest.mark.parametrize(
    "code",
    [
        'if kind.name == name: x("sft")',
        'x = {"sft": 1}',
        'x = {"kind": "sft", "files": []}',
        'x = source["kind"] + TABLE[source.get("kind")]',
        "x = isinstance(kind, Kind)",
        'OURS = {"sft": "a:B", "eagle3": "c:D"}',
    ],
)
def test_what_is_no_switch_on_the_kind(code, tmp_path):
    assert structure.switches_by_package(made(tmp_path, {"niels_gpt/kinds/kind": code})) == {}


def test_a_table_of_kinds_stands_in_one_module(tmp_path):
    code = 'OURS = {"sft": "a:B", "eagle3": "c:D"}'
    assert list(structure.switches_by_package(made(tmp_path, {"niels_gpt/kinds/look": code}))) == ["kinds"]


def test_what_a_home_takes_along_is_imported_by_nothing_else(tmp_path):
    modules = made(
        tmp_path,
        {
            "niels_gpt/eagle3/cache": "",
            "niels_gpt/commands/eagle3/tools": "import niels_gpt.eagle3.cache\n",
            "niels_gpt/commands/main": "def f():\n    from niels_gpt.commands.eagle3 import tools\n",
            "niels_gpt/recipes/eagle3/options": "",
            "niels_gpt/recipes/plan": "from niels_gpt.recipes.eagle3.options import KEYS\n",
        },
    )
    broken = list(structure.names_of_homes(modules))
    assert ["main.py: imports niels_gpt.commands.eagle3.tools" in line for line in broken] == [True]


def test_the_lowest_level_needs_only_the_standard_library_and_numpy(modules):
    for module in modules.values():
        if module.level == 0 and module.package:
            foreign = {name.split(".")[0] for name in structure.all_imports(module)} - sys.stdlib_module_names
            assert foreign <= {"niels_gpt", "numpy"}, module.name


def test_only_entry_points_read_argv_and_the_environment_and_the_core_never_imports_dagster(
    modules,
):
    for module in modules.values():
        if module.level < len(structure.LEVELS) - 1:
            words = {"sys.argv", "os.environ", "os.getenv", "argparse"}
            if module.name == "niels_gpt.buckets.bucket":
                words -= {"os.environ"}  # takes the values of keys out of messages, and no setting from it
            if module.name == "niels_gpt.eagle3.tensor_parallel":
                words -= {"os.environ"}  # transformers and gloo are told by it which rank and GPU a process has
            assert not [word for word in words if word in module.source], module.name
        if module.name.startswith("niels_gpt"):
            assert not {"dagster", "pipelines"} & {name.split(".")[0] for name in structure.all_imports(module)}


LIGHT = ("niels_gpt", "niels_gpt.cache", "niels_gpt.recipes", "niels_gpt.sampling", "niels_gpt.cache.cli")


@pytest.mark.parametrize("module", [*LIGHT, "pipelines.component", "pipelines.definitions"])
def test_light_modules_load_no_heavy_library(module):
    program = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_files_of_the_spec_and_the_public_names_are_pinned():
    import niels_gpt.cache
    import niels_gpt.sampling

    assert sorted(path.stem for path in (ROOT / "niels_gpt" / "cache").glob("*.py")) == CACHE_FILES.split()
    names = "CacheError PretrainTokenStreamDataset SFTExampleDataset build_pretrain_cache build_sft_cache read_meta"
    assert niels_gpt.cache.__all__ == [*names.split(), "sha256_file", "write_meta"]
    streams = ["Batch", "EpochStream", "MixtureStream", "PackedStream", "RandomAccess", "SFTStream"]
    assert niels_gpt.sampling.__all__ == [*streams, "bits_per_byte", "block_causal_mask", "iter_eval", "prefetch"]
    for package in (niels_gpt.cache, niels_gpt.sampling):
        assert all(getattr(package, name) for name in package.__all__)


def test_git_ignores_the_caches_but_not_the_cache_package():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no ignore rule to ask")
    command = "git check-ignore cache/meta.json artifacts/x niels_gpt/cache/mmap.py niels_gpt/engine/build.py"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["cache/meta.json", "artifacts/x"]
