"""python -m niels_gpt.prefix_tree: what folding would save on recorded rollouts, before it is integrated.

    python -m niels_gpt.prefix_tree stats ROLLOUTS.jsonl [...]             tokens, attention pairs, FLOPs: before, after
    python -m niels_gpt.prefix_tree stats ROLLOUTS.jsonl --plot stats.png    also draws a picture
    python -m niels_gpt.prefix_tree show ROLLOUTS.jsonl --line 3         the tree of the group on that line

A line is one group, {"prompt_ids": [...], "completions": [[...], ...]}, or one whole sequence, {"ids": [...]}; other
keys are ignored. A group is folded by itself. Whole sequences are folded in runs of consecutive lines, since rollouts
of one prompt are usually adjacent: --group-key names the key that identifies a group, --rows the length of a run. Files
may end in .gz; - is the standard input. The first bad line is an error; no line is skipped.

Exit status: 0 good, 1 a file cannot be read or has a bad line, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from niels_gpt.commands.console import exit_status, progress_bar, table
from niels_gpt.prefix_tree.forest import ModelShape
from niels_gpt.prefix_tree.savings.count import ROWS, SHAPE_7B, Folded, count_savings, forests, many
from niels_gpt.prefix_tree.savings.rollouts import read_rollouts

_INDENTED = 24  # levels; deeper nodes are not indented further
_FIRST_IDS, _LAST_IDS = 8, 4
_CHARACTERS = 60
_MOST = 10**15  # the largest number on the command line: FLOPs still fit into a float


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with arguments, default those of the process; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: arguments.run(arguments))


# --- stats ------------------------------------------------------------------------------------------------------------


def _stats(arguments: argparse.Namespace) -> None:
    target: Path | None = arguments.plot
    if target is not None:
        from niels_gpt.prefix_tree.savings.plot import check_picture

        check_picture(target)
    shape = ModelShape(arguments.parameters, arguments.layers, arguments.d_model)
    with progress_bar("stats", "B") as progress:
        lines = read_rollouts(arguments.rollouts, group_key=arguments.group_key, progress=progress)
        savings = count_savings(forests(lines, rows=arguments.rows), shape)
    if target is not None:
        from niels_gpt.prefix_tree.savings.plot import plot
        from niels_gpt.storage.fileio import write_bytes

        names = [Path(path).name for path in arguments.rollouts]
        write_bytes(target, plot(savings, names[0] if len(names) == 1 else f"{len(names)} files"))
    if arguments.json:
        print(json.dumps(savings.as_json(), indent=2))
    else:
        print(table(savings.rows()), savings.interpretation(), sep="\n\n")


# --- show -------------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> None:
    path, number = arguments.rollouts, arguments.line
    lines = dropwhile(lambda line: line.line < number, read_rollouts([path], group_key=arguments.group_key))
    folded = next(forests(lines, rows=arguments.rows), None)
    if folded is None or folded.lines[0].line != number:
        raise ValueError(f"{path}: has no rollouts on line {number}. Expected a line that has some, from 1")
    largest = int(folded.forest.input_ids.max())
    text_of = _ids_text if arguments.tokenizer is None else _decoder(arguments.tokenizer, largest)
    stats = folded.forest.stats()
    print(
        f"{_lines_of(folded)}: {many(stats.samples, 'sample')}, {many(stats.nodes, 'node')}, "
        f"{many(stats.tokens_before, 'token')} before, {stats.tokens_after:,} after"
    )
    for line in _tree(folded, text_of, arguments.nodes):
        print(line)


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


# --- arguments --------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.prefix_tree",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], None], **files: Any) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        added.add_argument("rollouts", metavar="ROLLOUTS", help=".jsonl or .jsonl.gz, or - for stdin", **files)
        add = added.add_argument
        add("--group-key", metavar="KEY", help="fold consecutive lines with the same value of this key together")
        rows = f"`ids` lines in a run (default: {ROWS}; 0: the file)"
        add("--rows", type=_number(0), metavar="N", default=ROWS, help=rows)
        return add

    add = command("stats", "print what folding would save: tokens, attention pairs, FLOPs", _stats, nargs="+")
    for name, value in vars(SHAPE_7B).items():
        flag, text = f"--{name.replace('_', '-')}", f"of the model (default: {value:g})"
        add(flag, type=_number(1), metavar="N", default=value, help=text)
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--plot", type=Path, metavar="PNG", help="write a picture of the savings per forest and in total")
    add = command("show", "print the tree of a group, or of the run of rows that begins at a line", _show)
    add("--line", type=_number(1), metavar="N", default=1, help="line of the file, from 1 (default: 1)")
    add("--tokenizer", metavar="MODEL", help="folder or hub id, to print text (default: ids)")
    add("--nodes", type=_number(1), metavar="N", default=200, help="at most so many nodes (default: 200)")
    return parser


def _number(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        number = float(text)  # accepts 7e9
        if not number.is_integer() or not least <= number <= _MOST:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number from {least} to {_MOST:g}")
        return int(number)

    return parsed
