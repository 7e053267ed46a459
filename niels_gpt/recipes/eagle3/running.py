"""How a target runs and where its weights lie, from the options: the plan's `run`, and its `Placement`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from niels_gpt.eagle3.format.plan import Run
from niels_gpt.eagle3.placement import (
    FORM,
    SCHEMES,
    STORED,
    Placement,
    parse_max_memory,
    read_device_map,
    refuse_other_devices,
    weight_form,
)
from niels_gpt.eagle3.tensor_parallel import refuse_few_gpus
from niels_gpt.recipes.eagle3.options import Options, TargetOptions
from niels_gpt.settings import usable_cores


def run_facts(options: TargetOptions, recorded: dict[str, Any], stored: str | None = None) -> dict[str, Any]:
    """Return how the target is run: the fields of `format.plan.Run`, and the form of its weights unless the default.

    recorded: supplies unset options. stored: see `weight_form`.
    Raises: ValueError if cuda is asked for but not usable, or has too few GPUs, or for another form than the checkpoint
        can have.
    """
    device, threads = options.device or recorded.get("device"), options.threads or recorded.get("threads")
    run = Run.here(device, attention=options.attention, threads=threads or usable_cores())
    dtype = recorded.get("compute_dtype") if run.device == recorded.get("device") else None
    dtype = options.compute_dtype or dtype or run.compute_dtype
    quantization, load_dtype = options.quantization, options.load_dtype
    if quantization is None and load_dtype is None:
        quantization = next((name for name in SCHEMES if name == recorded.get("quantization")), None)
        load_dtype = recorded.get("load_dtype")
    if recorded and "quantization" not in recorded and quantization is None and load_dtype is None:
        stored = None  # a plan of an earlier version, which does not state it
    form = weight_form(quantization, load_dtype, compute_dtype=dtype, stored=stored)
    facts = {**asdict(run), "compute_dtype": dtype, **form}
    if isinstance(options, Options) and (ranks := options.tensor_parallel or recorded.get("tensor_parallel", 1)) > 1:
        refuse_few_gpus(run.device, ranks, options.workers)
        facts["tensor_parallel"] = ranks
    return facts


def placement_of(options: TargetOptions, run: Mapping[str, Any]) -> Placement:
    """Return where the weights lie, and in which form. run: from `run_facts`.

    Raises: FileNotFoundError and ValueError for a device map or limits that cannot be used here.
    """
    where = None if options.device_map is None else read_device_map(options.device_map)
    limits = None if options.max_memory is None else parse_max_memory(options.max_memory)
    scheme, ranks = run.get("quantization", STORED), run.get("tensor_parallel", 1)
    placement = Placement(where, limits, None if scheme.startswith(STORED) else scheme, run.get("load_dtype"), ranks)
    if ranks > 1 and (where is not None or any(key in run for key in FORM)):
        forms = ", ".join(str(run[key]) for key in FORM if key in run)
        other = f"--device-map {options.device_map}" if where is not None else f"weights in another form ({forms})"
        raise ValueError(f"--tensor-parallel {ranks} with {other}: only one of them is possible. Leave one out")
    gpus = torch.cuda.device_count()
    if isinstance(where, dict):
        refuse_other_devices(where.values(), run["device"], gpus, f"--device-map {options.device_map}")
        if placement.quantization and "disk" in where.values():
            raise ValueError(
                f"--device-map {options.device_map}: weights that are quantized as they are loaded cannot lie on the "
                "disk. Leave out disk, or --quantization"
            )
    if limits is not None:
        refuse_other_devices(limits, run["device"], gpus, f"--max-memory {options.max_memory}")
    workers = getattr(options, "workers", 1)
    if where is not None and workers > 1 and run["device"] == "cuda":
        raise ValueError(
            f"--workers {workers} with --device-map {options.device_map}: each process would spread a copy over the "
            "same GPUs. Pass --workers 1; for several copies run partitions (--partitions, --partition), each "
            "with its own CUDA_VISIBLE_DEVICES"
        )
    return placement
