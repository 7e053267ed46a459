"""The ends of a target, read from its checkpoint: what lies outside the decoder blocks.

    model = load_ends("folder/of/model", dtype=torch.bfloat16)      # TargetHead.of_checkpoint takes the head from it

The embeddings, the final norm and lm_head of a target of hundreds of billions of weights take some gigabytes.
transformers builds the target's own class and loads the tensors under its own names and conversions; only its decoder
blocks have no weights, and pass on their input. So norm, scale and softcap are found and proved on the target's own
code, where the target itself cannot run. Files that hold blocks alone are not opened; they may be absent.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.eagle3.models import AGAIN, blocks_of, quiet, tensors_of_ends, transformers_library
from niels_gpt.storage.errors import TargetError

_TOKENS = 8
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
_TUPLES = (0, 1, 2)  # lengths of the tuple that a block returns, which begins with its states; 0: the states alone


def load_ends(
    name: str, *, revision: str | None = None, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> nn.Module:
    """Load a causal language model without its decoder blocks, in eval mode, without gradients.

    Its blocks have no weights and pass on their input; the last one gives drawn states, so what follows it meets
    numbers of every size. All other weights are the checkpoint's, in `dtype`, on `device`; embeddings that are not
    lm_head stay in the checkpoint's dtype if it is narrower.

    name: a folder, else a hub id, for which only the files with these tensors are downloaded. revision: see
        `target_facts`.
    Raises: FileNotFoundError for a folder without config, weights or a file that is needed; ConnectionError if the hub
        does not answer; ImportError without the extra; ValueError (E705) for a model that cannot be a target, a
        checkpoint that is not in safetensors, and tensors that are missing, quantized or of another shape.
    """
    config, folder, files = tensors_of_ends(name, revision)
    config = copy.deepcopy(config)
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        if getattr(each, "quantization_config", None) is not None:  # of the blocks: quantizers leave the ends alone
            del each.quantization_config
    model, found = _loaded(name, config, folder, files, dtype)
    wrong = {"lacks": found["missing_keys"], "has another shape of": {key for key, *_ in found["mismatched_keys"]}}
    for what, keys in wrong.items():
        if keys:
            raise TargetError(
                f"{folder}: its checkpoint {what} {', '.join(sorted(keys)[:3])}: expected embeddings, final norm and "
                f"lm_head as transformers names them, not quantized, and the config.json of this model. {AGAIN}"
            )
    _widen(model, dtype)
    ends: nn.Module = model.requires_grad_(False).eval().to(device)
    _choose_form(ends, name, dtype)
    return ends


def _loaded(name: str, config: Any, folder: Path, files: dict[str, Path], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a model without blocks in `dtype`, or in the narrower one of its files, and the report on its keys."""
    num_bytes = sum(path.stat().st_size for path in set(files.values()))
    try:
        with quiet(), ExitStack() as opened:
            slices = _slices(files, opened)
            stored = {about.get_dtype() for about in slices.values()}
            narrow = _NARROW.get(min(stored)) if len(stored) == 1 and dtype == torch.float32 else None
            loaded: tuple[Any, Any] = _class_without_blocks(config, f"{folder}", num_bytes).from_pretrained(
                None,
                config=config,
                state_dict=slices,
                dtype=narrow or dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused by name
                output_loading_info=True,
            )
    except (TargetError, OSError):
        raise
    except Exception as error:  # safetensors' or the model's own
        raise TargetError(f"{name}: its head could not be loaded: {type(error).__name__}: {error}") from error
    return loaded


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Cast all weights but embeddings that nothing computes with: a second copy of those may take gigabytes."""
    table, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings()
    for weight in model.parameters():
        if weight is not table or weight is getattr(lm_head, "weight", None):
            weight.data = weight.data.to(dtype)


def _slices(files: dict[str, Path], opened: ExitStack) -> dict[str, Any]:
    """Return tensors that are read once transformers takes them, by name. opened: closes their files."""
    from safetensors import safe_open

    handles = {path: opened.enter_context(safe_open(path, framework="pt")) for path in set(files.values())}
    slices = dict[str, Any]()
    for key, path in files.items():
        about = handles[path].get_slice(key) if key in handles[path].keys() else None  # noqa: SIM118
        if about is not None and about.get_dtype() in ("BF16", "F16", "F32", "F64"):  # another one is quantized
            slices[key] = about
    return slices


def _class_without_blocks(config: Any, where: str, num_bytes: int) -> Any:
    """Return the class of a config, changed so that its decoder blocks have no weights and pass on their states.

    where, num_bytes: the checkpoint's folder and size. A config that states more weights is refused once the class is
    built, before anything is allocated: transformers would draw the rest.
    """
    of_config: Any = transformers_library().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(of_config, Sequence):  # of several by architecture
        named = [each for each in of_config if each.__name__ in (config.architectures or [])]
        of_config = (named or of_config)[0]

    def build(self: Any, *arguments: Any, **named: Any) -> None:
        of_config.__init__(self, *arguments, **named)
        blocks = blocks_of(self)
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in _beside(self, blocks[0]) if blocks else ():
            module._modules.clear()
        for block in blocks:
            for contents in (block._modules, block._parameters, block._buffers):
                contents.clear()
            block._is_hf_initialized = True  # type: ignore[assignment]  # transformers draws no weights for it
        stated = sum(weight.numel() for weight in self.parameters())
        if stated > 2 * num_bytes:  # twice, for tied ones
            found = f"config.json states {stated:,} weights beside {len(inside):,} parts of blocks"
            raise TargetError(f"{where}: {found}, but their files have {num_bytes:,} bytes. {AGAIN}")

    return type(of_config.__name__, (of_config,), {"__init__": build, "__module__": of_config.__module__})


def _beside(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Return the modules with blocks of their own that do not hold the decoder's: the vision tower of a model."""
    found = list[nn.Module]()
    for child in model.children():
        if any(module is block for module in child.modules()):
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found += _beside(child, block)
        elif not isinstance(child, nn.ModuleList) and any(isinstance(each, nn.ModuleList) for each in child.modules()):
            found.append(child)
    return found


