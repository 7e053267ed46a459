"""A plan, samples and a target of eight small layers: a cache of three shards takes a tenth of a second."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from niels_gpt.eagle3.format.plan import Plan, make_plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.produce.producer import Produced, produce

VOCAB, HIDDEN, LENGTH = 40, 16, 24


@dataclass(frozen=True)
class Row:
    """A sample."""

    id: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]


def rows(count: int = 10, *, seed: int = 0, vocab: int = VOCAB, longest: int = LENGTH) -> list[Row]:
    """Return samples of 1 to `longest` tokens, some of them supervised."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        length = longest if number == 1 else chance.randint(1, longest)
        ids, mask = chance.choices(range(vocab), k=length), chance.choices((0, 1), k=length)
        found.append(Row(f"chat\n{number}", ids, mask))
    return found


@cache
def load(device: torch.device, *, seed: int = 0) -> Any:
    """Return a Llama of 8 layers, always the same. Pickled by its name, and made once in each process."""
    import transformers

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).requires_grad_(False).eval().to(device)


def manifest(**changed: Any) -> dict[str, Any]:
    """Return a manifest of version 1, or what is asked for, without what the plan and the target add to it."""
    made = {
        "format_version": 1,
        "target_model": "small",
        "target_vocab_size": VOCAB,
        "draft_vocab_size": 12,
        "seq_length": LENGTH,
        "dtype": "bf16",
        "shard_size": 4,
        "aux_hidden_dim": 3 * HIDDEN,
        "aux_layer_ids": [1, 3, 4],
        "selected_token_ids": [7, 3, 11, 0, 1, 2, 4, 5, 39, 20, 21, 8],
        **changed,
    }
    absent = ("shard_size", "aux_hidden_dim") if made["format_version"] == "native-1" else ()
    return {name: value for name, value in made.items() if name not in absent}


TOPK = {"format_version": 2, "target_probs_topk": 4}
NATIVE = {"format_version": "native-1", "hidden_size": HIDDEN, "aux_dtype": "bf16", "shard_bytes": 8192}
FP8 = {**NATIVE, "aux_dtype": "fp8", "aux_layer_ids": [5, 0, 2, 7], "dtype": "fp32"}


def plan(samples: Samples, *, batch_size: int = 3, max_batch_tokens: int = 64, **changed: Any) -> Plan:
    """Return a plan. changed: fields of the manifest, or whole parts of the plan."""
    parts: dict[str, Any] = {
        "target": {"name": "small", "vocab_size": VOCAB, "hidden_size": HIDDEN, "config_sha256": "c" * 64},
        "tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 5},
        "source": {"input_data": "rows", "kind": "own", "limit": None},
        "dropped": {"empty": 2},
        "run": {"device": "cpu", "threads": 1, "attention": "sdpa", "compute_dtype": "fp32"},
    }
    for name in parts.keys() & changed.keys():
        parts[name] = {**parts[name], **changed.pop(name)}
    return make_plan(manifest(**changed), samples, batch_size=batch_size, max_batch_tokens=max_batch_tokens, **parts)


def samples_of(count: int = 10, **how: Any) -> Samples:
    """Return the samples of `rows`."""
    return Samples.of_rows(rows(count, **how))


def run(
    folder: Path, *, samples: Samples | None = None, given: Plan | None = None, load: Any = load, **how: Any
) -> Produced:
    """Make a cache of ten samples in three shards, or what is missing of it. how: as `produce` has it."""
    samples = samples_of() if samples is None else samples
    return produce(folder, given or plan(samples), samples, load, **how)


def whole_tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a cache but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def times(folder: Path) -> dict[str, int]:
    """Return when each file and folder was changed, in nanoseconds."""
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def never(device: torch.device) -> Any:
    """Stand in for `load` where the target must not be loaded."""
    raise AssertionError("the target was loaded")


def has_shard(cache: Path, shard: int) -> bool:
    """Return whether a shard and its receipt are there."""
    name = f"shard-{shard:06d}"
    return (cache / f"{name}.safetensors").exists() and (cache / "sidecar" / f"{name}.json").exists()


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of a given size."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
