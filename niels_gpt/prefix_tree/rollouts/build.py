"""Builds a rollout cache: groups of samples -> tokens, loss bits, fields, index, meta.json. A killed build resumes.

Decides which group goes to val, and the counts of meta.json. Runs on the engine of the other caches, without encoder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from typing import Any

import numpy as np

from niels_gpt.cache.formats import OFFSET_DTYPE, SPLITS
from niels_gpt.documents import Partition
from niels_gpt.encoding import DIGEST_BYTES, split_keys
from niels_gpt.engine.build import How, NoTextError, claim_of, run_build
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS, Build
from niels_gpt.engine.journal import npy_parts
from niels_gpt.engine.meta import Source, vocabulary_of
from niels_gpt.engine.split import TextSplit, Waiting, count_repeated_lines
from niels_gpt.engine.stream import Batch, ItemKind
from niels_gpt.prefix_tree.rollouts.records import (
    FIELDS,
    GROUP_COLUMNS,
    KIND,
    SAMPLE_COLUMNS,
    RolloutGroup,
    Sample,
    checked,
    file_of,
    odd_in_group,
    odd_in_sample,
    per,
    scored_tokens,
    stored,
)
from niels_gpt.signals import NO_COMMON_END, REPEATED_GROUP, WITHOUT_PROMPT, Counts, warn_of_signals
from niels_gpt.storage.errors import SourceError
from niels_gpt.storage.fileio import id_lines
from niels_gpt.storage.meta_json import checked_int, shortened
from niels_gpt.tokenizers.protocol import MAX_IDS, TOKEN_DTYPES, Tokenizer, token_dtype_name
from niels_gpt.work import Progress

_BY_ID = (
    "by group: to val where the first 8 bytes of sha256(seed, newline, id), big-endian, are below val_frac * 2**64; "
)
SPLIT_RULE = f"{_BY_ID}where that would leave a split without a group, the nearest one goes there, to train first"
IN_PARTITIONS = {SPLIT_RULE: f"{_BY_ID}none is moved where that leaves a split without a group"}
"""The rule of a partition, which does not know the groups of the others."""
LAST_IDS = "index/last_ids.bin"
"""In a partition: the last id of each sample. `join` finds the most frequent one of all partitions."""
LAST_ID = np.dtype("<u4")
_FILES: dict[str, str | None] = {
    **{file_of(split, name): file_of(split, name) for split in SPLITS for name in ("tokens", "loss", *FIELDS)},
    **{f"{split}_{table}.bin": None for split in SPLITS for table in ("groups", "samples")},
    **{f"{split}_ids.txt": f"index/{split}_ids.txt" for split in SPLITS},
}
"""The files that a build appends to, and their names in the cache; files of absent fields stay empty and unnamed."""
_SUMS = (
    *("groups", "samples", "stored_tokens", "loss_bytes", "scores", "id_bytes"),
    *("tokens", "tokens_after", "pairs", "pairs_after", "loss_tokens", "samples_without_target"),
)
_RANGE = "range of "
_LAST = "last_ids.bin"


@dataclass(frozen=True)
class _GroupKind(ItemKind[RolloutGroup]):
    """Tells the engine the size and the digest of a group."""

    vocab_size: int | None = None

    def size(self, item: RolloutGroup) -> int:
        """Return about how many bytes a group has."""
        return sum(8 * len(each.ids) if hasattr(each.ids, "__len__") else 1 for each in item.samples)

    def digests(self, items: Sequence[RolloutGroup], encoder: Any) -> list[bytes]:
        """Return the digests of groups: another digest means a changed group."""
        return [_digest(group.id, self.samples(group)) for group in items]

    def samples(self, group: RolloutGroup) -> list[Sample | str]:
        """Return the samples of a group as arrays, or the reason to drop each."""
        return [checked(rollout, self.vocab_size) for rollout in group.samples]


def _name(group: RolloutGroup) -> str:
    return group.id


def build_rollouts(
    groups: Iterable[RolloutGroup],
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    seed: int = 0,
    val_frac: float = 0.0,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    partition: Partition | None = None,
    plan: str | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `path`; returns its meta. A killed build resumes.

    groups: the samples of each prompt or tree. A sample that `records.checked` refuses is dropped and counted in meta
        `dropped`; so is a group without a kept sample (`groups_without_sample`). All kept samples must have the fields
        of the first one.
    source, checkpoint_seconds, partition, plan, committed: see `build_sft`. seed: decides with val_frac which
        groups go to val.
    vocab_size: of the model. Samples with ids of this number or more are dropped. Up to 65,536 a token takes two bytes.
        None: the tokenizer's; without a tokenizer, 2**31 and four bytes.
    tokenizer: produced the ids; None if unknown.
    progress: called with the number of groups read and of tokens kept.

    Raises: ValueError for bad arguments; SourceError (a ValueError, E304) for samples with different fields;
        NoTextError (a ValueError) if no group is left for train; CacheError and RuntimeError as `build_sft`.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    source, vocabulary = source or Source(), _vocabulary(tokenizer, vocab_size)
    settings: dict[str, Any] = {"kind": KIND, "built": True, "val_frac": val_frac, "split_rule": SPLIT_RULE}
    settings |= claim_of(partition, plan, SPLIT_RULE, IN_PARTITIONS)
    rule = TextSplit(Fraction(val_frac), seed, moves=partition is None)
    return run_build(
        path,
        lambda _: groups,
        lambda build: _Groups(build, os.fspath(path), source, vocabulary, rule),
        How(checkpoint_seconds=checkpoint_seconds, committed=committed, progress=progress),
        tokenizer=tokenizer,
        files=_FILES if partition is None else _FILES | {_LAST: LAST_IDS},
        source=source,
        rule=rule,
        settings=settings,
        vocabulary=vocabulary,
        identity=vocabulary,
    )


def _vocabulary(tokenizer: Tokenizer | None, vocab_size: int | None) -> dict[str, Any]:
    if vocab_size is not None and checked_int("vocab_size", vocab_size, 1) > MAX_IDS:
        raise ValueError(f"vocab_size={vocab_size}: expected at most {MAX_IDS}")
    keys: dict[str, Any] = {"tokenizer_sha256": None, "special_token_ids": {}, "vocab_size": None}
    keys |= {"token_dtype": "uint32-le"} if tokenizer is None else vocabulary_of(tokenizer)
    if vocab_size is not None:
        keys |= {"vocab_size": int(vocab_size), "token_dtype": token_dtype_name(int(vocab_size))}
    return keys


class _Groups:
    """Appends groups to the files of their splits, and counts: the Writer of this kind."""

    encoder, expected, full = None, None, False

    def __init__(self, build: Build, path: str, source: Source, vocabulary: dict[str, Any], rule: TextSplit) -> None:
        self._build, self._path, self._source, self._rule = build, path, source, rule
        self.kind = _GroupKind(texts=lambda group: [], label=_name, name=_name, vocab_size=vocabulary["vocab_size"])
        self._dtype = TOKEN_DTYPES[vocabulary["token_dtype"]]
        none = dict.fromkeys(_SUMS, 0)
        state = build.restored({"counts": {}, "fields": {}, **{split: none for split in SPLITS}})
        self._odd = Counts(state)
        self._ranges = {  # least, most, sum and number of the values
            name.removeprefix(_RANGE): [float.fromhex(number) for number in text.split()]
            for name, text in self._odd.seen.items()
            if name.startswith(_RANGE)
        }
        self._last_ids, self._largest_id = Counter[str](state.get("last_ids", {})), int(state.get("largest_id", 0))
        self._counts = Counter[str](state["counts"])
        self._fields = tuple(name for name in FIELDS if name in state["fields"])
        self._sums = {split: dict(state[split]) for split in SPLITS}
        for split in SPLITS:
            build.expect(file_of(split, "tokens"), self._sums[split]["stored_tokens"] * self._dtype.itemsize)
            for table, columns in (("groups", GROUP_COLUMNS), ("samples", SAMPLE_COLUMNS)):
                build.expect(f"{split}_{table}.bin", self._sums[split][table] * len(columns) * OFFSET_DTYPE.itemsize)
        if self._is_part:
            build.expect(_LAST, sum(self._sums[split]["samples"] for split in SPLITS) * LAST_ID.itemsize)

    @property
    def _is_part(self) -> bool:
        """Whether this is a partition, which does not know the groups of the others."""
        return self._build.has(_LAST)

    def done(self) -> tuple[int, int]:
        """Return the groups read and the tokens of kept samples so far."""
        return self._counts["groups_read"], sum(sums["tokens"] for sums in self._sums.values())

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        fields = dict.fromkeys(self._fields, 1)
        self._odd.seen |= {_RANGE + name: " ".join(map(float.hex, numbers)) for name, numbers in self._ranges.items()}
        seen = {**self._odd.state(), "last_ids": self._last_ids, "largest_id": self._largest_id}
        return {"counts": self._counts, "fields": fields, **self._sums, **seen}

    def check_kept(self) -> None:
        """Raise NoTextError if no group is left for train."""
        if not self._sums["train"]["groups"]:
            counted = shortened({**self._counts, **self._source.counters})
            raise NoTextError(f"{self._path}: no group is left for train: {counted}")

    def waiting(self, item: RolloutGroup) -> Waiting:
        """Return a group's id, which decides its split, if a sample of it is kept."""
        kept = any(not isinstance(sample, str) for sample in self.kind.samples(item))
        return Waiting(item.id.encode(errors="surrogatepass") if kept else None, self.kind.size(item))

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log the signs of odd data in a new cache."""
        warn_of_signals(out_dir, meta)

    def add(self, batch: Batch[RolloutGroup], encoded: None) -> list[bytes]:
        """Append the groups that are kept; returns the digests of all."""
        digests = []
        for group in batch.items:
            samples = self.kind.samples(group)
            digests.append(_digest(group.id, samples))
            self._add(group.id, samples)
        return digests

    def _add(self, name: str, found: list[Sample | str]) -> None:
        self._counts["groups_read"] += 1
        self._counts["samples_read"] += len(found)
        samples: list[Sample] = []
        for number, sample in enumerate(found):
            if isinstance(sample, str):
                self._counts[sample] += 1
                continue
            self._check_fields(sample, name, number)
            self._look(sample, f"sample {number} of group {name}")
            samples.append(sample)
            if self._is_part:
                self._build.files[_LAST].write(sample.ids[-1:].astype(LAST_ID))
        if not samples:
            self._counts["groups_without_sample"] += 1
            return
        self._odd.note(odd_in_group(samples), f"group {name}")
        in_val = self._rule.in_val(split_keys([name.encode(errors="surrogatepass")], self._rule.seed))[0]
        self._append("val" if in_val else "train", name, samples)

    def _look(self, sample: Sample, place: str) -> None:
        """Count the signs of a kept sample, and take its values into the ranges of the fields."""
        self._odd.note(odd_in_sample(sample), place)
        for field, values in sample.fields.items():
            exact = values.astype(np.float64)
            least, most, total, count = self._ranges.get(field, [np.inf, -np.inf, 0.0, 0.0])
            if len(exact):
                least, most = min(least, float(exact.min())), max(most, float(exact.max()))
                self._ranges[field] = [least, most, total + float(exact.sum()), count + len(exact)]
        self._largest_id = max(self._largest_id, int(sample.ids.max()))
        self._last_ids[str(sample.ids[-1])] += 1

    def _noticed(self) -> dict[str, Any]:
        """Return the keys of meta.json for signs of odd data, and for the ranges of the fields."""
        self._odd[REPEATED_GROUP] = sum(  # groups of one id are in one split
            count_repeated_lines(self._build.path_of(f"{split}_ids.txt"), self._sums[split]["groups"])
            for split in SPLITS
        )
        samples = self._counts["samples_kept"]
        if self._odd[WITHOUT_PROMPT] == samples and not self._is_part:  # as in trees
            del self._odd[WITHOUT_PROMPT]
        self._odd[NO_COMMON_END] = samples - max(self._last_ids.values(), default=0)
        ranges = {
            field: {"min": least, "mean": total / count, "max": most}
            for field, (least, most, total, count) in self._ranges.items()
        }
        counts = {name: number for name, number in sorted(self._odd.items()) if number}
        return {
            "largest_id": self._largest_id,
            "noticed": counts,
            **self._odd.keys_of_meta(),
            **({"ranges": ranges} if ranges else {}),
        }

    def _check_fields(self, sample: Sample, group: str, number: int) -> None:
        """Raise SourceError E304 for a sample with other fields than the first one: a field's file has all samples."""
        if not self._counts["samples_kept"]:
            self._fields = tuple(sample.fields)
        self._counts["samples_kept"] += 1
        if tuple(sample.fields) != self._fields:
            problem = (
                f"sample {number} of group {shortened(group)} has the fields ({', '.join(sample.fields)}); expected "
                f"({', '.join(self._fields)}), those of the first sample. Give every sample the same fields"
            )
            raise SourceError(problem, code="E304")

    def _append(self, split: str, name: str, samples: list[Sample]) -> None:
        group, sums, files = stored(samples), self._sums[split], self._build.files
        tokens_after, pairs_after = group.folded
        begins = (sums[key] for key in ("stored_tokens", "loss_bytes", "scores", "id_bytes"))
        row = (sums["samples"], len(samples), group.prefix, *begins, tokens_after, pairs_after)
        line, (lengths, prompts, targets) = id_lines([name]), group.samples[:, :3].T
        files[file_of(split, "tokens")].write(group.tokens.astype(self._dtype))
        files[file_of(split, "loss")].write(group.bits)
        for field in self._fields:
            files[file_of(split, field)].write(group.fields[field].astype("<f4"))
        files[f"{split}_groups.bin"].write(np.array(row, dtype=OFFSET_DTYPE))
        files[f"{split}_samples.bin"].write(group.samples.astype(OFFSET_DTYPE))
        files[f"{split}_ids.txt"].write(line)
        added = (
            *(1, len(samples), len(group.tokens), len(group.bits), scored_tokens(lengths, prompts).sum(), len(line)),
            *(lengths.sum(), tokens_after, (lengths * (lengths + 1) // 2).sum(), pairs_after),
            *(targets.sum(), (targets == 0).sum()),
        )
        for key, value in zip(_SUMS, added, strict=True):
            sums[key] += int(value)

    def described(self) -> dict[str, Any]:
        """Finish the files; returns their keys of meta.json and the counts."""
        build, sums = self._build, self._sums
        shards, index, ids, files = {}, {}, {}, []
        for split in SPLITS:
            tokens = sums[split]["stored_tokens"]
            shards[split] = [{**build.finish(file_of(split, "tokens")), "tokens": tokens}]
            index[split] = self._table(split, "groups", len(GROUP_COLUMNS))
            index[f"{split}_samples"] = self._table(split, "samples", len(SAMPLE_COLUMNS))
            ids[split] = {**build.finish(f"{split}_ids.txt"), "entries": sums[split]["groups"]}
            files += [build.finish(file_of(split, name)) for name in ("loss", *self._fields)]
        files += [build.finish(_LAST)] if self._is_part else []
        read = {key: self._counts[key] for key in ("groups_read", "samples_read")}
        kept = ("samples_kept", *read)
        totals = {f"{split}_{key}": sums[split][key] for split in SPLITS for key in ("groups", "samples", "tokens")}
        more = ("tokens_after", "pairs", "pairs_after", "loss_tokens", "scores", "samples_without_target")
        return {
            "shards": shards,
            "index": index,
            "ids": ids,
            "files": files,
            "checksums": build.add_checksums(shards=shards, index=index, ids=ids, files=files),
            "totals": totals,
            "fields": {field: per(field) for field in self._fields},
            **{key: {split: sums[split][key] for split in SPLITS} for key in more},
            **read,
            "dropped": {key: self._counts[key] for key in sorted(self._counts) if key not in kept},
            **self._noticed(),
        }

    def _table(self, split: str, table: str, columns: int) -> dict[str, Any]:
        """Write a table of the index as one row of int64; returns its record."""
        entries = self._sums[split][table] * columns
        record = self._build.add(
            f"index/{split}_{table}.npy", npy_parts(self._build.path_of(f"{split}_{table}.bin"), entries)
        )
        return {**record, "entries": entries}


def _digest(name: str, samples: Iterable[Sample | str]) -> bytes:
    """Return the digest of a group's id and samples; a dropped sample enters by the reason."""
    hashed = sha256(name.encode(errors="surrogatepass"))
    for sample in samples:
        if isinstance(sample, str):
            hashed.update(b"\0" + sample.encode())
            continue
        parts = [sample.ids, np.array([sample.prompt_length]), sample.loss_mask]
        for field, values in sample.fields.items():
            parts += [np.frombuffer(field.encode(), dtype=np.uint8), values]
        hashed.update(b"".join(len(part).to_bytes(8, "little") + part.tobytes() for part in parts))
    return hashed.digest()[:DIGEST_BYTES]
