"""The target's head: turns hidden states into logits without the rest of the target.

    head = TargetHead.of_cache("targets", device="cuda")     # from target_weights.safetensors
    batch["target_probs"] = head.target_probs(batch)          # [B, W, D], on that device

A native cache stores hidden states instead of distributions. The head is the target's final norm, its lm_head, and the
operations on the logits: `logit_scale` (Cohere, Granite) and a softcap (Gemma). `TargetHead.of_model` finds these parts
by running a few tokens through the model, and checks on them that the head's logits equal the model's.
`TargetHead.of_checkpoint` does the same on the model's code without its decoder blocks, whose weights are not needed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from niels_gpt.eagle3.format.layout import MANIFEST_NAME, WEIGHTS_NAME, PathLike
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, is_native, read_manifest
from niels_gpt.eagle3.format.meta import compare_once
from niels_gpt.eagle3.format.weights import WEIGHTS, read_weights
from niels_gpt.eagle3.models import blocks_of
from niels_gpt.eagle3.target import CHUNK_VALUES, most_probable, pieces
from niels_gpt.storage.errors import CacheError, TargetError

__all__ = ["TargetHead"]

RMS = ("rms", "wide_rms", "gemma_rms")
"""Kinds of RMS norm: w * rms(x), rounded before the product (Llama); the same, rounded after it (OLMo 2, GPT-OSS),
which differs in bf16 only; (1 + w) * rms(x) (Gemma)."""
# Shares of the largest value: room for two kernels that round differently in this dtype. A wrong norm, scale or softcap
# is off by far more.
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # float32: 1e-4
_PROBED = 8  # tokens
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TargetHead(nn.Module):
    """The final norm, lm_head, logit scale and softcap of a target. Its tensors are buffers, without gradients."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        norm: str = "none",
        eps: float | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        tied: bool = False,
        dtype: torch.dtype = torch.float32,
        last_hidden: str = "pre_norm",
    ) -> None:
        """weights: `lm_head` [V, H], or `embeddings` [V, H] if tied; `norm`, `norm_bias` [H], `lm_head_bias` [V].

        norm: one of `RMS`, "layer" or "none". eps: epsilon of the norm.
        logit_scale, softcap: logits become softcap * tanh(logits * logit_scale / softcap); None: no softcap.
        tied: lm_head is the embeddings.
        dtype: dtype of the computation; mean and variance of a norm are always float32.
        last_hidden: side of the final norm that the given states are from: "pre_norm", or "post_norm", the lm_head's
            input; then `norm` is "none".
        """
        super().__init__()
        self.norm, self.eps, self.logit_scale, self.softcap = norm, eps, logit_scale, softcap
        self.tied, self.last_hidden = tied, last_hidden
        self.selected_token_ids: list[int] | None = None
        """Draft id -> target id, if the head is from a cache; None if it is from a model."""
        embeddings = weights.get("embeddings")
        self._embeddings = None if embeddings is None else embeddings.detach()
        self._kept_rows: tuple[list[int], Tensor, Tensor | None] | None = None
        stored = {**weights, "lm_head": weights["embeddings"]} if tied else weights
        for name in WEIGHTS.keys() - {"embeddings"}:
            tensor = stored.get(name)
            self.register_buffer(f"_{name}", None if tensor is None else tensor.detach().to(dtype), persistent=False)
        self._lm_head: Tensor
        self._norm: Tensor | None
        self._norm_bias: Tensor | None
        self._lm_head_bias: Tensor | None

    @classmethod
    def of_model(cls, model: nn.Module) -> Self:
        """Return the head of a causal language model, sharing its weights. Runs a few tokens through the model.

        `last_hidden` is "post_norm" if no known norm turns the last block's output into the lm_head's input.
        Weights that are not whole in memory (offloaded, split over devices, quantized) are read from the folder that
        the model was loaded from.

        Raises: ValueError (E705) if the head's logits differ from the model's; the errors of `of_checkpoint`.
        """
        probe = Probe.of(model)
        lm_head: Any = model.get_output_embeddings()  # type: ignore[operator]
        embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        of_norms = (weight for norm in probe.norms for weight in norm.parameters())
        if not all(map(_is_whole, (embeddings, *lm_head.parameters(), *of_norms))):
            head = cls.of_model(_ends_of(model, lm_head.weight.dtype)).to(probe.logits.device)
            head._prove(model, probe)
            return head
        tied = embeddings.shape == lm_head.weight.shape and embeddings.data_ptr() == lm_head.weight.data_ptr()
        weights = {"embeddings": embeddings, "lm_head_bias": getattr(lm_head, "bias", None)}
        if not tied:
            weights["lm_head"] = lm_head.weight
        kind, eps, found = final_norm(probe) or (None, None, {})
        about_norm = {
            name: tensor if tensor is None else tensor.to(lm_head.weight.device) for name, tensor in found.items()
        }
        dtype = torch.bfloat16 if lm_head.weight.dtype == torch.bfloat16 else torch.float32
        head = cls(
            {name: tensor for name, tensor in {**weights, **about_norm}.items() if tensor is not None},
            norm=kind or "none",
            eps=eps,
            tied=tied,
            dtype=dtype,
            last_hidden="post_norm" if kind is None else "pre_norm",
        )
        head._fit_logits(model, probe)
        head._prove(model, probe)
        return head

    @classmethod
    def of_checkpoint(
        cls, name: str, *, revision: str | None = None, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> Self:
        """Return the head of a target, read from its safetensors without the decoder blocks, whose files may be absent.

        Kind and eps of the norm, scale and softcap are found and proved on the target's class without blocks
        (`checkpoint.load_ends`). Not proved: that the target's own last block feeds this norm, and any state.

        name: a folder, else a hub id. revision: branch, tag or commit on the hub.
        dtype: as the target would be loaded; equal to `of_model` of that, bit for bit. device: holds its tensors.
        Raises: FileNotFoundError for a folder without config, weights or a file with the head; ConnectionError if the
            hub does not answer; ImportError without the extra; ValueError (E705) for tensors that are missing or
            quantized, for a checkpoint that is not in safetensors, and for a class that does not run without blocks.
        """
        from niels_gpt.eagle3.checkpoint import load_ends

        return cls.of_model(load_ends(name, revision=revision, dtype=dtype, device=device))

    @classmethod
    def of_cache(
        cls,
        cache_dir: PathLike,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        follow_links: bool = False,
    ) -> Self:
        """Return the head of a native cache. Reads only the tensors that it needs from target_weights.safetensors.

        device: holds its tensors; None: the CPU. A distribution takes 2 * D * H operations a token: nothing on a GPU; a
            CPU core computes some hundreds of tokens a second.
        dtype: dtype of the computation; None: the dtype that the target ran in.
        follow_links: read files that are symbolic links.
        Raises: FileNotFoundError; CacheError E208 for a cache that is not native; CacheError E701 for weights that do
            not fit the manifest.
        """
        compare_once(cache_dir, MANIFEST_NAME, follow_links=follow_links)
        manifest = read_manifest(cache_dir, follow_links=follow_links)
        if not is_native(manifest):
            found = f"format_version {manifest['format_version']} stores distributions, and not the target's head"
            raise CacheError(cache_dir, found, "a native cache", "Run precompute with --format native", code="E208")
        facts = {name: manifest["head"][name] for name in ("norm", "eps", "logit_scale", "softcap", "tied")}
        names = WEIGHTS.keys() - {"lm_head" if facts["tied"] else "embeddings"}
        weights = read_weights(cache_dir, names, follow_links=follow_links)
        sizes = {"norm": manifest["hidden_size"], "lm_head_bias": manifest["target_vocab_size"]}
        sizes["norm_bias"] = sizes["norm"]
        for name, tensor in weights.items():
            expected = [sizes[name]] if name in sizes else [sizes["lm_head_bias"], sizes["norm"]]
            if list(tensor.shape) != expected:
                found = f"{WEIGHTS_NAME} has {name} of shape {list(tensor.shape)}"
                raise CacheError(cache_dir, found, f"{expected} by the manifest", PRODUCE_AGAIN, code="E701")
        needed = ["embeddings" if facts["tied"] else "lm_head", *["norm"] * (facts["norm"] in RMS[1:])]
        for name in needed:
            if name not in weights:
                raise CacheError(cache_dir, f"{WEIGHTS_NAME} has no {name}", remedy=PRODUCE_AGAIN, code="E701")
        head = cls(
            {name: tensor.to(device or "cpu") for name, tensor in weights.items()},
            **facts,
            dtype=_COMPUTE[manifest["head"]["compute_dtype"]] if dtype is None else dtype,
            last_hidden=manifest["conventions"]["last_hidden"],
        )
        head._embeddings = None
        head.selected_token_ids = manifest["selected_token_ids"]
        return head

    @property
    def vocab_size(self) -> int:
        """V, the number of the target's tokens."""
        return self._lm_head.shape[0]

    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm: return the input of lm_head, [R, H] in the head's dtype and on its device.

        Returns states unchanged if they are "post_norm".
        """
        return normed(self.norm, states.to(self._lm_head), self._norm, self._norm_bias, self.eps)

    def logits(self, states: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return the logits of states, in the head's dtype and on its device.

        states: [R, H], or any [..., H], of any float dtype and device.
        ids: target ids to compute, [R, D] in this order; None: all, [R, V].
        """
        weight, bias = (self._lm_head, self._lm_head_bias) if ids is None else self._rows(ids)
        logits = functional.linear(self.normed(states), weight, bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits [R, V] of states [R, H]."""
        return self.logits(states)

    @torch.no_grad()
    def log_normalizer_and_argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logsumexp over all V logits, float32 [R], and the most probable token, int64 [R], of states [R, H].

        The logits are computed `CHUNK_VALUES` at a time.
        """
        normalizers = torch.empty(len(states), dtype=torch.float32, device=self._lm_head.device)
        argmax = torch.empty(len(states), dtype=torch.int64, device=self._lm_head.device)
        for chunk, logits in self.parts_of_logits(states):
            for piece in pieces(torch.arange(len(logits)), logits):
                some = logits[piece]
                normalizers[chunk][piece], argmax[chunk][piece] = some.logsumexp(-1), most_probable(some)
        return normalizers, argmax

    @torch.no_grad()
    def target_probs(
        self, batch: Mapping[str, Tensor], selected_token_ids: Sequence[int] | Tensor | None = None
    ) -> Tensor:
        """Return the target's distributions over the draft's tokens for a batch of `native_batch`.

        batch: `input_ids` [B, W], `last_hidden_states` [R, H] and `target_slots` int64 [R] into the B * W slots.
        selected_token_ids: draft id -> target id; None: the vocabulary of the head's cache, or all V for the head of a
            model.
        Returns float32 [B, W, D] on the head's device: a softmax over the draft's tokens; zeros in slots without a
        target row.
        """
        ids = self.selected_token_ids if selected_token_ids is None else selected_token_ids
        rows, width = batch["input_ids"].shape
        states, slots = batch["last_hidden_states"], batch["target_slots"].to(self._lm_head.device)
        size = self.vocab_size if ids is None else len(ids)
        probs = torch.zeros(rows * width, size, dtype=torch.float32, device=self._lm_head.device)
        for chunk, logits in self.parts_of_logits(states, ids):
            probs[slots[chunk]] = logits.softmax(-1)
        return probs.view(rows, width, size)

    def parts_of_logits(
        self, states: Tensor, ids: Sequence[int] | Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, logits): slices of the states and their float32 logits, `CHUNK_VALUES` values at a time.

        ids: see `logits`.
        """
        for chunk in _chunks(len(states), self.vocab_size if ids is None else len(ids)):
            yield chunk, self.logits(states[chunk], ids).float()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights for `format.weights.write_weights`.

        Raises: ValueError for a head that was read from a cache.
        """
        if self._embeddings is None:
            raise ValueError("a head read from a cache has no embeddings, expected a head from TargetHead.of_model")
        buffers = {name: getattr(self, f"_{name}") for name in WEIGHTS.keys() - {"embeddings"}}
        if self.tied:
            del buffers["lm_head"]
        return {"embeddings": self._embeddings, **{name: value for name, value in buffers.items() if value is not None}}

    def after_norm(self) -> Self:
        """Return the same head for states after the norm. Raises: ValueError for a head that was read from a cache."""
        weights = {name: tensor for name, tensor in self.weights().items() if not name.startswith("norm")}
        return type(self)(
            weights,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            tied=self.tied,
            dtype=self._lm_head.dtype,
            last_hidden="post_norm",
        )

    def facts(self) -> dict[str, Any]:
        """Return the manifest's `head`: norm, eps, logit_scale, softcap, tied, compute_dtype."""
        names = {dtype: name for name, dtype in _COMPUTE.items()}
        return {
            "norm": self.norm,
            "eps": self.eps,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "tied": self.tied,
            "compute_dtype": names[self._lm_head.dtype],
        }

    def _rows(self, ids: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows of lm_head and of its bias for some ids; keeps the last ones for the next call."""
        wanted = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        last = self._kept_rows
        kept = None if last is None else (last[0], last[1].dtype, last[1].device)
        if last is None or kept != (wanted, self._lm_head.dtype, self._lm_head.device):
            index = torch.tensor(wanted, dtype=torch.int64, device=self._lm_head.device)
            bias = self._lm_head_bias
            last = self._kept_rows = wanted, self._lm_head[index], None if bias is None else bias[index]
        return last[1:]

    def _prove(self, model: nn.Module, probe: Probe) -> None:
        """Raise ValueError (E705) if the head's logits differ from the model's."""
        states = probe.post_norm if self.last_hidden == "post_norm" else probe.pre_norm
        error = difference(self.logits(states), probe.logits.to(self._lm_head.device))
        if not error <= tolerance(probe.logits):
            raise other_logits(model, error)

    @torch.no_grad()
    def _fit_logits(self, model: nn.Module, probe: Probe) -> None:
        """Choose scale and softcap from the model's config so that the logits match.

        Raises: ValueError if none does.
        """
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        scales = [getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "output_multiplier")]
        given = [float(scale) for scale in scales if isinstance(scale, int | float) and scale]
        stated = getattr(config, "final_logit_softcapping", None) or None
        if stated is not None:  # small logits hardly show a softcap, so larger ones are made
            gain = 2 * stated / float(probe.logits.abs().max().clamp_min(1e-6))
            probe = Probe.of(model, gain=max(1.0, gain))
        raw = functional.linear(probe.post_norm.to(self._lm_head), self._lm_head, self._lm_head_bias).float()
        errors = {
            (scale, cap): difference(raw * scale if cap is None else torch.tanh(raw * scale / cap) * cap, probe.logits)
            for scale in dict.fromkeys((1.0, *given, *(1 / each for each in given)))
            for cap in dict.fromkeys((None, stated))
        }
        self.logit_scale, self.softcap = best = min(errors, key=lambda each: errors[each])
        if not errors[best] <= tolerance(probe.logits):
            raise other_logits(model, errors[best])


def embeddings_of(model: nn.Module) -> Tensor:
    """Return a causal language model's input embeddings [V, H]; not whole in memory, from its folder, as `of_model`."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    if _is_whole(weight):
        return weight
    return _ends_of(model, weight.dtype).get_input_embeddings().weight  # type: ignore[operator, no-any-return]


def _is_whole(weight: Tensor) -> bool:
    """Return whether a weight's numbers are here: not on `meta`, split over devices, packed or quantized."""
    is_plain = type(weight) in (Tensor, nn.Parameter) and not weight.is_meta
    return is_plain and weight.dtype in (*_COMPUTE.values(), torch.float16, torch.float64)


def _ends_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a loaded model's ends, read from the folder that it was loaded from. Raises: see `load_ends`.

    dtype: of a weight of its ends; a packed or quantized one leaves it to the model's.
    """
    from niels_gpt.eagle3.checkpoint import load_ends

    folder, known = str(getattr(model, "name_or_path", "")), (*_COMPUTE.values(), torch.float16)
    dtypes = [each for each in (dtype, getattr(model, "dtype", None)) if each in known]
    if not os.path.isdir(folder):
        raise TargetError(
            f"{type(model).__name__}: its head is not whole in memory, and was loaded from {folder!r}, which is no "
            "folder here. Load it from the folder with its checkpoint"
        )
    return load_ends(folder, dtype=[*dtypes, torch.bfloat16][0])


def _chunks(rows: int, values: int) -> Iterator[slice]:
    """Yield slices of rows, of at most `CHUNK_VALUES` values each."""
    step = max(1, CHUNK_VALUES // max(1, values))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


# --- what a model does to its last hidden state -----------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """States and logits of a model for a few tokens."""

    pre_norm: Tensor
    """Output of the last block [T, H]; empty if it has another shape than lm_head's input."""
    post_norm: Tensor
    """Input of lm_head [T, H]."""
    logits: Tensor
    """[T, V]"""
    norms: list[nn.Module]
    """Modules without children, outside the blocks, that took the last block's output."""

    @classmethod
    def of(cls, model: nn.Module, *, gain: float = 1.0) -> Probe:
        """Run a few tokens through a model. gain: factor on the lm_head's input.

        Raises: ValueError (E705) for a model without an lm_head.
        """
        lm_head = _lm_head(model)
        seen: dict[str, Tensor] = {}
        norms: list[nn.Module] = []
        blocks = blocks_of(model)
        inside = {id(module) for block in blocks for module in block.modules()}

        def of_block(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen["pre"] = output[0] if isinstance(output, tuple) else output

        def of_leaf(module: nn.Module, inputs: Any) -> None:
            if module is lm_head and inputs:
                seen["post"] = inputs[0]
            elif "pre" in seen and inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == seen["pre"].shape:
                norms.extend([module] * torch.equal(inputs[0].to(seen["pre"].device), seen["pre"]))

        handles = [blocks[-1].register_forward_hook(of_block)]
        if gain != 1.0:  # before the hook that keeps the lm_head's input
            handles.append(lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gain, *inputs[1:])))
        leaves = (module for module in model.modules() if not any(True for _ in module.children()))
        handles += [leaf.register_forward_pre_hook(of_leaf) for leaf in leaves if id(leaf) not in inside]
        was_training = model.training
        try:
            with torch.inference_mode(False), torch.no_grad():
                logits = _run(model.eval(), lm_head)
        finally:
            model.train(was_training)
            for handle in handles:
                handle.remove()
        if "post" not in seen or seen["post"].dim() != 3:
            found = f"{type(model).__name__}: its lm_head is not called with [B, S, H], so its input cannot be captured"
            raise TargetError(found)
        pre, post = seen.get("pre", logits), seen["post"]
        return cls(pre[0] if pre.shape == post.shape else pre.new_empty(0), post[0], logits[0], norms)


def _lm_head(model: nn.Module) -> Any:
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(getattr(lm_head, "weight", None), Tensor):
        found = f"{type(model).__name__}: has no output embeddings, expected a causal language model with an lm_head"
        raise TargetError(found)
    return lm_head


def other_logits(model: nn.Module, error: float) -> ValueError:
    """Return the error for a model whose logits differ from its head's by `error`, a `difference`."""
    return TargetError(
        f"{type(model).__name__}: its final norm, lm_head, logit scale and softcap give logits that differ from "
        f"the model's by {error:.1e} of the largest one, so it computes them in another way. A native cache "
        "needs logits that follow from the last hidden state. Run precompute with --format 1 or --format 2"
    )


def _run(model: nn.Module, lm_head: Any) -> Tensor:
    vocab_size = lm_head.weight.shape[0]
    # Weights that accelerate offloads are on `meta`; its hooks move the ids to where they are needed.
    device = "cpu" if lm_head.weight.is_meta else lm_head.weight.device
    ids = (torch.arange(_PROBED, device=device) + _PROBED).remainder(vocab_size)[None]
    knows_cache = "use_cache" in inspect.signature(model.forward).parameters
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **({"use_cache": False} if knows_cache else {}))
    logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


def final_norm(probe: Probe) -> tuple[str, float | None, dict[str, Tensor | None]] | None:
    """Return kind, eps and weights of the final norm; None if no known kind gives the lm_head's input."""
    if not probe.pre_norm.numel():
        return None
    allowed = tolerance(probe.post_norm)
    if torch.equal(probe.pre_norm, probe.post_norm):
        return "none", None, {}
    # Values with a mean distinguish a norm that subtracts it from one that does not; those of a model may have none.
    drawn = torch.randn(probe.pre_norm.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    both, halves = torch.cat((drawn.to(probe.pre_norm), probe.pre_norm)), (slice(_PROBED), slice(_PROBED, None))
    for module in probe.norms:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        given = both if weight is None else both.to(weight.device)
        stated = [value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)]
        with torch.no_grad():
            made = module(given)
            errors = {
                (kind, eps): max(
                    difference(normed(kind, given, weight, bias, eps)[half], made[half]) for half in halves
                )
                for kind in _kinds(weight, bias)
                for eps in stated[:1] or (1e-5, 1e-6)
            }
        kind, eps = min(errors, key=lambda each: errors[each])
        if (
            errors[kind, eps] <= allowed
            and difference(made[_PROBED:].to(probe.post_norm.device), probe.post_norm) <= allowed
        ):
            return kind, eps, {"norm": weight, "norm_bias": bias}
    return None


def _kinds(weight: Tensor | None, bias: Tensor | None) -> tuple[str, ...]:
    return ("layer",) if bias is not None else ("layer", "rms") if weight is None else ("layer", *RMS)


def normed(kind: str, states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
    """Return the normed states; mean and variance are float32."""
    if kind == "none":
        return states
    if kind == "layer":
        return functional.layer_norm(states, states.shape[-1:], weight, bias, eps or 0.0)
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or 0.0))
    if kind == "gemma_rms":
        assert weight is not None
        return (wide * (1.0 + weight.float())).to(states.dtype)
    if kind == "wide_rms":
        assert weight is not None
        return (wide * weight.float()).to(states.dtype)
    scaled = wide.to(states.dtype)
    return scaled if weight is None else (weight * scaled).to(states.dtype)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; infinite for other shapes or NaN."""
    if found.shape != expected.shape:
        return torch.inf
    wanted = expected.float()
    difference = float((found.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return difference if difference == difference else torch.inf  # NaN


def tolerance(values: Tensor) -> float:
    """Return the accepted `difference` between two computations in this dtype."""
    return _TOLERANCES.get(values.dtype, 1e-4)
