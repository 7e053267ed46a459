"""python -m niels_gpt.train_tokenizer: train a tokenizer on files (PR-01).

    python -m niels_gpt.train_tokenizer --input_glob 'texts/**/*.md' --input_glob 'more/*.jsonl.gz' --out_dir DIR

Exit codes: 0 written; 1 nothing matched or the training failed, with the reason on stderr; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from niels_gpt.commands.console import exit_status
from niels_gpt.data.files.rows import TABLE_SUFFIXES, iter_rows
from niels_gpt.data.files.text import read_text
from niels_gpt.data.local import expand, in_order
from niels_gpt.interrupts import ended_at_once
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.tokenizer import TokenizerPaths
from niels_gpt.tokenizer_training import MODEL_TYPES, NORMALIZATIONS, TrainedTokenizer, train_tokenizer, write_tokenizer

_NO_LIMIT = 1 << 62  # of a document: a corpus may be one file, and is cut at line ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, default those of the process; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    return exit_status(lambda: _train(options), errors=(OSError, ValueError), unread=1)


def _train(options: argparse.Namespace) -> None:
    files, base = input_files(options.input_glob)
    with ended_at_once():
        trained = train_tokenizer(
            _texts(files, options.text_field),
            vocab_size=options.vocab_size,
            seed=options.seed,
            model_type=options.model_type,
            normalization=options.normalization,
            character_coverage=options.character_coverage,
            max_bytes=options.max_bytes,
            trained_on="files",
        )
    where = {
        "input_globs": [_glob_below(pattern, base) for pattern in options.input_glob],
        "input_files": [path.relative_to(base).as_posix() for path in files],
    }
    trained = dataclasses.replace(trained, meta={**trained.meta, **where})
    _report(trained, write_tokenizer(trained, options.out_dir))


def input_files(patterns: Sequence[str]) -> tuple[list[Path], Path]:
    """Expand glob patterns, `**` included, to files and the folder common to them; each file once.

    They are in order of their path below that folder, so that the same files elsewhere come in the same order.
    Raises: FileNotFoundError if a pattern matches no file.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = expand(pattern)
        if not files:
            raise FileNotFoundError(f"no file matches --input_glob {pattern!r}. Check the pattern, and quote it")
        found += files
    return in_order(found)


def _texts(files: Sequence[Path], field: str) -> Iterator[str]:
    counters: Counter[str] = Counter()  # the first file that is not UTF-8 is logged
    for path in files:
        if not path.name.lower().endswith(TABLE_SUFFIXES):
            yield read_text(path, counters=counters, max_document_bytes=_NO_LIMIT)
            continue
        for number, row in enumerate(iter_rows([path], counters=counters, max_document_bytes=_NO_LIMIT), 1):
            text = row.get(field)
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}, row {number}: expected text in the field {field!r}, found {type(text).__name__}; "
                    f"its fields are {', '.join(sorted(row))}. Name the right one with --text-field"
                )
            yield text


def _glob_below(pattern: str, base: Path) -> str:
    # Relative to the files' common folder: no absolute path in the meta, and the same for the same tree elsewhere.
    return Path(os.path.relpath(os.path.abspath(os.path.expanduser(pattern)), base)).as_posix()


def _report(trained: TrainedTokenizer, paths: TokenizerPaths) -> None:
    meta = trained.meta
    print(f"wrote {paths.model_path} and {paths.meta_path.name}")
    print(f"vocabulary: {meta['vocab_size']} ids, sha256 {meta['model_sha256']}")
    if meta["vocab_size"] < meta["requested_vocab_size"]:
        print(f"  smaller than the {meta['requested_vocab_size']} asked for: the texts allow no more")
    print(
        f"trained on {meta['documents']} documents from {len(meta['input_files'])} files in {meta['pieces']} pieces; "
        f"{meta['share_seen']:.2%} of {meta['bytes_given']:,} bytes seen"
    )
    if meta["documents_with_reserved_literal"]:
        print(f"  left out for a reserved literal: {meta['documents_with_reserved_literal']} documents")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m niels_gpt.train_tokenizer", description="Train a tokenizer.")
    add = parser.add_argument
    add("--input_glob", action="append", required=True, metavar="GLOB", help="files to read; may be given repeatedly")
    add("--out_dir", type=Path, default=DEFAULT_TOKENIZER_PATH.parent, help="default: %(default)s")
    add("--vocab_size", type=int, default=16_000, help="ids, the four sentinels included (default: %(default)s)")
    add("--seed", type=int, default=42, help="recorded; the training draws no random number (default: %(default)s)")
    add("--model_type", choices=MODEL_TYPES, default="unigram", help="default: %(default)s")
    add("--normalization", choices=NORMALIZATIONS, default="identity", help="only identity is lossless, the default")
    add("--character_coverage", type=float, default=0.9999, help="share of characters (default: %(default)s)")
    add("--max_bytes", type=int, default=None, help="read at most so many bytes of text (default: all)")
    add("--text-field", "--text_field", default="text", help="of jsonl and parquet rows (default: %(default)s)")
    return parser
