"""Write the table of kinds and operations into docs/kinds.md, from niels_gpt.kinds.

python tools/kinds_page.py [--check]

With --check nothing is written; exit status 1 where the page differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from niels_gpt.kinds.kind import OURS, Kind, kind_named

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kinds.md"
BEGIN, END = "<!-- operations: python tools/kinds_page.py -->\n", "<!-- end of operations -->\n"
OF_ALL = ("list", "gc", "verify", "card", "push", "pull", "stage", "published")
"""Operations that no kind leaves out."""
BY_METHOD = {"stats": "stats", "stats --plot": "plot", "show": "show", "locate": "locate", "export": "formats"}
"""Operations that a kind may leave out, and the method or attribute of Kind that makes each."""


def cell(kind: Kind, operation: str) -> str:
    """Return what a kind has of an operation: yes, what it is by, or no."""
    if operation == "diff":
        return f"settings, {kind.unit}s" if kind.has("digests") else "settings"
    if operation in OF_ALL:
        return "yes"
    if not kind.has(BY_METHOD[operation]):
        return "no"
    if operation == "show":
        return f"by {kind.unit or 'id'}" if kind.unit != "document" else "by token"
    return ", ".join(sorted(kind.formats)) if operation == "export" else "yes"


def table() -> str:
    """Return the table, and the reasons for its holes."""
    kinds = [kind for name in OURS if (kind := kind_named(name)) is not None]
    rows = [["", *(f"`{kind.name}`" for kind in kinds)], ["---"] * (1 + len(kinds))]
    for operation in (*OF_ALL, *BY_METHOD, "diff"):
        rows.append([f"`{operation}`", *(cell(kind, operation) for kind in kinds)])
    operations = {method: name for name, method in BY_METHOD.items()}
    reasons = [
        f"- `{operations[method]}` of `{kind.name}`: {why}."
        for kind in kinds
        for method, why in kind.why_not.items()
        if method in operations
    ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", "Why not:", "", *reasons, ""])


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    made = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
