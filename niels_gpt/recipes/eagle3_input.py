"""What a target is run over: a source of chats of the project or of one's own, or files of chats or of rows with ids.

dolly15k, oasst1, or a name from sources.toml's [sft] or --sft      as its sft cache has it
a file, a folder or a glob of .jsonl, .json, .parquet (or .gz)      chats in any of the shapes of data/chat_rows.py
the same, where the first row has the field input_ids               rows of input_ids and loss_mask, taken as they are
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.data import local, places
from niels_gpt.data.credits import Credit
from niels_gpt.data.exclude import read_exclusion, remaining
from niels_gpt.data.text_files import Problem
from niels_gpt.data.types import ChatSample, source_id
from niels_gpt.eagle3.chats import GIVEN_FIELDS, ChatTokenizer, Row, chat_rows, given_rows
from niels_gpt.recipes import sources
from niels_gpt.recipes.origins import Origin, origin_of, own_origin
from niels_gpt.recipes.own import UNSTATED, OwnSource, own_sources
from niels_gpt.recipes.pretrain import OWN
from niels_gpt.recipes.produce import cache_root, recorded_recipe
from niels_gpt.recipes.sft import READS
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)

CHATS, ROWS = "chats", "rows"
"""The forms of input."""
FLAG = "--input-data"
_OF_AN_SFT_CACHE = ("seed", "on_special", "sft_val_frac")  # settings that decide its split, and none of the chats


def input_facts(settings: Settings, input_data: str, *, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what identifies the input: equal facts, equal chats or rows.

    Keys: input_data as given; form, "chats" or "rows"; settings, those that decide what is read; exclude, where there
    is a file of what is left out; and of the source kind, licence, attribution, revision and fingerprint, as an sft
    cache's meta.json has them. No time, host or path but input_data itself.
    recorded: facts of an earlier run, whose revision of a hub dataset counts; None: those of the committed sft cache,
        if there is one. The hub is asked where nothing is recorded.
    Raises: FileNotFoundError where there is nothing of that name; ValueError for a source of text; ConnectionError;
        CacheError as origin_of.
    """
    origin = _origin(settings, input_data)
    known = recorded or {}
    if not known and origin.own is None:
        known = recorded_recipe(cache_root(settings) / "sft" / origin.source).get("source") or {}
    reads = READS[OWN if origin.own else origin.source]
    facts: dict[str, Any] = {
        "input_data": input_data,
        "form": _form(origin),
        "settings": {name: getattr(settings, name) for name in reads if name not in _OF_AN_SFT_CACHE},
        **origin.facts(known),
    }
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
    """Yield the input's rows in the order of its source, without what settings.exclude lists.

    vocab_size: of the target; None: of the tokenizer.
    facts: of `input_facts`, whose revision is read; None: they are looked up.
    counters: as chat_rows and given_rows have them, and before these the reasons of the source's loader, such as
        unreadable_row, missing_field, malformed, unknown_role and excluded.
    Raises: as input_facts, chat_rows and given_rows, when the first row is asked for.
    """
    facts = facts or input_facts(settings, input_data)
    origin = _origin(settings, input_data)
    if facts["form"] == ROWS:
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        given = _given(settings, origin, counters)
        yield from given_rows(given, vocab_size=size, seq_length=seq_length, counters=counters)
        return
    yield from chat_rows(
        sources.chats(settings, origin, facts["revision"], counters),
        tokenizer,
        seq_length=seq_length,
        counters=counters,
        vocab_size=vocab_size,
        on_special=settings.on_special,
    )


def _origin(settings: Settings, input_data: str) -> Origin:
    own = own_sources(settings)
    chats = [*(name for name in READS if name != OWN), *(name for name, each in own.items() if each.family == "sft")]
    if input_data in chats:
        return origin_of(settings, input_data)
    if input_data in own:
        raise ValueError(f"{FLAG} {input_data}: a source of text, expected chats: {', '.join(chats)}, or files")
    source = OwnSource("sft", input_data, files=input_data, base=Path.cwd(), said_in=FLAG)
    try:
        found = local.find(input_data, suffixes=local.CHAT_SUFFIXES, follow_links=settings.follow_links)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{FLAG} {input_data}: {error}. Or name a source: {', '.join(chats)}") from None
    return own_origin(input_data, Credit(UNSTATED, UNSTATED), found, source)


def _form(origin: Origin) -> str:
    """Tell chats from rows by the first row of each file. Raises: ValueError where files differ."""
    if origin.own is None:
        return CHATS
    forms: dict[str, Path] = {}
    for path in origin.files:
        row = next(iter(places.numbered_rows(path, columns=GIVEN_FIELDS[:1], unreadable=lambda _: None)), None)
        if row is not None:
            forms.setdefault(CHATS if row[1].get(GIVEN_FIELDS[0]) is None else ROWS, path)
    if len(forms) > 1:
        raise ValueError(
            f"{FLAG} {origin.source}: the first row of {forms[ROWS]} has input_ids, and that of {forms[CHATS]} has "
            "none. Expected chats only, or rows of input_ids and loss_mask only"
        )
    return next(iter(forms), CHATS)


def _given(settings: Settings, origin: Origin, counters: Counter[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kept = remaining(_given_samples(settings, origin, counters), settings.exclude, counters)
    return ((source_id(sample), sample.meta["fields"]) for sample in kept)


def _given_samples(settings: Settings, origin: Origin, counters: Counter[str]) -> Iterator[ChatSample]:
    """Yield each row as a chat without messages, so that it has a source id and can be excluded by it."""
    assert origin.root is not None
    found = local.LocalFiles(origin.root, origin.files, origin.other_files)

    places.note_links(counters, origin.links)

    def pass_over(problem: Problem) -> None:
        places.note(counters, problem.reason, problem, problem.rows)

    for path in origin.files:
        name = found.name_of(path)
        columns = (*GIVEN_FIELDS, "id")
        rows = places.numbered_rows(
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
