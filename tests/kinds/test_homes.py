"""A home package may be deleted, and the rest still works."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT

from niels_gpt.kinds.homes import HOMES, homes, is_installed, loaded
from niels_gpt.storage.meta_json import meta_bytes

GONE_OF = {
    "niels_gpt.eagle3": (["eagle3"], "eagle3/targets", "eagle3"),
    "niels_gpt.prefix_tree": (["tree"], "trees/oasst1", "rollouts"),
    "niels_gpt.exchange": (["push", "pull", "export", "import", "card", "stage"], "", ""),
}
"""Of each home its commands, the key of a cache, and its kind."""
PROGRAM = """
import importlib, json, sys

GONE = sys.argv[1]


class Deleted:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(f"{GONE}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Deleted())
for line in sys.stdin:
    words = json.loads(line)
    print(">>>", flush=True)
    if words[0] == "assets":
        definitions = importlib.import_module("pipelines.definitions")
        graph = definitions.defs.resolve_asset_graph()
        print(*sorted(key.to_user_string() for key in graph.get_all_asset_keys()))
        code = 0
    else:
        code = importlib.import_module("niels_gpt.commands.main").main(words)
    print(f"<<<{int(code)}", flush=True)
"""
"""Runs a command for each line of stdin where the package GONE is not there."""


def run_without(gone, folder, *commands):
    """Return the exit code of each command and all that it printed."""
    lines = "".join(json.dumps(command.split()) + "\n" for command in commands)
    program = [sys.executable, "-c", PROGRAM, gone]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}, "stderr": subprocess.STDOUT}
    done = subprocess.run(program, input=lines, stdout=subprocess.PIPE, text=True, check=False, **how)
    parts = [part.rpartition("<<<") for part in done.stdout.split(">>>\n")[1:]]
    assert len(parts) == len(commands), done.stdout
    return [(int(code), text) for text, _, code in parts]


WORKS = (
    ("--help", "Look inside"),
    ("build roam oasst1 --source-root sample", "pretrain/roam  built"),
    ("list cache", "sft/oasst1"),
    ("verify cache/sample --deep", "cache/sample/sft/oasst1: ok"),
    ("stats cache/sample/sft/oasst1", "supervised"),
    ("show cache/sample/sft/oasst1", "<|asst|>"),
    ("locate cache/sample/pretrain/roam train 10", "source id:"),
    ("diff cache/sample/sft/oasst1 cache/sample/sft/oasst1", "equal"),
    ("gc cache/sample", "nothing to remove"),
    ("doctor cache/sample", "2 caches; none in need of care"),
    ("explain E105", "no-such-path"),
    ("build --all --source-root sample --dry-run", "sft/dolly15k"),
    ("assets", "sft/oasst1"),
)
"""Commands, and what each prints."""
EXCHANGES = (
    ("push cache/sample/pretrain/roam bucket/roam", "sent"),
    ("pull bucket/roam pulled", "pulled: 8 files"),
    ("export cache/sample/pretrain/roam out --to hf", "out: "),
)


@pytest.mark.parametrize("gone", GONE_OF)
def test_a_home_package_may_be_deleted_and_the_rest_works(gone, tmp_path):
    commands, key, kind = GONE_OF[gone]
    wanted = [*WORKS, *(EXCHANGES if gone != "niels_gpt.exchange" else ())]
    absent = [f"{command} x y" for command in commands]
    found = run_without(gone, tmp_path, *(command for command, _ in wanted), *absent)
    for (command, text), (code, printed) in zip(wanted, found, strict=False):
        assert code == 0, (command, printed)
        assert text in printed, (command, printed)
    for command, (code, printed) in zip(absent, found[len(wanted) :], strict=True):
        assert code == 2 and "No such command" in printed, (command, printed)
    said = dict(zip((command for command, _ in wanted), (printed for _, printed in found), strict=False))
    for others, keys, _ in GONE_OF.values():
        is_there = others != commands
        assert all((f" {other} " in said["--help"]) == is_there for other in others)
        if keys:
            assert [keys in said["build --all --source-root sample --dry-run"], keys in said["assets"].split()] == [
                is_there
            ] * 2
    if key:
        _names_a_cache_of_an_absent_kind(gone, tmp_path, key, kind)


def _names_a_cache_of_an_absent_kind(gone, tmp_path, key, kind):
    root = tmp_path / "cache" / "sample"
    meta = json.loads((root / "pretrain" / "roam" / "meta.json").read_bytes())
    (root / key).mkdir(parents=True)
    (root / key / "meta.json").write_bytes(meta_bytes(meta | {"kind": kind}))
    why = f"kind is '{kind}' of a package that is not installed"
    looks = ("list cache", "verify cache/sample", f"stats cache/sample/{key}", "doctor cache/sample")
    for command, (code, printed) in zip(looks, run_without(gone, tmp_path, *looks), strict=True):
        assert why in " ".join(printed.split()), (command, printed)
        assert code == (1 if command.startswith("stats") else 3), (command, printed)


def test_a_home_that_is_there_and_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "broken_home.py").write_text("import nothing_of_this_name\n")
    program = "from niels_gpt.kinds.homes import is_installed; print(is_installed('broken_home'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "No module named 'nothing_of_this_name'" in done.stderr


def test_a_folder_that_is_left_behind_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "left_behind" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("left_behind")


def test_the_table_names_what_is_there():
    for home in homes():
        places = [place for place in (*home.commands.values(), home.recipes, home.assets) if place]
        assert all(map(loaded, places)), home.package
        assert not home.recipes or tuple(loaded(home.recipes).recipes) == home.keys
    assert len(list(homes())) == len(HOMES) == 3
