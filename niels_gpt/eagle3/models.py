"""Load target models, by folder or hub id; write the small model of the sample.

Decides which models are refused. Only a hub id reaches the network; code of a model's repository never runs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import operator
import os
import re
import secrets
import shlex
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from niels_gpt.eagle3.format.layout import WITHOUT_HOLES, refuse_sparse
from niels_gpt.eagle3.format.torch_files import refuse_odd_archive
from niels_gpt.eagle3.placement import METHOD, Placement, compute_in, refuse_other_modules, refuse_small_share
from niels_gpt.eagle3.tensor_parallel import distributed_config
from niels_gpt.hub.models import CONFIG, hub_file, hub_weights, is_local, optional_file, refuse_large, shards_of
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import NotFound, TargetError, errors_as
from niels_gpt.storage.fileio import canonical_json, open_for_reading, sha256_file
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON
from niels_gpt.tokenizers.library import needs_transformers

if TYPE_CHECKING:
    from niels_gpt.tokenizers.protocol import FullTokenizer

_MAX_LAYERS = 1000
_WEIGHTS, _INDEX, _ADAPTER = ".safetensors", "model.safetensors.index.json", "adapter_config.json"
_WHOLE = "model.safetensors"
_OF_A_BLOCK = re.compile(r"(^|\.)(layers?|h|(res)?blocks?)\.\d+\.")  # model.layers.3.mlp.up_proj.weight
AGAIN = "Download it again"
_NOT_ON_DISK = (
    "Weights that are quantized as they are loaded cannot lie on the disk: raise --max-memory, or leave it out"
)
_BLOCKS = (
    "model.layers",  # Llama, Qwen, Mistral and most others
    "model.language_model.layers",  # multimodal models
    "language_model.layers",
    "layers",
    "transformer.h",  # GPT-2
    "gpt_neox.layers",
)


@dataclass(frozen=True)
class TargetFacts:
    """A target's identity and sizes, known before its weights are loaded."""

    name: str
    """Folder or hub id, as given."""
    revision: str | None
    """Commit on the hub; None for a folder."""
    weights_sha256: str | None
    """sha256 over names and sha256 of a folder's weight files; None for the hub, where the commit identifies them."""
    config_sha256: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """Most tokens of a sample; None if the config states no limit."""


def target_facts(name: str, *, revision: str | None = None, hash_weights: bool = True) -> TargetFacts:
    """Read a target's config, and hash the weight files of a local folder. Loads no weights.

    name: a folder, else a hub id. revision: branch, tag or commit on the hub; ignored for a folder.
    hash_weights: False looks at no weights: weights_sha256, None then, reads every byte.
    Raises: FileNotFoundError for a folder without config or, if they are hashed, weights; ConnectionError if the hub
        does not answer; ValueError for a model that is missing on the hub, not open to the user, not a causal language
        model, or needs code of its repository; ImportError without the extra.
    """
    facts, _, folder = _of_config(name, revision)
    if facts.revision is not None or not hash_weights:
        return facts
    return replace(facts, weights_sha256=_sha256_of_all(_weight_files(folder)))


