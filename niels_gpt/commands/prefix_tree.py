"""tree stats and tree show: how much folding saves on recorded rollouts; also python -m niels_gpt.prefix_tree.

Reads files as `build --rollouts` does; - is the standard input. Each group is folded by itself. Samples without a group
are folded in runs of consecutive lines, since rollouts of one prompt are usually adjacent.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from niels_gpt.commands.console import Command, Group, Result, argument, command, option, parsed, progress_bar, run, say
from niels_gpt.display.numbers import many
from niels_gpt.display.tables import folded, table
from niels_gpt.prefix_tree import ATTENTIONS, MODEL_7B, ROWS
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError, TreeError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.remedies import PROGRAM
from niels_gpt.work import Progress

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.forest import ModelShape
    from niels_gpt.prefix_tree.savings import Folded, Rollouts

_GROUP = "group"
_INDENTED = 24  # levels; deeper nodes are not indented further
_FIRST_IDS, _LAST_IDS = 8, 4
_CHARACTERS = 60
_MOST = 10**15  # the largest number on the command line: FLOPs still fit into a float
_PATH = click.Path(path_type=Path)
_LINES = """Reads lines as `build --rollouts` does: {"prompt_ids": [...], "completions": [[...], ...]} is a group,
{"ids": [...]} a sample. Each group is folded by itself; samples without a group are folded in runs of consecutive
lines. Lines that a build would leave out are left out and counted."""
_FILES = ".jsonl, .json (also .gz, .zst) or .parquet, or - for .jsonl from stdin"


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.prefix_tree and return its exit status. argv: default sys.argv."""
    return run(FACE, argv, "python -m niels_gpt.prefix_tree")


def _number(least: int) -> Callable[[str | int], int]:
    def number(text: str) -> int:
        value = float(text)  # accepts 7e9
        if not value.is_integer() or not least <= value <= _MOST:
            raise ValueError(f"{text}: expected a whole number from {least} to {_MOST:g}")
        return int(value)

    return parsed(number)


def _folding(function: Callable[..., Result]) -> Callable[..., Result]:
    rows = "fold N samples without a group together; 0: all of the file"
    function = option("--rows", type=_number(0), metavar="N", default=ROWS, help=rows)(function)
    key = "fold consecutive lines together that have the same value for this key"
    function = option("--group-key", metavar="KEY", default=_GROUP, help=key)(function)
    most = "limit of a line's bytes; larger ones are left out and counted"
    return option("--max-document-bytes", type=_number(1), metavar="N", default=Settings.max_document_bytes, help=most)(
        function
    )


# --- files ------------------------------------------------------------------------------------------------------------


