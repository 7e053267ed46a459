"""Where a target's weights lie, and in which form: the options of a target that does not fit.

`Placement` holds them. Its device map and its memory limits decide no byte of a cache. Quantization and load dtype do,
so they are in the plan's `run`. Importing this module loads no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version as version_of
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.storage.errors import TargetError
from niels_gpt.storage.fileio import open_for_reading
from niels_gpt.storage.meta_json import parse_object, shortened

if TYPE_CHECKING:
    import torch
    from torch import nn

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers computes from the sizes of the modules and the free memory."""
SCHEMES = {
    "torchao:int8wo": "Int8WeightOnlyConfig",
    "torchao:float8wo": "Float8WeightOnlyConfig",
    "bitsandbytes:8bit": "load_in_8bit",
    "bitsandbytes:4bit": "load_in_4bit",
}
"""Library and scheme -> torchao's class, or the argument of transformers' BitsAndBytesConfig."""
FORM = ("quantization", "quantizer", "load_dtype")
"""Keys of the plan's `run` that state the form of the weights, each only where it is not the default."""
STORED = "checkpoint:"
"""Begins run.quantization of a checkpoint that is quantized itself: checkpoint:gptq."""
METHOD = re.compile(r"[a-z0-9_.-]{1,64}")
"""What may follow STORED."""

