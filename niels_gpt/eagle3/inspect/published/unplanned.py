"""`recomputed` for a cache without plan and raw tokens, as other tools write it.

The stored ids are shifted, so of a sample of L tokens x[1] to x[L-1] are known, and x[0] is not. The hidden states of
slot 0 depend on x[0] alone, so x[0] is searched for: the likely tokens first, then the whole vocabulary. How the cache
was computed is not known either, so whole slots are compared within a tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.manifest import number_in
from niels_gpt.eagle3.forward import cache_fields
from niels_gpt.eagle3.inspect.compare import WRONG, WRONG_SHARE, differing, vector_length
from niels_gpt.eagle3.inspect.open_cache import NotChecked, slots
from niels_gpt.eagle3.inspect.published.opened import AUX, PROBS, PublishedCache, Row, comparable_probs
from niels_gpt.eagle3.target import PART_VALUES, HFEagle3TargetModel
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError

_FREQUENT = 64  # tokens of the drawn samples that are tried first
_TRIED = 4  # candidates for a sample's first token with which all of it is run
_READ_SAMPLES = 200  # whose masks are read
_REPLIES, _SAME, _MANY = 8, 0.9, 0.5  # of the rule about masks that are not shifted


def differences(
    cache: PublishedCache, model: Any, device: torch.device, k: int, seed: int, progress: Progress
) -> Iterator[CacheError]:
    """Yield where `k` samples, drawn by `seed`, are not what a target gives for them, and a mask that is not shifted.

    model: on `device`. progress: its items and units are samples.
    Raises: NotChecked where the manifest does not say what was captured; CacheError.
    """
    if not cache.aux_layer_ids:
        raise NotChecked("cannot be checked: manifest.json has no aux_layer_ids, so what was captured is not known")
    yield from _unshifted(cache)
    again = _Again(cache, model, device)
    recorded = number_in(cache.manifest, "target_vocab_size", cache.folder, 1)
    if again.vocab_size != recorded:
        found = f"target_vocab_size is {recorded}, and the target has {again.vocab_size} tokens"
        yield CacheError(cache.folder, found, code="E701")
        return
    order = torch.randperm(cache.num_samples, generator=torch.Generator().manual_seed(seed))
    rows = [row for number in sorted(order[:k].tolist()) if (row := cache.row(number)).length]
    for number, (row, tokens) in enumerate(zip(rows, again.first_tokens(rows), strict=True)):
        progress(number, number, len(rows))
        if not tokens:
            yield row.problem(
                "no token of the target gives the hidden states of slot 0: they are of other blocks than "
                f"{list(cache.aux_layer_ids)}, of another target, or of another slot"
            )
            continue
        best: list[CacheError] = []
        for token in tokens:
            found_wrong = list(again.differences(row, token))
            if not found_wrong:
                break
            best = best or found_wrong
        else:
            yield from best


class _Again:
    """Runs a target over samples of a cache."""

    def __init__(self, cache: PublishedCache, model: Any, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._target = HFEagle3TargetModel(model, cache.manifest["aux_layer_ids"])
        self.vocab_size = len(self._target.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._likely = [getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
        self._selected = torch.tensor(cache.manifest.get("selected_token_ids") or [], dtype=torch.int64, device=device)
        self._mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self._mask[self._selected] = True

    def first_tokens(self, rows: list[Row]) -> list[list[int]]:
        """Return for each row the tokens that give the hidden states of its slot 0, the best one first."""
        stored = [row.fields[AUX][0].float() for row in rows]
        found: list[list[tuple[float, int]]] = [[] for _ in rows]
        candidates = self._candidates(rows)
        at_once = max(1, PART_VALUES // max(1, self.vocab_size))
        for begin in range(0, len(candidates), at_once):
            tokens = candidates[begin : begin + at_once]
            states = self._run(torch.tensor(tokens)[:, None]).aux_hidden_states[:, 0].float().cpu()
            for row, wanted in enumerate(stored):
                apart = (vector_length(self._by_layer(states - wanted)) / vector_length(self._by_layer(wanted))).amax(
                    -1
                )
                fits = (apart <= WRONG).nonzero()[:, 0].tolist()
                found[row] = sorted([*found[row], *((float(apart[at]), tokens[at]) for at in fits)])[:_TRIED]
            if all(found):
                break
        return [[token for _, token in tokens] for tokens in found]

    def differences(self, row: Row, first: int) -> Iterator[CacheError]:
        """Yield the fields in which a row differs from what the target gives for it with this first token."""
        length, vocab_size = row.length, self._cache.layout.draft_vocab_size
        ids = torch.cat([torch.tensor([first]), row.fields["input_ids"][: length - 1]])
        loss = torch.cat([torch.zeros(1, dtype=torch.int64), row.fields["loss_mask"][: length - 1]])
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            yield row.problem(f"input_ids from {int(ids.min())} to {int(ids.max())}", f"0 to {self.vocab_size - 1}")
            return
        outputs, topk = self._run(ids[None], loss[None]), self._cache.layout.topk
        fields, _ = cache_fields(outputs, [length], self._selected, self._mask, topk=topk, dtype=row.fields[AUX].dtype)
        again = {name: tensor[0] for name, tensor in fields.items()}
        stored = {name: tensor[:length] for name, tensor in row.fields.items()}
        kept, computed = (self._by_layer(each[AUX].float()) for each in (stored, again))
        apart = vector_length(kept - computed) / vector_length(computed)
        for place, layer in enumerate(self._cache.aux_layer_ids):
            yield from differing(row, f"{AUX} of block {layer}", apart[:, place])
        inner = slice(0, length - 1)  # what a last token predicts depends on how the tool padded
        one, other = (comparable_probs(each, vocab_size)[inner] for each in (stored, again))
        yield from differing(row, PROBS, (one - other).abs().sum(-1) / 2)
        wrong = int((stored["position_mask"] != again["position_mask"])[inner].sum())
        allowed = 1 + int(WRONG_SHARE * int(stored["loss_mask"].sum()))
        if wrong > allowed:
            yield row.problem(f"position_mask differs in {slots(wrong)}", f"{allowed} at most")

    def _run(self, ids: Tensor, loss: Tensor | None = None) -> Any:
        ids = ids.to(self._device)
        loss = torch.zeros_like(ids) if loss is None else loss.to(self._device)
        return self._target.generate_batch(ids, torch.ones_like(ids), loss)

    def _candidates(self, rows: list[Row]) -> list[int]:
        """Return all ids of the vocabulary, those that are likely to begin a sample first."""
        counts: Counter[int] = Counter()
        for row in rows:
            counts.update(row.fields["input_ids"][: row.length].tolist())
        frequent = [token for token, _ in counts.most_common(_FREQUENT)]
        order = dict.fromkeys([*self._likely, *frequent, *range(self.vocab_size)])
        return [token for token in order if isinstance(token, int) and 0 <= token < self.vocab_size]

    def _by_layer(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], len(self._cache.aux_layer_ids), -1)


def _unshifted(cache: PublishedCache) -> Iterator[CacheError]:
    """Yield that the loss mask is not shifted as the ids are, where the ids show it.

    Before a reply stands the last token of its header, the same in every chat. With a shifted mask that is the id one
    slot before the first slot with loss. With a mask that is not shifted it is the id two slots before, and the first
    token of the reply, which varies, stands between.
    """
    one_before: Counter[int] = Counter()
    two_before: Counter[int] = Counter()
    left = _READ_SAMPLES
    for shard in range(cache.num_shards):
        tables = cache.tables(shard)
        for ids, loss in zip(tables["input_ids"][:left], tables["loss_mask"][:left], strict=True):
            begins = ((loss[2:] == 1) & (loss[1:-1] == 0) & (loss[:-2] == 0)).nonzero()[:, 0]
            one_before.update(ids[begins + 1].tolist())
            two_before.update(ids[begins].tolist())
        left -= min(left, cache.rows_of(shard))
        if not left:
            break
    replies = one_before.total()
    if replies < _REPLIES:
        return
    (_, near), (token, far) = one_before.most_common(1)[0], two_before.most_common(1)[0]
    if far >= _SAME * replies and near < _MANY * replies:
        yield CacheError(
            cache.folder,
            f"loss_mask is not shifted as input_ids are: in {far:,} of {replies:,} replies token {token} stands two "
            "slots before the first slot with loss, and what stands between varies, as the first token of a reply does",
            remedy="Slot p must have the mask of token p+1",
            code="E701",
        )
