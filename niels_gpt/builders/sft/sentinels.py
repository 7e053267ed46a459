"""Builds an sft cache by the project's own template. Decides which chats are dropped, and counts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from niels_gpt.builders import pipeline
from niels_gpt.builders.build import CHECKPOINT_SECONDS, Build
from niels_gpt.builders.losses import Losses
from niels_gpt.builders.meta_keys import Source, build_identity, describe_and_commit, vocabulary_of
from niels_gpt.builders.resume import NoTextError, open_build, seek
from niels_gpt.builders.sft.examples import FILES, SPLIT_RULE, ExampleBuffer
from niels_gpt.builders.source import Batch, ItemKind, digest_list, first_number, item_digest
from niels_gpt.builders.split import TextSplit, chat_text
from niels_gpt.cache.formats import OFFSET_DTYPE
from niels_gpt.chat_template import ROLE_TO_NAME, UNKNOWN_ROLE, count_names
from niels_gpt.encoding import EncodedTexts, TextEncoder
from niels_gpt.progress import Progress
from niels_gpt.signals import ODD_TEXTS
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import Tokenizer

_JOINT = "\0"  # after each role


class Example(NamedTuple):
    """One chat in the builder's form."""

    name: str
    """Its id in the source."""
    problem: str | None
    """The counter under which it is dropped for its form; None if the form is good."""
    roles: str
    """Of its messages, joined; of a dropped chat, all of its strings."""
    texts: list[str]
    """Of its messages; [] for a dropped chat."""


