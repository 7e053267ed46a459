"""What the sections of gpu.py share: random models, waiting for a device, and the table of a section."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring import ratio
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32_000


def llama(device: str, **sizes: int) -> Any:
    """Return a Llama in bf16 with random weights."""
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=1 << 14, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def finished(work: Callable[[], object], device: str) -> Callable[[], object]:
    """Return some work that ends when the device has done it."""

    def run() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def show(seconds: dict[str, list[float]], limit: str, tokens: int) -> None:
    """Print the median of each way, the tokens a second, and the share of the limit's speed."""
    for name, found in seconds.items():
        middle = statistics.median(found)
        speed = f"{tokens / middle:13,.0f} tokens/s" if tokens else ""
        print(f"  {name:<44} {middle * 1e3:10.2f} ms {speed} {ratio(seconds, name, limit):7.3f}", flush=True)
