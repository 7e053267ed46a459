"""Determines which blocks another tool's states come from, and on which side of the final norm its last states are.

No file of another tool says this. So the target runs over some samples; each stored layer is compared with the output
of every block, and the stored last state with both sides of the final norm. The match is the convention; without a
match the error names the nearest candidate, also one token to either side.

The distance of two states is the length of their difference divided by the length of the computed one. Stored states of
zeros are left out: this project's exports have them where no loss looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.eagle3.exchange.foreign import LAST_HIDDEN, ForeignSample
from niels_gpt.storage.errors import CacheError

FITS, FITS_FP8 = 0.05, 0.1
"""A layer is a block's output if the median distance of its tokens is at most this. bf16 arithmetic moves a state by
some hundredths, float8 by about as much again; the next block is several tenths away."""
FAR, FAR_SHARE = 0.2, 0.02
"""And if at most FAR_SHARE of the tokens are further away than FAR."""
APART = 2.0
"""The next best block must be this many times as far; otherwise the layer is ambiguous."""
PROOF_TOKENS = 512
"""First tokens of a sample that the target runs over; later tokens do not change their states. More only if no drawn
sample has stored states among them: then up to its first stored state."""
_NEAR_ZERO = 1e-6
_REPLIES, _SAME, _MANY = 8, 0.9, 0.5  # of the rule about shifted masks

Capture = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Token ids [L] -> the outputs of all n blocks [L, n, H], and the last hidden states [L, H] before and after the final
norm."""


@dataclass(frozen=True)
class Convention:
    """The meaning of a tool's states."""

    aux_layer_ids: tuple[int, ...]
    """The captured blocks, counted from 0."""
    last_hidden: str
    """One of LAST_HIDDEN."""
    samples: int = 0
    """Number of compared samples; 0: the convention was stated, not compared."""
    tokens: int = 0
    """Number of compared tokens."""
    distances: tuple[float, ...] = ()
    """Median distance of each auxiliary layer, and of the last hidden states."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields for manifest.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def capture_of(model: nn.Module, num_layers: int, device: torch.device) -> Capture:
    """Return a function that runs a target over one sample and returns the outputs of all its blocks."""
    from niels_gpt.eagle3.target import capture

    def run(input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = input_ids[None].to(device)
        states = capture(model, ids, torch.ones_like(ids), list(range(num_layers)))
        aux, before, after = (each[0].float().cpu() for each in states)
        return aux, before, after

    return run


def prove(folder: Path, samples: Sequence[tuple[str, ForeignSample]], capture: Capture) -> Convention:
    """Return the convention that fits all samples. samples: with names; each has a `reach`.

    Raises: CacheError E706 if a layer fits no block or two blocks, or one of the samples does not fit.
    """
    fits = FITS_FP8 if any(sample.was_fp8 for _, sample in samples) else FITS
    found = [_distances(sample, capture) for _, sample in samples]
    layers = torch.cat([each.layers for each in found])
    last = torch.cat([each.last for each in found])
    chosen = []
    for place in range(layers.shape[1]):
        what = f"auxiliary layer {place} of {layers.shape[1]}"
        chosen.append(_nearest(folder, what, layers[:, place], _block_names(layers.shape[2]), fits, found, place))
    side = _nearest(folder, "last hidden state", last, LAST_HIDDEN, fits, found, None)
    if len({*chosen}) != len(chosen):
        raise _refusal(folder, f"its auxiliary layers are the blocks {chosen}", "a block for each, no two the same")
    for (name, _), each in zip(samples, found, strict=True):
        own = [each.layers[:, place, block] for place, block in enumerate(chosen)] + [each.last[:, side]]
        furthest = max((float(apart.median()) for apart in own if len(apart)), default=0.0)
        if furthest > fits:
            text = f"{name} does not fit as the others do: its states are {furthest:.2g} away, like another text"
            raise _refusal(folder, text, f"{fits} at most")
    fitting = [*(layers[:, place, block] for place, block in enumerate(chosen)), last[:, side]]
    far = max(float((apart > FAR).float().mean()) for apart in fitting)
    if far > FAR_SHARE:
        raise _refusal(folder, f"{far:.0%} of its states are more than {FAR} away", f"{FAR_SHARE:.0%} at most")
    distances = tuple(round(float(apart.median()), 6) for apart in fitting)
    return Convention(tuple(chosen), LAST_HIDDEN[side], len(samples), len(layers), distances)


def reach(sample: ForeignSample) -> int | None:
    """Return how many tokens of a sample the target must run over; None if a stored layer is zeros at all tokens."""
    stored = [filled.nonzero()[:, 0] for filled in _filled(sample.aux, sample.last)]
    return max(PROOF_TOKENS, *(int(each[0]) + 1 for each in stored)) if all(map(len, stored)) else None


def refuse_shifted_mask(folder: Path, samples: Sequence[ForeignSample]) -> bool:
    """Check by the replies that the loss mask belongs to each token itself. Returns False if there are too few replies.

    The last token of a reply's header comes before every reply and is always the same; the tokens after it vary. With a
    mask of the next token, the first token with loss is the header's.

    Raises: CacheError E711 if the replies show a mask of the next token.
    """
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for sample in samples:
        loss = sample.loss_mask.to(torch.int8)
        begins = ((loss[1:-1] == 1) & (loss[:-2] == 0)).nonzero()[:, 0] + 1
        firsts.update(sample.input_ids[begins].tolist())
        seconds.update(sample.input_ids[begins + 1].tolist())
    replies = firsts.total()
    if replies < _REPLIES:
        return False
    (token, same), (_, varied) = firsts.most_common(1)[0], seconds.most_common(1)[0]
    if same >= _SAME * replies and varied < _MANY * replies:
        raise CacheError(
            folder,
            f"the first token with loss is {token} in {same} of {replies} replies, and the one after it varies: the "
            "last token of a reply's header, as if the mask were of the next token",
            "the mask of each token itself",
            "If so, pass --loss-mask shifted; if these tokens belong to the replies, --loss-mask raw",
            code="E711",
        )
    return True


@dataclass(frozen=True)
class _Distances:
    """Distances for one sample with K layers and a target of n blocks, at its tokens with stored states."""

    layers: Tensor
    """[tokens, K, n]"""
    last: Tensor
    """[tokens, 2], in the order of LAST_HIDDEN"""
    beside: dict[int, tuple[Tensor, Tensor]]
    """Shift -> the same two, of stored state p and the computed one of token p + shift."""


def _filled(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens have all auxiliary states, and which have a last one: bool [L] each."""
    return aux.any(-1).all(-1), last.any(-1)


