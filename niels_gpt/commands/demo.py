"""niels-gpt demo: builds every cache of the bundled sample, and suggests commands to try."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from niels_gpt.commands.console import (
    ExitCode,
    Result,
    argument,
    command,
    escaped,
    is_color_wanted,
    print_failures,
    say,
    tell,
)
from niels_gpt.display.tables import hints
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.recipes.records import Outcome

_SHOWN = "sft/oasst1"
_TOKENS = 120  # of the example


@command(
    "demo",
    "Build every cache from the bundled sample, and suggest commands to try.\n\n"
    "Writes FOLDER/sample/pretrain/..., FOLDER/sample/sft/... and so on. Without FOLDER it makes a new temporary "
    "folder, which stays. eagle3/targets needs the extra eagle3.",
    kept=". Finished caches are kept; the same command resumes",
    level=logging.ERROR,  # the sample has odd rows on purpose
    examples="niels-gpt demo          in a new temporary folder\nniels-gpt demo cache    in cache/sample",
)
@argument(
    "folder",
    type=click.Path(path_type=Path),
    required=False,
    help="folder for the caches; default: a new temporary folder",
)
def demo(folder: Path | None) -> Result:
    """Build the sample."""
    from niels_gpt.commands.build import bar_of, build_each, built_rows, chosen_keys
    from niels_gpt.commands.report import outcomes_table
    from niels_gpt.kinds.look import show, tokenizer_of
    from niels_gpt.recipes.records import cache_root

    start = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="niels-gpt-demo-")) if folder is None else folder
    settings = Settings(source_root="sample", cache_dir=str(place))
    root, outcomes, failures = cache_root(settings), list["Outcome"](), dict[str, Exception]()
    tell(f"Building the caches of the bundled sample in {escaped(root)} ...")
    build_each(settings, chosen_keys(settings, None), outcomes, failures, refresh=False, of_all=True, bar=bar_of)
    say(outcomes_table(outcomes, failures))
    say(f"{len(outcomes)} caches in {root}, in {time.monotonic() - start:.0f} s")
    code = print_failures(failures)
    if code is ExitCode.GOOD:
        tokenizer = tokenizer_of(root / _SHOWN, None)
        piece: dict[str, Any] = {"split": "train", "position": 0, "num_tokens": _TOKENS, "color": is_color_wanted()}
        text = show(root / _SHOWN, tokenizer, **piece)
        say(f"\nA chat of {_SHOWN}, and which of its tokens carry loss:\n")
        say(text, is_safe=True)
        say(f"\n{_next(root, outcomes)}")
    return Result(lambda: {"folder": str(root), "caches": built_rows(settings, outcomes, failures)}, code)


def _next(root: Path, outcomes: list[Outcome]) -> str:
    """Return commands to try; each works as it is printed."""
    tries = [
        (["show", f"{root}/{_SHOWN}", "--split", "val"], "another chat, with its loss mask"),
        (["stats", f"{root}/pretrain/wikitext"], "lengths, drops, source and licence"),
        (["show", f"{root}/trees/oasst1", "--at", "3"], "threads of a tree, folded into one row"),
        (["locate", f"{root}/pretrain/wikitext", "train", "1_000"], "the document at a token"),
        (["verify", f"{root}", "--deep"], "every byte against its checksum"),
    ]
    if outcomes[-1].key.startswith("eagle3"):
        tries.append((["eagle3", "stats", f"{root}/eagle3/targets"], "what a draft is trained on"))
    lines = [(shlex.join(["niels-gpt", *words]), why) for words, why in tries]
    lines.append(("niels-gpt build --help", "caches of the hub, or of your own text"))
    return f"Try next:\n{hints(lines)}"
