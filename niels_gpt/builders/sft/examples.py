"""The examples of an unfinished sft build: all of them in one buffer, then copied to their splits.

All ids first go to a buffer file: the split of a small corpus needs all of it. Memory holds a few numbers for each
example, never its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.builders.build import Build
from niels_gpt.builders.losses import loss_keys
from niels_gpt.builders.split import TextSplit, num_duplicates
from niels_gpt.cache.formats import OFFSET_DTYPE, SPLITS, npy_header
from niels_gpt.encoding import DIGEST_BYTES, split_keys
from niels_gpt.signals import EMPTY_REPLIES, REPEATED_REPLY, Counts, odd_in_chat
from niels_gpt.storage.fileio import id_lines
from niels_gpt.tokenizers.protocol import Ids

SPLIT_RULE = (
    "by roles and contents: to val where the first 8 bytes of sha256(seed, newline, JSON of [[role, content], ...]), "
    "big-endian, are below val_frac * 2**64; where that would leave a split without an example, the nearest one goes "
    "there, to train first; both splits keep the order of the stream"
)
FILES: dict[str, str | None] = dict.fromkeys(("tokens.bin", "examples.bin", "ids.txt"))
"""The files that a build appends to: the tokens of all kept examples, the COLUMNS of each, their source ids."""
LOSS = "loss.bin"
"""One more, where the tokens that carry loss are stored: a byte for each token, 1 for a target."""
COLUMNS = 5
"""Of an example: tokens, supervised tokens, utf-8 bytes, digest (equal examples have equal ones), key of its split."""
_LAST_REPLY = "digest of the last reply"
_LINES = 4096  # of source ids at once
_COPIED = 1 << 22  # tokens at once, from the buffer to a split


class ExampleBuffer:
    """The ids of all kept examples in stream order, four numbers for each, and the counts of what was read."""

    def __init__(self, build: Build, dtype: np.dtype[Any], rule: TextSplit) -> None:
        """dtype: of the tokens. The build has `FILES`, and `LOSS` if it stores the targets."""
        self._build, self._dtype, self._rule = build, dtype, rule
        self._has_loss = LOSS in build.files
        state = build.restored({"counts": {}, "noticed": {}, "kept": 0, "tokens": 0})
        self.counts, self.warnings = Counter[str](state["counts"]), Counts(state)
        self.kept, self.tokens = int(state["kept"]), int(state["tokens"])
        build.expect("tokens.bin", self.tokens * dtype.itemsize)
        build.expect("examples.bin", self.kept * COLUMNS * OFFSET_DTYPE.itemsize)
        if self._has_loss:
            build.expect(LOSS, self.tokens)

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        return {"counts": self.counts, **self.warnings.state(), "kept": self.kept, "tokens": self.tokens}

    def note(
        self, name: str, roles: Sequence[str], texts: Sequence[str], odd: Mapping[str, str], *, has_empty: bool = True
    ) -> None:
        """Count what is odd about a chat that is kept. roles, texts: of its messages.

        odd: counters of what is odd about single texts, each with such a text. has_empty: whether an empty reply is
            odd.
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
        names: Iterable[str],
        texts: Iterable[bytes],
        is_target: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append examples. tokens: of all of them, end to end. numbers: int64 [examples, 4], the first COLUMNS.

        names: source ids. texts: that decide the split (`chat_text`). is_target: bool, as long as tokens; None where
        they are not stored.
        """
        files = self._build.files
        keys = split_keys(texts, self._rule.seed).view(np.int64)
        rows = np.column_stack([numbers, keys])
        files["tokens.bin"].write(tokens)
        files["examples.bin"].write(rows.astype(OFFSET_DTYPE))
        files["ids.txt"].write(id_lines(names))
        if is_target is not None:
            files[LOSS].write(is_target.view(np.uint8))
        self.kept += len(rows)
        self.tokens += len(tokens)

    def split(self) -> dict[str, Any]:
        """Copy the buffer to both splits; returns the keys of meta.json for their files and the counts."""
        build, rule = self._build, self._rule
        rows = np.fromfile(build.folder / "examples.bin", dtype=OFFSET_DTYPE).reshape(-1, COLUMNS)
        keys = np.ascontiguousarray(rows[:, 4]).view(np.uint64)
        rule.settle(keys, self.counts["examples_read"], int(rows[:, 2].sum()))
        in_val = rule.in_val(keys)
        chosen = {"train": ~in_val, "val": in_val}
        files = {
            split: build.add(f"{split}_tokens.bin", self._tokens_of("tokens.bin", rows[:, 0], chosen[split]))
            for split in SPLITS
        }
        index = {split: build.add(f"{split}_idx.npy", _offsets(rows[chosen[split], 0])) for split in SPLITS}
        ids = {split: build.add(f"index/{split}_ids.txt", self._ids_of(chosen[split])) for split in SPLITS}
        sums = {split: rows[chosen[split], :3].sum(axis=0).tolist() for split in SPLITS}
        entries = {split: int(chosen[split].sum()) for split in SPLITS}
        shards = {split: [{**files[split], "tokens": sums[split][0]}] for split in SPLITS}
        index, ids = ({key: {**records[key], "entries": entries[key]} for key in SPLITS} for records in (index, ids))
        groups: dict[str, Any] = {"shards": shards, "index": index, "ids": ids}
        if self._has_loss:
            parts = {split: self._tokens_of(LOSS, rows[:, 0], chosen[split]) for split in SPLITS}
            groups["loss_bits"] = {split: build.add(f"{split}_loss.bits", packed(parts[split])) for split in SPLITS}
        return {
            **groups,
            "checksums": build.add_checksums(**groups),
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

    def _tokens_of(self, name: str, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Iterator[NDArray[Any]]:
        """Yield what a file has for the tokens of chosen examples: their ids, or whether they are targets."""
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _COPIED)) + 1
        with open(self._build.folder / name, "rb") as file:
            for start, stop in pairwise([0, *cuts.tolist(), len(lengths)]):
                some = lengths[start:stop]
                values = np.fromfile(file, dtype=np.uint8 if name == LOSS else self._dtype, count=int(some.sum()))
                yield values[np.repeat(chosen[start:stop], some)]

    def _ids_of(self, chosen: NDArray[np.bool_]) -> Iterator[bytes]:
        with open(self._build.folder / "ids.txt", "rb") as file:
            for start in range(0, len(chosen), _LINES):
                lines, of_lines = list(islice(file, _LINES)), chosen[start : start + _LINES]
                yield b"".join(line for line, wanted in zip(lines, of_lines, strict=True) if wanted)


def packed(parts: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a file of loss bits: a bit for each value, 0 or 1, of all parts end to end, lowest first."""
    rest = np.empty(0, dtype=np.uint8)
    for part in parts:
        values = np.concatenate([rest, part])
        whole = len(values) - len(values) % 8
        yield np.packbits(values[:whole], bitorder="little")
        rest = values[whole:]
    yield np.packbits(rest, bitorder="little")


def _offsets(lengths: NDArray[np.int64]) -> Iterator[Any]:
    yield npy_header(len(lengths))
    yield (np.cumsum(lengths) - lengths).astype(OFFSET_DTYPE)
