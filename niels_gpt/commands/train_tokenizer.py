"""train-tokenizer (PR-01), also python -m niels_gpt.train_tokenizer; and add-sentinels."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from niels_gpt.commands.console import Result, argument, command, option, run, say
from niels_gpt.data.files.rows import TABLE_SUFFIXES, iter_rows
from niels_gpt.data.files.text import read_text
from niels_gpt.data.files.walk import in_order
from niels_gpt.data.local import expand
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.storage.errors import SourceError, SourceNotFound
from niels_gpt.tokenizer import TokenizerPaths
from niels_gpt.tokenizer_training import (
    MODEL_TYPES,
    NORMALIZATIONS,
    TRAINED_KINDS,
    TrainedTokenizer,
    train_tokenizer,
    write_tokenizer,
)
from niels_gpt.work import ended_at_once

_OF_SENTENCEPIECE = ("model_type", "normalization", "character_coverage")
_NO_LIMIT = 1 << 62  # bytes of a document: a corpus may be one file; training cuts it at line ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.train_tokenizer and return its exit status. argv: default sys.argv."""
    return run(train, argv, "python -m niels_gpt.train_tokenizer")


@command(
    "train-tokenizer",
    "Train a tokenizer on files.\n\nFlags may be written with underscores too: --input_glob.",
    errors=(OSError, ValueError, ImportError),
    unread=1,
    level=logging.WARNING,
    examples="niels-gpt train-tokenizer --input-glob 'texts/**/*.md' --input-glob 'more/*.jsonl' --out-dir DIR",
)
@option("--input-glob", multiple=True, required=True, metavar="GLOB", help="files to read; repeatable")
@option(
    "--out-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_TOKENIZER_PATH.parent,
    metavar="DIR",
    help="folder of spm.model or tokenizer.json",
    show_default="artifacts/tokenizer of the project",
)
@option(
    "--kind",
    type=click.Choice(TRAINED_KINDS),
    default="sentencepiece",
    help="sentencepiece, or bpe: a byte-level tokenizer.json",
)
@option("--vocab-size", type=int, default=16_000, metavar="N", help="number of ids, the four sentinels included")
@option("--seed", type=int, default=42, metavar="N", help="recorded only: training is not random")
@option("--model-type", type=click.Choice(MODEL_TYPES), default="unigram", help="SentencePiece model type")
@option(
    "--normalization",
    type=click.Choice(NORMALIZATIONS),
    metavar="RULE",
    default="identity",
    help=f"SentencePiece normalization rule: {', '.join(NORMALIZATIONS)}; only identity is lossless",
)
@option(
    "--character-coverage", type=float, default=0.9999, metavar="X", help="share of characters with an id of their own"
)
@option("--max-bytes", type=int, metavar="N", help="read at most N bytes of text; default: all")
@option("--text-field", default="text", metavar="NAME", help="text field of JSONL and Parquet rows")
def train(input_glob: tuple[str, ...], out_dir: Path, text_field: str, **how: Any) -> Result:
    """Train and write a tokenizer."""
    context = click.get_current_context()
    for name in _OF_SENTENCEPIECE if how["kind"] == "bpe" else ():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')}: for SentencePiece, without effect with --kind bpe")
    files, base = input_files(input_glob)
    with ended_at_once():
        trained = train_tokenizer(_texts(files, text_field), trained_on="files", **how)
    where = {
        "input_globs": [_glob_below(pattern, base) for pattern in input_glob],
        "input_files": [path.relative_to(base).as_posix() for path in files],
    }
    trained = dataclasses.replace(trained, meta={**trained.meta, **where})
    paths = write_tokenizer(trained, out_dir)
    _report(trained, paths)
    return Result(trained.meta, next=f"niels-gpt build --all --tokenizer {shlex.quote(str(paths.model_path))}")


