"""What the builder of rollout caches reads: recorded groups, and the threads of trees as token ids by message.

A message of a tree is encoded once, as in an sft cache: its role's sentinel, its content, the end-of-turn sentinel. So
threads that share messages share their ids, whatever a tokenizer would merge across messages; and the tokens after an
assistant's sentinel, up to and including the end of turn, carry loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat_template import ROLE_TO_NAME
from niels_gpt.data.types import ChatSample, SequenceGroup, source_id
from niels_gpt.encoding import TextEncoder, TextError
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup


def recorded_groups(groups: Iterable[SequenceGroup]) -> Iterator[RolloutGroup]:
    """Yield recorded groups in the builder's form."""
    for group in groups:
        samples = [
            Rollout(each.ids, each.prompt_length, each.loss_mask, each.logprobs, each.advantage, each.reward)
            for each in group.samples
        ]
        yield RolloutGroup(source_id(group), samples)


def tree_groups(threads: Iterable[ChatSample], encoder: TextEncoder, counters: Counter[str]) -> Iterator[RolloutGroup]:
    """Yield the threads of each tree as a group; threads of one tree come one after another.

    counters: count each thread that is dropped for a special token in one of its messages, and what is repaired or odd
        in a message.
    Raises: ValueError for a text with a special token where encoder.on_special is "raise"; TextError for a text that
        cannot be encoded.
    """
    for tree, members in groupby(threads, lambda thread: str(thread.meta["message_tree_id"])):
        yield RolloutGroup(tree, list(_encoded(list(members), encoder, counters)))


def _encoded(threads: Sequence[ChatSample], encoder: TextEncoder, counters: Counter[str]) -> Iterator[Rollout]:
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
