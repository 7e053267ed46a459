"""Run a target model and return its outputs: shifted for an EAGLE-3 draft, or as they are for the native form.

    model = load_target("meta-llama/Llama-3.1-8B-Instruct", revision=None, dtype=torch.bfloat16, attention="sdpa",
                        device="cuda")
    batch = HFEagle3TargetModel(model).generate_batch(input_ids, attention_mask, loss_mask)

Slot p of a batch holds what the draft gets at position p: the hidden states of token p, the id of token p+1, and the
target's logits for token p+2. Ids, loss mask and logits are therefore shifted left by one; hidden states and attention
mask are not. A layer id counts decoder blocks from 0 and means the block's output: id i is `hidden_states[i + 1]` of
transformers. `capture` returns the unshifted hidden states of any number of layers, for the native form.

models.py loads target models and writes the small one of the sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.eagle3.models import TargetFacts, blocks_of, load_target, target_facts, write_small_target
from niels_gpt.storage.errors import TargetError, TargetRunError

__all__ = [
    "Eagle3TargetBatch",
    "HFEagle3TargetModel",
    "TargetFacts",
    "capture",
    "checked_aux_layer_ids",
    "default_eagle3_aux_layer_ids",
    "load_target",
    "parse_aux_layers",
    "target_facts",
    "write_small_target",
]

NUM_AUX_LAYERS = 3
CHUNK_VALUES = 1 << 24
"""Logits computed at a time: 64 MiB of float32. All logits of a batch take gigabytes."""
CACHED_VALUES = 1 << 20
"""Logits that a CPU reduces at a time: 4 MiB of float32. Larger copies leave its caches and take fresh memory from the
system, whose first touch takes longer than the arithmetic."""


@dataclass
class Eagle3TargetBatch:
    """The target's outputs for a batch of B samples of S slots, shifted; on the model's device.

    aux_hidden_states: [B, S, 3H] in the model's dtype; the captured layers side by side, in the order of their ids.
    logits: [B, S, V] in the model's dtype; slot p has the logits of token p+1, the last slot zeros.
    input_ids, loss_mask: [B, S], shifted left by one; the last slot is zero.
    attention_mask: [B, S] as given.
    """

    aux_hidden_states: Tensor
    logits: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor


def _shift_left_with_zero(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor [B, S, ...] shifted left by one slot; the last slot is zero."""
    shifted = torch.zeros_like(tensor)
    shifted[:, :-1] = tensor[:, 1:]
    return shifted


