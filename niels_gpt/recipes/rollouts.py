"""Recorded rollouts, or message trees + tokenizer -> a committed cache: the recipes of rollouts/NAME and trees/NAME.

A message of a tree is encoded once, as in an sft cache: its role's sentinel, its content, the end-of-turn sentinel. So
threads that share messages share their ids, whatever a tokenizer would merge across messages; and the tokens after an
assistant's sentinel, up to and including the end of turn, carry loss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat_template import ROLE_TO_NAME
from niels_gpt.data.files.part import GROUPS_RULE
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import LoadRequest, Part
from niels_gpt.data.types import ChatSample, SequenceGroup, source_id
from niels_gpt.encoding import TextEncoder, TextError
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.recipes import sources
from niels_gpt.recipes.family import Family, Job
from niels_gpt.recipes.request import Request
from niels_gpt.recipes.tokenizer import usable_tokenizer
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)


def recorded_groups(groups: Iterable[SequenceGroup]) -> Iterator[RolloutGroup]:
    """Yield recorded groups in the builder's form, by their names in the source."""
    return (RolloutGroup(source_id(group), group.samples) for group in groups)


def tree_groups(threads: Iterable[ChatSample], encoder: TextEncoder, counters: Counter[str]) -> Iterator[RolloutGroup]:
    """Yield the threads of each tree as a group; threads of one tree come one after another.

    counters: receives threads dropped for a special token in a message, and repairs and odd signs of messages.
    Raises: ValueError for a text with a special token where encoder.on_special is "raise"; TextError for a text that
        cannot be encoded.
    """
    for tree, members in groupby(threads, lambda thread: str(thread.meta["message_tree_id"])):
        yield RolloutGroup(tree, list(_encoded(list(members), encoder, counters)))


def _encoded(threads: Sequence[ChatSample], encoder: TextEncoder, counters: Counter[str]) -> Iterator[Rollout]:
    """Yield the threads of one tree. Each message is encoded once, so that the threads share ids."""
    special = encoder.tokenizer.special_token_ids()
    messages = {
        name: message
        for thread in threads
        for name, message in zip(thread.meta["message_ids"], thread.messages, strict=True)
    }
    names = list(messages)
    try:
        encoded = encoder.encode([message.content for message in messages.values()])
    except TextError as error:
        raise error.named(error.number, f"message {names[error.number]}") from error
    ids: dict[str, NDArray[Any]] = {}
    parts = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    for (name, message), part in zip(messages.items(), parts, strict=True):
        ids[name] = np.concatenate([[special[ROLE_TO_NAME[message.role]]], part, [special["eot"]]]).astype(np.int64)
    dropped = {names[at]: encoder.accept(problem, names[at]) for at, problem in encoded.problems.items()}
    notes = {names[at]: found for at, found in encoded.notes.items()}
    for thread in threads:
        path = thread.meta["message_ids"]
        reason = next((dropped[name] for name in path if name in dropped), None)
        if reason is not None:
            counters[reason] += 1
            continue
        for name in path:
            counters.update(notes.pop(name, ()))  # a message counts once, with the first thread that it is in
        masks = [
            (np.arange(len(ids[name])) > 0) & (message.role == "assistant")
            for name, message in zip(path, thread.messages, strict=True)
        ]
        yield Rollout(np.concatenate([ids[name] for name in path]), loss_mask=np.concatenate(masks))


class Rollouts(Family):
    """Recorded rollouts -> rollouts/NAME."""

    name = kind = "rollouts"
    title, holds = "Rollout cache", "rollouts"
    partition_rule = GROUPS_RULE
    # id_copies is 0: recorded ids are decimals of any length, so their file sets no bound.

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the groups of all rows."""
        return [(None, found.rollouts(**how))]

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """Build rollouts/NAME. progress gets groups, tokens of their sequences, and None."""
        from niels_gpt.prefix_tree.rollouts.build import build_rollouts

        return build_rollouts(
            recorded_groups(sources.sequences(*request.reading(job.source), job.partition)),
            job.path,
            val_frac=request.settings.rollouts_val_frac,
            vocab_size=request.settings.rollouts_vocab_size or None,
            source=job.source,
            seed=request.settings.seed,
            partition=job.partition,
            plan=job.plan,
            committed=job.committed,
            progress=job.progress,
        )

    def look_back(self, settings: Settings, path: Path, meta: Mapping[str, Any]) -> None:
        """Log a warning where the cache has an id that the tokenizer of the settings does not have."""
        largest, size = meta.get("largest_id"), None
        try:
            tokenizer = None if settings.tokenizer is None else usable_tokenizer(settings)
            size = None if tokenizer is None else tokenizer.vocab_size
        except (OSError, ValueError) as error:  # the cache needs none
            message = "%s: its ids are not compared with the tokenizer: %s"
            logger.warning(message, path, error, extra={"code": "W314"})
        if type(largest) is int and size is not None and largest >= size:
            logger.warning(
                "%s: the largest id is %s, and %s has %s ids (ids_beyond_tokenizer). Were they sampled with another "
                "one? --rollouts-vocab-size %d drops such samples",
                path,
                f"{largest:,}",
                settings.tokenizer,
                f"{size:,}",
                size,
                extra={"code": "W314"},
            )


class TreeCaches(Family):
    """Message trees -> trees/NAME. They are built whole: a thread needs the messages of its tree."""

    name, kind = "trees", "rollouts"
    of_users = False
    takes_tokenizer = has_text = True
    id_copies = 1

    def needs_sentinels(self, settings: Settings) -> bool:
        """Return whether a message is marked by sentinels: always."""
        return True

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """Build trees/NAME. progress gets groups, tokens of their sequences, and None."""
        from niels_gpt.prefix_tree.rollouts.build import build_rollouts
        from niels_gpt.tokenizers.engine import open_engine

        settings, tokenizer, reading = request.settings, request.tokenizer, request.reading(job.source)
        assert tokenizer is not None
        engine = open_engine(tokenizer, settings.engine)
        encoder = TextEncoder(tokenizer, on_special=settings.on_special, engine=engine)
        return build_rollouts(
            tree_groups(sources.sequences(*reading), encoder, reading[3]),
            job.path,
            val_frac=settings.sft_val_frac,
            tokenizer=tokenizer,
            source=job.source,
            seed=settings.seed,
            committed=job.committed,
            progress=job.progress,
        )


ROLLOUTS, TREE_CACHES = Rollouts(), TreeCaches()
