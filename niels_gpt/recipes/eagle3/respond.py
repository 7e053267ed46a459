"""Writes a file of the target's own replies to chats, which is input of an EAGLE-3 cache.

    responder = resolve(options, settings)
    record = respond(responder)

Here CHATS chats are read at a time, chats with prompts of similar length form a batch, and a batch
stays together until its last reply. So a resumed run has the batches, and gives the bytes, of a run without
interruption. With --server each chat goes its own way, and nothing is known of how the server forms batches.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from niels_gpt.recipes.eagle3.options import RespondOptions
from niels_gpt.recipes.eagle3.request import Target
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import InputError, TargetError

if TYPE_CHECKING:
    from niels_gpt.chat.protocol import Chat
    from niels_gpt.eagle3.replies import Answered, Prompt, Reply, ReplyFile, Sampling
    from niels_gpt.eagle3.server import Client
    from niels_gpt.eagle3.speaker import Speaker
    from niels_gpt.work import Progress

    _Answered = list[tuple[int, Answered]]

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
CHATS = 1024
"""Chats read at a time; batches are formed among them."""
_NO_REASONS = ("generated", "degenerate_", "ids_of_", "other_token_count", "prompt_not_compared", "served: ")
"""Begin the counters of other things than reasons."""


@dataclass(frozen=True)
class Responder(Target):
    """The resolved options of a file of replies."""

    options: RespondOptions
    sampling: Sampling
    stop_ids: tuple[int, ...]

    @property
    def record(self) -> dict[str, Any]:
        """Everything that decides the rows."""
        options = self.options
        chosen = {name: getattr(options, name) for name in ("limit", "turns", "form", "batch_size")}
        if options.drop_degenerate:
            chosen["drop_degenerate"] = True
        is_folder = self.target.revision is None  # which may lie elsewhere
        target = {name: value for name, value in asdict(self.target).items() if name != "name" or not is_folder}
        source = {name: value for name, value in self.source.items() if name != "input_data"}
        tokenizer = {name: getattr(self.tokenizer, name) for name in ("sha256", "template_sha256")}
        parts = {"target": target, "tokenizer": tokenizer, "source": source, "run": self.run}
        if options.server is not None:  # its URL is no setting: the same model may move
            parts["server"] = {"model": options.model, "ids": options.server_ids}
            del parts["run"], chosen["batch_size"]
        if self.tokenizer.start is not None:
            parts["document_start"] = self.tokenizer.start.record
        return {**parts, "sampling": asdict(self.sampling), "stop_ids": list(self.stop_ids), **chosen}


@dataclass(frozen=True)
class Trial:
    """What a run would do, as far as is known before the target replies."""

    chats: int
    waiting: int
    """Chats with a first prompt."""
    prompt_tokens: int
    longest_prompt: int
    counts: Counter[str]
    """Chats without one, by reason."""
    dropped: dict[str, int]
    """Rows that the source dropped, by reason."""


def resolve(options: RespondOptions, settings: Settings) -> Responder:
    """Look up target, tokenizer and input. An interrupted run supplies unset options of how the target runs.

    Raises: FileNotFoundError, ConnectionError, ImportError or ValueError if something is missing or unusable;
        TargetError if no reply would end.
    """
    from niels_gpt.eagle3.replies import recorded

    before = (recorded(options.output) or {}).get("settings", {})
    found = Target.named(options, settings, before, hash_weights=options.server is None)
    stop_ids = found["tokenizer"].turn_ends()
    if not stop_ids:
        raise TargetError(
            f"{options.target_model}: its chat template writes no token after a reply, and its tokenizer has no "
            "EOS, so no reply would end. Name a template that has one: --chat-template FILE"
        )
    return Responder(**found, options=options, sampling=options.sampling, stop_ids=stop_ids)


def respond(responder: Responder, *, key: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Write the file of replies, or its missing rows; return its record.

    key: of the server, if it needs one; it is shown and recorded nowhere. progress: called with the tokens of replies,
        the finished chats, and None.
    Raises: CacheError for a file that cannot be resumed (see replies.opened); the errors of load_target, input_chats
        and server.replied; ValueError if no chat has a reply.
    """
    from niels_gpt.eagle3.degenerate import of_replies
    from niels_gpt.eagle3.replies import Finished, ReplyFile, opened

    options = responder.options
    with opened(options.output, responder.record) as file:
        if not isinstance(file, ReplyFile):
            return file
        dropped = Counter[str]()
        client = None if options.server is None else client_of(responder, key)
        what = (responder, file, dropped)
        with closing(_by_target(*what) if client is None else _by_server(*what, client)) as answered:
            for chats in answered:
                file.append([Finished(at, _rows(each, options.form), each.counts, each.examples) for at, each in chats])
                if progress is not None:
                    progress(file.counts["reply_tokens"], len(file.done), None)
        if not file.counts["replies"]:
            counts = (file.counts + dropped).items()
            reasons = ", ".join(f"{number:,} {name}" for name, number in counts if not name.startswith(_NO_REASONS))
            remedy = ". Take --form ids" if file.counts["not_prefix_stable"] else ""
            found = f"not one chat has a reply: {reasons or 'none read'}{remedy}"
            raise InputError(f"{options.input_data}: {found}")
        by = {} if client is None else {"server": {"url": client.url, "reproducible": False}}
        record = file.finish(dropped, **by)
    if (degenerate := of_replies(record["counts"], record.get("degenerate", []))).is_above:
        logger.warning("%s: %s", options.output, degenerate, extra={"code": "W705"})
    return record


