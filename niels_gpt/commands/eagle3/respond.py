"""eagle3 respond, and python -m niels_gpt.eagle3.respond: the target's own replies to chats, for on-policy training."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich_click import option

from niels_gpt.commands.console import ERRORS, Result, command, progress_bar, run, say
from niels_gpt.progress import Progress
from niels_gpt.recipes.eagle3 import respond as recipe
from niels_gpt.recipes.eagle3.respond import RespondOptions
from niels_gpt.settings import Settings

_PATH = click.Path(path_type=Path)
_LINE_EVERY_S = 10.0
_COUNT = click.IntRange(min=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3.respond with arguments; returns the exit status."""
    return run(respond, argv, "python -m niels_gpt.eagle3.respond")


@command(
    "respond",
    "Let the target reply to chats, as input for precompute.\n\n"
    "MODEL and SOURCE are as for precompute. Each turn of the assistant is replaced by the target's reply to what "
    "stands before it, with the replies before; a chat that ends with a question gets a reply too. A chat ends with "
    "the first reply that is cut, and before one that is empty or holds a special token; all are counted, and a cut "
    "one is marked in its row. FILE appears when all is done: the same command resumes a run that was killed.\n\n"
    "A reply depends on the seed and the chat's id alone, not on the order of chats or on resuming; of chats with one "
    "id, also on how many stand before it. Another batch size "
    "may round otherwise, and change replies where two tokens are nearly equal: seldom in fp32, often in bf16.",
    examples="""niels-gpt eagle3 respond --target-model MODEL --input-data chats.jsonl --output replies.jsonl
niels-gpt eagle3 respond --target-model MODEL --input-data dolly15k --output replies.jsonl --temperature 0.7 --seed 1
niels-gpt eagle3 precompute --target-model MODEL --input-data replies.jsonl --output-dir DIR""",
    errors=(*ERRORS, RuntimeError),
    level=logging.WARNING,
    kept="; the replies so far stay: resume with the same command",
    unread=1,
)
@option("--target-model", required=True, metavar="MODEL", help="folder or hub id of a causal language model")
@option("--revision", metavar="REV", help="hub commit, tag or branch of a target on the hub (default: main)")
@option("--input-data", required=True, metavar="SOURCE", help="a source of chats by its name, or files of chats")
@option("--source-root", default=Settings().source_root, metavar="ROOT", help="hub, sample, or the folder of a mirror")
@option("--chat-template", type=_PATH, metavar="FILE", help="a file of jinja (default: tokenizer, its own)")
@option("--document-start", metavar="TOKEN", help="token before each prompt, as for precompute: none, auto or a token")
@option("--limit", type=_COUNT, metavar="N", help="use the first N chats only (default: all)")
@option("--output", required=True, type=_PATH, metavar="FILE", help="file of the replies, as JSON lines")
@option(
    "--form",
    type=click.Choice(["messages", "ids"]),
    default="messages",
    help="a row for each chat with its messages, or for each reply with ids and loss mask, exactly as the target chose "
    "them; with messages a chat ends where the template would write its earlier replies otherwise",
)
@option(
    "--turns",
    type=click.Choice(["all", "last"]),
    default="all",
    help="the assistant's turns to replace: all of them in turn, or the last one alone, where precompute puts loss on "
    "the others too, unless the form is ids",
)
@option("--max-new-tokens", type=_COUNT, default=1024, metavar="N", help="tokens of a reply, at most")
@option("--temperature", type=float, default=0.0, metavar="X", help="of sampling; 0: the most probable token")
@option("--top-p", type=float, default=1.0, metavar="X", help="sample from the tokens that reach this probability")
@option("--seed", type=int, default=0, metavar="N", help="of sampling")
@option("--batch-size", type=_COUNT, default=8, metavar="N", help="chats that the target replies to at a time")
@option("--threads", type=_COUNT, metavar="N", help="torch threads (default: usable cores)")
@option("--device", type=click.Choice(["cpu", "cuda"]), help="where the target runs (default: cuda where there is one)")
@option(
    "--compute-dtype", type=click.Choice(["bf16", "fp32"]), help="of the target (default: bf16 on cuda, fp32 on cpu)"
)
@option("--attention", type=click.Choice(["sdpa", "eager"]), default="sdpa", help="how the target computes attention")
@option("--dry-run", is_flag=True, help="read the chats, print how many prompts and tokens, and stop")
def respond(source_root: str, chat_template: Path | None, dry_run: bool, **given: Any) -> Result:
    """Make a file of replies."""
    from niels_gpt.recipes.chats import template_text

    try:
        template = template_text(Settings(chat_template=str(chat_template) if chat_template else None))
        options = RespondOptions(chat_template=template, **given)
        options.check()
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
    responder = recipe.resolve(options, Settings(source_root=source_root))
    if dry_run:
        return _trial(responder)
    with _progress() as progress:
        record = recipe.respond(responder, progress=progress)
    counts, dropped = dict(record["counts"]), record["dropped"]
    replies, tokens, left_out = (counts.pop(name, 0) for name in ("replies", "reply_tokens", "replies_left_out"))
    say(f"{options.output}: {replies:,} replies, {tokens:,} tokens; sha256 {record['sha256']}")
    if left_out:
        say(f"replies left out behind the end of their chat: {left_out:,}")
    _say_counts("left out by the source", dropped)
    _say_counts("of chats and replies", counts)
    _say_advice(counts)
    target = shlex.join(["--target-model", options.target_model, "--input-data", str(options.output)])
    if options.document_start is not None and options.form == "messages":
        target += f" {shlex.join(['--document-start', options.document_start])}"
    return Result(record, next=f"niels-gpt eagle3 precompute {target} --output-dir DIR")


def _trial(responder: recipe.Responder) -> Result:
    found, most = recipe.tried(responder), responder.options.max_new_tokens
    mean = found.prompt_tokens / max(1, found.waiting)
    say(
        f"{found.chats:,} chats, {found.waiting:,} with a prompt; first prompts of {mean:.0f} tokens on average, the "
        f"longest {found.longest_prompt:,}; at most {most:,} tokens a reply, ended by ids {list(responder.stop_ids)}"
    )
    _say_counts("left out by the source", found.dropped)
    _say_counts("without a prompt", found.counts)
    _say_advice(found.counts)
    return Result({**asdict(found), "stop_ids": list(responder.stop_ids)})


def _say_counts(what: str, counts: Mapping[str, int]) -> None:
    shown = ", ".join(f"{reason} {number:,}" for reason, number in counts.items() if number)
    if shown:
        say(f"{what}: {shown}")


def _say_advice(counts: Mapping[str, int]) -> None:
    from niels_gpt.chat.protocol import NOT_STABLE

    if counts.get(NOT_STABLE):
        say("the chat template writes earlier replies otherwise when a reply follows: --form ids has a row for each")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a progress callback: a bar on a terminal, elsewhere a line every ten seconds."""
    with progress_bar("replies", "chats", "tokens") as bar:
        last = [time.monotonic()]

        def show(tokens: int, chats: int, total: int | None) -> None:
            if bar is not None:
                bar(tokens, chats, total)
            elif time.monotonic() - last[0] >= _LINE_EVERY_S:
                last[0] = time.monotonic()
                print(f"replies: {chats:,} chats, {tokens:,} tokens", file=sys.stderr, flush=True)

        yield show
