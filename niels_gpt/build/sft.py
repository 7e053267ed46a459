"""Chats -> train_tokens.bin, train_idx.npy, val_tokens.bin, val_idx.npy, source ids and meta.json.

The split needs the number of examples, so ids go to a spool file first and are copied out once that number is known:
memory holds three numbers for each example, never its text.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt import versions
from niels_gpt.build import pipeline, resume
from niels_gpt.build.describe import Source, build_identity, vocabulary_of, write_description
from niels_gpt.build.encode import EncodedTexts, TextEncoder, Tokenizer
from niels_gpt.build.pipeline import Progress
from niels_gpt.build.resume import CHECKPOINT_SECONDS, Build
from niels_gpt.build.split import SPLITS
from niels_gpt.build.stream import Batch, labelled_digest
from niels_gpt.build.writer import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_DTYPE, id_lines, npy_header
from niels_gpt.chat_template import ROLE_TO_NAME

SPLIT_RULE = (
    "by example: n kept examples, the first max(1, int(n * val_frac)) of torch.randperm(n) seeded with seed go to val "
    "(none where n = 1 or val_frac = 0); both splits keep the order of the stream"
)
_FILES = dict.fromkeys(("tokens.bin", "examples.bin", "ids.txt"))
"""What a build appends to: the ids of all kept examples, tokens, targets and utf-8 bytes of each, and their ids."""
_COPIED = 4096  # examples at once, on their way from the spool to a split

Example = tuple[str, str | None, Sequence[Mapping[str, Any]]]
"""The id that the source has for a chat, the counter under which it is dropped for its shape or None, the messages."""


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
    source: Source | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta. A build that was killed goes on.

    examples: lists of {"role": system|user|assistant, "content": text}, or pairs (id, list); one without an id has its
        number in the stream. An example with a sentinel in its text, an unknown role, a content that is no text, or no
        assistant turn is dropped and counted in meta `dropped`.
    The other arguments are those of `build_pretrain`.
    Raises: ValueError for bad arguments and where no example is left; CacheError and RuntimeError as `build_pretrain`.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    source = source or Source()
    encoder = TextEncoder(tokenizer, on_special=on_special)
    settings: dict[str, Any] = {"kind": "sft", "built": True, "val_frac": val_frac, "on_special": on_special}
    settings["split_rule"] = SPLIT_RULE
    vocabulary = vocabulary_of(tokenizer)
    identity = build_identity(source, vocabulary, seed=seed, **settings)
    with resume.opened(out_dir, identity, _FILES, checkpoint_seconds) as build:
        spool = _Spool(build, encoder, progress)
        spool.fill(_numbered(examples), source, num_threads, executor)
        if not spool.kept:
            lost = {**spool.counts, **source.counters}
            raise ValueError(
                f"{os.fspath(out_dir)}: no example is left of {spool.counts['examples_read']} read: {lost}"
            )
        build.checkpoint(spool.state(), ended=True)
        meta = build.committed_meta() or write_description(
            build.work,
            vocabulary=vocabulary,
            source=source,
            counters=source.counters,
            seed=seed,
            **spool.split(_val_rows(spool.kept, val_frac, seed)),
            **settings,
        )
        build.seal(str(meta["content_sha256"]))
        versions.commit(build.work, out_dir, str(meta["content_sha256"]))
        if committed is not None:
            committed(meta)
    return meta


def _numbered(examples: Iterable[Any]) -> Iterator[Example]:
    for number, example in enumerate(examples):
        name, messages = str(number), example
        if isinstance(example, tuple) and len(example) == 2 and not isinstance(example[0], Mapping):
            name, messages = example[0] or name, example[1]
        yield name, _problem(messages), messages


def _texts(example: Example) -> list[str]:
    return [] if example[1] is not None else [message["content"] for message in example[2]]


def _label(example: Example) -> str:
    name, problem, messages = example
    return "\0".join([name, *([repr(messages)] if problem else [message["role"] for message in messages])])


def _problem(messages: Any) -> str | None:
    """Return the counter under which an example is dropped for its shape; None for a good one."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return "malformed"
    if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        return "malformed"
    if any(message["role"] not in ROLE_TO_NAME for message in messages):
        return "unknown_role"
    return None if any(message["role"] == "assistant" for message in messages) else "no_assistant_turn"