DeviceMap = str | dict[str, int | str]
"""One of MAPS, or module -> "cpu", "disk" or the number of a GPU."""
_UNITS = {"": 1} | {f"{unit}B": 1000**power for power, unit in enumerate(("", "K", "M", "G", "T"))}
_UNITS |= {f"{unit}iB": 1024**power for power, unit in enumerate(("K", "M", "G", "T"), 1)}
_DEVICE = re.compile(r"cpu|disk|(?:cuda:)?[0-9]{1,3}")
_LIMIT = re.compile(r"([0-9]{1,15})(B|[KMGT]i?B|)")
_MAX_MAP_BYTES = 1 << 20
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Placement:
    """Where a target's weights lie, and in which form; pickled to worker processes."""

    device_map: DeviceMap | None = None
    """None: all of it on the device of the run."""
    max_memory: dict[int | str, int] | None = None
    """Most bytes of weights by GPU number and "cpu", for a device map that is computed; None: what is free."""
    quantization: str | None = None
    """One of SCHEMES; None: as the checkpoint has them."""
    load_dtype: str | None = None
    """Dtype in which the weights of the blocks stay in memory; a block is cast to the compute dtype as it runs. None:
    the compute dtype."""
    tensor_parallel: int = 1
    """Processes that hold a copy together, each a part of the blocks' matrices; see eagle3/tensor_parallel.py."""

    def arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return the keywords of transformers' from_pretrained for a target that runs on `device` in `dtype`.

        Raises: ImportError naming the package to install.
        """
        from niels_gpt.eagle3.format.layout import DTYPES

        if importlib.util.find_spec("accelerate") is None:
            raise ImportError("loading a target needs accelerate. Install the extra: pip install 'niels-gpt[eagle3]'")
        limits = self.max_memory
        if isinstance(self.device_map, str) and limits is None and device.type == "cpu":  # else GPUs would be taken too
            get_max_memory: Any = import_module("accelerate.utils").get_max_memory
            limits = {"cpu": int(get_max_memory()["cpu"] * 0.9)}
        where: Any = {"": device} if self.device_map is None else self.device_map
        if isinstance(where, dict) and len(places := {*where.values()}) == 1 and "disk" not in places:
            where = {"": places.pop()}  # one device needs no hooks
        found = {"device_map": where, "dtype": DTYPES[self.load_dtype] if self.load_dtype else dtype}
        more = {"max_memory": limits, "quantization_config": self._quantization_config(dtype)}
        return found | {name: value for name, value in more.items() if value is not None}

    def _quantization_config(self, dtype: torch.dtype) -> Any:
        if self.quantization is None:
            return None
        refuse_absent(self.quantization)
        import transformers

        library, scheme = self.quantization.partition(":")[0], SCHEMES[self.quantization]
        if library == "torchao":
            made: Any = getattr(import_module("torchao.quantization"), scheme)
            return transformers.TorchAoConfig(made())
        config: Any = transformers.BitsAndBytesConfig
        four: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        return config(**{scheme: True}, **four if scheme == "load_in_4bit" else {})


def refuse_absent(quantization: str) -> None:
    """Raise ImportError, naming the command that installs it, if the library of a scheme is absent."""
    library = quantization.partition(":")[0]
    if importlib.util.find_spec(library) is None:
        install = "'niels-gpt[quantized]'" if library == "torchao" else library
        raise ImportError(f"--quantization {quantization} needs {library}. Install: pip install {install}")


# --- what the flags say -----------------------------------------------------------------------------------------------


def parse_max_memory(text: str) -> dict[int | str, int]:
    """Return the bytes by device that a text names.

        >>> parse_max_memory("0=70GiB,cpu=200GB")
        {0: 75161927680, 'cpu': 200000000000}

    Raises: ValueError for another text, an unknown device, or one that is there twice.
    """
    found: dict[int | str, int] = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition("=")
        size = _LIMIT.fullmatch(limit.strip())
        device = _device(name.strip())
        if size is None or device is None or device == "disk" or device in found:
            raise ValueError(
                f"--max-memory {text}: {part!r} is no limit of another device, expected DEVICE=BYTES for GPUs by "
                "number and cpu (the disk takes the rest), such as 0=70GiB,1=70GiB,cpu=200GiB"
            )
        found[device] = int(size[1]) * _UNITS[size[2]]
    return found


def read_device_map(text: str) -> DeviceMap:
    """Return a device map: one of MAPS, or the content of a JSON file of modules and devices.

        {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk", ...}

    Raises: FileNotFoundError; ValueError for a file that is too large or says something else.
    """
    if text in MAPS:
        return text
    path = Path(text).expanduser()
    try:
        with open(open_for_reading(path, follow_links=True), "rb") as file:
            raw = file.read(_MAX_MAP_BYTES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"--device-map {text}: no such file, expected one of {', '.join(MAPS)}, or a JSON file of module -> device"
        ) from None
    try:
        if len(raw) > _MAX_MAP_BYTES:
            raise ValueError(f"more than {_MAX_MAP_BYTES:,} bytes")
        stated = parse_object(raw)
        found = {name: _device(value) for name, value in stated.items()}
        wrong = next((name for name, device in found.items() if device is None), None)
        if wrong is not None or not found:
            raise ValueError("no module" if wrong is None else f"{wrong!r} is on {shortened(stated[wrong])}")
    except ValueError as error:
        raise ValueError(
            f"--device-map {path}: {error}, expected a JSON object of module -> cpu, disk or the number of a GPU"
        ) from error
    return {name: device for name, device in found.items() if device is not None}


def _device(value: Any) -> int | str | None:
    """Return the number of a GPU, "cpu" or "disk"; None for anything else."""
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        return None
    return value if value in ("cpu", "disk") else int(value.removeprefix("cuda:"))


def refuse_other_devices(devices: Iterable[int | str], device: str, gpus: int, flag: str) -> None:
    """Raise ValueError unless the devices that a flag names are usable in a run on `device`.

    device: cpu or cuda. gpus: number of GPUs of this machine.
    """
    named = sorted(each for each in devices if isinstance(each, int))
    if device == "cpu" and named:
        raise ValueError(f"{flag} names GPU {named[0]}, and the target runs on the cpu. Pass --device cuda")
    if device == "cuda" and not named:
        raise ValueError(f"{flag} names no GPU, and the target runs on cuda. Pass --device cpu, or name a GPU")
    if named and named[-1] >= gpus:
        raise ValueError(f"{flag} names GPU {named[-1]}, and this machine has {gpus}, numbered from 0")


def weight_form(
    quantization: str | None, load_dtype: str | None, *, compute_dtype: str, stored: str | None
) -> dict[str, str]:
    """Return the keys FORM of the plan's `run`; {} for the default.

    stored: how the checkpoint is quantized itself, such as "gptq"; None: it is not.
    Raises: ValueError for options that contradict each other or the checkpoint; ImportError for an absent library.
    """
    if stored is not None and (quantization or load_dtype):
        flag = f"--quantization {quantization}" if quantization else f"--load-dtype {load_dtype}"
        raise TargetError(
            f"{flag}: the checkpoint is quantized already ({stored}), and is loaded as it is. Leave it out"
        )
    if quantization and load_dtype:
        raise ValueError(
            f"--quantization {quantization} with --load-dtype {load_dtype}: the weights have one form. Leave one out"
        )
    if stored is not None:
        return {"quantization": f"{STORED}{stored}"}
    if quantization:
        refuse_absent(quantization)
        library = quantization.partition(":")[0]
        return {"quantization": quantization, "quantizer": f"{library} {version_of(library)}"}
    if load_dtype is None or load_dtype == compute_dtype:
        return {}
    if _WIDTHS[load_dtype] >= _WIDTHS[compute_dtype]:
        raise ValueError(
            f"--load-dtype {load_dtype} with --compute-dtype {compute_dtype}: it would save no memory. Leave it out"
        )
    return {"load_dtype": load_dtype}


# --- a loaded model ---------------------------------------------------------------------------------------------------


def refuse_other_modules(device_map: DeviceMap | None, model: nn.Module, name: str) -> None:
    """Raise TargetError for a map that names no module of a model, or leaves out a weight. name: of the target."""
    if not isinstance(device_map, dict):
        return
    weights = model.named_parameters(remove_duplicate=False)  # a tied lm_head is placed too
    tensors = [each for each, _ in chain(weights, model.named_buffers())]
    known = {each for each, _ in model.named_modules()}
    if unknown := [each for each in device_map if each not in known]:
        raise TargetError(
            f"{name}: --device-map names {unknown[0]!r}, which is no module of {type(model).__name__}. Its modules are "
            f"{', '.join(_largest_modules(tensors))}"
        )
    places = tuple(f"{each}." if each else "" for each in device_map)
    if missing := [each for each in tensors if not f"{each}.".startswith(places)]:
        raise TargetError(f"{name}: --device-map has no device for {missing[0]}. Name it or a module that holds it")


def _largest_modules(tensors: Sequence[str]) -> list[str]:
    """Return the names of the modules that a device map usually has: blocks, and what lies beside them."""
    names = (re.sub(r"(\.\d+)\..*", r"\1", each) for each in tensors)
    found = dict.fromkeys(each if each[-1].isdecimal() else each.rpartition(".")[0] for each in names)
    return [*list(found)[:6], "..."]


def refuse_small_share(blocks: Iterable[nn.Module], what: str) -> None:
    """Raise TargetError if less than half of the weights of the blocks is quantized.

    The libraries quantize linear layers, and transformers keeps the experts of a mixture in another form.
    """
    from torch import Tensor, nn

    sizes = {True: 0, False: 0}
    for module in chain.from_iterable(block.modules() for block in blocks):
        for weight in module.parameters(recurse=False):
            is_plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
            is_packed = not is_plain and isinstance(module, nn.Linear)  # as 4-bit weights are
            sizes[is_plain] += int(module.in_features * module.out_features) if is_packed else weight.numel()  # type: ignore[operator]
    quantized, whole = sizes[False], sum(sizes.values())
    if 2 * quantized < whole:
        raise TargetError(
            f"{what} reaches {quantized / whole:.0%} of the weights of its blocks, its linear layers. Pass "
            "--device-map auto instead, or name a checkpoint that is quantized already"
        )


def compute_in(
    model: nn.Module, blocks: Iterable[nn.Module], dtype: torch.dtype, computed: Mapping[str, torch.Tensor]
) -> None:
    """Let a model of narrower weights compute in `dtype`: each block is cast as it runs, and the rest once.

    The weights of a block are cast before its forward, and the narrow ones are put back after it, so that one block at
    a time takes the wider memory. Embeddings, final norm and lm_head stay in `dtype`. Offloaded weights (on meta) are
    cast by accelerate as it loads them for a module: it takes the dtype of the tensor on meta.

    computed: buffers that are in no file, by name, as the model has them in `dtype`: here they were rounded.
    """
    narrow = {id(each) for block in blocks for each in block.parameters() if not each.is_meta}
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point() and id(tensor) not in narrow:
            tensor.data = tensor.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name in computed and not buffer.is_meta:
            buffer.data = computed[name].to(buffer.device)
    for block in blocks:
        cast = _CastAsItRuns(dtype)
        block.register_forward_pre_hook(cast.widen)
        block.register_forward_hook(cast.put_back, always_call=True)
    config: Any = model.config
    config.dtype = dtype


class _CastAsItRuns:
    """Casts the weights of a block for the time of its forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._narrow: list[tuple[nn.Parameter, torch.Tensor]] = []

    def widen(self, block: nn.Module, _inputs: Any) -> None:
        """Cast the weights."""
        for weight in block.parameters():
            if weight.is_floating_point() and weight.dtype != self._dtype:
                self._narrow.append((weight, weight.data))
                weight.data = weight.data.to(self._dtype)

    def put_back(self, _block: nn.Module, _inputs: Any, _output: Any) -> None:
        """Free the cast ones."""
        for weight, narrow in self._narrow:
            weight.data = narrow
        self._narrow.clear()
