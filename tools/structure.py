"""Check levels, circles, functions, maps and switches of niels_gpt and pipelines: python tools/structure.py [ROOT]

Prints lines, modules, imports of a higher level and circles, and what breaks a rule; exit status 1 where something
does. `make check` runs it. The rules are docs/decisions/0011-one-plan.md's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"", "storage", "settings", "paths", "work"}),
    frozenset(
        {
            "data",
            "hub",
            "chat",
            "display",
            "encoding",
            "tokenizer",
            "tokenizer_training",
            "tokenizers",
            "documents",
            "chat_template",
            "special_tokens",
            "signals",
            "buckets",
        }
    ),
    frozenset({"cache", "builders", "engine"}),
    frozenset({"kinds", "sampling", "eagle3", "prefix_tree", "exchange"}),
    frozenset({"recipes"}),
    frozenset({"commands", "train_tokenizer", "inspection", "interop", "trainers"}),
)
"""Packages and modules of niels_gpt by level, lowest first. A module imports its own level and lower ones."""
ENTRY_POINTS = frozenset(
    {
        "niels_gpt.cache.cli",
        "niels_gpt.eagle3.__main__",
        "niels_gpt.eagle3.precompute",
        "niels_gpt.eagle3.respond",
        "niels_gpt.prefix_tree.__main__",
    }
)
"""Modules of the highest level in packages of a lower one: what `python -m` runs."""
NEIGHBOURS = {
    "engine": {"cache.formats"},
    "cache": {"engine"},
    "kinds": {"engine", "cache"},
    "exchange": {"engine", "cache", "kinds"},
    "sampling": {"engine", "cache"},
    "eagle3": {
        *("cache.checksums", "cache.meta", "cache.reader", "engine.units", "kinds.kind"),
        *("sampling.epochs", "sampling.stream", "sampling.stretches"),
    },
    "prefix_tree": {"engine", "cache", "sampling"},
}
"""Which packages of levels 2 and 3 a package of these levels may import, beside itself; or which module of one."""
NO_SOURCES = {"data", "hub"}
"""What levels 2 and 3 may not import: they take iterables and models. eagle3.models may import hub."""
KINDS = frozenset({"pretrain", "sft", "rollouts", "eagle3", "draft_vocab", "tokenizer"})
"""Names of the kinds of caches: the table of niels_gpt/kinds/kind.py."""
WITHOUT_SWITCHES = frozenset({"commands", "exchange", "kinds", "pipelines"})
"""Packages that ask a kind, and never which one it is."""
OF_HOMES = (
    *("niels_gpt.eagle3", "niels_gpt.recipes.eagle3", "niels_gpt.commands.eagle3", "pipelines.eagle3"),
    "niels_gpt.trainers.speculators",
    *("niels_gpt.prefix_tree", "niels_gpt.recipes.rollouts", "niels_gpt.commands.prefix_tree"),
    *("niels_gpt.exchange", "niels_gpt.recipes.exchange"),
    *("niels_gpt.commands.exchange", "pipelines.exchange"),
)
"""The homes of niels_gpt/kinds/homes.py, which may be deleted, with their recipes, commands, assets and trainers."""
SHARED_OF_HOMES = frozenset({"niels_gpt.recipes.eagle3.request", "niels_gpt.recipes.eagle3.options"})
"""Modules of homes that others may import: what settings and keys say, without the home itself."""
MOST_FUNCTION_LINES = 60  # 40 is what a new one aims at


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    path: Path
    source: str
    tree: ast.Module
    is_package: bool

    @property
    def package(self) -> str:
        """The package or module right below niels_gpt; empty for niels_gpt itself and for pipelines."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "niels_gpt" and len(parts) > 1 else ""

    @property
    def level(self) -> int:
        if self.name.startswith("pipelines") or self.name in ENTRY_POINTS:
            return len(LEVELS) - 1
        package = "kinds" if self.is_kind else self.package
        return next(number for number, packages in enumerate(LEVELS) if package in packages)

    @property
    def is_kind(self) -> bool:
        """Whether it is the kind of its package's caches, which imports niels_gpt.kinds: `kind`, `draft_kind`."""
        return any(part == "kind" or part.endswith("_kind") for part in self.name.split(".")[2:])


