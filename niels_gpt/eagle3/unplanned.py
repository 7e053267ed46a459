"""Does the target say what is stored, where no plan and no raw tokens are: in caches that other tools wrote?

The stored ids are shifted, so of a sample of L tokens x[1] to x[L-1] are known, and x[0] is not. The hidden states of
slot 0 depend on x[0] alone: the token that gives them is looked for, the likely ones first, then the whole vocabulary.
How the cache was computed is not known either, so numbers are compared within a tolerance, of whole slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.manifest import number_in
from niels_gpt.eagle3.opened import NotChecked, Opened, tables_of
from niels_gpt.eagle3.row_checks import AUX, INDICES, PROBS, VALUES, Row, slots
from niels_gpt.eagle3.supervision import cache_fields
from niels_gpt.eagle3.target import PART_VALUES, HFEagle3TargetModel

MEDIAN, WRONG, WRONG_SHARE = 0.05, 0.2, 0.02
"""A field is another one where the median of its slots' differences is above the first, or where a larger share of the
slots than the third differs by more than the second. A difference is that of two vectors by their length, or half the
sum of those of the probabilities. Arithmetic in bf16 moves a slot by some hundredths, the next layer by several tenths.
"""
_FREQUENT = 64  # tokens of the drawn samples that are tried first
_TRIED = 4  # first tokens of a sample with which all of it is run
_LOOKED_AT = 200  # samples whose masks are looked at
_REPLIES, _SAME, _MANY = 8, 0.9, 0.5  # of the rule about masks that are not shifted

Progress = Callable[[int, int], None]


def differences(cache: Opened, model: Any, device: torch.device, k: int, seed: int, told: Progress) -> Iterator[str]:
    """Yield in what `k` samples, drawn by `seed`, are not what a target says of them, and what no target is needed for.

    model: on `device`. told: is told the samples that are done, and all.
    Raises: NotChecked where the manifest does not say what was captured; CacheError.
    """
    layers = cache.manifest.get("aux_layer_ids")
    if not layers:
        raise NotChecked("cannot be checked: manifest.json has no aux_layer_ids, so what was captured is not known")
    yield from _unshifted(cache)
    again = _Again(cache, model, device)
    if (size := again.vocab_size) != number_in(cache.manifest, "target_vocab_size", cache.folder, 1):
        said = cache.manifest["target_vocab_size"]
        yield f"{cache.folder}: target_vocab_size is {said}, and the target has {size} tokens"
        return
    chance = torch.Generator().manual_seed(seed)
    drawn = sorted(torch.randperm(cache.num_samples, generator=chance)[:k].tolist())
    rows = [cache.row(number, tables_of(cache, number // cache.shard_size)) for number in drawn]
    rows = [row for row in rows if row.length]
    firsts = again.first_tokens(rows)
    for number, row in enumerate(rows):
        told(number, len(rows))
        if not firsts[number]:
            yield (
                f"{row.where}: no token of the target gives the hidden states of slot 0: they are of other blocks than "
                f"{list(layers)}, of another target, or of another slot"
            )
            continue
        tried = (list(again.differences(row, first)) for first in firsts[number])
        found: list[str] = []
        for wrong in tried:
            found = found or wrong
            if not wrong:
                found = []
                break
        yield from found


class _Again:
    """A target, and how it is run over samples of a cache."""

    def __init__(self, cache: Opened, model: Any, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._target = HFEagle3TargetModel(model, cache.manifest["aux_layer_ids"])
        self.vocab_size = len(self._target.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._likely = [getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
        self._selected = torch.tensor(cache.manifest.get("selected_token_ids") or [], dtype=torch.int64, device=device)
        self._mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self._mask[self._selected] = True

    def first_tokens(self, rows: list[Row]) -> list[list[int]]:
        """Return, for each row, the tokens that give the hidden states of its slot 0, the best one first."""
        wanted = [row.fields[AUX][0].float() for row in rows]
        found: list[list[tuple[float, int]]] = [[] for _ in rows]
        order = self._in_order(rows)
        at_once = max(1, PART_VALUES // max(1, self.vocab_size))
        for begin in range(0, len(order), at_once):
            some = order[begin : begin + at_once]
            states = self._run(torch.tensor(some)[:, None]).aux_hidden_states[:, 0].float().cpu()
            for row, stored in enumerate(wanted):
                apart = _length(self._by_layer(states - stored)) / _length(self._by_layer(stored))
                largest = apart.amax(-1)
                fits = (largest <= WRONG).nonzero()[:, 0].tolist()
                found[row] = sorted([*found[row], *((float(largest[at]), some[at]) for at in fits)])[:_TRIED]
            if all(found):
                break
        return [[token for _, token in tokens] for tokens in found]

    def differences(self, row: Row, first: int) -> Iterator[str]:
        """Yield in which fields a row differs from what the target says of it, with this token in front."""
        length = row.length
        ids = torch.cat([torch.tensor([first]), row.fields["input_ids"][: length - 1]])
        loss = torch.cat([torch.zeros(1, dtype=torch.int64), row.fields["loss_mask"][: length - 1]])
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            ends = f"{int(ids.min())} to {int(ids.max())}"
            yield f"{row.where}: input_ids from {ends}, expected 0 to {self.vocab_size - 1}"
            return
        outputs = self._run(ids[None], loss[None])
        dtype = row.fields[AUX].dtype
        topk = self._cache.layout.topk
        fields, _ = cache_fields(outputs, [length], self._selected, self._mask, topk=topk, dtype=dtype)
        again = {name: tensor[0] for name, tensor in fields.items()}
        stored = {name: tensor[:length] for name, tensor in row.fields.items()}
        kept, found = (self._by_layer(each[AUX].float()) for each in (stored, again))
        apart = _length(kept - found) / _length(found)
        for place, layer in enumerate(row.aux_layer_ids):
            yield from _differing(row, f"{AUX} of block {layer}", apart[:, place])
        inner = slice(0, length - 1)  # what a last token predicts depends on how the tool padded
        one, other = (self._distribution(each)[inner] for each in (stored, again))
        yield from _differing(row, PROBS, (one - other).abs().sum(-1) / 2)
        wrong = (stored["position_mask"] != again["position_mask"])[inner]
        most = 1 + int(WRONG_SHARE * int(stored["loss_mask"].sum()))
        if int(wrong.sum()) > most:
            yield f"{row.where}: position_mask differs in {slots(int(wrong.sum()))}, expected {most} at most"

    def _run(self, ids: Tensor, loss: Tensor | None = None) -> Any:
        given = ids.to(self._device)
        loss = torch.zeros_like(given) if loss is None else loss.to(self._device)
        return self._target.generate_batch(given, torch.ones_like(given), loss)

    def _in_order(self, rows: list[Row]) -> list[int]:
        counts: Counter[int] = Counter()
        for row in rows:
            counts.update(row.fields["input_ids"][: row.length].tolist())
        frequent = [token for token, _ in counts.most_common(_FREQUENT)]
        order = dict.fromkeys([*self._likely, *frequent, *range(self.vocab_size)])
        return [token for token in order if isinstance(token, int) and 0 <= token < self.vocab_size]

    def _by_layer(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], len(self._cache.manifest["aux_layer_ids"]), -1)

    def _distribution(self, fields: dict[str, Tensor]) -> Tensor:
        if VALUES not in fields:
            return fields[PROBS].float()
        values = fields[VALUES].float()
        whole = reconstruct_target_probs(values, fields[INDICES], self._cache.layout.draft_vocab_size)
        return torch.maximum(whole, values.amin(dim=-1, keepdim=True))  # which of two near ones is the k-th may change


def _length(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)


def _differing(row: Row, name: str, apart: Tensor) -> Iterator[str]:
    """Yield that a field is another one, by the difference of each slot."""
    if not len(apart):
        return
    apart = apart.nan_to_num(torch.inf)
    median, wrong = float(apart.median()), apart > WRONG
    if median > MEDIAN or int(wrong.sum()) > WRONG_SHARE * len(apart):
        first = int(wrong.nonzero()[0]) if wrong.any() else int(apart.argmax())
        yield (
            f"{row.where}: {name} is not what the target says: the median difference of a slot is {median:.2g}, "
            f"expected {MEDIAN} at most; {slots(int(wrong.sum()))} of {len(apart):,} differ by more than {WRONG}, the "
            f"first at {first}"
        )


def _unshifted(cache: Opened) -> Iterator[str]:
    """Yield that the loss mask is not shifted as the ids are, where that shows.

    In front of a reply stands the last token of its header, the same in every chat. By a shifted mask that is the id
    before the first slot with loss; by one that is not shifted it is the one before that, and replies begin between.
    """
    before: Counter[int] = Counter()
    further: Counter[int] = Counter()
    left = _LOOKED_AT
    for shard in range(cache.num_shards):
        tables = tables_of(cache, shard)
        for ids, loss in zip(tables["input_ids"][:left], tables["loss_mask"][:left], strict=True):
            begins = ((loss[2:] == 1) & (loss[1:-1] == 0) & (loss[:-2] == 0)).nonzero()[:, 0]
            before.update(ids[begins + 1].tolist())
            further.update(ids[begins].tolist())
        left -= min(left, cache.rows_of(shard))
        if not left:
            break
    replies = before.total()
    if replies < _REPLIES:
        return
    (_, near), (token, far) = before.most_common(1)[0], further.most_common(1)[0]
    if far >= _SAME * replies and near < _MANY * replies:
        yield (
            f"{cache.folder}: loss_mask is not shifted as input_ids are: in {far:,} of {replies:,} replies token "
            f"{token} stands two slots before the first slot with loss, and what stands between varies, as the first "
            "token of a reply does. Slot p must have the mask of token p+1"
        )
