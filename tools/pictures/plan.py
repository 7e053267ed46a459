"""plan.svg: the packages of niels_gpt by level, and every import between them, as tools/structure.py reads it."""

from collections import Counter
from pathlib import Path

from tools import structure
from tools.pictures.svg import BLUE, GREEN, LINE, MUTED, ORANGE, PALE, VIOLET, Picture

ROOT = Path(__file__).resolve().parents[2]
TEXT = "tokenizer"
TOGETHER = {
    **dict.fromkeys(
        ("encoding", "tokenizer", "tokenizer_training", "tokenizers", "chat_template", "special_tokens"), TEXT
    ),
    **dict.fromkeys(("documents", "signals"), "data"),
    "train_tokenizer": "commands",
}
"""Modules beside the packages that are drawn as one box."""
OTHERS = {0: "work, paths", 2: "engine", 3: "kinds", 5: "commands"}
"""The box of every other module beside the packages, by its level."""
LEVELS = (
    ("commands, Dagster, trainers", ("commands", "pipelines", "trainers"), VIOLET),
    ("source + tokenizer + builder", ("recipes",), ORANGE),
    ("finished caches", ("kinds", "exchange", "sampling", "eagle3", "prefix_tree"), GREEN),
    ("build and read", ("engine", "cache"), BLUE),
    ("text, chats, models, buckets", ("data", "hub", "chat", TEXT, "display", "buckets"), MUTED),
    ("files, settings", ("storage", "settings", "work, paths"), MUTED),
)


def package_of(module: structure.Module) -> str:
    """Return the box of a module; empty for niels_gpt itself."""
    if module.name.startswith("pipelines"):
        return "pipelines"
    if module.name in structure.ENTRY_POINTS:
        return "commands"
    if module.is_kind:  # in the package of its readers, at the level of kinds
        return "kinds"
    package = TOGETHER.get(module.package, module.package)
    drawn = {name for _, packages, _ in LEVELS for name in packages}
    return package if package in drawn or not package else OTHERS[module.level]


def draw(target: Path) -> None:
    """Write plan.svg."""
    modules = structure.read_modules(ROOT)
    sizes = Counter(package_of(module) for module in modules.values())
    imports = {
        (package_of(module), package_of(modules[name]))
        for module in modules.values()
        for name in structure.own_imports(module, modules)
    }
    picture = Picture(800, 564, "The packages in six levels; every import goes down or stays in its level.")
    places: dict[str, tuple[float, float, float]] = {}
    for level, (_, packages, _) in enumerate(LEVELS):
        width = min(150.0, 560 / len(packages) - 12)
        total = len(packages) * (width + 12) - 12
        for number, package in enumerate(packages):
            places[package] = (480 - total / 2 + number * (width + 12), 24 + level * 88, width)
    for importer, imported in sorted(imports):
        if importer and imported and importer != imported:
            connect(picture, places[importer], places[imported])
    for level, (name, packages, colour) in enumerate(LEVELS):
        y = 24 + level * 88
        picture.text(24, y + 22, str(len(LEVELS) - 1 - level), size=15, bold=True, fill=colour)
        picture.text(42, y + 22, name, size=12, fill=MUTED)
        for package in packages:
            left, top, width = places[package]
            picture.box(left, top, width, 44, fill=PALE[colour], stroke=colour)
            picture.text(left + width / 2, top + 19, package, size=12.5, anchor="middle", bold=True)
            words = f"{sizes[package]} module" + "s" * (sizes[package] != 1)
            picture.text(left + width / 2, top + 35, words, size=10.5, anchor="middle", fill=MUTED)
    circles, back = structure.circles(modules), structure.back_arrows(modules)
    picture.path("M24 530H776", stroke=LINE)
    facts = f"{len(modules)} modules. A line is an import. To a higher level: {len(back)}. In a circle: {len(circles)}."
    picture.text(400, 551, facts, size=12, anchor="middle", fill=MUTED)
    picture.write(target / "plan.svg")


def connect(picture: Picture, upper: tuple[float, float, float], lower: tuple[float, float, float]) -> None:
    """Draw an import as a thin curve from the lower edge of one box to the upper edge of another."""
    x, y = upper[0] + upper[2] / 2, upper[1] + 44
    to_x, to_y = lower[0] + lower[2] / 2, lower[1]
    if upper[1] == lower[1]:  # beside each other
        picture.path(f"M{x:g} {y:g}C{x:g} {y + 22:g} {to_x:g} {y + 22:g} {to_x:g} {y:g}", weight=1, opacity=0.55)
    else:
        bend = (to_y - y) / 2
        picture.path(
            f"M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}", weight=1, opacity=0.35
        )
