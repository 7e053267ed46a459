"""Count how much of the tests stands on public names, and list what does not.

    python tools/test_surface.py              functions, lines and files of each class
    python tools/test_surface.py --list C D   each function of these classes with the private names that it reaches
    python tools/test_surface.py --names      the private names by the number of functions that reach them

Each test function is followed through the helpers and fixtures of its file, of conftest.py and of tests/support.

A      reaches public names only
B      private names, but only through tests/support or a conftest.py
C      private names in its own file
D      patches a name of the code, or uses a name that begins with _
units  below tests/units/: pins insides on purpose

Public is what docs/api lists, what README, docs and examples import, every name of the modules of the specs, and the
entry points.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("niels_gpt", "pipelines")
SPEC_MODULES = frozenset(
    f"niels_gpt.{name}"
    for name in (
        "cache.build_cache",
        "cache.cli",
        "cache.meta",
        "cache.mmap",
        "cache.pretrain_dataset",
        "cache.sft_dataset",
        "chat_template",
        "data.dolly",
        "data.fineweb_edu",
        "data.gutenberg",
        "data.oasst1",
        "data.roam",
        "data.wikitext",
        "eagle3.cache",
        "eagle3.precompute",
        "eagle3.target",
        "paths",
        "prefix_tree.fold",
        "settings",
        "special_tokens",
        "tokenizer",
        "tokenizer_training",
        "train_tokenizer",
    )
)
"""Modules that the specs name."""
ENTRY_POINTS = frozenset({"niels_gpt.commands.start", "niels_gpt.commands.main.main", "pipelines.definitions.defs"})
CLASSES = ("A", "B", "C", "D", "units")


@dataclass
class Source:
    """One Python file of the tests: what its names stand for, and its functions and classes at the top level."""

    path: Path
    names: dict[str, str] = field(default_factory=dict)
    """Local name -> dotted name that was imported."""
    bodies: dict[str, list[ast.AST]] = field(default_factory=dict)
    """Name -> what defines it at the top level."""


@cache
def product(name: str) -> ast.Module | None:
    """Return the parsed module of the project, None if there is none of this name."""
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


@cache
def defined(name: str) -> str:
    """Return the dotted name under which something is defined, through the imports of the modules that pass it on."""
    module, _, last = name.rpartition(".")
    tree = product(module) if module and product(name) is None else None
    for node in ast.walk(tree) if tree else ():  # packages import for type checkers what they load at first use
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            for alias in node.names:
                if (alias.asname or alias.name) == last:
                    return defined(f"{node.module}.{alias.name}")
    return name


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield local name and dotted name of each import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name


def public_names() -> set[str]:
    """Return the public names, as they are defined."""
    names = set(ENTRY_POINTS)
    for page in (ROOT / "docs" / "api").glob("*.md"):
        names.update(re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("**/*.py")]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")):
        texts += re.findall(r"```(?:python|py)[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for text in texts:
        try:
            names.update(name for _, name in imported(ast.parse(text)) if name.startswith(PACKAGES))
        except SyntaxError:
            continue  # a block that shows a part of a program
    return {defined(name) for name in names}


class Bare(ast.NodeTransformer):
    """Takes annotations away: no test reaches a name by them."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def read(path: Path) -> Source:
    """Return a file of the tests."""
    tree = Bare().visit(ast.parse(path.read_text(encoding="utf-8")))
    source = Source(path, dict(imported(tree)))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            source.bodies.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        source.bodies.setdefault(part.id, []).append(node)
    return source