def read_modules(root: Path) -> dict[str, Module]:
    """Return the modules of niels_gpt and pipelines below `root` by their dotted names."""
    modules: dict[str, Module] = {}
    for path in sorted([*root.glob("niels_gpt/**/*.py"), *root.glob("pipelines/**/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, source, ast.parse(source), parts[-1] == "__init__")
    return modules


def all_imports(module: Module) -> set[str]:
    """Return the dotted names that a module imports, inside functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def own_imports(module: Module, modules: dict[str, Module]) -> set[str]:
    """Return the modules of this project that a module imports."""
    names = (name if name in modules else name.rpartition(".")[0] for name in all_imports(module))
    return {name for name in names if name in modules and name != module.name}


def back_arrows(modules: dict[str, Module]) -> list[tuple[str, str]]:
    """Return the imports of a module of a higher level, or of a neighbour that a package may not import."""
    arrows = []
    for module in modules.values():
        for name in sorted(own_imports(module, modules)):
            target = modules[name]
            package, other = module.package, target.package
            beside = NEIGHBOURS.get(package, set()) | ({"kinds"} if module.is_kind else set())
            sideways = (
                package in NEIGHBOURS
                and module.level < len(LEVELS) - 1
                and package != other
                and (
                    (other in NEIGHBOURS and not {other, name.removeprefix("niels_gpt.")} & beside)
                    or (other in NO_SOURCES and not (other == "hub" and ".eagle3.models." in f"{module.name}."))
                )
            )
            if target.level > module.level or sideways:
                arrows.append((module.name, name))
    return arrows


def circles(modules: dict[str, Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    graph = {name: own_imports(module, modules) for name, module in modules.items()}
    reached = {name: _reachable(name, graph) for name in modules}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in modules}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reachable(name: str, graph: dict[str, set[str]]) -> set[str]:
    found, waiting = {name}, [name]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def long_functions(modules: dict[str, Module]) -> Iterator[str]:
    """Yield the functions that are too long."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    yield f"{module.path}: {node.name} has {length} lines, at most {MOST_FUNCTION_LINES}"


def missing_in_maps(modules: dict[str, Module]) -> Iterator[str]:
    """Yield the modules that the docstring of their package does not name with a purpose, and names of none."""
    for package in (module for module in modules.values() if module.is_package):
        named = {
            word.rstrip("/").removesuffix(".py")
            for line in (ast.get_docstring(package.tree) or "").splitlines()
            if len(words := line.split()) > 1 and (word := words[0]).endswith((".py", "/")) and "/" not in word[:-1]
        }
        inside = {
            name.rpartition(".")[2]
            for name, module in modules.items()
            if name.rpartition(".")[0] == package.name and not _is_empty(module)
        }
        if inside != named:
            absent, unknown = sorted(inside - named), sorted(named - inside)
            yield f"{package.path}: its docstring lacks {absent}" if absent else f"{package.path}: no module {unknown}"


def _is_empty(module: Module) -> bool:
    return module.is_package and len(module.tree.body) <= 1 and module.name.endswith(".sample")


def names_of_homes(modules: dict[str, Module]) -> Iterator[str]:
    """Yield imports of what belongs to a home, by a module that does not: such code is found by the table of homes."""
    for module in modules.values():
        if _home_of(module.name):
            continue
        for name in sorted(own_imports(module, modules)):
            if _home_of(name) and name not in SHARED_OF_HOMES:
                yield f"{module.path}: imports {name}, of a package that may be deleted"


def _home_of(name: str) -> str:
    """Return the home that a module belongs to; "" for none."""
    return next((home for home in OF_HOMES if f"{name}.".startswith(f"{home}.")), "")


def switches(module: Module, subclasses: frozenset[str] = frozenset()) -> list[int]:
    """Return the lines of a module that ask which kind a cache is of, in place of asking the kind.

    subclasses: names of subclasses of Kind.
    """
    tables = [node.value for node in module.tree.body if isinstance(node, ast.Assign) and _is_table(node, module)]
    return [
        node.lineno
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.MatchValue) and _names_kind(node.value))
        or (isinstance(node, ast.expr) and node not in tables and _is_switch(node, subclasses))
    ]


def _is_table(node: ast.Assign, module: Module) -> bool:
    """Whether an assignment is the table of kinds."""
    return module.name == "niels_gpt.kinds.kind" and [ast.unparse(target) for target in node.targets] == ["OURS"]


def _is_switch(node: ast.expr, subclasses: frozenset[str]) -> bool:
    match node:
        case ast.Compare():
            return any(map(_names_kind, [node.left, *node.comparators]))
        case ast.Dict():
            return sum(key is not None and _names_kind(key) for key in node.keys) > 1
        case ast.Subscript():
            return _has_key_kind(node.slice)
        case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]):
            return _has_key_kind(key)
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, types]):
            return bool(subclasses & {each.id for each in ast.walk(types) if isinstance(each, ast.Name)})
    return False


def _names_kind(node: ast.expr) -> bool:
    """Whether an expression is the name of a kind, or a display with one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_names_kind, node.elts))
    return isinstance(node, ast.Constant) and node.value in KINDS


def _has_key_kind(node: ast.expr) -> bool:
    """Whether a key is made of meta["kind"] or meta.get("kind")."""
    return any(_is_meta_kind(each) for each in ast.walk(node))


def _is_meta_kind(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id="meta"), slice=ast.Constant(value="kind")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value="kind")):
            return True
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value="kind"), *_]):
            return "meta" in (getattr(owner, "id", ""), getattr(owner, "attr", ""))
    return False


def switches_by_package(modules: dict[str, Module]) -> dict[str, list[tuple[str, int]]]:
    """Return the switches on the kind of each package that has some: their modules and lines."""
    subclasses = frozenset(
        node.name
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Kind") and node.bases
    )
    found: dict[str, list[tuple[str, int]]] = {}
    for module in modules.values():
        package = module.package or module.name.partition(".")[0]
        for line in switches(module, subclasses):
            found.setdefault(package, []).append((module.name, line))
    return found


def forbidden_switches(modules: dict[str, Module]) -> Iterator[str]:
    """Yield the switches on the kind in packages that may have none."""
    for package, places in switches_by_package(modules).items():
        if package in WITHOUT_SWITCHES:
            yield from (f"{modules[name].path}:{line}: asks which kind a cache is of" for name, line in places)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    modules = read_modules(root)
    arrows, rounds = back_arrows(modules), circles(modules)
    for what, figure in {
        "lines": f"{sum(module.source.count(chr(10)) for module in modules.values()):,}",
        "modules": len(modules),
        "back arrows": len(arrows),
        "circles": len(rounds),
        **{f"switches {package}": len(places) for package, places in switches_by_package(modules).items()},
    }.items():
        print(f"{what:20} {figure}")
    broken = [
        *(f"{name} imports {other}, of a higher level or beside it" for name, other in arrows),
        *(f"import each other: {', '.join(group)}" for group in rounds),
        *long_functions(modules),
        *missing_in_maps(modules),
        *forbidden_switches(modules),
        *names_of_homes(modules),
    ]
    print("\n".join(broken), end="\n" * bool(broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