def build_sft(
    examples: Iterable[Sequence[Mapping[str, Any]] | tuple[str | None, Sequence[Mapping[str, Any]]]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    val_frac: float,
    seed: int,
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    engine: str = "auto",
    source: Source | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta. A killed build resumes.

    examples: lists of {"role": system|user|assistant, "content": text}, or pairs (id, list); the id of an example
        without one is its number in the stream. An example with a special token in its text, an unknown role, a content
        that is no text, or no assistant turn is dropped and counted in meta `dropped`.
    The other arguments are those of `build_pretrain`; progress does not know the tokens to expect.
    Raises: ValueError for bad arguments and if no example is left; CacheError and RuntimeError as `build_pretrain`.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    source = source or Source()
    encoder = TextEncoder(tokenizer, on_special=on_special, engine=open_engine(tokenizer, engine, seed=seed))
    settings: dict[str, Any] = {"kind": "sft", "built": True, "val_frac": val_frac, "on_special": on_special}
    settings["split_rule"] = SPLIT_RULE
    vocabulary = vocabulary_of(tokenizer)
    identity = build_identity(source, tokenizer, seed=seed, **settings)
    with open_build(out_dir, identity, FILES, checkpoint_seconds, source) as build:
        chats = _Chats(build, encoder, TextSplit(Fraction(val_frac), seed), progress)
        buffer = chats.buffer
        seek(build, source)
        chats.fill(_numbered(examples, source.position), source, num_threads, executor)
        if not buffer.kept:
            lost = {**buffer.counts, **source.counters}
            raise NoTextError(
                f"{os.fspath(out_dir)}: no example is left of {buffer.counts['examples_read']} read: {lost}"
            )
        build.checkpoint(buffer.state(), ended=True)
        meta = describe_and_commit(
            build,
            out_dir,
            buffer.split,
            committed,
            vocabulary=vocabulary,
            source=source,
            counters=source.counters,
            seed=seed,
            **settings,
        )
    chats.losses.warn(out_dir, meta)
    return meta


def _numbered(examples: Iterable[Any], position: dict[str, int] | None) -> Iterator[Example]:
    for number, example in enumerate(examples, first_number(position)):
        name, messages = None, example
        if isinstance(example, tuple) and len(example) == 2 and not isinstance(example[0], Mapping):
            name, messages = example
        yield _example(str(number) if name is None else name, messages)


def _example(name: str, messages: Any) -> Example:
    """Return a chat in the builder's form; in one pass, because most chats have two messages."""
    joined, texts = "", []
    if not isinstance(messages, (list, tuple, Sequence)):
        return Example(name, "malformed", type(messages).__name__, [])
    for message in messages:
        known = type(message) is dict or isinstance(message, Mapping)
        role, text = (message.get("role"), message.get("content")) if known else (None, None)
        if not isinstance(role, str) or not isinstance(text, str):
            return Example(name, "malformed", _strings(messages), [])
        joined += role + _JOINT
        texts.append(text)
    problem = _problem(joined) if joined.count(_JOINT) == len(texts) else UNKNOWN_ROLE
    return (
        Example(name, problem, joined, texts)
        if problem is None
        else Example(name, problem, joined + _JOINT.join(texts), [])
    )


def _strings(messages: Iterable[Any]) -> str:
    """Return the strings in a malformed chat: the repr of other values may differ between processes."""
    values = (value for message in messages if isinstance(message, Mapping) for value in message.values())
    return _JOINT.join(value for value in values if isinstance(value, str))


@lru_cache(maxsize=4096)
def _problem(roles: str) -> str | None:
    each = roles.split(_JOINT)[:-1]
    if not ROLE_TO_NAME.keys() >= set(each):
        return UNKNOWN_ROLE
    return None if "assistant" in each else "no_assistant_turn"


_EXAMPLES = ItemKind[Example](
    texts=lambda example: cast(list[bytes | str], example.texts),
    label=lambda example: f"{example.name}{_JOINT}{example.roles}",
    name=lambda example: example.name,
)


class _Chats:
    """Encodes chats, and appends those that are kept to the buffer."""

    def __init__(self, build: Build, encoder: TextEncoder, rule: TextSplit, progress: Progress | None) -> None:
        self._build, self._encoder, self._progress = build, encoder, progress
        self._special = encoder.tokenizer.special_token_ids()
        self._role_ids = {role: self._special[name] for role, name in ROLE_TO_NAME.items()}
        self.buffer = ExampleBuffer(build, encoder.dtype, rule)
        self.counts, self.warnings = self.buffer.counts, self.buffer.warnings
        self.losses = Losses(encoder, self.warnings)

    def fill(self, examples: Iterable[Example], source: Source, num_threads: int, executor: Executor | None) -> None:
        """Read all examples and append those that are kept."""
        with pipeline.encoded(
            self._build,
            examples,
            source.counters,
            self._encoder,
            _EXAMPLES,
            exhausted=True,
            num_threads=num_threads,
            executor=executor,
            report=self._report,
        ) as batches:
            for batch, encoded in batches:
                self._build.record_consumed(self._add(batch, encoded), batch.chunk)
                self._build.checkpoint(self.buffer.state())
                self._report(self.counts["examples_read"])

    def _report(self, examples: int) -> None:
        if self._progress is not None:
            self._progress(examples, self.buffer.tokens, None)

    def _add(self, batch: Batch[Example], encoded: EncodedTexts) -> list[bytes]:
        """Append the examples of a batch that are kept; returns the digests of all."""
        digests: list[bytes] = []
        kept: list[Example] = []
        contents: list[bytes] = []
        firsts: list[int] = []
        is_kept = np.ones(len(encoded.lengths), dtype=np.bool_)
        first, text_digests = 0, digest_list(encoded.digests)
        for example in batch.items:
            last = first + len(example.texts)
            digests.append(item_digest(_EXAMPLES.label(example), text_digests[first:last]))
            problem = example.problem
            if problem is None and encoded.problems:
                problem = self._refused(encoded, range(first, last), example.name)
            if problem is None:
                kept.append(example)
                contents.append(item_digest(example.roles, text_digests[first:last]))
                firsts.append(first)
                notes = [
                    (note, text)
                    for number, text in enumerate(example.texts, first)
                    for note in encoded.notes.get(number, ())
                ]
                self.warnings.update(note for note, _ in notes if note not in ODD_TEXTS)
                odd = {note: text for note, text in notes if note in ODD_TEXTS}
                self.buffer.note(example.name, example.roles.split(_JOINT)[:-1], example.texts, odd)
            else:
                self.counts[problem] += 1
                if problem == UNKNOWN_ROLE:
                    roles = example.roles.split(_JOINT)
                    unknown = next((role for role in roles if role not in ROLE_TO_NAME), "")
                    count_names(self.warnings, UNKNOWN_ROLE, [unknown])
                is_kept[first:last] = False
            first = last
        self.counts["examples_read"] += len(batch.items)
        if kept:
            self.losses.look(batch.payload, encoded, np.flatnonzero(is_kept))
            self._write(kept, contents, firsts, is_kept, encoded)
        return digests

    def _write(
        self,
        examples: list[Example],
        contents: list[bytes],
        firsts: list[int],
        is_kept: NDArray[np.bool_],
        encoded: EncodedTexts,
    ) -> None:
        """Append examples; each text gets its role's sentinel before it and an end-of-text after it.

        contents: digest of roles and contents of each. firsts: number of the first text of each. is_kept: bool [texts]
        of the batch.
        """
        lengths = encoded.lengths[is_kept]
        ids = encoded.ids if is_kept.all() else encoded.ids[np.repeat(is_kept, encoded.lengths)]
        ends = np.cumsum(lengths + 2)
        roles = "".join(example.roles for example in examples).split(_JOINT)[:-1]
        tokens = np.full(int(ends[-1]), self._special["eot"], dtype=self._encoder.dtype)
        is_text = np.ones(len(tokens), dtype=np.bool_)
        is_text[ends - 1] = is_text[ends - lengths - 2] = False
        tokens[is_text] = ids
        tokens[ends - lengths - 2] = [self._role_ids[role] for role in roles]
        is_target = np.array([role == "assistant" for role in roles])
        begins = (np.cumsum(is_kept) - 1)[firsts]
        columns = (lengths + 2, np.where(is_target, lengths + 1, 0), encoded.utf8_bytes[is_kept])
        digests = np.frombuffer(b"".join(contents), dtype=OFFSET_DTYPE)
        numbers = np.stack([*(np.add.reduceat(column, begins) for column in columns), digests], axis=1)
        turns = (list(zip(each.roles.split(_JOINT), each.texts, strict=False)) for each in examples)
        self.buffer.write(tokens, numbers, (example.name for example in examples), map(chat_text, turns))

    def _refused(self, encoded: EncodedTexts, texts: range, name: str) -> str | None:
        problems = (self._encoder.accept(encoded.problems.get(text), name) for text in texts)
        return next(filter(None, problems), None)