class Tests:
    """All files of the tests, and what a function of them reaches."""

    def __init__(self) -> None:
        self.public = public_names()
        self.sources = {path: read(path) for path in sorted(TESTS.rglob("*.py"))}
        by_name = {".".join(path.relative_to(TESTS).with_suffix("").parts): path for path in self.sources}
        by_name.update({path.stem: path for path in self.sources if path.parent.name in ("builders", "pipelines")})
        by_name.update({name.removesuffix(".__init__"): path for name, path in list(by_name.items())})
        self.by_name = by_name
        self.used: dict[int, set[str]] = {}

    def is_public(self, name: str) -> bool:
        """Return whether a dotted name, or what it is an attribute of, is public."""
        all_parts = [each.split(".") for each in (name, defined(name))]  # a public module passes on private ones' names
        plain = [".".join(parts[:end]) for parts in all_parts for end in range(2, len(parts) + 1)]
        heads = {*plain, *map(defined, plain)}
        return any(head in self.public or head in SPEC_MODULES for head in heads) and "._" not in name

    def functions(self) -> Iterator[tuple[Source, ast.FunctionDef]]:
        """Yield the test functions."""
        for path, source in self.sources.items():
            if path.name.startswith("test_"):
                for nodes in source.bodies.values():
                    for node in nodes:
                        members = node.body if isinstance(node, ast.ClassDef) else [node]
                        for member in members:
                            if isinstance(member, ast.FunctionDef) and member.name.startswith("test_"):
                                yield source, member

    def reached(self, source: Source, node: ast.AST) -> tuple[set[str], set[str], set[str]]:
        """Return the private names that a test reaches in its own file, those beyond it, and what it patches."""
        own: set[str] = set()
        beyond: set[str] = set()
        patched: set[str] = set()
        seen: set[tuple[Path, str]] = set()
        waiting: list[tuple[Source, ast.AST]] = [(source, node)]
        while waiting:
            place, part = waiting.pop()
            direct = place.path == source.path
            found = own if direct else beyond
            if id(part) not in self.used:
                self.used[id(part)] = set(used(place, part))
            for name in self.used[id(part)]:
                if name.startswith(PACKAGES):
                    if product(name) is None and not self.is_public(name):
                        found.add(defined(name))
                    continue
                for target, local in self._helpers(place, name):
                    if (target.path, local) not in seen:
                        seen.add((target.path, local))
                        waiting += [(target, body) for body in target.bodies[local]]
            if direct:
                patched |= set(self._patches(place, part))
        return own, beyond, patched

    def _helpers(self, place: Source, name: str) -> Iterator[tuple[Source, str]]:
        """Yield the helper or fixture that a name stands for: in the file, a file of the tests, or a conftest.py."""
        if name in place.bodies:
            yield place, name
            return
        module, _, last = name.rpartition(".")
        target = self.by_name.get(module)
        if target is not None and last in self.sources[target].bodies:
            yield self.sources[target], last
            return
        if "." not in name:
            for folder in place.path.parents:
                conftest = self.sources.get(folder / "conftest.py")
                if conftest is not None and name in conftest.bodies:
                    yield conftest, name
                    return

    def _patches(self, place: Source, part: ast.AST) -> Iterator[str]:
        """Yield what a part of a test patches or takes by a private name."""
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".setattr", ".delattr")) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    name = first.value
                else:
                    attribute = node.args[1] if len(node.args) > 1 else None
                    last = attribute.value if isinstance(attribute, ast.Constant) else "?"
                    name = f"{dotted(place, first)}.{last}"
                if name.startswith(PACKAGES):
                    yield f"patches {name}"
            elif isinstance(node, ast.Attribute | ast.Name):
                name = dotted(place, node)
                last = name.rpartition(".")[2]
                if name.startswith(PACKAGES) and last.startswith("_") and not last.startswith("__"):
                    yield name


def dotted(place: Source, node: ast.AST) -> str:
    """Return the dotted name that an expression stands for, empty if it is none."""
    if isinstance(node, ast.Name):
        return place.names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(place, node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def used(place: Source, part: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a part of a file uses, those of the product whole, and names of its arguments."""
    inner = {id(node.value) for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    here = dict(imported(part))
    values = {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    values |= {node.arg for node in ast.walk(part) if isinstance(node, ast.arg)}
    hidden = {name: name for name in values}  # a value that has the name of an import
    place = Source(place.path, {**place.names, **hidden, **here}, place.bodies)
    for node in ast.walk(part):
        if isinstance(node, ast.Name | ast.Attribute) and (name := dotted(place, node)):
            if id(node) not in inner or not name.startswith(PACKAGES):
                yield name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # usefixtures("name"), getfixturevalue("name")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", default=[], choices=CLASSES, metavar="CLASS")
    parser.add_argument("--names", action="store_true", help="private names by the number of functions")
    parser.add_argument("--under", default="", help="count the files below this path of tests/ alone")
    arguments = parser.parse_args()
    tests = Tests()
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    reaching: Counter[str] = Counter()
    for source, node in tests.functions():
        where = source.path.relative_to(TESTS).as_posix()
        if not where.startswith(arguments.under):
            continue
        own, beyond, patched = tests.reached(source, node)
        kind = "units" if where.startswith("units/") else "D" if patched else "C" if own else "B" if beyond else "A"
        counted[kind].update(functions=1, lines=(node.end_lineno or 0) - node.lineno + 1)
        if kind in ("C", "D"):
            reaching.update(own | patched)
        if kind in arguments.list:
            print(f"{kind} {where}:{node.lineno} {node.name}: {', '.join(sorted(patched or own or beyond))}")
    if arguments.names:
        print("\n".join(f"{count:5} {name}" for name, count in reaching.most_common()))
    total = sum(figures["functions"] for figures in counted.values())
    for kind in CLASSES:
        figures = counted[kind]
        share = figures["functions"] / max(total, 1)
        print(f"{kind:6} {figures['functions']:6,} functions {share:6.1%} {figures['lines']:7,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