def _of_config(name: str, revision: str | None) -> tuple[TargetFacts, Any, Path]:
    """Return the facts in a target's config, the config, and its folder.

    Raises: FileNotFoundError without a config; ConnectionError; ValueError and ImportError for a model that cannot be a
        target.
    """
    transformers = transformers_library()
    path = _config_path(name, revision)
    try:
        refuse_large(path.parent)
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{path}: there is no such file, expected the folder of a transformers model", code="E705"
        ) from None
    config, text = _read_config(path)
    sizes: list[Any] = [getattr(text, size, None) for size in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or None in sizes:
        raise TargetError(
            f"{path}: model_type {config.model_type!r} is no causal language model of transformers "
            f"{transformers.__version__}. Name one that predicts the next token"
        )
    if not 0 < sizes[0] <= _MAX_LAYERS:
        raise TargetError(f"{path}: {sizes[0]:,} layers, expected 1 to {_MAX_LAYERS:,}")
    facts = TargetFacts(
        name=name,
        revision=None if is_local(name) else path.parent.name,
        weights_sha256=None,
        config_sha256=hashlib.sha256(raw).hexdigest(),
        model_type=config.model_type,
        num_layers=sizes[0],
        hidden_size=sizes[1],
        vocab_size=sizes[2],
        max_positions=getattr(text, "max_position_embeddings", None),
    )
    return facts, config, path.parent


def checkpoint_quantization(name: str, revision: str | None) -> str | None:
    """Return how a target's checkpoint is quantized itself, such as "gptq"; None if it is not. Loads no weights.

    Raises: see `target_facts`.
    """
    _, config, _ = _of_config(name, revision)
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    text = str(getattr(method, "value", method))
    return text if METHOD.fullmatch(text) else "unknown"


def refuse_other_placement(name: str, revision: str | None, placement: Placement) -> None:
    """Raise TargetError (E705) if a target lacks modules of the device map, or cannot be split; loads no weights.

    See `refuse_other_modules` and `distributed_config`.
    """
    ranks = placement.tensor_parallel
    if ranks == 1 and not isinstance(placement.device_map, dict):
        return
    if (empty := _without_weights(_of_config(name, revision)[1])) is not None:
        refuse_other_modules(placement.device_map, empty, name)
        if ranks > 1:
            distributed_config(name, empty, ranks)


def load_target(
    name: str,
    *,
    revision: str | None,
    dtype: torch.dtype,
    attention: str,
    device: str | torch.device,
    placement: Placement = Placement(),  # noqa: B008  it is frozen
) -> nn.Module:
    """Load a causal language model in eval mode, without gradients, that computes in `dtype` on `device`.

    The weights are read from the files onto their device. `name_or_path` of the model is the folder of its files.

    name, revision: see `target_facts`. attention: transformers' attn_implementation, such as "sdpa" or "eager".
    placement: where the weights lie, and in which form; by default all on `device`, in `dtype`.
    Raises: FileNotFoundError for a folder without config or weights; ConnectionError if the hub does not answer;
        ImportError without the extra, or without the library of a quantization; ValueError for a model that cannot be
        a target, a device map of other modules, unreadable weights, and weights that are missing or of another shape,
        which transformers would initialize at random.
    """
    transformers_library()
    facts, config, folder = _of_config(name, revision)
    if facts.revision is not None:
        folder = hub_weights(name, facts.revision)
    files = _weight_files(folder)
    how = placement.arguments(torch.device(device), dtype)
    empty = _without_weights(config)
    if empty is not None:
        _refuse_more_weights(folder, config, empty, sum(path.stat().st_size for path in files))
        refuse_other_modules(placement.device_map, empty, name)
        if placement.tensor_parallel > 1:
            del how["device_map"]  # transformers takes the rank's own device
            how["distributed_config"] = distributed_config(name, empty, placement.tensor_parallel)
    model, found = _from_pretrained(name, folder, config, attention, how)
    wrong = {"missing": found["missing_keys"], "of another shape": {key for key, *_ in found["mismatched_keys"]}}
    for what, keys in wrong.items():
        if keys:
            first = ", ".join(sorted(keys)[:3])
            raise TargetError(
                f"{name}: {len(keys)} of its weights are {what} (such as {first}): expected a complete model, with "
                f"its own {CONFIG}. {AGAIN}"
            )
    if placement.quantization and "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise TargetError(f"{name}: it does not fit into memory. {_NOT_ON_DISK}")
    if placement.quantization:
        refuse_small_share(blocks_of(model), f"{name}: --quantization {placement.quantization}")
    if placement.load_dtype is not None:
        compute_in(model, blocks_of(model), dtype, _buffers_of_no_file(config, dtype))
    opened: nn.Module = model.requires_grad_(False).eval()
    return opened


def _from_pretrained(name: str, folder: Path, config: Any, attention: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model, and transformers' report on its keys. how: from `Placement.arguments`.

    Weights on "disk" are read from their safetensors as a module runs. What transformers must rewrite for that, such
    as the experts of a mixture, it puts into a temporary folder, which lives as long as the model.
    """
    import transformers

    from_files: Any = transformers.AutoModelForCausalLM.from_pretrained
    offload = TemporaryDirectory(prefix="niels-gpt-offload-")
    try:
        with quiet():
            # A folder, as for an id transformers may have an online service convert weights of an old format.
            model, found = from_files(
                folder,
                config=config,  # opened here, else its own attn_implementation, code of the hub, precedes ours
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # refused by name
                output_loading_info=True,
                offload_folder=offload.name,
                **how,
            )
        if os.listdir(offload.name):
            weakref.finalize(model, offload.cleanup)
        else:
            offload.cleanup()
        return model, found
    except BaseException as error:
        offload.cleanup()
        if isinstance(error, ImportError):
            raise ImportError(f"{name}: {error}") from error
        if not isinstance(error, Exception):
            raise
        if "attention implementation" in str(error) and attention != "eager":
            problem = f"transformers has no attention {attention!r} for this model. Run it with --attention eager"
            raise TargetError(f"{name}: {problem}") from error
        advice = f". {_NOT_ON_DISK}" if "quantization_config" in how and "" not in how["device_map"] else ""
        problem = f"its weights could not be loaded: {type(error).__name__}: {error}{advice}"
        raise TargetError(f"{name}: {problem}") from error  # safetensors', pickle's or the model's own


def text_config(name: str, *, revision: str | None = None) -> Any:
    """Return the config of a target's language model. Raises: see `target_facts`."""
    return _of_config(name, revision)[1].get_text_config()


def sha256_of_ends(name: str, *, revision: str | None = None) -> dict[str, str]:
    """Return the sha256 of each file that `checkpoint.load_ends` reads, by name; {} for the hub, which has commits.

    Raises: see `checkpoint.load_ends`.
    """
    if not is_local(name):
        return {}
    return {path.name: sha256_file(path) for path in sorted(set(tensors_of_ends(name, revision)[2].values()))}


def tensors_of_ends(name: str, revision: str | None) -> tuple[Any, Path, dict[str, Path]]:
    """Return a target's config, its folder, and the tensors outside its blocks by name, each with its file.

    Of the hub only these files are downloaded. Raises: see `checkpoint.load_ends`.
    """
    facts, config, folder = _of_config(name, revision)
    fetched = optional = partial(_local, folder)
    if facts.revision is not None:
        fetched, optional = (partial(each, name, revision=facts.revision) for each in (hub_file, optional_file))
    if optional(_ADAPTER) is not None:
        raise TargetError(f"{folder}: has {_ADAPTER}, expected a whole model. Merge the adapter into its model")
    if (whole := optional(_WHOLE)) is not None:
        names, files = _names_in(whole), {_WHOLE: whole}
        placed = dict.fromkeys(names, _WHOLE)
    elif (index := fetched(_INDEX)) is not None:  # raises OfflineError if the hub may not be asked
        refuse_large(index.parent)
        shards_of(index, str(folder))  # refuses names of files elsewhere
        placed = {str(key): str(file) for key, file in json.loads(index.read_bytes())["weight_map"].items()}
        files = {}
    else:
        raise _no_safetensors(folder)
    ends = {key: file for key, file in placed.items() if not _OF_A_BLOCK.search(key)}
    for key, file in ends.items():
        if file not in files:
            path = fetched(file)
            if path is None:
                raise NotFound(f"{folder / file}: no such file, and {_INDEX} has {key} there. {AGAIN}", code="E705")
            files[file] = path
            _names_in(path)
    return config, folder, {key: files[file] for key, file in ends.items()}


def _no_safetensors(folder: Path) -> ValueError | OSError:
    """Return the error for a folder whose single tensors cannot be read."""
    if not any((folder / file).exists() for file in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        found = f"{folder}: neither {_WHOLE} nor {_INDEX} is there, expected weights in safetensors"
        return NotFound(found, code="E705")
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
    command = shlex.join(["python", "-c", f"{code}.save_pretrained({str(folder)!r})"])
    return TargetError(
        f"{folder}: its weights are pickled, and single tensors are read of safetensors alone. Convert it: {command}"
    )


def _local(folder: Path, file: str) -> Path | None:
    return folder / file if os.path.lexists(folder / file) else None


def _names_in(path: Path) -> list[str]:
    """Return the tensors of a safetensors file. Raises: TargetError for a file that is damaged or mostly holes."""
    from safetensors import SafetensorError, safe_open

    with open(open_for_reading(path, follow_links=True), "rb") as file:
        refuse_sparse(file.fileno(), str(path), *WITHOUT_HOLES, AGAIN)
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise TargetError(f"{path}: safetensors cannot read it: {error}. {AGAIN}") from error


def transformers_library() -> ModuleType:
    """Import transformers without the warnings of its imports. Raises: ImportError without the extra."""
    # transformers imports torchao, if it is there, which warns of its extensions for other platforms, and torch of it.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError as error:
        raise needs_transformers("running a target") from error
    return transformers


def _config_path(name: str, revision: str | None) -> Path:
    """Return the path of a config: in a local folder, where it may be absent, or in the hub cache."""
    if is_local(name):
        return Path(name).expanduser() / CONFIG
    found = hub_file(name, CONFIG, revision)
    if found is None:
        raise TargetError(f"{name}: has no {CONFIG} on the hub, expected a transformers model")
    return found


def _read_config(path: Path) -> tuple[Any, Any]:
    """Return a model's config, and its text config, which may be the same."""
    import transformers

    folder = path.parent
    try:
        with quiet():
            # By default transformers asks at the terminal whether to run the repository's code.
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return config, config.get_text_config()
    except Exception as error:  # any error of the config's class
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"{path}: transformers {transformers.__version__} has no such model, and code of a model's repository "
                "is never run here. Name a model that needs none"
            ) from error
        raise TargetError(f"{path}: transformers {transformers.__version__} cannot read it: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder.

    Raises: NotFound; ValueError if loading them could run code or read elsewhere.
    """
    with errors_as("E705"):
        files = list(folder.iterdir())
    paths = sorted((path for path in files if path.suffix in (_WEIGHTS, ".bin")), key=lambda path: path.name)
    if not paths:
        raise NotFound(
            f"{folder}: no *.safetensors and no *.bin is there, expected the weights of a model", code="E705"
        )
    if (folder / _ADAPTER).exists():  # transformers would load the model that it names, from anywhere
        raise TargetError(
            f"{folder}: has {_ADAPTER}, expected a whole model. Merge the adapter into its model, or remove it"
        )
    for index in (folder / _INDEX, folder / "pytorch_model.bin.index.json"):
        if index.is_file():
            shards_of(index, str(folder))  # refuses names of files elsewhere
    is_pickle = not (folder / "model.safetensors").exists() and not (folder / _INDEX).exists()
    for path in paths:
        with open(open_for_reading(path, follow_links=True), "rb") as file:
            refuse_sparse(file.fileno(), str(path), *WITHOUT_HOLES, AGAIN)
            if is_pickle and path.suffix == ".bin":
                try:
                    refuse_odd_archive(file)
                except ValueError as error:
                    raise TargetError(f"{path}: {error}. Convert it to safetensors") from error
    return paths


def _without_weights(config: Any) -> nn.Module | None:
    """Return the model of a config on meta, where it takes no memory; None if from_pretrained must say why not."""
    import transformers

    of_config: Any = transformers.AutoModelForCausalLM.from_config
    try:
        with quiet(), torch.device("meta"):
            empty: nn.Module = of_config(config, trust_remote_code=False)
    except Exception:
        return None
    return empty


def _buffers_of_no_file(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the buffers that a model computes itself in `dtype`, by name, such as Gemma's scale of the embeddings."""
    import transformers

    init_empty_weights: Any = import_module("accelerate").init_empty_weights
    of_config: Any = transformers.AutoModelForCausalLM.from_config
    with quiet(), init_empty_weights(include_buffers=False):
        model: nn.Module = of_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored}


def _refuse_more_weights(folder: Path, config: Any, empty: nn.Module, num_bytes: int) -> None:
    """Raise TargetError if the config states more weights than the files can hold, as transformers would allocate them.

    A byte holds one weight at most, or eight quantized ones. empty: the config's model.
    """
    num_weights = sum(each.numel() for each in chain(empty.parameters(), empty.buffers()))
    if num_weights > num_bytes * (8 if getattr(config, "quantization_config", None) else 1):
        found = f"{CONFIG} states {num_weights:,} weights, but the weight files have {num_bytes:,} bytes"
        raise TargetError(f"{folder}: {found}, expected whole files, and the {CONFIG} of this model. {AGAIN}")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's decoder blocks in order."""
    for path in _BLOCKS:
        try:
            blocks = operator.attrgetter(path)(model)
        except AttributeError:
            continue
        if isinstance(blocks, nn.ModuleDict):
            return [blocks[str(index)] for index in range(len(blocks))]
        return list(blocks)
    raise TargetError(
        f"{type(model).__name__}: unsupported model structure, its decoder blocks were not found. Expected one of "
        f"{', '.join(_BLOCKS)}, as in Llama, Qwen, Mistral or GPT-2"
    )


def _sha256_of_all(paths: list[Path]) -> str:
    lines = (f"{path.name} {sha256_file(path)}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its report on keys, which this module checks itself."""
    from transformers.utils import logging as of_transformers

    library: Any = of_transformers
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    if bars:
        library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


# --- the target of the sample -----------------------------------------------------------------------------------------


def write_small_target(folder: str | os.PathLike[str], tokenizer: FullTokenizer, *, seed: int = 0) -> Path:
    """Write an untrained Llama of 8 layers and hidden size 64, with the tokenizer beside it; return the folder.

    It is the target of the sample: a first run downloads nothing. Equal arguments give equal bytes on any machine;
    torch's global generators are not used. The folder is complete or absent; an existing one is not written again.

    Raises: FileExistsError if the folder holds something else.
    """
    final = Path(folder).absolute()
    config = _small_config(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _drawn(shape, generator) for name, shape in _small_shapes(config).items()}
    files = {
        CONFIG: canonical_json(config),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        TOKENIZER_JSON if tokenizer.kind == "huggingface" else MODEL_NAME: Path(tokenizer.model_path).read_bytes(),
    }
    if not final.exists():
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
        try:
            fileio.make_dir(temporary)
            for name, content in files.items():
                fileio.write_bytes(temporary / name, content)
            fileio.rename(temporary, final)
        except BaseException as error:
            fileio.remove(temporary)
            if not isinstance(error, OSError) or not final.exists():  # else another process was first
                raise
    if {path.name: path.read_bytes() for path in final.iterdir() if path.is_file()} != files:
        raise FileExistsError(f"{final}: not the small target of these settings. Remove it, or name another folder")
    return final


def _small_config(tokenizer: FullTokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.special_token_ids()["eot"],
    }


def _small_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    blocks = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in block.items()
    }
    ends = {"model.embed_tokens": (vocab, wide), "model.norm": (wide,), "lm_head": (vocab, wide)}
    return {**blocks, **{f"{name}.weight": shape for name, shape in ends.items()}}


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return ones for a norm, else numbers of mean 0 and variance 1 / inputs, drawn without exp or log."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    return (torch.rand(shape, dtype=torch.float32, generator=generator) - 0.5) * math.sqrt(12 / shape[1])
