"""RolloutDataset: the groups of a split, each as samples or as a forest, with their fields.

Opening checks meta.json, the size of every file and the whole index; reading a group checks its ids and its folding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from niels_gpt.cache.checksums import CheckedItems
from niels_gpt.cache.formats import token_dtype_of
from niels_gpt.cache.mmap import FetchedItems, mapped_npy, mmap_tokens, public_file, token_files
from niels_gpt.cache.reader import Opening, Reader, local_path, named_cache
from niels_gpt.prefix_tree.rollouts.records import (
    BIT_ORDER,
    FIELDS,
    GROUP_COLUMNS,
    KIND,
    PER_TOKEN,
    SAMPLE_COLUMNS,
    Ints,
    Rollout,
    RolloutGroup,
    Sample,
    file_of,
    per,
    scored_tokens,
)
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME, id_of_line
from niels_gpt.storage.meta_json import file_records, path_inside, wrong_value
from niels_gpt.tokenizers.protocol import MAX_IDS

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.forest import PrefixForest


from niels_gpt.prefix_tree.rollouts.records import PER_SAMPLE

_FLOAT = np.dtype("<f4")
_BYTE = np.dtype("u1")
_MAX_ID_BYTES = 1 << 24
_FILL = "Build it with a share of the groups for val: val_frac, or --rollouts-val-frac for recorded rollouts"
_FIRST_OF = {"token": "first_score", "sample": "first_sample"}
_FIRST_ID, _NEWLINE = GROUP_COLUMNS.index("first_id"), ord("\n")


class _Offsets(NamedTuple):
    """Where the samples of a group lie: int64 [samples] each."""

    rests: Ints  # of the ids after the prefix, in the token file
    bits: Ints  # in the loss file
    scores: Ints  # in the files of float32 by token


class RolloutDataset(Reader):
    """The groups of one split. The samples of a group keep the order of the build.

    It holds its version and may be forked and pickled: see `niels_gpt.cache.reader.Reader`. Files are mapped and never
    read as a whole, except the index, which is checked in pieces.
    """

    kind = KIND
    _not_copied = ("groups", "samples", "_tokens", "_bits", "_ids", "_values", "_offsets")
    meta: dict[str, Any]

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None = None,
        **opening: Unpack[Opening],
    ) -> None:
        """path: of a rollout cache, such as cache/rollouts/NAME, or of a split in it: cache/rollouts/NAME/val.

        split: "train" or "val"; None: what `path` says, else "train".
        opening: see `niels_gpt.cache.reader.Opening`.

        Raises:
            FileNotFoundError: no such cache or file.
            CacheError: a damaged cache, a cache of another kind, or a split without a group (E204). It names the file.
            ValueError: another split or check.
        """
        self._asked = opening.get("tokenizer_sha256")
        self._open_version(*named_cache(local_path(path, opening), split), **opening)

    def _prepare(self) -> None:
        if self.meta is None:
            raise CacheError(self.cache, f"no {META_NAME}", "a rollout cache", REBUILD, code="E207")
        if self._asked is not None and self.meta.get("tokenizer_sha256") is None:
            found, remedy = "does not record which tokenizer made its ids", "Open it without tokenizer_sha256"
            raise CacheError(self.cache / META_NAME, found, remedy=remedy, code="E402")
        self.fields: dict[str, str] = _fields(self.meta, str(self.cache / META_NAME))
        """The names of the fields -> "token" or "sample", as `LossEdges.field(values, per=...)` takes it."""

    def _open(self) -> None:
        where = str(self.cache / META_NAME)
        sizes = {record["name"]: record["bytes"] for record in file_records(self.meta, where)}
        if self.vocab_size is None and self.meta.get("token_dtype") != "uint32-le":
            raise wrong_value(where, "token_dtype", self.meta.get("token_dtype"), "'uint32-le' without a vocab_size")
        self._offsets: tuple[int, _Offsets] | None = None

        def opened(name: str) -> tuple[Path, int]:
            if name not in sizes:
                raise CacheError(self.cache / META_NAME, f"does not name {name}", remedy=REBUILD, code="E202")
            return path_inside(self.cache, name), sizes[name]

        def mapped(name: str, dtype: np.dtype[Any]) -> Any:
            place, size = opened(name)
            if self._sums.mount is not None and not name.startswith("index/"):
                return FetchedItems(token_files([(place, size)], self._sums, dtype=dtype))
            items = mmap_tokens(place, expected_bytes=size, dtype=dtype, sums=self._sums)
            return CheckedItems(items, place, self._sums) if self._sums.every_block else items

        def table(name: str, columns: Sequence[str]) -> npt.NDArray[np.int64]:
            place, size = opened(f"index/{self.split}_{name}.npy")
            flat = mapped_npy(place, size, self._sums)
            if len(flat) % len(columns):
                found = f"{len(flat)} numbers"
                raise CacheError(place, found, f"{len(columns)} for each of {name}", REBUILD, code="E203")
            if not len(flat):
                raise CacheError(
                    self.cache, f"split {self.split} is empty: no group is in it", remedy=_FILL, code="E204"
                )
            return flat.reshape(-1, len(columns))

        self.groups, self.samples = table("groups", GROUP_COLUMNS), table("samples", SAMPLE_COLUMNS)
        self._tokens = mapped(file_of(self.split, "tokens"), token_dtype_of(self.meta, self.cache / META_NAME))
        self.num_tokens = len(self._tokens)
        self._bits = mapped(file_of(self.split, "loss"), _BYTE)
        self._ids = mapped(f"index/{self.split}_ids.txt", _BYTE)
        self._values = {name: mapped(file_of(self.split, name), _FLOAT) for name in self.fields}
        files = {"tokens": self._tokens, "loss": self._bits, "ids": self._ids, **self._values}
        check_index(self.cache, self.split, self.groups, self.samples, {key: len(file) for key, file in files.items()})
        self._check_totals()
        ends = np.append(self.groups[1:, _FIRST_ID], len(self._ids)) - 1
        if (self._ids[:][ends] != _NEWLINE).any():
            path = public_file(self.cache / f"index/{self.split}_groups.npy")
            raise CacheError(path, "first_id inside a line", "the first byte of one", REBUILD, code="E203")

    def _check_totals(self) -> None:
        totals = self.meta.get("totals")
        counted = {"groups": len(self.groups), "samples": len(self.samples), "tokens": int(self.samples[:, 0].sum())}
        for unit, number in counted.items():
            found = totals.get(f"{self.split}_{unit}") if isinstance(totals, dict) else None
            if found != number:
                where = str(self.cache / META_NAME)
                raise wrong_value(where, f"totals.{self.split}_{unit}", found, f"{number} by the index")

    def _sizes(self) -> str:
        fields = ", ".join(self.fields) or "no fields"
        return f"{len(self):,} groups, {len(self.samples):,} samples, {fields}"

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def id(self, group: int) -> str:
        """Return the id of a group in its source. Raises: IndexError; CacheError for a line that is not an id."""
        first = int(self._group(group)["first_id"])
        end = int(self.groups[group + 1, _FIRST_ID]) if group + 1 < len(self) else len(self._ids)
        line, path = self._ids[first:end], public_file(self.cache / f"index/{self.split}_ids.txt")
        lines = int((line == _NEWLINE).sum())
        if len(line) > _MAX_ID_BYTES or lines != 1:
            found = f"the id of group {group} has {len(line):,} bytes in {lines} lines"
            raise CacheError(path, found, "one line of at most 16 MiB", REBUILD, code="E201")
        try:
            return id_of_line(line[:-1].tobytes())
        except ValueError as error:
            raise CacheError(path, f"line {group} is not an id ({error})", remedy=REBUILD, code="E201") from error

    def group(self, group: int) -> RolloutGroup:
        """Return the samples of a group, with their masks and fields; `loss_mask` is never None.

        Raises: IndexError; CacheError E203, naming file and place, for values that no build writes.
        """
        return RolloutGroup(self.id(group), [_rollout(sample) for sample in self.read(group)])

    def forest(self, group: int, samples: Sequence[int] | None = None) -> PrefixForest:
        """Return a group, or some of its samples, folded: with loss mask and prompt lengths, samples in this order.

        Raises: IndexError; CacheError E203 for an id outside the vocabulary, or if the group folds into another number
            of tokens than the index has.
        """
        return self.folded(group, self.read(group, samples), samples is None)

    def folded(self, group: int, samples: Sequence[Sample], is_whole: bool) -> PrefixForest:
        """Return samples of `read` as a forest. is_whole: all samples of the group; compares the forest's size."""
        import torch

        from niels_gpt.prefix_tree.forest import PrefixForest

        forest = PrefixForest.from_sequences(
            [sample.ids for sample in samples], loss_mask=[sample.loss_mask for sample in samples]
        )
        expected = int(self._group(group)["tokens_after"])
        if is_whole and forest.num_tokens != expected:
            path = public_file(self.cache / f"index/{self.split}_groups.npy")
            found = f"group {group} has {expected} tokens after folding"
            raise CacheError(path, found, f"{forest.num_tokens} by its ids", REBUILD, code="E203")
        starts = torch.tensor([sample.prompt_length for sample in samples])
        return replace(forest, completion_starts=starts)  # from_sequences takes no -1

    def field(self, name: str, group: int, samples: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """Return a field of a group as `edges.field(values, per=dataset.fields[name])` takes it.

        float32 [samples], or [sum of sample lengths] for a field by token: nan in prompts, which have no target.

        Raises: IndexError; KeyError for a field that the cache does not have.
        """
        if name not in self.fields:
            raise KeyError(f"{name!r}: the fields of this cache are ({', '.join(self.fields)})")
        return np.concatenate([values_of(sample, name) for sample in self.read(group, samples)])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the group of a sample of the split, and its number there. Raises: IndexError."""
        if not 0 <= sample < len(self.samples):
            raise IndexError(f"sample {sample}: there are {len(self.samples)}")
        group = int(np.searchsorted(self.groups[:, 0], sample, side="right")) - 1
        return group, sample - int(self.groups[group, 0])

    def will_read(self, groups: Ints) -> None:
        """Say which groups will be read next, in this order: those of a cache at a URL are fetched ahead."""
        if not self.is_fetched:
            return
        last = len(self) - 1
        for items, name in [
            (self._tokens, "first_token"),
            (self._bits, "first_byte"),
            *((values, _FIRST_OF[per(field)]) for field, values in self._values.items()),
        ]:
            firsts = self.groups[:, GROUP_COLUMNS.index(name)]
            items.will_read(firsts[groups], np.where(groups < last, firsts[np.minimum(groups + 1, last)], len(items)))

    def read(self, group: int, samples: Sequence[int] | None = None) -> list[Sample]:
        """Return all samples of a group, or some of them, as arrays.

        Raises: IndexError; CacheError E203, naming file and place, for values that no build writes.
        """
        row, at = self._group(group), self._offsets_of(group)
        first, begin = row["first_sample"], row["first_token"]
        shared = self._tokens[begin : begin + row["prefix"]]
        wanted = range(row["samples"]) if samples is None else [range(row["samples"])[number] for number in samples]
        found = []
        for number in wanted:
            length, prompt, targets = self.samples[first + number, :3].tolist()
            rest = int(at.rests[number])
            ids = np.concatenate([shared, self._tokens[rest : rest + length - row["prefix"]]])
            self._check_ids(ids, group, number)
            fields = {}
            for name, values in self._values.items():
                by_token = self.fields[name] == "token"
                start, size = (int(at.scores[number]), length - max(prompt, 0)) if by_token else (first + number, 1)
                fields[name] = values[start : start + size]
            sample = Sample(ids.astype(np.int64), prompt, self._mask(int(at.bits[number]), length), fields)
            self._check_sample(sample, targets, group, number)
            found.append(sample)
        return found

    def _offsets_of(self, group: int) -> _Offsets:
        """Return where the samples of a group lie. Keeps the last answer: a stream reads a large group in parts."""
        if self._offsets is None or self._offsets[0] != group:
            row = self._group(group)
            lengths, prompts = self.samples[row["first_sample"] : row["first_sample"] + row["samples"], :2].T
            at, rests, scored = np.cumsum(lengths) - lengths, lengths - row["prefix"], scored_tokens(lengths, prompts)
            self._offsets = (
                group,
                _Offsets(
                    row["first_token"] + row["prefix"] + np.cumsum(rests) - rests,
                    8 * row["first_byte"] + at,
                    row["first_score"] + np.cumsum(scored) - scored,
                ),
            )
        return self._offsets[1]

    def _mask(self, first: int, length: int) -> npt.NDArray[np.bool_]:
        """Return the loss mask of a sample, bool [length]. first: its first bit in the file."""
        some = self._bits[first // 8 : (first + length + 7) // 8]
        return np.unpackbits(some, bitorder=BIT_ORDER)[first % 8 : first % 8 + length].view(np.bool_)

    def _group(self, group: int) -> dict[str, int]:
        if not 0 <= group < len(self):
            raise IndexError(f"group {group}: there are {len(self)}")
        return dict(zip(GROUP_COLUMNS, self.groups[group].tolist(), strict=True))

    def _check_ids(self, ids: npt.NDArray[Any], group: int, number: int) -> None:
        limit = self.vocab_size or MAX_IDS
        if ids.max() >= limit:
            path = public_file(self.cache / file_of(self.split, "tokens"))
            found = f"sample {number} of group {group} has the id {ids.max()}"
            raise CacheError(path, found, f"ids below {limit}", REBUILD, code="E203")

    def _check_sample(self, sample: Sample, targets: int, group: int, number: int) -> None:
        """Raise CacheError E203 unless mask and fields are as docs/formats.md says. targets: by the index."""
        where, mask = f"sample {number} of group {group}", sample.loss_mask
        for name, values in sample.fields.items():
            if not np.isfinite(values).all():
                path = public_file(self.cache / file_of(self.split, name))
                raise CacheError(path, f"{where} has a value that is not finite", remedy=REBUILD, code="E203")
        path = public_file(self.cache / file_of(self.split, "loss"))
        if sample.num_loss_tokens != targets:
            found = f"{where} has {sample.num_loss_tokens} targets"
            raise CacheError(path, found, f"{targets} by the index", REBUILD, code="E203")
        if "token" in self.fields.values() and mask[: max(sample.prompt_length, 0)].any():
            raise CacheError(path, f"{where} has a target in its prompt, without a score", remedy=REBUILD, code="E203")

    def __iter__(self) -> Iterator[RolloutGroup]:
        """Yield every group in the order of the build."""
        self.will_read(np.arange(len(self)))
        return (self.group(number) for number in range(len(self)))


def values_of(sample: Sample, name: str) -> npt.NDArray[np.float32]:
    """Return a field of a sample: [1], or [tokens] with nan in the prompt for a field by token."""
    values = sample.fields[name]
    if name not in PER_TOKEN:
        return values
    prompt = np.full(max(sample.prompt_length, 0), np.nan, dtype=np.float32)
    return np.concatenate([prompt, values])


def _rollout(sample: Sample) -> Rollout:
    fields = {name: values for name, values in sample.fields.items() if name in PER_TOKEN}
    single = {name: float(values[0]) for name, values in sample.fields.items() if name not in PER_TOKEN}
    advantage = fields.get("advantages", single.get("advantage"))
    return Rollout(
        sample.ids, sample.prompt_length, sample.loss_mask, fields.get("logprobs"), advantage, single.get("reward")
    )


def _fields(meta: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return `fields` of a meta.json. Raises: CacheError for unknown ones."""
    fields = meta.get("fields")
    if not isinstance(fields, dict) or not all(name in FIELDS and fields[name] == per(name) for name in fields):
        raise wrong_value(where, "fields", fields, f"some of {', '.join(FIELDS)}, with token or sample")
    return {name: per(name) for name in FIELDS if name in fields}


# --- the index --------------------------------------------------------------------------------------------------------


_PIECE = 1 << 18  # samples that are checked at once, or one group: the check takes many times their memory
MAX_TOKENS = 1 << 31
"""The most tokens of a sample: more would overflow its attention pairs in int64."""


def check_index(folder: Path, split: str, groups: Ints, samples: Ints, sizes: Mapping[str, int]) -> None:
    """Raise CacheError E203 unless the numbers of the index fit each other and the sizes of the files.

    groups: int64 [groups, 9]. samples: int64 [samples, 5]. sizes: entries of the files by name: tokens, bytes of loss
    bits and ids, and float32 of each field. Shared prefixes follow from the ids: the deep check compares them.
    """
    path = public_file(folder / f"index/{split}_groups.npy")
    counts, column = groups[:, 1], dict(zip(GROUP_COLUMNS, groups.T, strict=True))
    if counts.min() < 1 or counts.max() > len(samples):
        raise CacheError(path, f"a group of {counts.min()} samples", "1 or more", REBUILD, code="E203")
    ends = np.cumsum(counts)  # no overflow: each is at most the number of rows, and so is their number
    if ends[-1] != len(samples) or not np.array_equal(column["first_sample"], ends - counts):
        raise CacheError(path, "first_sample", f"sums of samples, {len(samples)} in all", REBUILD, code="E203")
    begins = dict.fromkeys(("first_token", "first_byte", "first_score"), 0)
    for first, last in _pieces(ends):
        rows = samples[ends[first] - counts[first] : ends[last - 1]]
        problem = _row_problem(rows, counts[first:last], sizes["tokens"])
        if problem:
            name = public_file(folder / f"index/{split}_samples.npy")
            raise CacheError(name, f"{problem} in groups {first} to {last - 1}", remedy=REBUILD, code="E203")
        for key, expected in _derived(rows, counts[first:last]).items():
            actual = column[key][first:last]
            if key in begins:
                at = begins[key]
                begins[key] = at + int(expected.sum())
                expected = at + np.cumsum(expected) - expected
            if not np.array_equal(actual, expected):
                wrong = int((actual != expected).argmax())
                found = f"{key} of group {first + wrong} is {actual[wrong]}"
                raise CacheError(path, found, f"{expected[wrong]} by its samples", REBUILD, code="E203")
    _check_ends(folder, split, begins, len(samples), sizes)
    lines = column["first_id"]
    if lines[0] != 0 or (np.diff(lines) < 1).any() or lines[-1] >= sizes["ids"]:
        raise CacheError(path, "first_id", "rising bytes of the file of ids", REBUILD, code="E203")


def _check_ends(folder: Path, split: str, ends: Mapping[str, int], samples: int, sizes: Mapping[str, int]) -> None:
    expected = {"tokens": ends["first_token"], "loss": ends["first_byte"]}
    expected |= {name: ends["first_score"] for name in PER_TOKEN} | dict.fromkeys(PER_SAMPLE, samples)
    for name, size in sizes.items():
        if size != expected.get(name, size):
            path = public_file(folder / f"{split}_{name}.bin")
            raise CacheError(path, f"{size} entries", f"{expected[name]} by the index", REBUILD, code="E203")


def sums(groups: Ints, samples: Ints) -> dict[str, int]:
    """Return the counts of a split, by the keys of meta.json; it has groups, samples and tokens in `totals`."""
    lengths, prompts, targets, _, _ = samples.T
    return {
        "groups": len(groups),
        "samples": len(samples),
        "tokens": int(lengths.sum()),
        "tokens_after": int(groups[:, 7].sum()),
        "pairs": int((lengths * (lengths + 1) // 2).sum()),
        "pairs_after": int(groups[:, 8].sum()),
        "loss_tokens": int(targets.sum()),
        "scores": int(scored_tokens(lengths, prompts).sum()),
        "samples_without_target": int((targets == 0).sum()),
    }


def _pieces(ends: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges of groups with at most _PIECE samples, or of one group."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(ends.searchsorted(begin + _PIECE, side="right")))
        yield first, last
        first = last


def _row_problem(rows: Ints, counts: Ints, tokens: int) -> str | None:
    """Return the first problem of the samples of whole groups, or None."""
    lengths, prompts, targets, order, lcps = rows.T
    starts = np.cumsum(counts) - counts
    if lengths.min() < 1 or lengths.max() > min(tokens, MAX_TOKENS):
        return "a sample of 0 tokens, or of more than there are"
    if (prompts < -1).any() or (prompts >= lengths).any():
        return "a prompt that is not shorter than its sample"
    if (targets < 0).any() or (targets >= lengths).any():
        return "more targets than tokens after the first"
    if (order < 0).any() or (order >= counts.repeat(counts)).any():
        return "an order beyond its group"
    places = order + starts.repeat(counts)
    if not (np.bincount(places, minlength=len(rows)) == 1).all():
        return "an order that names a sample twice"
    sizes = lengths[places]
    before = np.minimum(sizes, np.append(0, sizes[:-1]))
    before[starts] = 0
    if (lcps < 0).any() or (lcps > before).any():
        return "an lcp that is longer than its samples"
    return None


def _derived(rows: Ints, counts: Ints) -> dict[str, Ints]:
    """Return the columns of the groups that follow from their samples; places as sizes."""
    lengths, prompts, _, order, lcps = rows.T
    starts = np.cumsum(counts) - counts

    def sums(values: Ints) -> Ints:
        return np.add.reduceat(values, starts)

    total, sizes = sums(lengths), lengths[order + starts.repeat(counts)]
    shared = lcps.copy()
    shared[starts] = sizes[starts]
    prefix = np.where(counts > 1, np.minimum.reduceat(shared, starts), 0)
    return {
        "prefix": prefix,
        "first_token": total - (counts - 1) * prefix,
        "first_byte": -(-total // 8),
        "first_score": sums(scored_tokens(lengths, prompts)),
        "tokens_after": sums(sizes - lcps),
        "pairs_after": sums((sizes * (sizes + 1) - lcps * (lcps + 1)) // 2),
    }
