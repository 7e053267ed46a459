"""Chats -> train_tokens.bin, train_idx.npy, val_tokens.bin, val_idx.npy and meta.json.

The split needs the number of examples, so ids go to a spool file first and are copied out once that number is known:
memory holds three numbers for each example, never its text.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from niels_gpt import versions
from niels_gpt.build.describe import Source, vocabulary_of, write_description
from niels_gpt.build.encode import EncodedText, TextEncoder, Tokenizer, batches
from niels_gpt.build.pretrain import Progress
from niels_gpt.build.split import SPLITS
from niels_gpt.build.writer import TOKEN_BYTES, TOKEN_DTYPE, HashedFile, OffsetsWriter, file_record
from niels_gpt.chat_template import ROLE_TO_NAME

SPLIT_RULE = (
    "by example: n kept examples, the first max(1, int(n * val_frac)) of torch.randperm(n) seeded with seed go to val "
    "(none where n = 1 or val_frac = 0); both splits keep the order of the stream"
)
_COPY_BYTES = 1 << 20


class _Spool:
    """The ids of all kept examples in stream order, and three numbers for each."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path = path
        self._file = files.enter_context(open(path, "wb"))
        self.tokens, self.supervised, self.utf8_bytes = array("q"), array("q"), array("q")

    def add(self, ids: NDArray[np.uint16], supervised: int, utf8_bytes: int) -> None:
        """Append one example."""
        self._file.write(ids.tobytes())
        self.tokens.append(len(ids))
        self.supervised.append(supervised)
        self.utf8_bytes.append(utf8_bytes)

    def close(self) -> None:
        """Flush the file; the numbers stay."""
        self._file.close()