def read_rollouts(
    paths: Sequence[str],
    group_key: str = _GROUP,
    max_document_bytes: int = Settings.max_document_bytes,
    counters: Counter[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Rollouts]:
    """Yield the lines of files in order, read as `build --rollouts` does.

    paths: "-" is the standard input. group_key: the field that names a line's group. counters: receives the numbers of
    lines and samples left out, by reason; the first of each is logged. progress: gets lines, tokens, and None.
    Raises: ValueError for a damaged file; TreeError E804 for a sample without a `group_key` other than "group", and for
        a file without rollouts; CacheError E208 for a cache; OSError.
    """
    from niels_gpt.data.files.rollouts import FORMS

    counters = Counter() if counters is None else counters
    lines = tokens = 0
    for path in paths:
        before = lines
        for number, row in _rows(path, group_key, max_document_bytes, counters):
            line = _line(path, number, row, group_key, counters)
            if line is not None:
                lines, tokens = lines + 1, tokens + sum(len(sample.ids) for sample in line.samples)
                yield line
            if progress is not None:
                progress(lines, tokens, None)
        if lines == before:
            raise TreeError(f"{path}: holds no rollouts. Expected lines with {FORMS}", code="E804")


def _line(path: str, number: int, row: dict[str, Any], group_key: str, counters: Counter[str]) -> Rollouts | None:
    """Return a row's samples; None, and count it, if a build would keep none of them. Raises TreeError E804."""
    from niels_gpt.data.files.rollouts import NotRolloutsError, samples_of
    from niels_gpt.data.files.text import note
    from niels_gpt.prefix_tree.rollouts.records import checked
    from niels_gpt.prefix_tree.savings import Rollouts

    try:
        found = [checked(sample, None) for sample in samples_of(row)[1]]
    except NotRolloutsError as error:
        note(counters, error.reason, f"{path}, line {number}: found {error.found or f'the fields {_names(row)}'}")
        return None
    is_group, key = row.get("completions") is not None, row.get(group_key)
    if key is None and group_key != _GROUP and not is_group:
        text = f"{path}:{number}: no group key {group_key!r}, but the keys {_names(row)}. Expected it in each sample"
        raise TreeError(text, code="E804")
    for reason in (sample for sample in found if isinstance(sample, str)):
        note(counters, reason, f"{path}, line {number}: a sample is left out")
    samples = [sample for sample in found if not isinstance(sample, str)]
    key = None if key is None else json.dumps(key, sort_keys=True)
    return Rollouts(path, number, samples, is_group, key) if samples else None


def _names(row: dict[str, Any]) -> str:
    return ", ".join(map(shortened, list(row)[:20])) or "none"


def _rows(path: str, group_key: str, limit: int, counters: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file with their numbers. Raises: ValueError, CacheError E208, OSError."""
    from niels_gpt.data.files import rollouts, rows, text

    def drop(problem: text.Problem) -> None:
        text.note(counters, problem.reason, problem, problem.rows)

    if path != "-":
        if os.path.lexists(os.path.join(path, META_NAME)):
            remedy = f"Run: {shlex.join([PROGRAM, 'stats', path])}, or {shlex.join([PROGRAM, 'show', path])}"
            raise CacheError(path, "a cache", "a file of recorded rollouts", remedy, code="E208")
        columns = rollouts.FIELDS | {group_key}
        yield from rows.numbered_rows(
            Path(path), counters=counters, columns=columns, unreadable=drop, max_document_bytes=limit
        )
        return
    reading = rows.Reading(counters=counters, unreadable=drop, max_document_bytes=limit)
    yield from cast(Iterator[rows.Row], rows.rows_of_lines(sys.stdin.buffer, Path(path), reading))


# --- stats ------------------------------------------------------------------------------------------------------------


@command(
    "stats",
    f"Print how many tokens, attention pairs and FLOPs folding saves.\n\n{_LINES}",
    examples="niels-gpt tree stats ROLLOUTS.jsonl --plot stats.png",
)
@argument("rollouts", nargs=-1, required=True, help=_FILES)
@_folding
@option("--attention", type=click.Choice(ATTENTIONS), default=ATTENTIONS[0], help="the attention that runs folded rows")
@option("--model", metavar="MODEL", help="count FLOPs of this model: folder or hub id with a config.json")
@option("--parameters", type=_number(1), metavar="N", help="parameters of the model (7B)")
@option("--layers", type=_number(1), metavar="N", help="layers of the model (32)")
@option("--d-model", type=_number(1), metavar="N", help="width of the model's attention (4096)")
@option("--plot", type=_PATH, metavar="PNG", help="draw the savings of each forest and in total into this file")
def stats(
    rollouts: tuple[str, ...],
    group_key: str,
    max_document_bytes: int,
    rows: int,
    plot: Path | None,
    attention: str,
    model: str | None,
    **sizes: int | None,
) -> Result:
    """Print savings."""
    from niels_gpt.prefix_tree.savings import count_savings, forests

    if plot is not None:
        from niels_gpt.prefix_tree.plot import check_picture

        check_picture(plot)
    shape = _shape(model, sizes)
    counters = Counter[str]()
    with progress_bar("stats", items="lines") as progress:
        lines = read_rollouts(rollouts, group_key, max_document_bytes, counters, progress)
        savings = count_savings(forests(lines, rows=rows), shape, attention)
    savings.counters = counters
    if plot is not None:
        from niels_gpt.prefix_tree.plot import plot as draw
        from niels_gpt.storage.fileio import write_bytes

        names = [Path(path).name for path in rollouts]
        write_bytes(plot, draw(savings, names[0] if len(names) == 1 else f"{len(names)} files"))
    say(f"{table(savings.rows())}\n\n{chr(10).join(folded(savings.interpretation()))}")
    return Result(savings.as_json())


def _shape(model: str | None, sizes: Mapping[str, int | None]) -> ModelShape:
    """Return the shape of a model; without a name, the given sizes, and for the rest the sizes of a 7B model."""
    from niels_gpt.prefix_tree.forest import ModelShape

    given = {name: value for name, value in sizes.items() if value is not None}
    if model is None:
        return ModelShape(**{**MODEL_7B, **given})
    from niels_gpt.hub.models import CONFIG, hub_file, is_local, refuse_large
    from niels_gpt.prefix_tree.savings import shape_of

    path = Path(model).expanduser() / CONFIG if is_local(model) else hub_file(model, CONFIG, None)
    if path is None:
        raise ValueError(f"{model}: has no {CONFIG} on the hub, expected a transformers model")
    refuse_large(path.parent)
    return replace(shape_of(path.parent), **given)


# --- show -------------------------------------------------------------------------------------------------------------


@command(
    "show",
    "Print the tree of the group, or of the run of samples, that begins at a line.",
    examples="niels-gpt tree show ROLLOUTS.jsonl --line 3",
)
@argument("rollouts", help=_FILES)
@_folding
@option("--line", type=_number(1), metavar="N", default=1, help="line of the file, from 1")
@option("--tokenizer", metavar="MODEL", help="print text by this tokenizer, a folder or hub id; default: ids")
@option("--nodes", type=_number(1), metavar="N", default=200, help="print at most N nodes")
def show(
    rollouts: str,
    group_key: str,
    max_document_bytes: int,
    rows: int,
    line: int,
    tokenizer: str | None,
    nodes: int,
) -> Result:
    """Print a tree."""
    from niels_gpt.prefix_tree.savings import forests

    lines = dropwhile(lambda found: found.line < line, read_rollouts([rollouts], group_key, max_document_bytes))
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
    """Return a function from ids to text. Raises: ValueError for ids outside the vocabulary; OSError, ValueError."""
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


COMMANDS: list[Command] = [stats, show]
FACE = Group("prefix_tree", COMMANDS, help="How much folding shared prefixes saves on recorded rollouts.")
TREE = Group("tree", COMMANDS, help=str(FACE.help))
