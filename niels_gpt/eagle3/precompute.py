"""Run a frozen target over chats once, and store what an EAGLE-3 draft is trained on.

    python -m niels_gpt.eagle3.precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --dry-run
    python -m niels_gpt.eagle3.precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --show 3
    python -m niels_gpt.eagle3.precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --resume

MODEL is the folder of a transformers model or its id on the hub. The input is a source of chats of the project
(dolly15k, oasst1, one of your own by its name), or a file, folder or pattern of JSONL, JSON or parquet: chats, or rows
of input_ids and loss_mask. A run that was killed goes on with --resume, with any number of workers: the bytes are
those of a run that was not.

Exit status: 0 good, 1 failed or does not fit, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.interrupts import interruptible, say_interrupted
from niels_gpt.recipes.eagle3 import Prepared, carry_out, prepare, resolve
from niels_gpt.recipes.eagle3_options import ATTENTIONS, COMPUTE_DTYPES, DEVICES, DTYPE_NAMES, Options
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.eagle3.estimate import Estimate

_LINE_EVERY_S = 10.0
_ATTENTION = "how the target computes attention; eager for one that sdpa cannot run, slower (default: %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, default those of the process; returns the exit status."""
    parser = _parser()
    arguments = vars(parser.parse_args(argv))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for client in ("httpx", "httpx2"):  # a line for each request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)
    dry_run, settings = arguments.pop("dry_run"), Settings(source_root=arguments.pop("source_root"))
    try:
        options = _options(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        with interruptible():
            return _run(options, settings, dry_run=dry_run)
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # CacheError is a ValueError
        logging.debug("", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        say_interrupted(error, "; finished shards stay: the same command with --resume goes on")
        return 130


def _options(arguments: dict[str, Any]) -> Options:
    template, layers = arguments["chat_template"], arguments["aux_layer_ids"]
    if template is not None:
        arguments["chat_template"] = template.read_text(encoding="utf-8")
    return Options(**{**arguments, "aux_layer_ids": None if layers is None else tuple(layers)})


def _run(options: Options, settings: Settings, *, dry_run: bool) -> int:
    from niels_gpt.eagle3.estimate import estimate, refuse_without_room
    from niels_gpt.eagle3.folder import finished_shards

    assert options.output_dir is not None
    resolved = resolve(options, settings)
    _hint_at_threads(options.workers, resolved.run)
    with _told("tokenizing", "samples") as told:
        prepared = prepare(resolved, tokenized=None if told is None else lambda samples, _: told(samples, None, None))
    if prepared.shown:
        from niels_gpt.eagle3.chats import show_rows

        print(show_rows(prepared.shown, resolved.tokenizer, color=sys.stdout.isatty()), flush=True)
    done = finished_shards(options.output_dir, prepared.plan, resume=options.resume)
    found = estimate(options.output_dir, prepared.plan, prepared.samples, done=done)
    _print_estimate(found, prepared, options.output_dir)
    if dry_run:
        return 0 if found.fits else 1
    refuse_without_room(options.output_dir, found)
    with _told("target", "tok") as told:
        produced = carry_out(prepared, options.output_dir, resume=options.resume, progress=told)
    _print_made(produced.meta, options.output_dir, produced.shards)
    return 0


def _hint_at_threads(workers: int, run: dict[str, Any]) -> None:
    """Tell that workers wait for each other: the bytes depend on the number of threads, so it is not changed here."""
    cores = len(os.sched_getaffinity(0))
    if workers > 1 and run["device"] == "cpu" and workers * run["threads"] > cores:
        print(
            f"hint: {workers} workers of {run['threads']} threads each share {cores} cores and slow each other down; "
            f"name --threads {max(1, cores // workers)} for a new cache",
            file=sys.stderr,
        )


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_estimate(found: Estimate, prepared: Prepared, folder: Path) -> None:
    manifest = prepared.plan.manifest
    print(
        f"{found.samples:,} samples, {found.tokens:,} tokens, {found.supervised_share:.1%} supervised; "
        f"mean length {found.mean_length:.0f}, longest {found.max_length} of {manifest['seq_length']}"
    )
    for what, counts in (("left out", prepared.plan.dropped), ("altered", prepared.plan.altered)):
        if counts:
            print(f"{what}: {', '.join(f'{reason} {number:,}' for reason, number in counts.items())}")
    draft = f"draft vocabulary {manifest['draft_vocab_size']:,} of {manifest['target_vocab_size']:,}"
    topk = manifest.get("target_probs_topk") or "all"
    print(f"format version {manifest['format_version']}, {manifest['dtype']}, {draft}, probabilities kept: {topk}")
    finished = f", {found.shards_done:,} of them finished" if found.shards_done else ""
    print(f"{found.shards:,} shards{finished}, {found.batches:,} batches")
    holes = "padding is holes there" if found.has_holes else "no holes on that file system"
    print(
        f"{folder}: {prepared.plan.layout.token_bytes:,} bytes a token; {found.apparent_bytes:,} bytes of files with "
        f"padding and embeddings; to write {found.to_write_bytes:,} ({holes}), free {found.free_bytes:,}: "
        f"{'fits' if found.fits else 'does not fit'}",
        flush=True,
    )


def _print_made(meta: dict[str, Any], folder: Path, shards: int) -> None:
    from niels_gpt.eagle3.cache_folder import counts_of
    from niels_gpt.eagle3.manifest import layout_of

    totals, token_bytes = meta["totals"], layout_of(meta["manifest"], folder).token_bytes
    on_disk = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    print(f"{folder}: {'made ' + format(shards, ',') + ' shards' if shards else 'up to date'}")
    kept = "all" if meta["kept_mass"] is None else f"{meta['kept_mass']:.4f}"
    print(
        f"{totals['samples']:,} samples, {totals['tokens']:,} tokens, {counts_of(meta)}, "
        f"probability mass kept: {kept}\n"
        f"{token_bytes:,} bytes a token; {meta['disk_bytes']:,} bytes of files with padding and embeddings, "
        f"{on_disk:,} on disk"
    )


@contextmanager
def _told(what: str, unit: str) -> Iterator[Callable[[int, int | None, int | None], None]]:
    """Yield a progress callback of done, total and bytes: a bar on a terminal, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(what, unit)
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, unit_scale=True, leave=False) as bar:
        pace = _Pace()

        def told(done: int, total: int | None, size: int | None) -> None:
            if bar.total is None and total is not None:  # the first call: what was there before
                bar.total, bar.initial, bar.n = total, done, done
            if pace.told(done, size) is None:  # the bar's own speed counts from here, too
                bar.initial = bar.n = bar.last_print_n = done
                bar.start_t = bar.last_print_t = time.time()
            elif size is not None:
                bar.set_postfix_str(f"{pace.bytes_per_s / 1e6:.1f} MB/s", refresh=False)
            bar.update(done - bar.n)

        yield told


class _Pace:
    """How fast it goes, from the first report in which something is done: the target was loaded before that."""

    def __init__(self) -> None:
        self._begun: tuple[float, int, int] | None = None
        self._before: int | None = None
        self.bytes_per_s = 0.0

    def told(self, done: int, size: int | None) -> float | None:
        """Return what is done in a second; None where that cannot be told yet."""
        now = time.monotonic()
        if self._before is None or done == self._before:
            self._before = done
            return None
        if self._begun is None:
            self._begun = now, done, size or 0
            return None
        seconds = max(now - self._begun[0], 1e-9)
        self.bytes_per_s = ((size or 0) - self._begun[2]) / seconds
        return (done - self._begun[1]) / seconds


class _Lines:
    """Prints a line every ten seconds to stderr."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit, self._pace = what, unit, _Pace()
        self._last = time.monotonic()

    def __call__(self, done: int, total: int | None, size: int | None) -> None:
        speed, now = self._pace.told(done, size), time.monotonic()
        if now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        line = f"{self._what}: {done:,} {self._unit}"
        if total is not None:
            line += f", {done / total:.0%}"
        if speed:
            line += f", {speed:,.0f} {self._unit}/s"
            if size is not None:
                line += f", {self._pace.bytes_per_s / 1e6:.1f} MB/s"
            if total is not None:
                line += f", {(total - done) / speed:,.0f} s left"
        print(line, file=sys.stderr, flush=True)


# --- flags ------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.eagle3.precompute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser.add_argument_group("what").add_argument)
    _add_form(parser.add_argument_group("the cache's form").add_argument)
    _add_how(parser.add_argument_group("how").add_argument)
    return parser


def _add_what(add: Callable[..., Any]) -> None:
    default = Settings().source_root
    add("--target-model", required=True, metavar="MODEL", help="folder or hub id of a causal language model")
    add("--revision", metavar="REV", help="hub commit, tag or branch of a target on the hub (default: main)")
    add(
        "--input-data", required=True, metavar="SOURCE", help="a source of chats by its name, or files of chats or rows"
    )
    add(
        "--source-root", default=default, metavar="ROOT", help=f"hub, sample, or a mirror's folder (default: {default})"
    )
    add("--chat-template", type=Path, metavar="FILE", help="jinja template (default: the tokenizer's own)")
    add("--limit", type=int, metavar="N", help="take the first N samples only, for a trial (default: all)")
    add("--output-dir", required=True, type=Path, metavar="DIR", help="folder of the cache")


def _add_form(add: Callable[..., Any]) -> None:
    given = {name: each.default for name, each in Options.__dataclass_fields__.items()}
    number = {"type": int, "metavar": "N"}

    def add_number(flag: str, text: str) -> None:
        default = given[flag.strip("-").replace("-", "_")]
        add(flag, **number, default=default, help=f"{text} (default: {default})")

    add_number("--seq-length", "slots of a sample, in tokens; a longer one is cut")
    add("--draft-vocab-size", **number, help="tokens that the draft knows (default: all of the target's)")
    add("--draft-vocab-from", metavar="PATH", help="take them from a token mapping or a cache (default: most frequent)")
    add_number("--target-probs-topk", "probabilities kept of each slot, renormalised; 0: all, exactly")
    add_number("--shard-size", "samples of a shard")
    add("--dtype", choices=DTYPE_NAMES, default=given["dtype"], help=f"of the floats (default: {given['dtype']})")
    add("--format-version", type=int, choices=(1, 2), help="of the manifest (default: 1; 2 with --target-probs-topk)")
    add("--aux-layer-ids", type=int, nargs=3, metavar="ID", help="blocks to capture, from 0 (default: 1, n/2-1, n-4)")


def _add_how(add: Callable[..., Any]) -> None:
    given = {name: each.default for name, each in Options.__dataclass_fields__.items()}
    for flag, text in {
        "--batch-size": "samples of a forward, at most",
        "--max-batch-tokens": "tokens of a forward, padding included, at most",
        "--workers": "processes, each with the target; never changes the bytes",
        "--show": "print the first N samples, the supervised tokens marked, before the target is loaded",
    }.items():
        default = given[flag.strip("-").replace("-", "_")]
        add(flag, type=int, metavar="N", default=default, help=f"{text} (default: {default})")
    add("--threads", type=int, metavar="N", help="torch threads of each worker (default: as begun; else usable cores)")
    add("--device", choices=DEVICES, help="where the target runs (default: as begun; else cuda where there is one)")
    add(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        help="what the target calculates in (default: as begun; else bf16 on cuda, fp32 on the cpu)",
    )
    add("--attention", choices=ATTENTIONS, default=given["attention"], help=_ATTENTION)
    add("--resume", action="store_true", help="go on with what is in DIR, if the plan is the same (default: refuse)")
    add("--dry-run", action="store_true", help="print sizes and free space, and stop; status 1 if it does not fit")


if __name__ == "__main__":
    sys.exit(main())
