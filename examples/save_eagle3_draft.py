"""Save a draft of eagle3_draft.py as checkpoints that inference engines and trainers load: docs/eagle3_draft.md.

`speculators/` is what speculators 0.9.0 saves; vLLM loads it. `specforge/` is what SpecForge 0.2.0 exports; SGLang
loads it. The weights are equal. Names differ, and so do the numbers of the auxiliary layers: SpecForge and SGLang count
blocks from 0 and take their outputs, as caches do; speculators and vLLM number the boundaries between blocks, so that
block i ends at boundary i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from eagle3_draft import Draft
from safetensors.torch import save
from torch import Tensor
from transformers import AutoConfig

from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder


def save_draft(draft: Draft, out: Path, target: str, layers: Sequence[int], chain: int) -> None:
    """Write out/speculators and out/specforge in the dtype of the target's own config; complete, or not at all.

    target: its folder or hub id. layers: the blocks, from 0, whose outputs the draft takes. chain: proposals for a pass
    of the target that vLLM takes where its command line names none.
    Raises: ValueError unless there are three layers, which all four expect; CacheError E704 if `out` holds anything.
    """
    if len(layers) != 3:
        raise ValueError(f"a draft of {len(layers)} auxiliary layers: vLLM, SGLang and SpecForge load drafts of three")
    of_target: Any = AutoConfig.from_pretrained(target)
    dtype = of_target.dtype or torch.float32
    ordered = in_ascending_order(draft)
    weights = {name: part.to(dtype) if part.is_floating_point() else part for name, part in ordered.items()}
    layer = {**draft.config.to_dict(), "dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": False}
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"]  # where readers of transformers 4 look
    common = {"draft_vocab_size": len(weights["d2t"]), "dtype": layer["dtype"], "tie_word_embeddings": False}
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    if layer["vocab_size"] == common["draft_vocab_size"]:  # speculators has no such tensors then
        renamed = {name: tensor for name, tensor in renamed.items() if name not in ("d2t", "t2d")}
    spec = {**common, **of_speculators(target, of_target, layers, chain), "transformer_layer_config": layer}
    forge = {**layer, **common, **of_specforge(layer["hidden_size"], layers)}
    with fresh_folder(out) as work:  # renamed at the end
        for name, config, tensors in (("speculators", spec, renamed), ("specforge", forge, weights)):
            (work / name).mkdir()
            write_bytes(work / name / "config.json", canonical_json(config))
            write_bytes(work / name / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def of_speculators(target: str, of_target: Any, layers: Sequence[int], chain: int) -> dict[str, Any]:
    """Return what speculators' config states beside the layer: the target by its place or id, and greedy proposals."""
    place = str(Path(target).resolve()) if Path(target).is_dir() else target
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": chain}],
            "verifier": {"name_or_path": place, "architectures": of_target.architectures or []},
        },
        "eagle_aux_hidden_state_layer_ids": [block + 1 for block in layers],
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False),
    }


def of_specforge(hidden_size: int, layers: Sequence[int]) -> dict[str, Any]:
    """Return what SpecForge's config states beside the layer; SGLang adds 1 to each number of a block itself."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def in_ascending_order(draft: Draft) -> dict[str, Tensor]:
    """Return the draft's tensors with its tokens in the order of the target's ids.

    A cache lists the draft's tokens by frequency. speculators picks rows of the target's lm_head by the mask t2d, so
    they come in the order of ids, and the draft's own rows must come so too. d2t: target id less draft id.
    """
    tensors, count = cast("dict[str, Tensor]", draft.state_dict()), len(draft.d2t)
    selected, order = (tensors["d2t"] + torch.arange(count)).sort()
    ordered = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": selected - torch.arange(count)}
    return {name: tensor.contiguous() for name, tensor in (tensors | ordered).items()}