def build_sft(
    examples: Iterable[Sequence[Mapping[str, Any]]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    val_frac: float,
    seed: int,
    on_special: str = "drop",
    num_threads: int = 1,
    source: Source | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta.

    examples: lists of {"role": system|user|assistant, "content": text}. An example with a sentinel in its text, an
        unknown role, a content that is no text, or no assistant turn is dropped and counted in meta `dropped`.
    Raises: ValueError for bad arguments and where no example is left; CacheError as `build_pretrain`.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    encoder = TextEncoder(tokenizer, on_special=on_special, num_threads=num_threads)
    with versions.building(out_dir) as work, ExitStack() as opened:
        spool = _Spool(work / "spool.bin", opened)
        counts = _spool_examples(examples, spool, encoder, progress)
        spool.close()
        if not spool.tokens:
            lost = {**counts, **(source or Source()).counters}
            raise ValueError(f"{os.fspath(out_dir)}: no example is left of {counts['examples_read']} read: {lost}")
        in_val = _val_rows(len(spool.tokens), val_frac, seed)
        files = _copy_out(spool, in_val, work, opened)
        spool.path.unlink()
        meta = write_description(
            work,
            vocabulary=vocabulary_of(encoder),
            source=source or Source(),
            seed=seed,
            shards={split: [files[split][0]] for split in SPLITS},
            index={split: files[split][1] for split in SPLITS},
            totals={
                **{f"{split}_examples": files[split][1]["entries"] for split in SPLITS},
                **{f"{split}_tokens": files[split][0]["tokens"] for split in SPLITS},
            },
            kind="sft",
            built=True,
            split_rule=SPLIT_RULE,
            val_frac=val_frac,
            on_special=on_special,
            supervised_tokens=_by_split(spool.supervised, in_val),
            utf8_bytes=_by_split(spool.utf8_bytes, in_val),
            examples_read=counts["examples_read"],
            dropped={key: counts[key] for key in sorted(counts) if key != "examples_read"},
            noticed=dict(sorted(encoder.noticed.items())),
        )
        versions.commit(work, out_dir, str(meta["content_sha256"]))
    return meta


def _problem(messages: Any) -> str | None:
    """Return the counter under which an example is dropped for its shape; None for a good one."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return "malformed"
    if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        return "malformed"
    if any(message["role"] not in ROLE_TO_NAME for message in messages):
        return "unknown_role"
    return None if any(message["role"] == "assistant" for message in messages) else "no_assistant_turn"


def _spool_examples(
    examples: Iterable[Sequence[Mapping[str, Any]]], spool: _Spool, encoder: TextEncoder, progress: Progress | None
) -> Counter[str]:
    counts: Counter[str] = Counter()
    tokens = 0
    for batch in batches(_well_formed(examples, counts), num_chars=lambda chat: sum(len(m["content"]) for m in chat)):
        encoded = iter(encoder.encode([message["content"] for chat in batch for message in chat]))
        for chat in batch:
            turns = [(str(message["role"]), next(encoded)) for message in chat]
            problem = next(filter(None, [encoder.accept(text) for _, text in turns]), None)
            if problem is not None:
                counts[problem] += 1
                continue
            for _, text in turns:
                encoder.note(text)
            ids, supervised = _chat_ids(turns, encoder.special_token_ids)
            spool.add(ids, supervised, sum(text.utf8_bytes for _, text in turns))
            tokens += len(ids)
        if progress is not None:
            progress(counts["examples_read"], tokens, None)
    return counts


def _well_formed(
    examples: Iterable[Sequence[Mapping[str, Any]]], counts: Counter[str]
) -> Iterator[Sequence[Mapping[str, Any]]]:
    for messages in examples:
        counts["examples_read"] += 1
        problem = _problem(messages)
        if problem is None:
            yield messages
        else:
            counts[problem] += 1


def _chat_ids(turns: list[tuple[str, EncodedText]], special: dict[str, int]) -> tuple[NDArray[np.uint16], int]:
    """Return the ids of `chat_template.format_chat`, and how many of them are targets: the replies with their EOTs."""
    parts: list[Any] = []
    supervised = 0
    for role, text in turns:
        parts += [[special[ROLE_TO_NAME[role]]], text.ids, [special["eot"]]]
        supervised += len(text.ids) + 1 if role == "assistant" else 0
    return np.concatenate([np.asarray(part, dtype=TOKEN_DTYPE) for part in parts]), supervised


def _val_rows(count: int, val_frac: float, seed: int) -> NDArray[np.bool_]:
    import torch

    num_val = max(1, int(count * val_frac)) if count > 1 and val_frac > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    in_val = np.zeros(count, dtype=np.bool_)
    in_val[order[:num_val].numpy()] = True
    return in_val


def _by_split(values: array[int], in_val: NDArray[np.bool_]) -> dict[str, int]:
    numbers = np.asarray(values)
    return {"train": int(numbers[~in_val].sum()), "val": int(numbers[in_val].sum())}


def _copy_out(
    spool: _Spool, in_val: NDArray[np.bool_], work: Path, opened: ExitStack
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    tokens = {split: HashedFile(work / f"{split}_tokens.bin", opened) for split in SPLITS}
    starts = {split: OffsetsWriter(work, f"{split}_idx.npy", opened) for split in SPLITS}
    with open(spool.path, "rb") as file:
        for length, is_val in zip(spool.tokens, in_val.tolist(), strict=True):
            split = SPLITS[is_val]
            starts[split].append(tokens[split].num_bytes // TOKEN_BYTES)
            _copy(file, tokens[split], length * TOKEN_BYTES)
    return {
        split: (
            file_record(f"{split}_tokens.bin", tokens[split].num_bytes // TOKEN_BYTES, tokens[split]),
            starts[split].close(),
        )
        for split in SPLITS
    }


def _copy(source: BinaryIO, target: HashedFile, num_bytes: int) -> None:
    while num_bytes:
        chunk = source.read(min(num_bytes, _COPY_BYTES))
        assert chunk, "the spool file ended early"
        target.write(chunk)
        num_bytes -= len(chunk)