def _choose_form(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Let the blocks return what the model's code takes: their states, or a tuple that begins with them."""
    blocks, weight = blocks_of(model), model.get_output_embeddings().weight  # type: ignore[operator]
    ids = torch.arange(_TOKENS, device=weight.device).remainder(len(weight))[None]
    how = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    errors = list[str]()
    for length in _TUPLES:
        for number, block in enumerate(blocks):
            # Not a module's own method: the class of a block may be any.
            block.forward = partial(_passed, length=length, drawn=dtype if number == len(blocks) - 1 else None)
        try:
            with torch.no_grad():
                output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
            logits = output[0] if isinstance(output, tuple) else output.logits
            if logits.shape == (1, _TOKENS, len(weight)):
                return
            errors.append(f"logits of shape {tuple(logits.shape)}")
        except Exception as error:  # of the model's code
            errors.append(f"{type(error).__name__}: {error}")
    found = f"{type(model).__name__} does not run without the weights of its blocks ({errors[0]})"
    raise TargetError(f"{name}: {found}, so its head is known where the target runs alone")


def _passed(*arguments: Tensor, length: int, drawn: torch.dtype | None, **named: Any) -> Any:
    """The forward of a block without weights. drawn: dtype of drawn states to return; None: the given ones.

    Raises: LookupError for a block that is not given hidden_states.
    """
    states: Tensor = arguments[0] if arguments else named["hidden_states"]
    if drawn is not None:  # an embedding may be zeros, which no norm and no scale changes
        made = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)) + 0.25
        states = made.to(states.device, drawn)
    return states if not length else (states, *[None] * (length - 1))
