"""The input of a target: a source of chats, built-in or the user's own, or files of chats or of tokenized rows.

dolly15k, oasst1, or a name from sources.toml's [sft] or --sft         the chats of its sft cache
a file, a folder or a glob of .jsonl, .json (or .gz, .zst), .parquet   chats in any of the shapes of data/chat_shapes.py
the same, if the first row has the field input_ids                     rows of input_ids and loss_mask, used unchanged
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.chat.protocol import Chat, ChatTokenizer
from niels_gpt.chat.rows import GIVEN_FIELDS, Row, chat_rows, given_rows
from niels_gpt.data import local
from niels_gpt.data.exclude import Exclusion, read_exclusion, remaining
from niels_gpt.data.files.rows import numbered_rows
from niels_gpt.data.files.text import Problem, note
from niels_gpt.data.files.walk import note_links
from niels_gpt.data.sources import SOURCES
from niels_gpt.data.types import ChatSample, source_id
from niels_gpt.recipes import sources
from niels_gpt.recipes.records import cache_root, recorded_recipe
from niels_gpt.recipes.resolve import ResolvedSource, resolve_user_source, resolve_whole
from niels_gpt.recipes.user_sources import UserSource, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import InputError, NotFound
from niels_gpt.storage.remedies import did_you_mean

logger = logging.getLogger(__name__)

CHATS, ROWS = "chats", "rows"
"""The forms of input."""
READING = "any role, with calls of tools"
"""How chats of files reach a target's template. Another reading gives other chats, so a run does not continue it."""
FLAG = "--input-data"
_OF_AN_SFT_CACHE = ("seed", "on_special", "sft_val_frac", "chat_template", "loss_on")  # they decide no chat of a target


