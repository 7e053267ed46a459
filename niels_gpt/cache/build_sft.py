"""Build an sft cache by the project's own template: chats to one token file per split, offsets, source ids, meta.json.

`Examples` writes sft caches of every template (other templates: build_templated.py). The module decides which chats are
dropped, and turns roles into sentinels, from which readers find the tokens that carry loss. Memory holds one batch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import OFFSET_DTYPE, SPLITS
from niels_gpt.chat_template import ROLE_TO_NAME, UNKNOWN_ROLE, count_names
from niels_gpt.documents import Partition
from niels_gpt.encoding import DIGEST_BYTES, EncodedTexts, TextEncoder, split_keys
from niels_gpt.engine.build import How, NoTextError, claim_of, run_build
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS, Build
from niels_gpt.engine.journal import npy_parts, parts_of
from niels_gpt.engine.losses import Losses, loss_keys
from niels_gpt.engine.meta import Source
from niels_gpt.engine.split import TextSplit, Waiting, chat_text, count_duplicates
from niels_gpt.engine.stream import Batch, ItemKind, digest_list, item_digest
from niels_gpt.signals import EMPTY_REPLIES, ODD_TEXTS, REPEATED_REPLY, Counts, odd_in_chat
from niels_gpt.storage.fileio import id_lines
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import Ids, Tokenizer
from niels_gpt.work import Progress

_BY_TEXT = (
    "by roles and contents: to val where the first 8 bytes of sha256(seed, newline, JSON of [[role, content], ...]), "
    "big-endian, are below val_frac * 2**64; "
)
_MOVED = "where that would leave a split without an example, the nearest one goes there, to train first; "
_IN_ORDER = "both splits keep the order of the stream"
SPLIT_RULE = _BY_TEXT + _MOVED + _IN_ORDER
IN_PARTITIONS = {
    SPLIT_RULE: f"{_BY_TEXT}none is moved where that leaves a split without an example; {_IN_ORDER} in each partition"
}
"""The rule in a partition, which does not know the chats of the others."""
FILES: dict[str, str | None] = {
    **{f"{split}_tokens.bin": f"{split}_tokens.bin" for split in SPLITS},
    **{f"{split}_starts.bin": None for split in SPLITS},
    **{f"{split}_digests.bin": None for split in SPLITS},
    **{f"{split}_ids.txt": f"index/{split}_ids.txt" for split in SPLITS},
}
"""Files that a build appends to, for each split: tokens, and start, digest (equal for equal examples) and source id of
each example."""
DIGESTS_OF = {split: f"index/{split}_digests.bin" for split in SPLITS}
"""Digests of the examples, by split, as files of a partition."""
LOSS: dict[str, str | None] = {f"{split}_loss.bin": None for split in SPLITS}
"""Further files of a template with stored loss: a byte per token, 1 for a target."""
NUMBERS = 4
"""Numbers per example: tokens, supervised tokens, utf-8 bytes, digest."""
_SUMS = ("examples", "tokens", "supervised_tokens", "utf8_bytes")
_LAST_REPLY = "digest of the last reply"
_JOINT = "\0"  # after each role


def files_of(partition: Partition | None) -> dict[str, str | None]:
    """Return the files that a build appends to. A partition keeps the digests, to count duplicates over all of them."""
    return FILES if partition is None else FILES | {f"{split}_digests.bin": name for split, name in DIGESTS_OF.items()}


class Examples:
    """Write the examples of both splits, and count what was read. Base of the Writers of sft caches."""

    expected, full = None, False

    def __init__(
        self, build: Build, source: Source, rule: TextSplit, dtype: np.dtype[Any], has_loss: bool = False
    ) -> None:
        """dtype: of the tokens. has_loss: store the targets too; the build then has the files of LOSS."""
        self._build, self._source, self._rule, self._has_loss = build, source, rule, has_loss
        zero = dict.fromkeys(SPLITS, 0)
        state = build.restored({"counts": {}, "noticed": {}, **dict.fromkeys(_SUMS, zero)})
        self.counts, self.warnings = Counter[str](state["counts"]), Counts(state)
        self._sums = {key: dict(state[key]) for key in _SUMS}
        for split in SPLITS:
            build.expect(f"{split}_tokens.bin", self._sums["tokens"][split] * dtype.itemsize)
            build.expect(f"{split}_starts.bin", self._sums["examples"][split] * OFFSET_DTYPE.itemsize)
            build.expect(f"{split}_digests.bin", self._sums["examples"][split] * DIGEST_BYTES)
            if has_loss:
                build.expect(f"{split}_loss.bin", self._sums["tokens"][split])

    def done(self) -> tuple[int, int]:
        """Return the chats read and the tokens written so far."""
        return self.counts["examples_read"], sum(self._sums["tokens"].values())

    @property
    def is_part(self) -> bool:
        """Whether this is a partition, which does not know the chats of the others."""
        return self._build.keeps("train_digests.bin")

    @property
    def kept(self) -> int:
        """Examples of both splits so far."""
        return sum(self._sums["examples"].values())

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        return {"counts": self.counts, **self.warnings.state(), **self._sums}

    def note(
        self, name: str, roles: Sequence[str], texts: Sequence[str], odd: Mapping[str, str], *, has_empty: bool = True
    ) -> None:
        """Count oddities of a kept chat. roles, texts: of its messages.

        odd: counter of an oddity -> a text that has it. has_empty: count an empty reply too.
        """
        for counter, text in sorted(odd.items()):
            self.warnings.note([counter], name, text)
        reply = next((text for role, text in zip(roles[::-1], texts[::-1], strict=True) if role == "assistant"), "")
        digest = sha256(reply.encode(errors="surrogatepass")).hexdigest()[: 2 * DIGEST_BYTES]
        found = odd_in_chat(roles, texts)
        if reply.strip() and digest == self.warnings.seen.get(_LAST_REPLY):
            found.append(REPEATED_REPLY)
        self.warnings.seen[_LAST_REPLY] = digest
        self.warnings.note([each for each in found if has_empty or each != EMPTY_REPLIES], name, reply)

    def write(
        self,
        tokens: Ids,
        numbers: NDArray[np.int64],
        names: Sequence[str],
        texts: Iterable[bytes],
        is_target: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append examples to the files of their splits. tokens: of all examples, end to end.

        numbers: int64 [examples, NUMBERS]. names: source ids. texts: decide the split (`chat_text`).
        is_target: bool, as long as tokens; None if targets are not stored.
        """
        files = self._build.files
        in_val = self._rule.in_val(split_keys(texts, self._rule.seed))
        for split, chosen in zip(SPLITS, (~in_val, in_val), strict=True):
            if not chosen.any():
                continue
            rows, of_split = numbers[chosen], np.repeat(chosen, numbers[:, 0])
            starts = self._sums["tokens"][split] + np.cumsum(rows[:, 0]) - rows[:, 0]
            files[f"{split}_tokens.bin"].write(tokens[of_split])
            files[f"{split}_starts.bin"].write(starts.astype(OFFSET_DTYPE))
            files[f"{split}_digests.bin"].write(rows[:, 3].astype(OFFSET_DTYPE))
            files[f"{split}_ids.txt"].write(id_lines([names[number] for number in np.flatnonzero(chosen).tolist()]))
            if is_target is not None:
                files[f"{split}_loss.bin"].write(is_target[of_split].view(np.uint8))
            for key, added in zip(_SUMS, (len(rows), *rows[:, :3].sum(axis=0).tolist()), strict=True):
                self._sums[key][split] += added

    def described(self) -> dict[str, Any]:
        """Finish the files. Returns their keys of meta.json, and the counts."""
        build, sums = self._build, self._sums
        shards, index, ids, bits = {}, {}, {}, {}
        for split in SPLITS:
            shards[split] = [{**build.finish(f"{split}_tokens.bin"), "tokens": sums["tokens"][split]}]
            entries = sums["examples"][split]
            starts = npy_parts(build.path_of(f"{split}_starts.bin"), entries)
            index[split] = {**build.add(f"{split}_idx.npy", starts), "entries": entries}
            ids[split] = {**build.finish(f"{split}_ids.txt"), "entries": entries}
            if self._has_loss:
                parts = (np.frombuffer(part, np.uint8) for part in parts_of(build.path_of(f"{split}_loss.bin")))
                bits[split] = build.add(f"{split}_loss.bits", packed(parts))
        groups: dict[str, Any] = {"shards": shards, "index": index, "ids": ids}
        groups |= {"loss_bits": bits} if bits else {}
        groups |= {"files": [build.finish(f"{split}_digests.bin") for split in SPLITS]} if self.is_part else {}
        digests = {split: build.path_of(f"{split}_digests.bin") for split in SPLITS}
        return {
            **groups,
            "checksums": build.add_checksums(**groups),
            "totals": {f"{split}_{key}": sums[key][split] for key in ("examples", "tokens") for split in SPLITS},
            "supervised_tokens": sums["supervised_tokens"],
            "utf8_bytes": sums["utf8_bytes"],
            "examples_read": self.counts["examples_read"],
            "dropped": {key: self.counts[key] for key in sorted(self.counts) if key != "examples_read"},
            "duplicates": {split: count_duplicates(path) for split, path in digests.items()},
            **loss_keys(self.warnings),
        }


