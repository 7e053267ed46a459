"""Builds an sft cache: chats -> train_tokens.bin, train_idx.npy, val_tokens.bin, val_idx.npy, source ids, meta.json.

The split needs the number of examples, so all ids first go to a buffer file and are then copied to their splits. Memory
holds a few numbers for each example, never its text. Decides which chats are dropped, and counts them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from niels_gpt.builders import pipeline
from niels_gpt.builders.build import CHECKPOINT_SECONDS, Build
from niels_gpt.builders.losses import Losses, count_blank, loss_keys
from niels_gpt.builders.meta_keys import Source, build_identity, describe_and_commit, vocabulary_of
from niels_gpt.builders.resume import NoTextError, open_build, seek
from niels_gpt.builders.source import Batch, ItemKind, digest_list, first_number, item_digest
from niels_gpt.builders.split import SPLITS, num_duplicates
from niels_gpt.builders.writer import OFFSET_DTYPE, npy_header
from niels_gpt.chat_template import ROLE_TO_NAME, UNKNOWN_ROLE, count_role
from niels_gpt.encoding import EncodedTexts, TextEncoder
from niels_gpt.progress import Progress
from niels_gpt.storage.fileio import id_lines
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import Ids, Tokenizer

SPLIT_RULE = (
    "by example: of n distinct kept examples (roles and contents) in order of first appearance, the first "
    "max(1, int(n * val_frac)) of torch.randperm(n) seeded with seed go to val (none where n = 1 or val_frac = 0); "
    "equal ones go with them; both splits keep the order of the stream"
)
_FILES = dict.fromkeys(("tokens.bin", "examples.bin", "ids.txt"))
"""The files that a build appends to: the tokens of all kept examples, the `_COLUMNS` of each, their source ids."""
_COLUMNS = 4
"""Of an example: tokens, supervised tokens, utf-8 bytes, digest of roles and contents."""
_JOINT = "\0"  # after each role
_COPIED = 4096  # examples at once, from the buffer to a split


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
    with open_build(out_dir, identity, _FILES, checkpoint_seconds, source) as build:
        buffer = _Buffer(build, encoder, progress)
        seek(build, source)
        buffer.fill(_numbered(examples, source.position), source, num_threads, executor)
        if not buffer.kept:
            lost = {**buffer.counts, **source.counters}
            raise NoTextError(
                f"{os.fspath(out_dir)}: no example is left of {buffer.counts['examples_read']} read: {lost}"
            )
        build.checkpoint(buffer.state(), ended=True)
        meta = describe_and_commit(
            build,
            out_dir,
            lambda: buffer.split(val_frac, seed),
            committed,
            vocabulary=vocabulary,
            source=source,
            counters=source.counters,
            seed=seed,
            **settings,
        )
    buffer.losses.warn(out_dir, meta)
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


class _Buffer:
    """The ids of all kept examples in stream order, four numbers for each, and the counts of what was read."""

    def __init__(self, build: Build, encoder: TextEncoder, progress: Progress | None) -> None:
        self._build, self._encoder, self._progress = build, encoder, progress
        self._special = encoder.tokenizer.special_token_ids()
        self._role_ids = {role: self._special[name] for role, name in ROLE_TO_NAME.items()}
        state = build.restored({"counts": {}, "noticed": {}, "kept": 0, "tokens": 0})
        self.counts, self.warnings = Counter(state["counts"]), Counter(state["noticed"])
        self.kept, self._tokens = int(state["kept"]), int(state["tokens"])
        self.losses = Losses(encoder, self.warnings)
        build.expect("tokens.bin", self._tokens * encoder.dtype.itemsize)
        build.expect("examples.bin", self.kept * _COLUMNS * OFFSET_DTYPE.itemsize)

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        return {"counts": self.counts, "noticed": self.warnings, "kept": self.kept, "tokens": self._tokens}

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
                self._build.checkpoint(self.state())
                self._report(self.counts["examples_read"])

    def _report(self, examples: int) -> None:
        if self._progress is not None:
            self._progress(examples, self._tokens, None)

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
                if not all(map(str.strip, example.texts)):
                    count_blank(self.warnings, example.roles.split(_JOINT), example.texts)
            else:
                self.counts[problem] += 1
                if problem == UNKNOWN_ROLE:
                    roles = example.roles.split(_JOINT)
                    count_role(self.warnings, next((role for role in roles if role not in ROLE_TO_NAME), ""))
                is_kept[first:last] = False
            first = last
        self.counts["examples_read"] += len(batch.items)
        for text, notes in encoded.notes.items():
            if is_kept[text]:
                self.warnings.update(notes)
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
        rows = np.stack([*(np.add.reduceat(column, begins) for column in columns), digests], axis=1)
        files = self._build.files
        files["tokens.bin"].write(tokens)
        files["examples.bin"].write(rows.astype(OFFSET_DTYPE))
        files["ids.txt"].write(id_lines(example.name for example in examples))
        self.kept += len(examples)
        self._tokens += len(tokens)

    def _refused(self, encoded: EncodedTexts, texts: range, name: str) -> str | None:
        problems = (self._encoder.accept(encoded.problems.get(text), name) for text in texts)
        return next(filter(None, problems), None)

    def split(self, val_frac: float, seed: int) -> dict[str, Any]:
        """Copy the buffer to both splits; returns the keys of meta.json for their files and the counts."""
        build = self._build
        rows = np.fromfile(build.folder / "examples.bin", dtype=OFFSET_DTYPE).reshape(-1, _COLUMNS)
        in_val = _val_rows(rows[:, 3], val_frac, seed)
        chosen = {"train": ~in_val, "val": in_val}
        files = {
            split: build.add(f"{split}_tokens.bin", self._tokens_of(rows[:, 0], chosen[split])) for split in SPLITS
        }
        index = {split: build.add(f"{split}_idx.npy", _offsets(rows[chosen[split], 0])) for split in SPLITS}
        ids = {split: build.add(f"index/{split}_ids.txt", self._ids_of(chosen[split])) for split in SPLITS}
        sums = {split: rows[chosen[split], :3].sum(axis=0).tolist() for split in SPLITS}
        entries = {split: int(chosen[split].sum()) for split in SPLITS}
        shards = {split: [{**files[split], "tokens": sums[split][0]}] for split in SPLITS}
        index, ids = ({key: {**records[key], "entries": entries[key]} for key in SPLITS} for records in (index, ids))
        return {
            "shards": shards,
            "index": index,
            "ids": ids,
            "checksums": build.add_checksums(shards, index, ids),
            "totals": {
                **{f"{split}_examples": entries[split] for split in SPLITS},
                **{f"{split}_tokens": sums[split][0] for split in SPLITS},
            },
            "supervised_tokens": {split: sums[split][1] for split in SPLITS},
            "utf8_bytes": {split: sums[split][2] for split in SPLITS},
            "examples_read": self.counts["examples_read"],
            "dropped": {key: self.counts[key] for key in sorted(self.counts) if key != "examples_read"},
            "duplicates": {split: num_duplicates(rows[chosen[split], 3]) for split in SPLITS},
            **loss_keys(self.warnings),
        }

    def _tokens_of(self, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Iterator[Ids]:
        with open(self._build.folder / "tokens.bin", "rb") as file:
            for start in range(0, len(lengths), _COPIED):
                some = lengths[start : start + _COPIED]
                ids = np.fromfile(file, dtype=self._encoder.dtype, count=int(some.sum()))
                yield ids[np.repeat(chosen[start : start + _COPIED], some)]

    def _ids_of(self, chosen: NDArray[np.bool_]) -> Iterator[bytes]:
        with open(self._build.folder / "ids.txt", "rb") as file:
            for start in range(0, len(chosen), _COPIED):
                lines = list(islice(file, _COPIED))
                yield b"".join(
                    line for line, wanted in zip(lines, chosen[start : start + _COPIED], strict=True) if wanted
                )


def _val_rows(digests: NDArray[np.int64], val_frac: float, seed: int) -> NDArray[np.bool_]:
    """Return bool [examples], true for val: a permutation of the distinct digests, by first appearance, decides."""
    import torch

    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    count = len(first)
    num_val = max(1, int(count * val_frac)) if count > 1 and val_frac > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    in_val = np.zeros(count, dtype=np.bool_)
    in_val[order[:num_val].numpy()] = True
    appearance = np.empty(count, dtype=np.int64)
    appearance[np.argsort(first)] = np.arange(count)
    return in_val[appearance[group]]


def _offsets(lengths: NDArray[np.int64]) -> Iterator[Any]:
    yield npy_header(len(lengths))
    yield (np.cumsum(lengths) - lengths).astype(OFFSET_DTYPE)