def _distances(sample: ForeignSample, capture: Capture) -> _Distances:
    ids = sample.input_ids[: reach(sample)]
    blocks, before, after = capture(ids)
    aux, last = sample.aux[: len(ids)].float(), sample.last[: len(ids)].float()
    sides = torch.stack([before, after], dim=1)
    has_aux, has_last = _filled(aux, last)

    def compared(stored: slice, computed: slice) -> tuple[Tensor, Tensor]:
        some, one = has_aux[stored], has_last[stored]
        each = [_apart(aux[stored][some, place, None], blocks[computed][some]) for place in range(aux.shape[1])]
        layers = torch.stack(each, dim=1) if each else aux.new_zeros((int(some.sum()), 0, blocks.shape[1]))
        return layers, _apart(last[stored][one, None], sides[computed][one])

    everything = slice(0, None)
    ahead, behind = slice(1, None), slice(0, -1)
    beside = {1: compared(behind, ahead), -1: compared(ahead, behind)} if len(ids) > 1 else {}
    return _Distances(*compared(everything, everything), beside)


def _apart(stored: Tensor, computed: Tensor) -> Tensor:
    """Return the distances [L, n] of stored states [L, 1, H] from computed ones [L, n, H]."""
    length = computed.square().sum(dim=-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return (stored - computed).square().sum(dim=-1).sqrt() / length


def _nearest(
    folder: Path,
    what: str,
    apart: Tensor,
    names: Sequence[str],
    fits: float,
    found: Sequence[_Distances],
    place: int | None,
) -> int:
    """Return the candidate that fits, by the distances [tokens, candidates]. Raises: CacheError."""
    medians = apart.median(dim=0).values
    order = torch.argsort(medians).tolist()
    best = order[0]
    nearest = float(medians[best])
    if nearest > fits:
        text = f"its {what} fits no {'block' if place is not None else 'side of the final norm'}: nearest is "
        text += f"{names[best]}, {nearest:.2g} away{_beside(found, place, names, fits)}"
        raise _refusal(folder, text, f"{fits} at most")
    if place is not None and len(order) > 1 and float(medians[order[1]]) <= max(APART * nearest, _NEAR_ZERO):
        text = f"its {what} fits {names[best]}, {nearest:.2g} away, and {names[order[1]]}, "
        raise _refusal(folder, f"{text}{float(medians[order[1]]):.2g} away", f"one that is {APART:g} times as near")
    return int(best)


def _beside(found: Sequence[_Distances], place: int | None, names: Sequence[str], fits: float) -> str:
    """Return the candidate that fits one token before or after, as text; "" for none."""
    for shift, where in ((1, "after"), (-1, "before")):
        parts = [each.beside[shift][0 if place is not None else 1] for each in found if each.beside]
        if not parts:
            return ""
        apart = torch.cat([part[:, place] if place is not None else part for part in parts])
        if not len(apart):
            return ""
        medians = apart.median(dim=0).values
        best = int(medians.argmin())
        if float(medians[best]) <= fits:
            return (
                f"; {names[best]} fits, {float(medians[best]):.2g} away, at the token {where}: the states are shifted"
            )
    return ""


def _block_names(count: int) -> list[str]:
    return [f"block {block}" for block in range(count)]


def _refusal(folder: Path, found: str, expected: str) -> CacheError:
    remedy = "Name the target that the states were made from; where it is that one, the files are wrong"
    return CacheError(folder, found, expected, remedy, code="E706")