@command(
    "add-sentinels",
    "Copy a tokenizer and add the four sentinels.\n\n"
    "Sentinels are the tokens that mark the turns of a chat; sft caches need them. The copy has four more ids; all "
    "other ids stay the same.",
    examples="niels-gpt add-sentinels models/gpt2 models/gpt2-chat",
)
@argument("model", help="a SentencePiece model, a tokenizer.json, or a folder with one")
@argument("out", type=click.Path(path_type=Path), help="the new folder")
@option("--follow-links", is_flag=True, help="read files that are links")
def sentinels(model: str, out: Path, follow_links: bool) -> Result:
    """Write a tokenizer with the sentinels."""
    from niels_gpt.tokenizers.protocol import NARROW_IDS
    from niels_gpt.tokenizers.sentinels import add_sentinels

    made = add_sentinels(os.path.expanduser(model), out, follow_links=follow_links)
    say(f"wrote {made.model_path}, sha256 {made.tokenizer_sha256}")
    say(f"added {', '.join(f'{name} = {token_id}' for name, token_id in made.special_token_ids.items())}")
    say(f"vocabulary: {made.vocab_size_before:,} ids before, {made.vocab_size:,} now")
    if made.vocab_size_before <= NARROW_IDS < made.vocab_size:
        say(f"  more than {NARROW_IDS:,}: the tokens of its caches take 32 bits instead of 16")
    folder = os.path.dirname(made.model_path)
    return Result(dataclasses.asdict(made), next=f"niels-gpt build --all --tokenizer {shlex.quote(folder)}")


def input_files(patterns: Sequence[str]) -> tuple[list[Path], Path]:
    """Expand glob patterns, `**` included. Returns the files, each once, and the folder common to them.

    The files are ordered by their path below that folder, so that the same files elsewhere have the same order.
    Raises: FileNotFoundError if a pattern matches no file.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = expand(pattern)
        if not files:
            raise SourceNotFound(f"no file matches --input-glob {pattern!r}. Check the pattern, and quote it")
        found += files
    return in_order(found)


def _texts(files: Sequence[Path], field: str) -> Iterator[str]:
    counters: Counter[str] = Counter()  # read_text logs the first file that is not UTF-8
    for path in files:
        if not path.name.lower().endswith(TABLE_SUFFIXES):
            yield read_text(path, counters=counters, max_document_bytes=_NO_LIMIT)
            continue
        for number, row in enumerate(iter_rows([path], counters=counters, max_document_bytes=_NO_LIMIT), 1):
            text = row.get(field)
            if not isinstance(text, str):
                raise SourceError(
                    f"{path}, row {number}: expected text in the field {field!r}, found {type(text).__name__}; "
                    f"its fields are {', '.join(sorted(row))}. Name the right one with --text-field",
                    code="E304",
                )
            yield text


def _glob_below(pattern: str, base: Path) -> str:
    # Relative to the files' common folder: no absolute path in the meta, and the same for the same tree elsewhere.
    return Path(os.path.relpath(os.path.abspath(os.path.expanduser(pattern)), base)).as_posix()


def _report(trained: TrainedTokenizer, paths: TokenizerPaths) -> None:
    meta = trained.meta
    say(f"wrote {paths.model_path} and {paths.meta_path.name}")
    say(f"vocabulary: {meta['vocab_size']} ids, sha256 {meta['model_sha256']}")
    if meta["vocab_size"] < meta["requested_vocab_size"]:
        say(f"  fewer than the {meta['requested_vocab_size']} asked for: the texts give no more")
    in_pieces = f" in {meta['pieces']} pieces" if "pieces" in meta else ""  # bpe takes whole texts
    say(
        f"trained on {meta['documents']} documents from {len(meta['input_files'])} files{in_pieces}; "
        f"{meta['share_seen']:.2%} of {meta['bytes_given']:,} bytes seen"
    )
    if meta["documents_with_reserved_literal"]:
        say(f"  left out: {meta['documents_with_reserved_literal']} documents that contain a reserved literal")
