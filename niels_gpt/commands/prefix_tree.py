"""What folding would save on recorded rollouts: the commands of python -m niels_gpt.prefix_tree, and its demo.

A line is one group, {"prompt_ids": [...], "completions": [[...], ...]}, or one whole sequence, {"ids": [...]}; other
keys are ignored. A group is folded by itself. Whole sequences are folded in runs of consecutive lines, since rollouts
of one prompt are usually adjacent. Files may end in .gz; - is the standard input. The first bad line is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich_click import argument, option

from niels_gpt.commands.console import Command, ExitCode, Group, Result, command, parsed, progress_bar, run, say
from niels_gpt.display.numbers import many
from niels_gpt.display.tables import folded, table
from niels_gpt.prefix_tree.savings import ATTENTIONS, MODEL_7B, ROWS
from niels_gpt.storage.errors import TreeError

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.forest import ModelShape
    from niels_gpt.prefix_tree.savings.count import Folded

_INDENTED = 24  # levels; deeper nodes are not indented further
_FIRST_IDS, _LAST_IDS = 8, 4
_CHARACTERS = 60
_MOST = 10**15  # the largest number on the command line: FLOPs still fit into a float
_PATH = click.Path(path_type=Path)
_LINES = """A line is one group, {"prompt_ids": [...], "completions": [[...], ...]}, or one whole sequence,
{"ids": [...]}; other keys are ignored. A group is folded by itself; whole sequences are folded in runs of consecutive
lines. The first bad line is an error; no line is skipped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.prefix_tree with arguments, default those of the process; returns the exit status."""
    return run(FACE, argv, "python -m niels_gpt.prefix_tree")


def _number(least: int) -> Callable[[str | int], int]:
    def number(text: str) -> int:
        value = float(text)  # accepts 7e9
        if not value.is_integer() or not least <= value <= _MOST:
            raise ValueError(f"{text}: expected a whole number from {least} to {_MOST:g}")
        return int(value)

    return parsed(number)


def _folding(function: Callable[..., Result]) -> Callable[..., Result]:
    rows = "`ids` lines that are folded together; 0: all of the file"
    function = option("--rows", type=_number(0), metavar="N", default=ROWS, help=rows)(function)
    key = "fold consecutive lines with the same value of this key together"
    return option("--group-key", metavar="KEY", help=key)(function)


# --- stats ------------------------------------------------------------------------------------------------------------


@command(
    "stats",
    f"Print what folding would save: tokens, attention pairs, FLOPs.\n\n{_LINES}",
    examples="niels-gpt tree stats ROLLOUTS.jsonl --plot stats.png",
)
@argument("rollouts", nargs=-1, required=True, help=".jsonl or .jsonl.gz, or - for stdin")
@_folding
@option("--attention", type=click.Choice(ATTENTIONS), default=ATTENTIONS[0], help="how a folded row is run")
@option("--model", metavar="MODEL", help="folder or hub id: FLOPs are of the shape in its config.json")
@option("--parameters", type=_number(1), metavar="N", help="of the model (7B)")
@option("--layers", type=_number(1), metavar="N", help="of the model (32)")
@option("--d-model", type=_number(1), metavar="N", help="of the model: the width of its attention (4096)")
@option("--plot", type=_PATH, metavar="PNG", help="write a picture of the savings per forest and in total")
def stats(
    rollouts: tuple[str, ...],
    group_key: str | None,
    rows: int,
    plot: Path | None,
    attention: str,
    model: str | None,
    **sizes: int | None,
) -> Result:
    """Print savings."""
    from niels_gpt.prefix_tree.savings.count import count_savings, forests
    from niels_gpt.prefix_tree.savings.rollouts import read_rollouts

    if plot is not None:
        from niels_gpt.prefix_tree.savings.plot import check_picture

        check_picture(plot)
    shape = _shape(model, sizes)
    with progress_bar("stats", "B") as progress:
        lines = read_rollouts(rollouts, group_key=group_key, progress=progress)
        savings = count_savings(forests(lines, rows=rows), shape, attention)
    if plot is not None:
        from niels_gpt.prefix_tree.savings.plot import plot as draw
        from niels_gpt.storage.fileio import write_bytes

        names = [Path(path).name for path in rollouts]
        write_bytes(plot, draw(savings, names[0] if len(names) == 1 else f"{len(names)} files"))
    say(f"{table(savings.rows())}\n\n{chr(10).join(folded(savings.interpretation()))}")
    return Result(savings.as_json())


def _shape(model: str | None, sizes: Mapping[str, int | None]) -> ModelShape:
    """Return the shape of a model; where it is not named, of the given sizes."""
    from niels_gpt.prefix_tree.forest import ModelShape

    given = {name: value for name, value in sizes.items() if value is not None}
    if model is None:
        return ModelShape(**{**MODEL_7B, **given})
    from niels_gpt.hub.models import CONFIG, hub_file, is_local, refuse_large
    from niels_gpt.prefix_tree.savings.models import shape_of

    path = Path(model).expanduser() / CONFIG if is_local(model) else hub_file(model, CONFIG, None)
    if path is None:
        raise ValueError(f"{model}: has no {CONFIG} on the hub, expected a transformers model")
    refuse_large(path.parent)
    return replace(shape_of(path.parent), **given)


# --- show -------------------------------------------------------------------------------------------------------------


@command(
    "show",
    "Print the tree of a group, or of the run of rows that begins at a line.",
    examples="niels-gpt tree show ROLLOUTS.jsonl --line 3",
)
@argument("rollouts", help=".jsonl or .jsonl.gz, or - for stdin")
@_folding
@option("--line", type=_number(1), metavar="N", default=1, help="line of the file, from 1")
@option("--tokenizer", metavar="MODEL", help="folder or hub id, to print text; ids if not given")
@option("--nodes", type=_number(1), metavar="N", default=200, help="at most so many nodes")
def show(rollouts: str, group_key: str | None, rows: int, line: int, tokenizer: str | None, nodes: int) -> Result:
    """Print a tree."""
    from niels_gpt.prefix_tree.savings.count import forests
    from niels_gpt.prefix_tree.savings.rollouts import read_rollouts

    lines = dropwhile(lambda found: found.line < line, read_rollouts([rollouts], group_key=group_key))
    folded = next(forests(lines, rows=rows), None)
    if folded is None or folded.lines[0].line != line:
        text = f"{rollouts}: has no rollouts on line {line}. Expected a line that has some, from 1"
        raise TreeError(text, code="E804")
    largest = int(folded.forest.input_ids.max())
    text_of = _ids_text if tokenizer is None else _decoder(tokenizer, largest)
    stats = folded.forest.stats()
    say(
        f"{_lines_of(folded)}: {many(stats.samples, 'sample')}, {many(stats.nodes, 'node')}, "
        f"{many(stats.tokens_before, 'token')} before, {stats.tokens_after:,} after"
    )
    found = list(_tree(folded, text_of, nodes))
    say("\n".join(found))
    counts = {"samples": stats.samples, "nodes": stats.nodes}
    tokens = {"tokens_before": stats.tokens_before, "tokens_after": stats.tokens_after}
    return Result({"line": line, **counts, **tokens, "tree": found})


def _tree(folded: Folded, text_of: Callable[[list[int]], str], most: int) -> Iterator[str]:
    """Yield a line for each of the first `most` nodes: rows, tokens, samples through it, samples that end, content."""
    forest = folded.forest
    starts, lengths = forest.node_starts.tolist(), forest.node_lengths.tolist()
    ending: dict[int, list[int]] = {}
    for sample, node in enumerate(forest.sample_ends.tolist()):
        ending.setdefault(node, []).append(sample)
    through = [len(ending.get(node, ())) for node in range(len(starts))]
    levels: list[int] = []
    parents = forest.node_parents.tolist()
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    for node in range(len(parents) - 1, -1, -1):  # children come after their parents
        if parents[node] >= 0:
            through[parents[node]] += through[node]
    for node, (start, length) in enumerate(zip(starts[:most], lengths[:most], strict=True)):
        level = levels[node]
        deep = f"(level {level}) " if level > _INDENTED else ""
        ends = f", ends {_samples(ending[node])}" if node in ending else ""
        content = text_of(forest.input_ids[start : start + length].tolist())
        yield (
            f"{'  ' * min(level, _INDENTED)}{deep}rows {start}:{start + length}, {many(length, 'token')}, "
            f"{many(through[node], 'sample')}{ends}: {content}"
        )
    if len(starts) > most:
        yield f"and {many(len(starts) - most, 'more node')}: see all with --nodes {len(starts)}"


def _lines_of(folded: Folded) -> str:
    first, last = folded.lines[0], folded.lines[-1]
    return first.where if first is last else f"{first.where} to {last.line}"


def _samples(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:_FIRST_IDS])) + (", ..." if len(numbers) > _FIRST_IDS else "")
    return f"sample{'' if len(numbers) == 1 else 's'} {listed}"


def _ids_text(ids: list[int]) -> str:
    if len(ids) > _FIRST_IDS + _LAST_IDS:
        return f"{' '.join(map(str, ids[:_FIRST_IDS]))} ... {' '.join(map(str, ids[-_LAST_IDS:]))}"
    return " ".join(map(str, ids))


def _decoder(name: str, largest: int) -> Callable[[list[int]], str]:
    """Return a function from ids to text. Raises: as open_tokenizer; ValueError for ids outside its vocabulary."""
    from niels_gpt.chat.tokenizers import open_tokenizer

    tokenizer = open_tokenizer(name)
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"{name}: has {tokenizer.vocab_size:,} ids, but the rollouts hold {largest}. Name their tokenizer"
        )

    def text_of(ids: list[int]) -> str:
        text = tokenizer.decode(ids)
        if len(text) <= _CHARACTERS:
            return repr(text)
        return f"{text[: _CHARACTERS // 2]!r} ... {text[-_CHARACTERS // 2 :]!r}"

    return text_of


# --- demo -------------------------------------------------------------------------------------------------------------


def demo_command(load: Callable[[], Callable[..., dict[str, Any]]]) -> Command:
    """Return the command that runs the step of niels_gpt/prefix_tree/demo.py.

    load: returns the function `run` of that module, which loads torch.
    """

    @command(
        "demo",
        "Run one policy-gradient step (GRPO) on a group of rollouts, folded and unfolded, and print the differences.",
        examples="niels-gpt tree demo --prompt 1024 --completion 32 --samples 8 --plot mask.png",
    )
    @option("--prompt", type=int, metavar="N", default=256, help="tokens of the prompt")
    @option("--completion", type=int, metavar="N", default=64, help="tokens of a completion, at most")
    @option("--samples", type=int, metavar="N", default=8, help="completions of the group")
    @option("--seed", type=int, metavar="N", default=0, help="of the rollouts and of the model's weights")
    @option("--threads", type=int, metavar="N", default=1, help="of torch")
    @option(
        "--attention", type=click.Choice([*ATTENTIONS, "eager"]), default=ATTENTIONS[0], help="how a folded row is run"
    )
    @option("--plot", type=_PATH, metavar="PNG", help="write a picture of the mask")
    def demo(prompt: int, completion: int, samples: int, threads: int, **how: Any) -> Result:
        if samples < 4 or min(prompt, completion, threads) < 1:
            text = "expected at least 4 samples, and a prompt, a completion and threads of at least 1"
            raise click.UsageError(text, click.get_current_context())
        found = load()(prompt=prompt, completion=completion, samples=samples, threads=threads, say=say, **how)
        return Result(found, ExitCode.GOOD if found["ok"] else ExitCode.FAILED)

    return demo


COMMANDS: list[Command] = [stats, show]
FACE = Group("prefix_tree", COMMANDS, help="What folding would save on recorded rollouts, before it is integrated.")
