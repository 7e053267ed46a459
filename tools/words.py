"""Count what makes docstrings hard to read: python tools/words.py [--list] [FOLDER...]

    relative   "that of", "those of", "of which", "what is" in docstrings, for each 1,000 words
    by name    errors that are given as another function's ("Raises: as `open`")
    silent     public functions and classes without a docstring
    comments   lines that are a comment, for each 100 lines

`make check` prints the figures; they forbid nothing. --list prints each sentence found, with its file and line.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RELATIVE = re.compile(r"\b(?:that of|those of|of which|what is)\b", re.IGNORECASE)
BY_NAME = re.compile(r"\b(?:Raises|raises|errors?)\b[^.`]{0,30}\b(?:as|those of|what)\b[^.`]{0,12}`")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Words:
    """The counts of one folder or module."""

    lines: int = 0
    words: int = 0  # of docstrings
    comments: int = 0
    found: dict[str, list[str]] = field(default_factory=lambda: {"relative": [], "by name": [], "silent": []})

    def add(self, path: Path) -> None:
        """Count one module."""
        text = path.read_text()
        self.lines += text.count("\n")
        self.comments += sum(line.lstrip().startswith("#") for line in text.splitlines())
        for node, public in _documented(ast.parse(text), public=True):
            docstring = ast.get_docstring(node)
            line = getattr(node, "lineno", 1)
            if docstring is None:
                if public and not isinstance(node, ast.Module):
                    self.found["silent"].append(f"{path}:{line}: {getattr(node, 'name', '')}")
                continue
            self.words += len(docstring.split())
            for name, pattern in (("relative", RELATIVE), ("by name", BY_NAME)):
                for match in pattern.finditer(docstring):
                    near = docstring[max(0, match.start() - 40) : match.end() + 40]
                    self.found[name].append(f"{path}:{line}: ... {' '.join(near.split())} ...")

    def row(self) -> str:
        """Return the figures as a row of the table."""
        rate = 1000 * len(self.found["relative"]) / max(1, self.words)
        counts = [len(self.found[name]) for name in ("by name", "silent")]
        return f"{self.words:7} {rate:9.2f} {counts[0]:8} {counts[1]:7} {100 * self.comments / max(1, self.lines):9.1f}"


def _documented(node: ast.AST, public: bool) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef, bool]]:
    """Yield a module, its classes and functions, and whether each is public; an override and a property too."""
    if isinstance(node, DOCUMENTED):
        public = public and not getattr(node, "name", "").startswith("_")
        yield node, public  # type: ignore[misc]
    for child in ast.iter_child_nodes(node):
        # A function inside a function belongs to it.
        inner = public and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _documented(child, inner)


def main() -> None:
    """Print the table, and with --list what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["niels_gpt", "pipelines"])
    parser.add_argument("--list", action="store_true", help="print each sentence that was found")
    arguments = parser.parse_args()
    groups: dict[str, Words] = {}
    for folder in arguments.folders:
        for path in sorted(Path(folder).rglob("*.py")) if Path(folder).is_dir() else [Path(folder)]:
            for name in ("/".join(path.parts[:2]), "all"):
                groups.setdefault(name, Words()).add(path)
    print(f"{'':34}{'words':>7} {'relative':>9} {'by name':>8} {'silent':>7} {'comments':>9}")
    for name in sorted(groups, key=lambda name: (name == "all", name)):
        print(f"{name:34}{groups[name].row()}")
    if arguments.list and groups:
        for name, found in groups["all"].found.items():
            print(f"\n{name}:", *found, sep="\n")


if __name__ == "__main__":
    main()
