"""Can a model run a folded row by its segments? Found out once for each model, by forwards of three and two tokens."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.backends.architectures import AttentionRouteError, is_sharded, unwrapped, wrappers
from niels_gpt.prefix_tree.backends.segments import NAME, Segments, register

probing: ContextVar[bool] = ContextVar("probing", default=False)  # the guard does not check these forwards
_found: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a model cannot; "" if it can


def use_segments(model: nn.Module, *, only_sdpa: bool = True) -> str:
    """Set a model to the implementation "prefix_tree", if it can run folded rows by segments; else return why not.

    A model that is set so runs a forward without segments as by "sdpa". One that cannot is left as it was, and so are
    the parts of a model that are not its text model, such as those for images.

    only_sdpa: leave models of other implementations than "sdpa" and "prefix_tree" as they are.
    """
    inner: Any = unwrapped(model)
    before = inner.config.get_text_config()._attn_implementation
    if only_sdpa and before not in ("sdpa", NAME):
        return f"its attn_implementation is {before!r}"
    if inner not in _found:
        _found[inner] = _tried(inner, next((module for module in wrappers(model) if is_sharded(module)), inner))
    if not _found[inner] and before != NAME:
        inner.set_attn_implementation(_implementations(inner.config, NAME))
    return _found[inner]


def _tried(model: Any, called: nn.Module) -> str:
    """Try a model by calls of `called`, which gathers its weights: itself, or the adapters that fully_shard got."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        return "its attention does not go through AttentionInterface of transformers"
    before = _implementations(model.config)
    modes = [(module, module.training) for module in model.modules()]
    token = probing.set(True)
    try:
        register()
        model.set_attn_implementation(_implementations(model.config, NAME))
        model.eval()
        return _compared(model, called)
    except Exception as error:  # whatever a model does with arguments that it does not know
        why = f": {error}" if isinstance(error, AttentionRouteError) else ""
        return f"a forward of three tokens by segments raised {type(error).__name__}{why}"
    finally:
        model.set_attn_implementation(before)
        for module, mode in modes:
            module.training = mode
        probing.reset(token)


def _implementations(config: Any, text: str | None = None) -> dict[str, Any]:
    """Return what a config and its parts have, as set_attn_implementation takes it; `text`: in place of the text's.

    The configs that hold the text's get `text` too: some models make the masks by theirs.
    """
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    of_text = config.get_text_config()
    return {
        "": text or config._attn_implementation,
        **{
            name: _implementations(part, text if part is of_text or part.get_text_config() is of_text else None)
            for name, part in parts.items()
            if part is not None
        },
    }


@torch.no_grad()
def _compared(model: Any, called: nn.Module) -> str:
    """Compare the samples (0, 1) and (0, 2), folded, with the second one alone."""
    device = next(model.parameters()).device

    def run(ids: list[int], positions: list[int], **more: Any) -> Tensor:
        at = {"input_ids": ids, "position_ids": positions}
        inputs = {name: torch.tensor([values], device=device) for name, values in at.items()}
        result: Tensor = called(**inputs, use_cache=False, return_dict=True, **more)[0]
        return result[0, -1].float()

    segments = Segments([3, 2, 3])
    segments.calls = []
    folded = run([0, 1, 2], [0, 1, 1], prefix_tree=segments)
    wanted = [module for module in model.modules() if getattr(module, "is_causal", None) is True]
    missed = {type(each).__name__ for each in wanted if all(each is not call for call in segments.calls)}
    if missed or not segments.calls:
        return f"its forward does not pass prefix_tree to {', '.join(sorted(missed)) or 'its attention'}"
    alone = run([0, 2], [0, 1])
    if not bool((folded - alone).abs().max() <= 2e-2 * alone.abs().max().clamp(min=1e-6)):
        return "a folded row of three tokens has other values than its samples"
    return ""