class _Spool:
    """The ids of all kept examples in stream order, three numbers for each, and the account of what was read."""

    def __init__(self, build: Build, encoder: TextEncoder, progress: Progress | None) -> None:
        self._build, self._encoder, self._progress = build, encoder, progress
        special = encoder.tokenizer.special_token_ids()
        self._sentinel = {name: np.array([found], dtype=TOKEN_DTYPE) for name, found in special.items()}
        state = build.restored({"counts": {}, "noticed": {}, "kept": 0, "tokens": 0})
        self.counts, self.noticed = Counter(state["counts"]), Counter(state["noticed"])
        self.kept, self._tokens = int(state["kept"]), int(state["tokens"])
        build.expect("tokens.bin", self._tokens * TOKEN_BYTES)
        build.expect("examples.bin", self.kept * 3 * OFFSET_DTYPE.itemsize)

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        return {"counts": self.counts, "noticed": self.noticed, "kept": self.kept, "tokens": self._tokens}

    def fill(self, examples: Iterable[Example], source: Source, num_threads: int, executor: Executor | None) -> None:
        """Read all examples and append those that are kept."""
        with pipeline.encoded(
            self._build,
            examples,
            source.counters,
            self._encoder,
            texts=_texts,
            label=_label,
            exhausted=True,
            num_threads=num_threads,
            executor=executor,
            report=self._report,
        ) as batches:
            for batch, encoded in batches:
                self._build.take(self._add(batch, encoded), batch.marks[-1])
                self._build.checkpoint(self.state())
                self._report(self.counts["examples_read"])

    def _report(self, examples: int) -> None:
        if self._progress is not None:
            self._progress(examples, self._tokens, None)

    def _add(self, batch: Batch[Example], encoded: EncodedTexts) -> list[bytes]:
        """Append the examples of a batch that are kept; returns the digests of all."""
        ends = np.cumsum(encoded.lengths).tolist()
        digests: list[bytes] = []
        names: list[str] = []
        parts: list[NDArray[np.uint16]] = []
        rows: list[tuple[int, int, int]] = []
        first = 0
        for example in batch.items:
            texts = range(first, first + len(_texts(example)))
            first = texts.stop
            digests.append(labelled_digest(_label(example), encoded.digests[texts.start : texts.stop]))
            self.counts["examples_read"] += 1
            problem = example[1] or self._refused(encoded, texts)
            if problem is not None:
                self.counts[problem] += 1
                continue
            tokens, supervised = 0, 0
            for text, message in zip(texts, example[2], strict=True):
                begin, end = ends[text - 1] if text else 0, ends[text]
                parts += [self._sentinel[ROLE_TO_NAME[message["role"]]], encoded.ids[begin:end], self._sentinel["eot"]]
                tokens += end - begin + 2
                supervised += end - begin + 1 if message["role"] == "assistant" else 0
                self.noticed.update(encoded.notes.get(text, ()))
            rows.append((tokens, supervised, int(encoded.utf8_bytes[texts.start : texts.stop].sum())))
            names.append(example[0])
        files = self._build.files
        if rows:
            files["tokens.bin"].write(np.concatenate(parts))
            files["examples.bin"].write(np.array(rows, dtype=OFFSET_DTYPE))
            files["ids.txt"].write(id_lines(names))
        self.kept += len(rows)
        self._tokens += sum(row[0] for row in rows)
        return digests

    def _refused(self, encoded: EncodedTexts, texts: range) -> str | None:
        problems = (self._encoder.accept(encoded.problems.get(text)) for text in texts)
        return next(filter(None, problems), None)

    def split(self, in_val: NDArray[np.bool_]) -> dict[str, Any]:
        """Copy the spool out into both splits; returns their part of meta.json, and the account of what was read."""
        build = self._build
        rows = np.fromfile(build.folder / "examples.bin", dtype=OFFSET_DTYPE).reshape(-1, 3)
        chosen = {"train": ~in_val, "val": in_val}
        files = {
            split: build.add(f"{split}_tokens.bin", self._tokens_of(rows[:, 0], chosen[split])) for split in SPLITS
        }
        index = {split: build.add(f"{split}_idx.npy", _offsets(rows[chosen[split], 0])) for split in SPLITS}
        ids = {split: build.add(f"index/{split}_ids.txt", self._ids_of(chosen[split])) for split in SPLITS}
        sums = {split: rows[chosen[split]].sum(axis=0).tolist() for split in SPLITS}
        entries = {split: int(chosen[split].sum()) for split in SPLITS}
        shards = {split: [{**files[split], "tokens": sums[split][0]}] for split in SPLITS}
        index, ids = ({key: {**found[key], "entries": entries[key]} for key in SPLITS} for found in (index, ids))
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
            "noticed": dict(sorted(self.noticed.items())),
        }

    def _tokens_of(self, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Iterator[NDArray[np.uint16]]:
        with open(self._build.folder / "tokens.bin", "rb") as file:
            for start in range(0, len(lengths), _COPIED):
                some = lengths[start : start + _COPIED]
                ids = np.fromfile(file, dtype=TOKEN_DTYPE, count=int(some.sum()))
                yield ids[np.repeat(chosen[start : start + _COPIED], some)]

    def _ids_of(self, chosen: NDArray[np.bool_]) -> Iterator[bytes]:
        with open(self._build.folder / "ids.txt", "rb") as file:
            for start in range(0, len(chosen), _COPIED):
                lines = list(islice(file, _COPIED))
                yield b"".join(
                    line for line, wanted in zip(lines, chosen[start : start + _COPIED], strict=True) if wanted
                )


def _val_rows(count: int, val_frac: float, seed: int) -> NDArray[np.bool_]:
    import torch

    num_val = max(1, int(count * val_frac)) if count > 1 and val_frac > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    in_val = np.zeros(count, dtype=np.bool_)
    in_val[order[:num_val].numpy()] = True
    return in_val


def _offsets(lengths: NDArray[np.int64]) -> Iterator[Any]:
    yield npy_header(len(lengths))
    yield (np.cumsum(lengths) - lengths).astype(OFFSET_DTYPE)