def _by_target(responder: Responder, file: ReplyFile, dropped: Counter[str]) -> Generator[_Answered]:
    """Yield batches of chats, with their numbers, answered by the target."""
    from niels_gpt.eagle3.workers import torch_threads

    speaker: Speaker | None = None
    with torch_threads(responder.run["threads"]):
        for batch in _batches(responder, dropped, file.done):
            speaker = speaker or _load(responder)
            _answer(responder, speaker, [answered for _, answered in batch])
            yield batch


def _by_server(responder: Responder, file: ReplyFile, dropped: Counter[str], client: Client) -> Generator[_Answered]:
    """Yield each chat, with its number, once the server has answered all of it."""
    from niels_gpt.eagle3.server import Talk, replied

    options, facts = responder.options, responder.target
    chats = (
        (number, _started(responder, *chat))
        for number, chat in enumerate(_chats(responder, dropped))
        if number not in file.done
    )
    how = (responder.stop_ids, responder.sampling, options.form, facts.max_positions)
    talk, has_replies = Talk(client, responder.tokenizer, *how), file.counts["replies"] > 0
    with closing(replied(chats, talk, at_once=options.concurrency, has_replies=has_replies)) as answered:
        yield from ([chat] for chat in answered)


def client_of(responder: Responder, key: str | None) -> Client:
    """Return the client of --server; nothing is sent. Raises: ValueError for a key that no header can hold."""
    from niels_gpt.eagle3.server import Client, chat_url

    options = responder.options
    assert options.server is not None and options.model is not None
    url, ids = chat_url(options.server), options.server_ids
    return Client(url, options.model, ids=ids, key=key, timeout_s=options.timeout)


def tried(responder: Responder) -> Trial:
    """Read the chats and tokenize their first prompts, without the target. Raises: the errors of input_chats."""
    dropped = Counter[str]()
    chats, counts, lengths = 0, Counter[str](), list[int]()
    for window in _cut(_chats(responder, dropped), CHATS):
        answered, prompts = _first_prompts(responder, window)
        chats += len(window)
        lengths += [length for length, each in zip(prompts, answered, strict=True) if each.ended_by is None]
        counts.update(each.ended_by for each in answered if each.ended_by is not None)
    return Trial(chats, len(lengths), sum(lengths), max(lengths, default=0), counts, dict(dropped))


def _chats(responder: Responder, dropped: Counter[str]) -> Iterator[tuple[Chat, int]]:
    """Yield each chat, and how many chats of the same name came before it."""
    from niels_gpt.recipes.eagle3.input import input_chats

    options = responder.options
    found = input_chats(
        responder.settings, options.input_data, responder.tokenizer, counters=dropped, facts=responder.source
    )
    seen = Counter[str]()
    for chat in islice(found, options.limit):
        yield chat, seen[chat.name]
        seen[chat.name] += 1


def _first_prompts(responder: Responder, chats: Sequence[tuple[Chat, int]]) -> tuple[list[Answered], list[int]]:
    """Return the chats without replies, and the tokens of their first prompts; 0 for an ended chat."""
    from niels_gpt.eagle3.replies import next_prompts

    answered = [_started(responder, *chat) for chat in chats]
    asked = next_prompts(answered, responder.tokenizer, responder.options.form)
    lengths = {id(each): len(ids) for each, _, ids in asked}
    return answered, [lengths.get(id(each), 0) for each in answered]


def _started(responder: Responder, chat: Chat, before: int) -> Answered:
    from niels_gpt.eagle3.replies import started

    options = responder.options
    return started(chat, options.turns, before, drop_degenerate=options.drop_degenerate)


def _batches(responder: Responder, dropped: Counter[str], done: set[int]) -> Iterator[list[tuple[int, Answered]]]:
    """Yield batches of unfinished chats with their numbers."""
    first = 0
    for window in _cut(_chats(responder, dropped), CHATS):
        numbers = range(first, first + len(window))
        if not done.issuperset(numbers):
            answered, lengths = _first_prompts(responder, window)
            order = sorted(range(len(window)), key=lengths.__getitem__)
            for places in _cut(order, responder.options.batch_size):
                if not done.issuperset(first + place for place in places):
                    yield [(first + place, answered[place]) for place in places]
        first += len(window)


def _answer(responder: Responder, speaker: Speaker, chats: list[Answered]) -> None:
    from niels_gpt.eagle3.replies import reply_to_all

    def generate(prompts: Sequence[Prompt]) -> list[Reply]:
        return speaker.replies(prompts, responder.sampling)

    reply_to_all(chats, responder.tokenizer, generate, responder.options.form)


def _rows(answered: Answered, form: str) -> list[dict[str, Any]]:
    if not answered.replies:
        return []
    return answered.rows if form == "ids" else [answered.row()]


def _load(responder: Responder) -> Speaker:
    import torch

    from niels_gpt.eagle3.speaker import Speaker
    from niels_gpt.recipes.eagle3.prepare import open_target

    options, run = responder.options, responder.run
    model = open_target(
        torch.device(run["device"]),
        name=options.target_model,
        revision=responder.target.revision,
        compute_dtype=run["compute_dtype"],
        attention=options.attention,
        placement=responder.placement,
    )
    tokenizer = responder.tokenizer
    return Speaker(model, responder.stop_ids, tokenizer.pad_id, tokenizer.vocab_size, responder.target.max_positions)


def _cut(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield the items in lists of `size`; the last one may be shorter."""
    stream = iter(items)
    while part := list(islice(stream, size)):
        yield part
