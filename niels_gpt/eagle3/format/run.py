"""How a target is run, as the plan records it: device, processor, dtype, attention, threads and versions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import torch

CONVERTED_FROM = "converted_from"
"""Key of the plan's `run` in a cache of version 1 or 2 that was made of a native one; its value is the dtype of that
one's auxiliary states."""


@dataclass(frozen=True)
class Run:
    """How the target is run: everything that may change a bit of its outputs."""

    device: str
    """cpu or cuda."""
    processor: str
    """Name of the GPU, or the CPU's instruction set, such as AVX512."""
    compute_dtype: str
    """bf16 or fp32."""
    attention: str
    """sdpa or eager."""
    threads: int
    """Of each worker process."""
    torch: str
    """Version."""
    transformers: str
    """Version."""

    @classmethod
    def here(cls, device: str | None, *, attention: str, threads: int) -> Run:
        """Return how a target runs on this machine. device: cpu or cuda; None: cuda where there is one.

        Raises: ValueError where cuda is asked for and cannot be used.
        """
        cuda = torch.cuda.is_available()
        if device == "cuda" and not cuda:
            raise ValueError("--device cuda: torch finds no usable GPU here. Use --device cpu")
        chosen = device or ("cuda" if cuda else "cpu")
        return cls(
            device=chosen,
            processor=torch.cuda.get_device_name() if chosen == "cuda" else torch.backends.cpu.get_cpu_capability(),
            compute_dtype="bf16" if chosen == "cuda" else "fp32",
            attention=attention,
            threads=threads,
            torch=str(torch.__version__),
            transformers=version("transformers"),
        )
