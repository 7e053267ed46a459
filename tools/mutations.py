"""Break the code in small ways, one at a time, and see whether the tests of its package notice.

    python tools/mutations.py --count 30 --seed 18        thirty mutations of niels_gpt and pipelines
    python tools/mutations.py --only niels_gpt/sampling   of one folder
    python tools/mutations.py --list                      what they would be

Each mutation is made in a copy of the checkout. Exit status 0, whatever survives: a survivor is something to look at.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PLACES = {"pipelines": ("pipelines",), "tokenizer_training": ("tokenizer",), "train_tokenizer": ("tokenizer",)}
"""Folders of tests for what has none of its own name."""


@dataclass(frozen=True)
class Mutation:
    """One change of one operator or constant."""

    path: Path
    number: int
    """Of the node among those of the module that can be changed."""
    line: int
    what: str


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes inside functions that can be changed, each with what becomes of it."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in inside:
            if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
                yield node, f"{type(node.ops[0]).__name__} -> {SWAPS[type(node.ops[0])].__name__}"
            elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
                yield node, f"{type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}"
            elif isinstance(node, ast.Constant) and type(node.value) is bool:
                yield node, f"{node.value} -> {not node.value}"
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield node, f"{node.value} -> {node.value + 1}"
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield node, "not x -> x"


def change(node: ast.AST) -> None:
    """Change a node in place."""
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)


def mutated(root: Path, mutation: Mutation) -> str:
    """Return the source of a module with one mutation."""
    tree = ast.parse((root / mutation.path).read_text(encoding="utf-8"))
    node = [node for node, _ in places(tree)][mutation.number]
    change(node)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def draw(root: Path, count: int, seed: int, only: str) -> list[Mutation]:
    """Draw mutations, every place that can be changed with the same probability."""
    every = []
    for path in sorted([*root.glob("niels_gpt/**/*.py"), *root.glob("pipelines/**/*.py")]):
        relative = path.relative_to(root)
        if not relative.as_posix().startswith(only) or "sample" in relative.parts:
            continue
        found = places(ast.parse(path.read_text(encoding="utf-8")))
        every += [Mutation(relative, n, getattr(node, "lineno", 0), what) for n, (node, what) in enumerate(found)]
    return random.Random(seed).sample(every, min(count, len(every)))


def tests_of(root: Path, path: Path) -> list[str]:
    """Return the test files of a module's package, of damage and of units, those that name the module first."""
    parts = path.with_suffix("").parts
    package = parts[0] if parts[0] == "pipelines" else parts[1]
    folders = [root / "tests" / name for name in PLACES.get(package, (package,))]
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    if package == "cache":
        files += sorted((root / "tests").glob("test_*.py"))
    dotted = ".".join(parts)
    files = files or sorted((root / "tests").rglob("test_*.py"))
    files += [file for name in ("damage", "units") for file in sorted((root / "tests" / name).glob("test_*.py"))]
    return [str(file) for file in sorted(files, key=lambda file: dotted not in file.read_text(encoding="utf-8"))]


def run_tests(root: Path, mutation: Mutation, limit: float) -> str:
    """Return what the tests of a package make of a mutation: killed, survived, or timeout."""
    path = root / mutation.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(root, mutation), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not real_text and not browser and not faults", *tests_of(root, mutation.path)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=limit, check=False)
        return "killed" if done.returncode else "survived"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--only", default="", metavar="PATH", help="of modules whose path begins so")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for one run of tests")
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a job in the background ignores them, and tests of signals would fail
    mutations = draw(ROOT, arguments.count, arguments.seed, arguments.only)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "checkout"
        if not arguments.list:
            ignored = shutil.ignore_patterns(".git", ".venv", ".peers", "artifacts", "__pycache__", "*.egg-info")
            shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        for mutation in mutations:
            begin = time.monotonic()
            outcome = "" if arguments.list else run_tests(copy, mutation, arguments.limit)
            counts[outcome] = counts.get(outcome, 0) + 1
            seconds = time.monotonic() - begin
            print(f"{mutation.path}:{mutation.line}: {mutation.what}: {outcome} ({seconds:.0f} s)", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
