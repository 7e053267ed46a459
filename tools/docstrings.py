"""An extension of griffe for the API pages: docstrings in the form of this project as Markdown.

name: what it is          a list item, for parameters, Raises, Returns and the entries below "Args:"
name: Type  # comment     the comment is the description of a field of a dataclass
_setting(1, "help")       the default and the help text of a field of Settings
indented after a blank    stays a code block, as Markdown has it; elsewhere *, <, and _ are plain characters
"""

import ast
import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function, Object

ENTRY = re.compile(r"(?P<indent> *)(?P<names>\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*): (?P<text>.+)")
SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes):$")
KNOWN = {"Raises", "Returns", "Yields"}


def plain(text: str) -> str:
    """Escape what Markdown would take for emphasis or HTML, outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_|])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )


def markdown(docstring: str, names: set[str]) -> str:
    """Return a docstring as Markdown. names: what a line `name: text` may begin with to be an item of a list."""
    lines: list[str] = []
    in_section, in_item, in_code = False, False, False
    for raw in docstring.splitlines():
        text = raw.strip()
        if SECTION.match(raw):  # its entries follow, indented
            in_section, in_item = True, False
            if not text.startswith("Args"):
                lines += ["", f"**{text[:-1]}**"]
            continue
        if raw and not raw.startswith(" "):
            in_section = False
        entry = ENTRY.fullmatch(raw)
        found = set(entry["names"].replace("*", "").split(", ")) if entry else set()
        if entry and ((found <= names | KNOWN and not entry["indent"]) or (in_section and len(entry["indent"]) == 4)):
            if not in_item:
                lines.append("")
            label = f"**{entry['names']}**" if found <= KNOWN else f"`{entry['names']}`"
            lines.append(f"- {label}: {plain(entry['text'])}")
            in_item, in_code = True, False
        elif not text:
            lines.append("")
            in_item = in_item and in_section
            in_code = False
        elif raw.startswith("    ") and in_item:
            lines.append("    " + plain(text))
        elif raw.startswith("    ") and (in_code or not lines or not lines[-1]):
            in_code = True
            lines.append(raw)
        else:
            lines += ["", plain(text)] if in_item else [plain(text)]
            in_item = False
    return "\n".join(lines)


class PlainDocstrings(Extension):
    """Rewrites the docstring of every object once griffe has the whole package."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Give a field the comment of its line, and every docstring its form."""
        if isinstance(obj, Attribute) and isinstance(obj.parent, Class):
            described(obj)
        init = obj.members.get("__init__") if isinstance(obj, Class) else None
        for parameter in init.parameters if isinstance(init, Function) else ():
            parameter.default = default_of(str(parameter.default)) if parameter.default else None
        if obj.docstring is None:
            return
        names: set[str] = set()
        if isinstance(obj, Function):
            names = {parameter.name for parameter in obj.parameters}
        elif isinstance(obj, Class):
            names = {name for name, member in obj.members.items() if isinstance(member, Attribute)}
            names |= {parameter.name for parameter in init.parameters} if isinstance(init, Function) else set()
        obj.docstring.value = markdown(obj.docstring.value, names)


def default_of(value: str) -> str:
    """Return the default of `_setting(default, text)`; another value is itself."""
    return ast.unparse(ast.parse(value, mode="eval").body.args[0]) if value.startswith("_setting(") else value


def described(field: Attribute) -> None:
    """Give a field of a dataclass without a docstring the comment behind it, or the help text of its setting."""
    value = str(field.value or "")
    if value.startswith("_setting("):
        field.value = default_of(value)
        field.docstring = Docstring(ast.literal_eval(ast.parse(value, mode="eval").body.args[1]), parent=field)
    elif field.docstring is None and field.lineno and field.lines:
        comment = re.search(r"  # (.+)$", field.lines[-1])
        if comment:
            field.docstring = Docstring(comment[1], parent=field)
