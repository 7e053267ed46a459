"""Write docs/errors.md, the page of errors and warnings, from codes.txt: python tools/errors_page.py

A test compares the page with the table.
"""

from pathlib import Path

from niels_gpt.storage.codes import Code, codes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
HEAD = """# Errors by code

Every error and warning has a code. A command prints it on stderr:

```text
error[E105]: cache/none: no such folder. Name a cache, or the folder that holds pretrain/ and sft/
```

The number says what it is about, and `niels-gpt explain E105` prints the same text as this page. In Python the code is
the attribute `code` of our errors (`niels_gpt.storage.errors`), and a warning of Python ends in it: `... are left out
[W202]`. Errors of Python and of libraries may have none: `niels_gpt.storage.codes.code_of(error)` returns the code of
any error.

The texts are in `niels_gpt/storage/codes.txt`; `tools/errors_page.py` writes this page from them.
"""
SUBJECTS = {
    "E1": "Errors of usage and arguments",
    "E2": "Errors of damaged and foreign caches",
    "E3": "Errors of sources and their files",
    "E4": "Errors of tokenizers",
    "E5": "Errors of the disk, locks and builds",
    "E6": "Errors of the hub and the network",
    "E7": "Errors of EAGLE-3 caches",
    "E8": "Errors of prefix trees",
    "E9": "Errors of the installation, and unexpected ones",
    "W1": "Warnings of streams of batches",
    "W2": "Warnings of caches",
    "W3": "Warnings of sources and their files",
    "W4": "Warnings of tokenizers",
    "W5": "Warnings of the disk and builds",
    "W6": "Warnings of the hub",
    "W7": "Warnings of EAGLE-3 caches",
    "W8": "Warnings of prefix trees",
}
"""Headings by the first two characters of a code."""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for start, subject in SUBJECTS.items():
        parts += [f"## {subject}\n", *(_section(row) for code, row in codes().items() if code.startswith(start))]
    return "\n".join(parts)


def _section(row: Code) -> str:
    kind = "error" if row.code.startswith("E") else "warning"
    lines = [f"### {row.code} {row.name} {{#{row.code.lower()}}}", row.meaning, f"**What to do:** {row.remedy}"]
    if row.example:
        lines.append(f"```text\n{kind}[{row.code}]: {row.example}\n```")
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
