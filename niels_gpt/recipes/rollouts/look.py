"""What rollout caches hold, for people: `stats` and its picture, the samples of a group, the group at a token."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import check_tokenizer, read_meta
from niels_gpt.display.decoded import decoded_text, runs
from niels_gpt.display.numbers import number_of
from niels_gpt.display.tables import cut, most_of, shown
from niels_gpt.inspection.show import parts_by_loss, short_names
from niels_gpt.inspection.source_ids import printable
from niels_gpt.inspection.stats import Stats, described, meta_errors, of_loader, spread, warned_of
from niels_gpt.storage.errors import PositionError
from niels_gpt.storage.fileio import META_NAME

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
    from niels_gpt.prefix_tree.rollouts.records import Sample
    from niels_gpt.tokenizers.protocol import FullTokenizer

LEGEND = "supervised tokens are in [[ ]]"


def stats(cache: Path) -> Stats:
    """Return what a rollout cache holds and what folding its groups saves. Raises: as RolloutDataset."""
    meta = read_meta(str(cache / META_NAME))
    with meta_errors(cache):
        return Stats((name, printable(str(value))) for name, value in _rows(cache, meta))


def stats_data(cache: Path) -> dict[str, Any]:
    """Return what a rollout cache holds, ready for JSON; docs/building.md has the fields. Raises: as `stats`."""
    meta = read_meta(str(cache / META_NAME))
    with meta_errors(cache):
        sizes: dict[str, Any] = {"sample_tokens": dict.fromkeys(SPLITS), "group_samples": dict.fromkeys(SPLITS)}
        for split in SPLITS:
            if meta["totals"][f"{split}_groups"]:
                data = _opened(cache, split)
                sizes["sample_tokens"][split] = spread(data.samples[:, 0])
                sizes["group_samples"][split] = spread(data.groups[:, 1])
        return {"cache": str(cache), **sizes, **described(meta)}


def _rows(cache: Path, meta: dict[str, Any]) -> list[tuple[str, Any]]:
    source, totals = meta["source"], meta["totals"]
    rows = [("cache", f"{cache} (rollouts, built)"), ("dataset", meta["dataset_name"])]
    rows += [(name, source.get(name) or "not stated") for name in ("licence", "attribution")]
    rows += [(split, _split_line(cache, meta, split)) for split in SPLITS]
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
        ("dropped", _counted(meta["dropped"])),
        *of_loader(meta),
        ("noticed", _counted(meta.get("noticed", {}))),
        *warned_of(meta),
        ("split", meta["split_rule"]),
    ]
    rows += [("largest id", f"{meta['largest_id']:,}")] if "largest_id" in meta else []
    size = "vocabulary not known" if meta["vocab_size"] is None else f"{meta['vocab_size']:,} ids"
    sha256 = meta["tokenizer_sha256"]
    return [*rows, ("tokenizer", f"{'not recorded' if sha256 is None else sha256[:12]}, {size}")]


def _split_line(cache: Path, meta: dict[str, Any], split: str) -> str:
    counts = {unit: meta["totals"][f"{split}_{unit}s"] for unit in ("token", "sample", "group")}
    if not counts["group"]:
        return "empty"
    data = _opened(cache, split)
    least, middle, most = np.percentile(data.samples[:, 0], [0, 50, 100])
    sizes = np.percentile(data.groups[:, 1], [0, 50, 100])
    return (
        f"{number_of(counts['token'], 'token')} in {number_of(counts['sample'], 'sample')} "
        f"({least:,.0f} to {most:,.0f}, median {middle:,.0f}) of {number_of(counts['group'], 'group')} "
        f"({sizes[0]:,.0f} to {sizes[2]:,.0f} samples, median {sizes[1]:,.0f}), "
        f"{number_of(meta['tokens_after'][split], 'token')} after folding"
    )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items())) or "none"


def picture(cache: Path, name: str) -> bytes:
    """Return a PNG of what folding saves, by group and in all, from the index. Raises: as RolloutDataset."""
    from niels_gpt.prefix_tree.forest import ForestStats
    from niels_gpt.prefix_tree.savings.count import SHAPE_7B, Savings
    from niels_gpt.prefix_tree.savings.plot import plot

    meta = read_meta(str(cache / META_NAME))
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


def show(cache: Path, tokenizer: FullTokenizer | None, *, split: str, group: int, num_tokens: int) -> str:
    """Return a group: its id, and the beginning of each sample with its fields; supervised tokens in [[ ]].

    tokenizer: of the cache, or that the caller names; None: ids are printed.
    Raises: as RolloutDataset; PositionError for a group that does not exist; CacheError for another tokenizer.
    """
    data, samples, found = _group(cache, split, group)
    names = _sentinels(data, tokenizer)
    head = (
        f"{cache}/{split}: group {group:,} of {len(data):,}, id {found['source_id']}, "
        f"{number_of(len(samples), 'sample')}, {number_of(found['tokens'], 'token')}, "
        f"{found['tokens_after_folding']:,} after folding"
    )
    lines, room = [printable(cut(head)), LEGEND], num_tokens
    for number, sample in enumerate(samples):
        if room <= 0:
            lines.append(f"and {number_of(len(samples) - number, 'sample')} more")
            break
        lines += ["", _heading(number, sample), _text(sample, min(room, len(sample.ids)), names, tokenizer)]
        room -= len(sample.ids)
    return "\n".join(lines)


def show_data(
    cache: Path, tokenizer: FullTokenizer | None, *, split: str, group: int, num_tokens: int | None
) -> dict[str, Any]:
    """Return what `show` prints, ready for JSON; docs/building.md has the fields.

    num_tokens: the most of each sample whose text is wanted; None: all. Raises: as `show`.
    """
    data, samples, found = _group(cache, split, group)
    return found | {"samples": [_sample_data(data, sample, num_tokens, tokenizer) for sample in samples]}


def _group(cache: Path, split: str, group: int) -> tuple[RolloutDataset, list[Sample], dict[str, Any]]:
    data = _opened(cache, split)
    if not 0 <= group < len(data):
        raise PositionError(f"position {group:,}: there are {len(data):,} groups in {split}")
    samples = data.read(group)
    found = {"cache": str(cache), "kind": "rollouts", "split": split, "group": group, "groups": len(data)}
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


def locate(cache: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int) -> str:
    """Return the group and the sample of a token, counted over all samples of the split, and its text.

    Raises: as `show`.
    """
    data, sample, found = _located(cache, split, position)
    names = _sentinels(data, tokenizer)
    place = found["sample_of_group"]
    rows = [
        ("token", f"{position:,} of {found['split_tokens']:,} of {cache}/{split}: id {found['token_id']}"),
        ("group", f"{found['group']:,} of {found['groups']:,}, {number_of(found['group_samples'], 'sample')}"),
        ("source id", found["source_id"]),
        ("sample", f"{place} of its group, {found['sample_of_split']:,} of the split"),
        ("offset in it", f"{found['offset_tokens']:,} tokens, {'with' if found['has_loss'] else 'without'} loss"),
    ]
    lines = [f"{label + ':':14}{printable(cut(str(value)))}" for label, value in rows]
    text = _text(sample, min(num_tokens, len(sample.ids)), names, tokenizer)
    return "\n".join([*lines, "", _heading(place, sample), text])


def locate_data(
    cache: Path, tokenizer: FullTokenizer | None, *, split: str, position: int, num_tokens: int | None
) -> dict[str, Any]:
    """Return what `locate` prints, ready for JSON; docs/building.md has the fields. num_tokens: as in `show_data`.

    Raises: as `show`.
    """
    data, sample, found = _located(cache, split, position)
    return found | {"sample": _sample_data(data, sample, num_tokens, tokenizer)}


def _located(cache: Path, split: str, position: int) -> tuple[RolloutDataset, Sample, dict[str, Any]]:
    data = _opened(cache, split)
    ends = np.cumsum(data.samples[:, 0])
    if not 0 <= position < ends[-1]:
        raise PositionError(f"position {position:,}: {cache}/{split} has {ends[-1]:,} tokens")
    number = int(np.searchsorted(ends, position, side="right"))
    group, place = data.locate(number)
    sample = data.read(group, [place])[0]
    offset = position - int(ends[number]) + len(sample.ids)
    found = {"cache": str(cache), "kind": "rollouts", "split": split, "position": position}
    found |= {"split_tokens": int(ends[-1]), "token_id": int(sample.ids[offset]), "source_id": data.id(group)}
    found |= {"group": group, "groups": len(data), "group_samples": int(data.groups[group, 1])}
    found |= {"sample_of_group": place, "sample_of_split": number, "offset_tokens": offset}
    found["has_loss"] = bool(sample.loss_mask[offset])
    return data, sample, found


def _opened(cache: Path, split: str) -> RolloutDataset:
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

    return RolloutDataset(cache, split)


def _sentinels(data: RolloutDataset, tokenizer: FullTokenizer | None) -> dict[int, str]:
    """Return names of sentinels. Raises: CacheError for another tokenizer than the recorded one."""
    if tokenizer is None or data.meta["tokenizer_sha256"] is None:
        return {}
    check_tokenizer(data.folder, data.meta, tokenizer.sha256)
    return {token: name if name == "<|eot|>" else f"\n{name}" for token, name in _names(data).items()}


def _names(data: RolloutDataset) -> dict[int, str]:
    return short_names(data.folder, data.meta) if data.meta["special_token_ids"] else {}


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


def _text(sample: Sample, num_tokens: int, names: dict[int, str], tokenizer: FullTokenizer | None) -> str:
    ids: npt.NDArray[Any] = sample.ids[:num_tokens]
    tokenizer, parts = _of_ids(tokenizer, ids), []
    for start, end in runs(sample.loss_mask[:num_tokens]):
        piece = ids[start:end]
        text = " ".join(map(str, piece)) if tokenizer is None else decoded_text(piece, names, tokenizer)
        text = shown(cut(text, most_of(end - start)))
        parts.append(f"[[{text}]]" if sample.loss_mask[start] else text)
    more = " …" if num_tokens < len(sample.ids) else ""
    return ("" if tokenizer else " ").join(parts).removeprefix("\n") + more