def packed(parts: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a file of loss bits: one bit per value (0 or 1) of all parts end to end, lowest bit first."""
    rest = np.empty(0, dtype=np.uint8)
    for part in parts:
        values = np.concatenate([rest, part])
        whole = len(values) - len(values) % 8
        yield np.packbits(values[:whole], bitorder="little")
        rest = values[whole:]
    yield np.packbits(rest, bitorder="little")


class Example(NamedTuple):
    """A chat in the builder's form."""

    name: str
    """Id in the source."""
    problem: str | None
    """Counter of a malformed chat, which is dropped; None for a good one."""
    roles: str
    """Roles of its messages, joined; for a dropped chat, all its strings."""
    texts: list[str]
    """Texts of its messages; [] for a dropped chat."""


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
    partition: Partition | None = None,
    plan: str | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build an sft cache and commit it at `out_dir`. Returns its meta. A killed build resumes.

    examples: lists of {"role": system|user|assistant, "content": text}, or pairs (id, list); without an id, the number
        in the stream is the id. Drops an example with a special token in its text, an unknown role, a content that is
        no text, or no assistant turn, and counts it in meta `dropped`.
    Takes the other arguments of `build_pretrain`; progress gets no expected tokens.
    Raises: ValueError for bad arguments; NoTextError E303 if no example is left; CacheError E503 while another process
        builds here, E504 if `out_dir` is no cache, E505 for a damaged unfinished build, E306 if examples changed since
        a killed run; WorkerDied E506, ForkedBuild E508.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    source = source or Source()
    encoder = TextEncoder(tokenizer, on_special=on_special, engine=open_engine(tokenizer, engine))
    settings: dict[str, Any] = {"kind": "sft", "built": True, "val_frac": val_frac, "on_special": on_special}
    settings |= {"split_rule": SPLIT_RULE, **claim_of(partition, plan, SPLIT_RULE, IN_PARTITIONS)}
    rule = TextSplit(Fraction(val_frac), seed, moves=partition is None)
    return run_build(
        out_dir,
        lambda number: _numbered(examples, number),
        lambda build: _Chats(build, os.fspath(out_dir), source, rule, encoder),
        How(num_threads, executor, checkpoint_seconds, committed, progress),
        tokenizer=tokenizer,
        files=files_of(partition),
        source=source,
        rule=rule,
        settings=settings,
    )


def _numbered(examples: Iterable[Any], first: int) -> Iterator[Example]:
    for number, example in enumerate(examples, first):
        name, messages = None, example
        if isinstance(example, tuple) and len(example) == 2 and not isinstance(example[0], Mapping):
            name, messages = example
        yield _example(str(number) if name is None else name, messages)


def _example(name: str, messages: Any) -> Example:
    """Return a chat in the builder's form, in one pass, because most chats have two messages."""
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
    """Return the strings in a malformed chat. The repr of other values may differ between processes."""
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


def _split_text(example: Example) -> bytes:
    return chat_text(list(zip(example.roles.split(_JOINT), example.texts, strict=False)))


class _Chats(Examples):
    """Append kept chats: the Writer of the own template."""

    kind = _EXAMPLES

    def __init__(self, build: Build, path: str, source: Source, rule: TextSplit, encoder: TextEncoder) -> None:
        super().__init__(build, source, rule, encoder.dtype)
        self.encoder, self._path = encoder, path
        self._special = encoder.tokenizer.special_token_ids()
        self._role_ids = {role: self._special[name] for role, name in ROLE_TO_NAME.items()}
        self._losses = Losses(encoder, self.warnings)

    def waiting(self, item: Example) -> Waiting:
        """Return the text that decides a chat's split, if the chat is kept."""
        num_bytes = sum(map(len, item.texts)) + len(item.roles)
        if item.problem is not None or any(map(self.encoder.drops, item.texts)):
            return Waiting(None, num_bytes)
        return Waiting(_split_text(item), num_bytes)

    def check_kept(self) -> None:
        """Raise NoTextError if no chat is kept."""
        if not self.kept:
            lost = {**self.counts, **self._source.counters}
            raise NoTextError(f"{self._path}: no example is left of {self.counts['examples_read']} read: {lost}")

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log oddities of a cache that was just built."""
        self._losses.warn(out_dir, meta)

    def add(self, batch: Batch[Example], encoded: EncodedTexts) -> list[bytes]:
        """Append the kept examples of a batch. Returns the digests of all examples."""
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
                self.note(example.name, example.roles.split(_JOINT)[:-1], example.texts, odd)
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
            self._losses.look(batch.payload, encoded, np.flatnonzero(is_kept))
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
        """Append examples. Each text gets its role's sentinel before it and an end-of-text after it.

        contents: digest of roles and contents of each. firsts: number of the first text of each. is_kept: bool [texts]
            of the batch.
        """
        lengths = encoded.lengths[is_kept]
        ids = encoded.ids if is_kept.all() else encoded.ids[np.repeat(is_kept, encoded.lengths)]
        ends = np.cumsum(lengths + 2)
        roles = "".join(example.roles for example in examples).split(_JOINT)[:-1]
        tokens = np.full(int(ends[-1]), self._special["eot"], dtype=self.encoder.dtype)
        is_text = np.ones(len(tokens), dtype=np.bool_)
        is_text[ends - 1] = is_text[ends - lengths - 2] = False
        tokens[is_text] = ids
        tokens[ends - lengths - 2] = [self._role_ids[role] for role in roles]
        is_target = np.array([role == "assistant" for role in roles])
        begins = (np.cumsum(is_kept) - 1)[firsts]
        columns = (lengths + 2, np.where(is_target, lengths + 1, 0), encoded.utf8_bytes[is_kept])
        digests = np.frombuffer(b"".join(contents), dtype=OFFSET_DTYPE)
        numbers = np.stack([*(np.add.reduceat(column, begins) for column in columns), digests], axis=1)
        self.write(tokens, numbers, [example.name for example in examples], map(_split_text, examples))

    def _refused(self, encoded: EncodedTexts, texts: range, name: str) -> str | None:
        problems = (self.encoder.accept(encoded.problems.get(text), name) for text in texts)
        return next(filter(None, problems), None)
