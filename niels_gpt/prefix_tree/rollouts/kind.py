"""The kind of rollout caches: groups of samples that share prompts, from recorded rollouts or trees of messages."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import check_tokenizer, checked_meta, read_meta, sentinel_names
from niels_gpt.display.decoded import decoded_text, runs
from niels_gpt.display.numbers import many, number_of
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.engine.meta import BUILDER_VERSIONS
from niels_gpt.kinds.checks import FILES, TOKENIZER_MAY_MATCH, partition_sums, warnings_of
from niels_gpt.kinds.files import HEADER_BYTES, Damage, FileChecks
from niels_gpt.kinds.kind import MALFORMED, Cache, Card, Finding, Held, Kind, Limits, Page, Rows
from niels_gpt.kinds.rows import counted, described, of_loader, of_partitions, parts_by_loss, spread, warned_of
from niels_gpt.kinds.verify import examined_unit, file_checks
from niels_gpt.prefix_tree.rollouts.records import PER_TOKEN
from niels_gpt.storage.checks import Check, Figures
from niels_gpt.storage.errors import REBUILD, CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import file_records, printable, shortened

if TYPE_CHECKING:
    from niels_gpt.display.sketch import Distributions
    from niels_gpt.engine.units import UnitKind
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
    from niels_gpt.prefix_tree.rollouts.records import Sample
    from niels_gpt.tokenizers.protocol import FullTokenizer

LEGEND = "supervised tokens are in [[ ]]"
_TOTALS = ("groups", "samples", "tokens")
_SUMS = (*_TOTALS, "tokens_after", "pairs", "pairs_after", "loss_tokens", "scores", "samples_without_target")
_DIGEST_BYTES = 16


# --- checks -----------------------------------------------------------------------------------------------------------


def _groups_read(files: FileChecks, limits: Limits, figures: Figures) -> Iterator[Finding]:
    """Let the reader open every split, and compare its counts with meta.json; deep: read and fold every group."""
    yield from _problems(files.folder, figures, deep=limits.deep)


def _problems(folder: Path, figures: Figures, *, deep: bool) -> Iterator[Finding]:
    kept, is_read = Counter[str](), True
    parts = [partial(_of_split, folder, split, kept, deep=deep) for split in SPLITS]
    for part in (*parts, partial(_counts, folder, kept)):
        try:
            yield from part() if is_read or part.func is _of_split else ()
        except (CacheError, OSError) as error:
            yield error
            is_read = False
        except MALFORMED as error:
            yield CacheError(folder / META_NAME, f"not as docs/formats.md describes it ({error!r})", code="E202")
            is_read = False
    held = f"{many(kept['groups'], 'group')} of {many(kept['samples'], 'sample')}"
    how = "each was read and folded" if deep else "none was read: deep_checks is false"
    figures.say(
        f"The reader opens {held}; {how}.",
        groups=kept["groups"],
        samples=kept["samples"],
    )


def _of_split(folder: Path, split: str, kept: Counter[str], *, deep: bool) -> Iterator[Finding]:
    """Yield the problems of a split. kept: counts its groups and samples."""
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset, sums

    meta: dict[str, Any] = read_meta(os.fspath(folder / META_NAME))
    data = None if _is_empty(meta, split) else RolloutDataset(folder, split)
    counts = dict.fromkeys(_SUMS, 0) if data is None else sums(data.groups, data.samples)
    kept.update(groups=counts["groups"], samples=counts["samples"])
    for key, number in counts.items():
        name, found = f"{key}.{split}", meta[key][split] if key not in _TOTALS else None
        if key in _TOTALS:
            name, found = f"totals.{split}_{key}", meta["totals"][f"{split}_{key}"]
        if found != number:
            yield Damage(META_NAME, 0, 0, f"{name} is {shortened(found)}, not {number}")
    if "partitions" in meta:
        yield from _of_partitions(meta, split, data)
    if deep and data is not None:
        yield from _of_groups(data)


def _of_partitions(meta: dict[str, Any], split: str, data: RolloutDataset | None) -> Iterator[Finding]:
    """Yield the first partition whose groups, samples and tokens do not end at one place of the index."""
    ends = np.zeros((1, 3), dtype=np.int64)
    if data is not None:
        tokens = np.append(0, np.cumsum(data.samples[:, 0]))[np.append(data.groups[:, 0], len(data.samples))]
        ends = np.stack([np.arange(len(data) + 1), np.append(data.groups[:, 0], len(data.samples)), tokens], axis=1)
    of_each = [[each[f"{split}_{key}"] for key in _TOTALS] for each in meta["partitions"]["of_each"]]
    found = np.cumsum(np.array(of_each, dtype=np.int64), axis=0)
    expected = ends[np.clip(found[:, 0], 0, len(ends) - 1)]
    for number in np.flatnonzero((found != expected).any(axis=1))[:1].tolist():
        problem = f"partitions.of_each[{number}] ends {split} elsewhere than its groups do, by the index"
        yield Damage(META_NAME, 0, 0, problem)


def _of_groups(data: RolloutDataset) -> Iterator[Finding]:
    """Read every group, and compare the index with its ids."""
    from niels_gpt.prefix_tree.rollouts.records import GROUP_COLUMNS, stored

    for number in range(len(data)):
        data.id(number)
        group, row = stored(data.read(number)), dict(zip(GROUP_COLUMNS, data.groups[number].tolist(), strict=True))
        first = row["first_sample"]
        rows = data.samples[first : first + row["samples"]]
        if not np.array_equal(group.samples, rows) or group.folded != (row["tokens_after"], row["pairs_after"]):
            index = f"index/{data.split}_groups.npy"
            yield Damage(index, 0, 0, f"group {number} does not fold as the index has it")


def _is_empty(meta: dict[str, Any], split: str) -> bool:
    """Return whether the files of a split hold nothing, whatever the totals say."""
    records = [record for record in file_records(meta) if record["name"].split("/")[-1].startswith(f"{split}_")]
    return all(record["bytes"] <= (HEADER_BYTES if record["name"].endswith(".npy") else 0) for record in records)


def _counts(folder: Path, kept: Counter[str]) -> Iterator[Finding]:
    """Compare what was read with what was kept and dropped."""
    meta = read_meta(os.fspath(folder / META_NAME))
    dropped = Counter(meta["dropped"])
    without = dropped.pop("groups_without_sample", 0)
    expected = {"groups_read": kept["groups"] + without, "samples_read": kept["samples"] + dropped.total()}
    for key, number in expected.items():
        if meta[key] != number:
            problem = f"{key} is {shortened(meta[key])}, but {number} were kept or dropped"
            yield Damage(META_NAME, 0, 0, problem)


# --- the kind ---------------------------------------------------------------------------------------------------------


def _reader(meta: Mapping[str, Any]) -> Iterator[str]:
    yield from ("from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset", "")
    yield 'groups = RolloutDataset("FOLDER")'
    yield from ("", "# without this library", "import json", "", "import numpy as np", "")
    split = next((split for split in SPLITS if meta["shards"][split]), SPLITS[0])
    dtype = "<u4" if str(meta.get("token_dtype")).startswith("uint32") else "<u2"
    yield f'file = json.load(open("FOLDER/meta.json"))["shards"]["{split}"][0]["name"]'
    yield f'ids = np.memmap("FOLDER/" + file, dtype="{dtype}", mode="r")'


class RolloutsKind(Kind):
    """Groups of samples that share a prompt, with loss mask and scores."""

    name = "rollouts"
    unit = "group"
    keys = ("rollouts/", "trees/")
    families: ClassVar[Mapping[str, str]] = {
        "trees": "niels_gpt.recipes.rollouts:TREE_CACHES",
        "rollouts": "niels_gpt.recipes.rollouts:ROLLOUTS",
    }
    built_whole = ("trees/",)
    builder_version = BUILDER_VERSIONS["rollouts"]
    may_lack_vocabulary = True
    has_loss = True
    formats = frozenset({"hf"})
    checks = (
        FILES,
        TOKENIZER_MAY_MATCH,
        Check(
            "groups_read",
            "The reader opens every split: index, ids, loss mask and fields belong together. A deep check reads every "
            "group, folds it, and compares the index with its ids.",
            rule=_groups_read,
        ),
        *warnings_of("samples"),
    )
    page = Page(
        "from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset\n\n"
        'groups = RolloutDataset("{path}", "train")\n'
        "samples = groups.read(0)  # of the first group",
        frozenset({"numpy"}),
        columns=(
            ("ids", "int64 [L]", "ids of one sample's tokens, the prompt first"),
            ("prompt_length", "int", "tokens of the prompt"),
            ("loss_mask", "bool [L]", "which tokens carry loss"),
            ("fields", "float32 [scored tokens], or [1]", "advantages, log-probabilities and such, by name"),
        ),
    )

    card = Card("A cache of groups of sampled sequences, and which of their tokens carry loss", _reader)

    @cached_property
    def units(self) -> UnitKind:
        """How to examine partitions, and join them. The engine is loaded here."""
        from niels_gpt.engine.units import UnitKind
        from niels_gpt.prefix_tree.rollouts import joining

        return UnitKind(
            name="rollouts",
            same=joining.SAME,
            examine=partial(examined_unit, joining.check_receipt),
            items=lambda meta: sum(meta["totals"][f"{split}_groups"] for split in SPLITS),
            read="groups_read",
            join=joining.join,
            warn=joining.warn_of_whole,
        )

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Compare the tokenizer and the sizes; groups_read opens the index."""
        checked_meta(cache.meta, str(cache.folder / META_NAME))
        check_tokenizer(cache.folder, cache.meta)
        files = file_checks(cache)
        for record in files.records:
            if damage := files.size_damage(record):
                raise CacheError(cache.folder / damage.file, damage.problem, remedy=REBUILD, code="E203")

    def wrong_sums(self, cache: Cache) -> Iterator[tuple[str, str]]:
        """Compare what partitions count with the totals; groups_read compares the rest with the files."""
        return partition_sums(cache.meta)

    def last_look(self, files: FileChecks, limits: Limits) -> Iterator[Finding]:
        """Yield the reader's refusals; groups of a damaged file are not judged."""
        return _problems(files.folder, Figures(), deep=limits.deep)

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return groups, samples and tokens."""
        totals, loss = meta.get("totals") or {}, meta.get("loss_tokens")
        counts = {unit: {split: int(totals[f"{split}_{unit}s"]) for split in SPLITS} for unit in _UNITS}
        return Held(counts, loss=sum(loss.values()) if isinstance(loss, dict) else None)

    def stats(self, cache: Cache, progress: Any = None) -> Rows:
        """Return lengths, sizes of groups and savings by folding."""
        return _rows(cache)

    def stats_data(self, cache: Cache, progress: Any = None) -> dict[str, Any]:
        """Return the figures of `stats`, ready for JSON."""
        sizes: dict[str, Any] = {"sample_tokens": dict.fromkeys(SPLITS), "group_samples": dict.fromkeys(SPLITS)}
        for split in SPLITS:
            if cache.meta["totals"][f"{split}_groups"]:
                data = _opened(cache, split)
                sizes["sample_tokens"][split] = spread(data.samples[:, 0])
                sizes["group_samples"][split] = spread(data.groups[:, 1])
        return {**sizes, **described(cache.meta)}

    def show(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int, color: bool
    ) -> str:
        """Return a group: its id, and the beginning of each sample with its fields; supervised tokens in [[ ]]."""
        data, samples, found = _group(cache, split, at)
        names = _sentinels(data, tokenizer)
        head = (
            f"{cache.shown}/{split}: group {at:,} of {len(data):,}, id {found['source_id']}, "
            f"{number_of(len(samples), 'sample')}, {number_of(found['tokens'], 'token')}, "
            f"{found['tokens_after_folding']:,} after folding"
        )
        lines, room = [printable(cut(head)), LEGEND], tokens
        for number, sample in enumerate(samples):
            if room <= 0:
                lines.append(f"and {number_of(len(samples) - number, 'sample')} more")
                break
            lines += ["", _heading(number, sample), _text(sample, min(room, len(sample.ids)), names, tokenizer)]
            room -= len(sample.ids)
        return "\n".join(lines)

    def show_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the group of `show`, ready for JSON. tokens: the most ids and text of each sample; None: all."""
        data, samples, found = _group(cache, split, at)
        return found | {"samples": [_sample_data(data, sample, tokens, tokenizer) for sample in samples]}

    def locate(self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int) -> str:
        """Return the group and the sample of a token, counted over all samples of the split, and its text."""
        data, sample, found = _located(cache, split, position)
        names = _sentinels(data, tokenizer)
        place = found["sample_of_group"]
        rows = [
            ("token", f"{position:,} of {found['split_tokens']:,} of {cache.shown}/{split}: id {found['token_id']}"),
            ("group", f"{found['group']:,} of {found['groups']:,}, {number_of(found['group_samples'], 'sample')}"),
            ("source id", found["source_id"]),
            ("sample", f"{place} of its group, {found['sample_of_split']:,} of the split"),
            ("offset in it", f"{found['offset_tokens']:,} tokens, {'with' if found['has_loss'] else 'without'} loss"),
        ]
        lines = [f"{label + ':':14}{printable(cut(str(value)))}" for label, value in rows]
        text = _text(sample, min(tokens, len(sample.ids)), names, tokenizer, around=found["offset_tokens"])
        return "\n".join([*lines, "", _heading(place, sample), text])

    def locate_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, position: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the place of `locate`, ready for JSON. tokens: the most ids and text of the sample; None: all."""
        data, sample, found = _located(cache, split, position)
        return found | {"sample": _sample_data(data, sample, tokens, tokenizer)}

    def sizes(self, cache: Cache) -> dict[str, int]:
        """Return the groups of each split."""
        return {split: int(cache.meta["totals"][f"{split}_groups"]) for split in SPLITS}

    def digests(self, cache: Cache, split: str) -> Iterator[bytes]:
        """Yield a hash of the ids and loss masks of each group's samples."""
        data = _opened(cache, split)
        for number in range(len(data)):
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            for sample in data.read(number):
                digest.update(np.asarray(sample.ids, dtype="<i8").tobytes())
                digest.update(np.asarray(sample.loss_mask, dtype=np.bool_).tobytes() + b"|")
            yield digest.digest()

    def source_ids(self, cache: Cache, split: str) -> Iterator[bytes] | None:
        """Yield the id of each group."""
        data = _opened(cache, split)
        return (str(data.id(number)).encode("unicode_escape") for number in range(len(data)))

    def rows(self, cache: Cache, split: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample in the form `ids` of data/files/rollouts.py, for `build --rollouts`."""
        from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

        data = RolloutDataset(cache.folder, split, check="blocks")
        for number in range(len(data)):
            name = data.id(number)
            for sample in data.read(number):
                row: dict[str, Any] = {"group": name, "ids": np.asarray(sample.ids, dtype=np.int32)}
                row["prompt_length"] = sample.prompt_length if sample.prompt_length >= 0 else None
                row["mask"] = np.asarray(sample.loss_mask, dtype=np.int8)
                fields = sample.fields.items()
                yield row | {of: values if of in PER_TOKEN else float(values[0]) for of, values in fields}

    def plot(self, cache: Cache, name: str) -> bytes:
        """Return a PNG of the savings by folding."""
        return _picture(cache, name)

    def distributions(self, cache: Cache) -> Distributions:
        """Return the tokens of each group, and how many times fewer they are after folding."""
        sizes, factors = dict[str, Any](), dict[str, Any]()
        for split in SPLITS:
            if cache.meta["totals"][f"{split}_groups"]:
                data = _opened(cache, split)
                sizes[split] = np.add.reduceat(data.samples[:, 0].astype(np.int64), data.groups[:, 0])
                factors[split] = sizes[split] / data.groups[:, -2]
        return {"tokens per group": sizes, "times fewer after folding": factors} if sizes else {}

    def more_results(self, cache: Cache) -> dict[str, Any]:
        """Return the factors by which folding reduces tokens and attention pairs."""
        meta, tokens = cache.meta, self.held(cache.meta).total("token")
        return {
            "folding/token_factor": round(tokens / sum(meta["tokens_after"].values()), 4),
            "folding/pair_factor": round(sum(meta["pairs"].values()) / sum(meta["pairs_after"].values()), 4),
        }


_UNITS = ("group", "sample", "token")


# --- contents ---------------------------------------------------------------------------------------------------------


def _rows(cache: Cache) -> Rows:
    meta = cache.meta
    source, totals = meta["source"], meta["totals"]
    rows = [("cache", f"{cache.shown} (rollouts, built)"), ("dataset", meta["dataset_name"])]
    rows += [(name, source.get(name) or "not stated") for name in ("licence", "attribution")]
    rows += [(split, _split_line(cache, split)) for split in SPLITS]
    before, pairs = (sum(of.values()) for of in ({s: totals[f"{s}_tokens"] for s in SPLITS}, meta["pairs"]))
    after, pairs_after = (sum(meta[name].values()) for name in ("tokens_after", "pairs_after"))
    token_factor, pair_factor = before / max(after, 1), pairs / max(pairs_after, 1)  # verify names a sum that is wrong
    saved = f"{token_factor:.2f}x fewer tokens, {pair_factor:.2f}x fewer attention pairs, each group folded"
    rows += [
        ("folding", saved),
        ("fields", ", ".join(f"{name} by {of}" for name, of in meta["fields"].items()) or "none"),
        ("with loss", f"{sum(meta['loss_tokens'].values()) / max(before, 1):.0%} of the tokens"),
        ("without a target", number_of(sum(meta["samples_without_target"].values()), "sample")),
        *(
            (f"range of {name}", f"{of['min']:.6g} to {of['max']:.6g}, mean {of['mean']:.6g}")
            for name, of in meta.get("ranges", {}).items()
        ),
        ("dropped", counted(meta["dropped"])),
        *of_partitions(meta),
        *of_loader(meta),
        ("noticed", counted(meta.get("noticed", {}))),
        *warned_of(meta),
        ("split", meta["split_rule"]),
    ]
    rows += [("largest id", f"{meta['largest_id']:,}")] if "largest_id" in meta else []
    size = "vocabulary not known" if meta["vocab_size"] is None else f"{meta['vocab_size']:,} ids"
    sha256 = meta["tokenizer_sha256"]
    return [*rows, ("tokenizer", f"{'not recorded' if sha256 is None else sha256[:12]}, {size}")]


def _split_line(cache: Cache, split: str) -> str:
    counts = {unit: cache.meta["totals"][f"{split}_{unit}s"] for unit in ("token", "sample", "group")}
    if not counts["group"]:
        return "empty"
    data = _opened(cache, split)
    least, middle, most = np.percentile(data.samples[:, 0], [0, 50, 100])
    sizes = np.percentile(data.groups[:, 1], [0, 50, 100])
    return (
        f"{number_of(counts['token'], 'token')} in {number_of(counts['sample'], 'sample')} "
        f"({least:,.0f} to {most:,.0f}, median {middle:,.0f}) of {number_of(counts['group'], 'group')} "
        f"({sizes[0]:,.0f} to {sizes[2]:,.0f} samples, median {sizes[1]:,.0f}), "
        f"{number_of(cache.meta['tokens_after'][split], 'token')} after folding"
    )


def _picture(cache: Cache, name: str) -> bytes:
    """Return a PNG of the savings by folding, by group and in total, from the index."""
    from niels_gpt.prefix_tree.forest import SHAPE_7B, ForestStats
    from niels_gpt.prefix_tree.plot import plot
    from niels_gpt.prefix_tree.savings import Savings

    meta = cache.meta
    savings, total = Savings(SHAPE_7B), np.zeros(4)
    flops_of: Any = SHAPE_7B.training_flops  # of numbers, and of arrays
    for split in SPLITS:
        if not meta["totals"][f"{split}_groups"]:
            continue
        data = _opened(cache, split)
        lengths, starts = data.samples[:, 0].astype(np.float64), data.groups[:, 0]
        columns = [np.add.reduceat(each, starts) for each in (lengths, lengths * (lengths + 1) / 2)]
        before, after = np.stack(columns), data.groups[:, -2:].T.astype(np.float64)
        savings.token_factors.extend(array("d", (before[0] / after[0]).tolist()))
        savings.flop_factors.extend(array("d", (flops_of(*before) / flops_of(*after)).tolist()))
        total += [*before.sum(axis=1), *after.sum(axis=1)]
    tokens, pairs, tokens_after, pairs_after = map(int, total)
    samples = sum(meta["totals"][f"{split}_samples"] for split in SPLITS)
    flops = (flops_of(tokens, pairs), flops_of(tokens_after, pairs_after))
    savings.total = ForestStats(samples, 0, tokens, tokens_after, pairs, pairs_after, 0, 0, 0, 0, *flops)
    savings.computed_pairs = pairs_after
    return plot(savings, name)


def _group(cache: Cache, split: str, group: int) -> tuple[RolloutDataset, list[Sample], dict[str, Any]]:
    data = _opened(cache, split)
    if not 0 <= group < len(data):
        raise PositionError(f"position {group:,}: there are {len(data):,} groups in {split}")
    samples = data.read(group)
    found = {"kind": cache.kind.name, "split": split, "group": group, "groups": len(data)}
    found |= {"source_id": data.id(group), "tokens": sum(len(sample.ids) for sample in samples)}
    return data, samples, found | {"tokens_after_folding": int(data.groups[group, -2])}


def _sample_data(
    data: RolloutDataset, sample: Sample, num_tokens: int | None, tokenizer: FullTokenizer | None
) -> dict[str, Any]:
    ids: npt.NDArray[Any] = sample.ids[:num_tokens]
    mask = sample.loss_mask[:num_tokens]
    names = _names(data) if _sentinels(data, tokenizer) else {}
    model = _of_ids(tokenizer, ids)
    return {
        "tokens": len(sample.ids),
        "prompt_tokens": sample.prompt_length if sample.prompt_length >= 0 else None,
        "supervised_tokens": int(np.count_nonzero(sample.loss_mask)),
        "fields": {name: values.tolist() for name, values in sample.fields.items()},
        "ids": ids.tolist(),
        "parts": None if model is None else parts_by_loss(ids, mask, names, model),
    }


def _located(cache: Cache, split: str, position: int) -> tuple[RolloutDataset, Sample, dict[str, Any]]:
    data = _opened(cache, split)
    ends = np.cumsum(data.samples[:, 0])
    if not 0 <= position < ends[-1]:
        raise PositionError(f"position {position:,}: {cache.shown}/{split} has {ends[-1]:,} tokens")
    number = int(np.searchsorted(ends, position, side="right"))
    group, place = data.locate(number)
    sample = data.read(group, [place])[0]
    offset = position - int(ends[number]) + len(sample.ids)
    found = {"kind": cache.kind.name, "split": split, "position": position}
    found |= {"split_tokens": int(ends[-1]), "token_id": int(sample.ids[offset]), "source_id": data.id(group)}
    found |= {"group": group, "groups": len(data), "group_samples": int(data.groups[group, 1])}
    found |= {"sample_of_group": place, "sample_of_split": number, "offset_tokens": offset}
    found["has_loss"] = bool(sample.loss_mask[offset])
    return data, sample, found


def _opened(cache: Cache, split: str) -> RolloutDataset:
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

    return RolloutDataset(cache.folder, split)


def _sentinels(data: RolloutDataset, tokenizer: FullTokenizer | None) -> dict[int, str]:
    """Return names of sentinels. Raises: CacheError for another tokenizer than the recorded one."""
    if tokenizer is None or data.meta["tokenizer_sha256"] is None:
        return {}
    check_tokenizer(data.folder, data.meta, tokenizer.sha256)
    return {token: name if name == "<|eot|>" else f"\n{name}" for token, name in _names(data).items()}


def _names(data: RolloutDataset) -> dict[int, str]:
    return sentinel_names(data.folder, data.meta) if data.meta["special_token_ids"] else {}


def _heading(number: int, sample: Sample) -> str:
    parts = [number_of(len(sample.ids), "token")]
    parts += [f"prompt {sample.prompt_length:,}"] if sample.prompt_length >= 0 else []
    parts += [f"{np.count_nonzero(sample.loss_mask):,} with loss"]
    for name, values in sample.fields.items():
        parts.append(f"{name} {values[0]:.4g}" if len(values) == 1 else f"{name} {values.mean():.4g} on average")
    return printable(cut(f"sample {number}: {', '.join(parts)}"))


def _of_ids(tokenizer: FullTokenizer | None, ids: npt.NDArray[Any]) -> FullTokenizer | None:
    """Return the tokenizer, None where it is not the one of the recorded ids."""
    return None if tokenizer is None or int(ids.max(initial=0)) >= tokenizer.vocab_size else tokenizer


def _text(
    sample: Sample, num_tokens: int, names: dict[int, str], tokenizer: FullTokenizer | None, around: int = 0
) -> str:
    """Return the text of at most `num_tokens` tokens of a sample, those around one; supervised tokens in [[ ]]."""
    first = max(0, min(around - num_tokens // 2, len(sample.ids) - num_tokens))
    ids: npt.NDArray[Any] = sample.ids[first : first + num_tokens]
    mask = sample.loss_mask[first : first + num_tokens]
    tokenizer, parts = _of_ids(tokenizer, ids), []
    for start, end in runs(mask):
        piece = ids[start:end]
        text = " ".join(map(str, piece)) if tokenizer is None else decoded_text(piece, names, tokenizer)
        text = shown(cut(text, most_of(end - start)))
        parts.append(f"[[{text}]]" if mask[start] else text)
    before, after = "… " if first else "", " …" if first + len(ids) < len(sample.ids) else ""
    return before + ("" if tokenizer else " ").join(parts).removeprefix("\n") + after


ROLLOUTS = RolloutsKind()
