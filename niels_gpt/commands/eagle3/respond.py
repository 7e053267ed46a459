"""eagle3 respond, and python -m niels_gpt.eagle3.respond: the target's own replies to chats, for on-policy training."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from niels_gpt.commands.console import ERRORS, Command, Result, progress_bar, run, say
from niels_gpt.commands.eagle3.precompute import flags_of, options_of
from niels_gpt.recipes.eagle3.options import RespondOptions
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.recipes.eagle3.respond import Responder


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3.respond with arguments; return the exit status."""
    return run(respond, argv, "python -m niels_gpt.eagle3.respond")


def _respond(source_root: str, dry_run: bool, **given: Any) -> Result:
    from niels_gpt.eagle3.degenerate import GENERATED, KINDS, counter_of
    from niels_gpt.eagle3.server import SERVED
    from niels_gpt.recipes.eagle3 import respond as recipe

    options = options_of(given, RespondOptions)
    key = _key(options)
    responder = recipe.resolve(options, Settings(source_root=source_root))
    if dry_run:
        return _trial(responder, key)
    with progress_bar("replies", "chats", "tokens") as progress:
        record = recipe.respond(responder, key=key, progress=progress)
    counts, dropped = dict(record["counts"]), record["dropped"]
    replies, tokens, left_out = (counts.pop(name, 0) for name in ("replies", "reply_tokens", "replies_left_out"))
    say(f"{options.output}: {replies:,} replies, {tokens:,} tokens; sha256 {record['sha256']}")
    if left_out:
        say(f"replies left out after the end of their chat: {left_out:,}")
    _say_counts("left out by the source", dropped)
    served = {name: counts.pop(name) for name in list(counts) if name.startswith(SERVED)}
    degenerate = {kind: counts.pop(counter_of(kind), 0) for kind in KINDS}
    _say_degenerate(degenerate, counts.pop(GENERATED, 0), record.get("degenerate", []))
    _say_counts("of chats and replies", counts)
    _say_counts("the server says that it is", {name.removeprefix(SERVED): served[name] for name in served})
    _say_advice(counts)
    target = shlex.join(["--target-model", options.target_model, "--input-data", str(options.output)])
    if options.document_start is not None and options.form == "messages":
        target += f" {shlex.join(['--document-start', options.document_start])}"
    return Result(record, next=f"niels-gpt eagle3 precompute {target} --output-dir DIR")


def _key(options: RespondOptions) -> str | None:
    key = os.environ.get(options.api_key_env)
    if not key and options.api_key_env != RespondOptions.api_key_env:  # not shown: it may be the key itself
        raise click.UsageError(
            "--api-key-env: the environment has no variable of this name, or an empty one", click.get_current_context()
        )
    return key


def _trial(responder: Responder, key: str | None) -> Result:
    from niels_gpt.recipes.eagle3.respond import tried

    found, most = tried(responder), responder.options.max_new_tokens
    mean = found.prompt_tokens / max(1, found.waiting)
    say(
        f"{found.chats:,} chats, {found.waiting:,} with a prompt; first prompts of {mean:.0f} tokens on average, the "
        f"longest {found.longest_prompt:,}; at most {most:,} tokens a reply, ended by ids {list(responder.stop_ids)}"
    )
    if responder.options.server is not None:
        _say_server(responder, key)
    _say_counts("left out by the source", found.dropped)
    _say_counts("without a prompt", found.counts)
    _say_advice(found.counts)
    return Result({**asdict(found), "stop_ids": list(responder.stop_ids)})


def _say_server(responder: Responder, key: str | None) -> None:
    from niels_gpt.recipes.eagle3.respond import client_of

    options, sampling = responder.options, responder.sampling
    with_key = f"the key in ${options.api_key_env}" if key else "no key"
    say(
        f"to send: POST {client_of(responder, key).url}/chat/completions with {with_key}, {options.concurrency} at "
        f"once; model {options.model}, temperature {sampling.temperature}, top_p {sampling.top_p}, a seed for each "
        f"reply, token ids: {options.server_ids}"
    )


def _say_degenerate(kinds: Mapping[str, int], generated: int, examples: Sequence[str]) -> None:
    number = sum(kinds.values())
    if generated:
        shown = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items() if count)
        say(f"degenerate replies: {number:,} of {generated:,} ({number / generated:.1%}){shown and ': '}{shown}")
        for each in examples:
            say(f"  {each}")


def _say_counts(what: str, counts: Mapping[str, int]) -> None:
    shown = ", ".join(f"{reason} {number:,}" for reason, number in counts.items() if number)
    if shown:
        say(f"{what}: {shown}")


def _say_advice(counts: Mapping[str, int]) -> None:
    from niels_gpt.chat.protocol import NOT_STABLE
    from niels_gpt.eagle3.server import OTHER_LENGTH, REPLACED, SPLIT_OFF

    if counts.get(NOT_STABLE):
        say("the chat template rewrites earlier replies when another follows; --form ids writes a row for each reply")
    if counts.get(SPLIT_OFF):
        say("the server splits the reasoning off: start it without a reasoning parser, or let it give token ids")
    if counts.get(OTHER_LENGTH):
        say("the server counts other tokens than a text has: the target chose others, or ran on after the turn's end")
    if counts.get(REPLACED):
        say("replies with U+FFFD: --form ids keeps them if the server gives token ids")


respond = Command(
    "respond",
    callback=_respond,
    params=flags_of(RespondOptions, "read the chats, print the numbers of prompts and tokens, and stop"),
    help="Generate the target's own replies to chats, as input for precompute.\n\n"
    "MODEL and SOURCE are as for precompute. The target's reply to the messages before it replaces each turn of the "
    "assistant; a chat that ends with a question gets a reply too. A chat ends with the first reply that is cut, and "
    "before one that is empty or holds a special token; all of these are counted, and a row marks its cut reply. FILE "
    "appears when everything is done: the same command resumes a run that was killed.\n\n"
    "With --server a server replies, such as vLLM, SGLang or transformers serve; docs/eagle3_server.md has their "
    "commands.\n\n"
    "A reply depends only on the seed and the chat's id (for equal ids also on their order), not on other chats or on "
    "resuming. Another batch size may round differently, and change a reply where two tokens are nearly equal: seldom "
    "in fp32, often in bf16.",
    examples="""niels-gpt eagle3 respond --target-model MODEL --input-data chats.jsonl --output replies.jsonl
niels-gpt eagle3 respond --target-model MODEL --input-data dolly15k --output replies.jsonl --temperature 0.7 --seed 1
niels-gpt eagle3 respond --target-model FOLDER --server URL --model NAME --input-data chats.jsonl --output replies.jsonl
niels-gpt eagle3 precompute --target-model MODEL --input-data replies.jsonl --output-dir DIR""",
    errors=(*ERRORS, RuntimeError),
    level=logging.WARNING,
    kept="; the replies so far stay: resume with the same command",
    unread=1,
)