def input_facts(settings: Settings, input_data: str, *, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the identity of the input: equal facts mean equal chats or rows.

    Keys: input_data as given; form, "chats" or "rows"; reading, for chats of files; settings that decide the chats;
        exclude, if a file lists excluded chats; and the source's kind, licence, attribution, revision and fingerprint,
        as in an sft cache's meta.json. No time or host, and no path except input_data.

    recorded: facts of an earlier run, which supply the revision of a hub dataset; None: the facts of the committed sft
        cache, if any. Without a recorded revision the hub is asked.
    Raises: FileNotFoundError if no source or file has that name; ValueError for a source of text; ConnectionError;
        CacheError for a source that cannot be resolved.
    """
    origin = _origin(settings, input_data)
    known = recorded or {}
    if not known and origin.user is None:
        known = recorded_recipe(cache_root(settings) / "sft" / origin.source).get("source") or {}
    facts: dict[str, Any] = {
        "input_data": input_data,
        "form": _form(origin),
        "settings": {name: getattr(settings, name) for name in origin.spec.settings if name not in _OF_AN_SFT_CACHE},
        **origin.provenance(known),
    }
    if origin.user is not None and facts["form"] == CHATS:
        facts["reading"] = READING
    return facts if settings.exclude is None else {**facts, "exclude": read_exclusion(settings.exclude).facts}


def input_rows(
    settings: Settings,
    input_data: str,
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    counters: Counter[str],
    vocab_size: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Yield the input's rows in the order of the source, without those that settings.exclude lists.

    settings.on_special "text" counts as "drop", as a target's template has no plain form of its special tokens.

    vocab_size: of the target; None: of the tokenizer.
    facts: from `input_facts`, with the revision to read; None: look them up.
    counters: counts the reasons of chat_rows and given_rows, and of the source's loader, such as unreadable_row,
        missing_field, malformed, unknown_role and excluded.
    Raises: on the first row, the errors of input_facts, chat_rows and given_rows.
    """
    facts = facts or input_facts(settings, input_data)
    origin = _origin(settings, input_data)
    if facts["form"] == ROWS:
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        given = _given(settings, origin, counters)
        yield from given_rows(given, vocab_size=size, seq_length=seq_length, counters=counters)
        return
    if settings.on_special == "text":
        logger.info(
            "%s: chats with a special token are dropped: on_special=text applies to caches of tokens only", FLAG
        )
    yield from chat_rows(
        input_chats(settings, input_data, tokenizer, counters=counters, facts=facts),
        tokenizer,
        seq_length=seq_length,
        counters=counters,
        vocab_size=vocab_size,
        on_special="raise" if settings.on_special == "raise" else "drop",
    )


def input_chats(
    settings: Settings,
    input_data: str,
    tokenizer: ChatTokenizer,
    *,
    counters: Counter[str],
    facts: Mapping[str, Any],
) -> Iterator[Chat]:
    """Yield the input's chats in the order of the source, also chats without a reply. Arguments: see `input_rows`.

    Raises: ValueError for files of rows, which have no chats.
    """
    if facts["form"] == ROWS:
        raise InputError(f"{FLAG} {input_data}: rows of input_ids and loss_mask, expected chats")
    read = sources.chats if tokenizer.mask_by == "sentinels" else sources.template_chats
    yield from (Chat(*chat) for chat in read(settings, _origin(settings, input_data), facts["revision"], counters))


def named_in_input(settings: Settings, facts: Mapping[str, Any], listed: Exclusion, *, raw: bool) -> Iterator[str]:
    """Yield the entries of an --exclude list that name something in an input, which is read for that.

    facts: from `input_facts`. raw: its chats go into a target's template.
    """
    origin = _origin(settings, facts["input_data"])
    if facts["form"] == ROWS:
        rows = _given_samples(settings, origin, Counter())
        return (entry for row in rows for entry in listed.matching(row))
    return sources.named(settings, origin, facts["revision"], listed, raw=raw)


def _origin(settings: Settings, input_data: str) -> ResolvedSource:
    own = user_sources(settings)
    specs = (*SOURCES.values(), *(user.spec for user in own.values()))
    chats = [spec.name for spec in specs if spec.family == "sft"]
    if input_data in chats:
        return resolve_whole(settings, input_data)
    if input_data in own:
        raise InputError(f"{FLAG} {input_data}: a source of text, expected chats: {', '.join(chats)}, or files")
    source = UserSource("sft", input_data, files=input_data, base=Path.cwd(), named_in=FLAG)
    try:
        found = local.open_files(input_data, rows_only=True, follow_links=settings.follow_links)
    except FileNotFoundError as error:
        meant = did_you_mean(input_data, chats) or f" Or name a source: {', '.join(chats)}"
        raise NotFound(f"{FLAG} {input_data}: {error}.{meant}", code="E709") from None
    return resolve_user_source(source, found)


def _form(origin: ResolvedSource) -> str:
    """Return CHATS or ROWS by the first row of each file. Raises: ValueError if files differ."""
    if origin.user is None:
        return CHATS
    forms: dict[str, Path] = {}
    for path in origin.files:
        row = next(iter(numbered_rows(path, columns=GIVEN_FIELDS[:1], unreadable=lambda _: None)), None)
        if row is not None:
            forms.setdefault(CHATS if row[1].get(GIVEN_FIELDS[0]) is None else ROWS, path)
    if len(forms) > 1:
        raise InputError(
            f"{FLAG} {origin.source}: {forms[ROWS]} begins with a row of input_ids, {forms[CHATS]} with a chat. "
            "Expected chats only, or rows of input_ids and loss_mask only"
        )
    return next(iter(forms), CHATS)


def _given(
    settings: Settings, origin: ResolvedSource, counters: Counter[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kept = remaining(_given_samples(settings, origin, counters), settings.exclude, counters)
    return ((source_id(sample), sample.meta["fields"]) for sample in kept)


def _given_samples(settings: Settings, origin: ResolvedSource, counters: Counter[str]) -> Iterator[ChatSample]:
    """Yield each row as a chat without messages: its source id allows excluding it."""
    found = origin.found
    assert found is not None

    note_links(counters, found.links)

    def pass_over(problem: Problem) -> None:
        note(counters, problem.reason, problem, problem.rows)

    for path in origin.files:
        name = found.name_of(path)
        columns = (*GIVEN_FIELDS, "id")
        rows = numbered_rows(
            path,
            counters=counters,
            columns=columns,
            unreadable=pass_over,
            max_document_bytes=settings.max_document_bytes,
        )
        for number, row in rows:
            known = isinstance(row.get("id"), str | int) and not isinstance(row["id"], bool)
            meta = {"path": name, "row": number, "fields": row} | ({"id": str(row["id"])} if known else {})
            yield ChatSample([], origin.source, meta)