def _shift_logits(logits: Tensor) -> Tensor:
    """Shift logits left by one slot, in place if possible."""
    if not logits.is_contiguous() or logits.is_inference() or logits.requires_grad:
        return _shift_left_with_zero(logits)
    num_rows, width, vocab_size = logits.shape
    most = CACHED_VALUES if logits.is_cpu else CHUNK_VALUES
    at_once = max(1, most // max(1, num_rows * vocab_size))
    for start in range(0, width - 1, at_once):
        stop = min(start + at_once, width - 1)
        # Through a copy, as the two overlap. The next chunk reads only later slots.
        logits[:, start:stop] = logits[:, start + 1 : stop + 1].clone()
    logits[:, -1:] = 0
    return logits


def default_eagle3_aux_layer_ids(num_layers: int) -> list[int]:
    """Return the ids of a low, a middle and a high block: 1, n // 2 - 1 and n - 4.

        >>> default_eagle3_aux_layer_ids(32)
        [1, 15, 28]

    Raises: ValueError for a model of fewer than 7 layers, where these are not three different blocks.
    """
    chosen = [1, num_layers // 2 - 1, num_layers - 4]
    if len(set(chosen)) != NUM_AUX_LAYERS or not all(0 <= layer < num_layers for layer in chosen):
        raise TargetError(
            f"a target of num_hidden_layers={num_layers} is too shallow for the default aux layers, which would be "
            f"{chosen}: expected 7 layers or more. Pass aux_layer_ids: three different ids in 0..{num_layers - 1}"
        )
    return chosen


def checked_aux_layer_ids(
    aux_layer_ids: Sequence[int] | None, num_layers: int, *, count: int | None = NUM_AUX_LAYERS
) -> list[int]:
    """Return the layer ids as a list; None stands for the default ones.

    count: required number of ids; None: any.
    Raises: ValueError unless the ids are distinct blocks of a model of `num_layers` layers.
    """
    if aux_layer_ids is None:
        return default_eagle3_aux_layer_ids(num_layers)
    chosen = list(aux_layer_ids)
    if not chosen or (count is not None and len(chosen) != count):
        why = "as the draft's projection takes three hidden states" if count == NUM_AUX_LAYERS else "one or more"
        expected = "one or more" if count is None else f"exactly {count}, {why}"
        raise TargetError(f"aux_layer_ids={chosen}: {len(chosen)} ids, expected {expected}")
    if len(set(chosen)) != len(chosen):
        raise TargetError(f"aux_layer_ids={chosen}: expected {'three ' if count == 3 else ''}distinct ids")
    for layer in chosen:
        if not 0 <= layer < num_layers:
            raise TargetError(
                f"aux_layer_ids={chosen}: layer {layer} is out of bounds for a model with {num_layers} layers, "
                f"expected ids in 0..{num_layers - 1}; an id is a block counted from 0, not an index into hidden_states"
            )
    return chosen


def parse_aux_layers(text: str, num_layers: int) -> list[int]:
    """Return the layer ids that a text names, for a model of `num_layers` layers.

    text: "eagle3": the three of `default_eagle3_aux_layer_ids`. "dflash:N": N blocks evenly spaced from 1 to n - 3, or
        n // 2 for N = 1, as `build_target_layer_ids` in model/utils.py of github.com/z-lab/dflash (and in
        specforge/modeling/draft/dflash.py of specforge 0.2.0). "dspark:N": of N blocks evenly spaced from 1 to n - 1,
        as `build_target_layer_ids` in components/speculative/dspark/registry.py of nemo_automodel 0.7.0, all but the
        last: its feature is the last hidden state. "none": no block. Else ids separated by commas: "1,15,28".
    Raises: ValueError for another text, or if these are not distinct blocks of the model.
    """
    rule, _, number = text.partition(":")
    if text == "eagle3":
        return default_eagle3_aux_layer_ids(num_layers)
    if text == "none":
        return []
    if rule == "dspark" and number.isdecimal() and int(number):
        return dspark_features(num_layers, int(number))[:-1]
    if rule == "dflash" and number.isdecimal() and int(number):
        chosen = _dflash_layer_ids(num_layers, min(int(number), num_layers + 1))
        if int(number) != len({*chosen}) or not all(0 <= layer < num_layers for layer in chosen):
            raise TargetError(f"{text}: a target of {num_layers} layers has no {number} different blocks by this rule")
        return chosen
    try:
        chosen = [int(part) for part in text.split(",")]
    except ValueError:
        expected = "expected eagle3, dflash:N, dspark:N, none, or ids of blocks such as 1,15,28"
        raise TargetError(f"{text!r}: {expected}") from None
    return checked_aux_layer_ids(chosen, num_layers, count=None)


def dspark_features(num_layers: int, count: int) -> list[int]:
    """Return the layers of DSpark's features by its own rule, ascending; the last one is n - 1.

    Raises: ValueError unless a target of so many layers has `count` different ones.
    """
    last = num_layers - 1
    step = (last - 1) / max(1, count - 1)
    chosen = [last] if count == 1 else [round(1 + index * step) for index in range(min(count, num_layers + 1))]
    if len({*chosen}) != count or chosen[0] < 0:
        raise TargetError(f"dspark:{count}: a target of {num_layers} layers has no {count} different ones by this rule")
    return chosen


def _dflash_layer_ids(num_layers: int, count: int) -> list[int]:
    if count == 1:
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    return [round(first + index * (last - first) / (count - 1)) for index in range(count)]


def capture(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, layers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a target over a batch and return its hidden states. Only one slot of each row reaches the lm_head.

    model: in eval mode. input_ids, attention_mask: int64 [B, W], unshifted and padded on the right. layers: K ids.
    Returns (aux [B, W, K, H], pre_norm [B, W, H], post_norm [B, W, H]): the outputs of the blocks `layers`, the output
    of the last block, and the input of lm_head; in the model's dtype, on the device of the ids, without gradients.

    Raises: ValueError for other padding, or if blocks or lm_head are not found; RuntimeError if one of them did not
        run.
    """
    _refuse_other_padding(attention_mask)
    blocks, lm_head = blocks_of(model), _lm_head(model)
    if layers:  # a config may state more than there are
        checked_aux_layer_ids(layers, len(blocks), count=None)
    taken: list[Tensor] = []

    def cut(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        taken.append(inputs[0])
        return (inputs[0][:, :1], *inputs[1:])

    # An inference tensor could not be saved for a draft's backward pass.
    with torch.inference_mode(False), torch.no_grad():
        handle = lm_head.register_forward_pre_hook(cut)
        try:
            captured, _ = _run_hooked(model, blocks, {*layers, len(blocks) - 1}, input_ids, attention_mask)
        finally:
            handle.remove()
        if len(taken) != 1 or taken[0].shape[:2] != input_ids.shape:
            shapes = ", ".join(str(tuple(each.shape)) for each in taken) or "nothing"
            raise TargetRunError(
                f"the model ran, and its lm_head took {shapes}: expected one hidden state for each slot"
            )
        last = captured[len(blocks) - 1]
        aux = torch.stack([captured[layer] for layer in layers], dim=2) if layers else last[:, :, None][:, :, :0]
        return aux, last, taken[0].to(input_ids.device)


def pieces(slots: Tensor, logits: Tensor) -> Iterator[slice | Tensor]:
    """Split slots, int64 [n] into the rows of `logits`; on a CPU into pieces of about `CACHED_VALUES` logits.

    Consecutive slots become a slice, since indexing with a slice makes no copy. No piece of several slots has one
    alone: torch would split the sum over a single row among its threads, and so add in another order.
    """
    parts = -(-len(slots) * logits.shape[-1] // CACHED_VALUES) if logits.is_cpu else 1
    for piece in slots.tensor_split(max(1, min(parts, len(slots) // 2))):
        start, stop = (int(piece[0]), int(piece[-1]) + 1) if len(piece) else (0, 0)
        yield slice(start, stop) if stop - start == len(piece) else piece


def most_probable(logits: Tensor) -> Tensor:
    """Return the argmax of logits [n, V], int64 [n]; of equal ones the first. On a CPU numpy is faster than torch."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _lm_head(model: nn.Module) -> nn.Module:
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    if found is None:
        raise TargetError(f"{type(model).__name__}: get_output_embeddings() gives no lm_head, expected a layer H -> V")
    return found


def _run_hooked(
    model: nn.Module, blocks: Sequence[nn.Module], layers: Collection[int], input_ids: Tensor, attention_mask: Tensor
) -> tuple[dict[int, Tensor], Any]:
    """Run a model; return the outputs [B, S, H] of the blocks `layers`, and the model's own output.

    Raises: RuntimeError if one of these blocks did not run.
    """
    captured: dict[int, Tensor] = {}

    def add_hook(layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            captured[layer] = states.to(input_ids.device)  # the blocks may lie on several

        return blocks[layer].register_forward_hook(keep)

    knows_cache = "use_cache" in inspect.signature(model.forward).parameters
    handles = [add_hook(layer) for layer in sorted(layers)]
    try:
        output = model(
            input_ids=input_ids, attention_mask=attention_mask, **({"use_cache": False} if knows_cache else {})
        )
    finally:
        for handle in handles:
            handle.remove()
    if len(captured) != len(layers):
        raise TargetRunError(
            f"the model ran, but of the layers {sorted(layers)} only {sorted(captured)} did: expected {len(layers)} "
            "auxiliary layers. Pass aux_layer_ids of blocks that its forward calls"
        )
    return captured, output


class HFEagle3TargetModel:
    """Runs a causal language model of transformers and captures its blocks' outputs. The model is not changed."""

    def __init__(self, model: nn.Module, aux_layer_ids: Sequence[int] | None = None) -> None:
        """model: put into eval mode. aux_layer_ids: three blocks; None: `default_eagle3_aux_layer_ids`.

        Raises: ValueError unless the ids are three distinct blocks of the model.
        """
        self.model = model.eval()
        self.aux_layer_ids = checked_aux_layer_ids(aux_layer_ids, _num_layers(model))
        """Captured blocks, in their order in `aux_hidden_states`."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the model's input embedding, whose `weight` is [V, H]."""
        embedding: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return embedding

    def generate_batch(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Eagle3TargetBatch:
        """Run the target once over a batch.

        input_ids, attention_mask, loss_mask: [B, S], unshifted and padded on the right.
        Returns plain tensors without gradients, even within torch.inference_mode(), so that a draft can train on them.

        The logits are shifted in place, as a copy takes gigabytes: a forward hook that keeps the model's logits later
        finds them shifted.

        Raises: ValueError for masks of another shape, other padding, or a model whose blocks are not found;
            RuntimeError if a block did not run.
        """
        for name, mask in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
            if mask.shape != input_ids.shape or mask.dim() != 2:
                raise TargetError(
                    f"{name} of shape {tuple(mask.shape)}, input_ids of shape {tuple(input_ids.shape)}: expected both "
                    "as [batch, sequence]"
                )
        _refuse_other_padding(attention_mask)
        # An inference tensor could not be saved for a draft's backward pass.
        with torch.inference_mode(False), torch.no_grad():
            aux_hidden_states, logits = self._run(input_ids, attention_mask)
            return Eagle3TargetBatch(
                aux_hidden_states=aux_hidden_states,
                logits=_shift_logits(logits),
                input_ids=_shift_left_with_zero(input_ids),
                attention_mask=attention_mask.clone() if attention_mask.is_inference() else attention_mask,
                loss_mask=_shift_left_with_zero(loss_mask),
            )

    def _run(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the captured hidden states [B, S, 3H] and the logits [B, S, V], both unshifted."""
        blocks = blocks_of(self.model)
        checked_aux_layer_ids(self.aux_layer_ids, len(blocks))  # a config may state more than there are
        captured, output = _run_hooked(self.model, blocks, self.aux_layer_ids, input_ids, attention_mask)
        logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        return torch.cat([captured[layer] for layer in self.aux_layer_ids], dim=-1), logits


def _num_layers(model: nn.Module) -> int:
    config: Any = model.config
    text = getattr(config, "text_config", None)  # of a multimodal model
    of_text = getattr(text, "num_hidden_layers", None)
    return int(config.num_hidden_layers if of_text is None else of_text)


def _refuse_other_padding(attention_mask: Tensor) -> None:
    """Raise ValueError unless every row of the mask is ones followed by zeros."""
    mask = attention_mask.bool()
    wrong = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        gap = int((mask[row, 1:] & ~mask[row, :-1]).nonzero()[0, 0])
        raise TargetError(
            f"attention_mask, row {row}: slot {gap} is 0 and slot {gap + 1} is 1, which is left padding or a hole; "
            "expected ones and then zeros. Pad on the right"
        )
