"""Samples and a target of eight small layers: a cache of three shards takes a tenth of a second.

`run` makes a cache by `niels_gpt.eagle3.make_target_cache`. Below it stand what has no public name: the plan and the
estimate of a run, parts that are joined or sealed, patches of its writer.
"""

from __future__ import annotations

import copy
import random
import subprocess
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from niels_gpt.eagle3 import make_target_cache

VOCAB, HIDDEN, LENGTH = 40, 16, 24
EAGLE3 = "niels_gpt.eagle3.__main__"
"""The module of `python -m niels_gpt.eagle3`, whose commands end with 1 where `niels-gpt eagle3` tells damage by 3."""


@dataclass(frozen=True)
class Row:
    """A sample."""

    id: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]


def rows(count=10, *, seed=0, vocab=VOCAB, longest=LENGTH):
    """Return samples of 1 to `longest` tokens, some of them supervised."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        length = longest if number == 1 else chance.randint(1, longest)
        ids, mask = chance.choices(range(vocab), k=length), chance.choices((0, 1), k=length)
        found.append(Row(f"chat\n{number}", ids, mask))
    return found


@cache
def load(device, *, seed=0):
    """Return a Llama of 8 layers, always the same. Pickled by its name, and made once in each process."""
    import transformers

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).requires_grad_(False).eval().to(device)


def load_bf16(device):
    """Return the same Llama in bf16."""
    return copy.deepcopy(load(torch.device("cpu"))).to(device, torch.bfloat16)


def target_rows(mask, targets="loss"):
    """Return the positions of a sample's target rows, as docs/formats.md has them."""
    at = [t for t in range(1, len(mask)) if mask[t] or mask[t - 1]]
    if targets == "reply":
        at = sorted({*at, *([0] * bool(mask[0])), *(t for t in range(len(mask) - 1) if mask[t + 1])})
    return [*range(len(mask))] if targets == "all" else at


def rows_of(mask, targets="loss"):
    """Return a sample's numbers of tokens, auxiliary rows and target rows, as docs/formats.md has them."""
    at = target_rows(mask, targets)
    return len(mask), len(mask) if targets == "all" else max(at, default=0), len(at)


def manifest(**changed):
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
REPLY = {**NATIVE, "targets": "reply", "enough_for": ["dflash", "dspark", "eagle3", "peagle"]}
ALL = {**FP8, "targets": "all", "enough_for": ["dflash", "dspark", "eagle3", "mtp", "peagle"], "made_for": "dspark"}
ALL["shard_bytes"] = 10_000
MTP = {**NATIVE, "aux_layer_ids": [], "targets": "all", "enough_for": ["mtp"]}


@dataclass(frozen=True)
class Given:
    """What decides the bytes of a cache: samples, and what `make_target_cache` takes beside them and the target."""

    samples: Sequence[Row]
    settings: dict[str, Any]


def plan(samples, *, batch_size=3, max_batch_tokens=64, **changed):
    """Return what a run is given. changed: fields of the manifest, or of whole parts of the plan."""
    parts = {
        "target": {"name": "small", "vocab_size": VOCAB, "hidden_size": HIDDEN, "config_sha256": "c" * 64},
        "tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 5},
        "source": {"input_data": "rows", "kind": "own", "limit": None},
        "dropped": {"empty": 2},
        "run": {"device": "cpu", "threads": 1, "attention": "sdpa", "compute_dtype": "fp32"},
    }
    for name in parts.keys() & changed.keys():
        parts[name] = {**parts[name], **changed.pop(name)}
    sizes = {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens}
    return Given(samples, {"manifest": manifest(**changed), **sizes, **parts})


def samples_of(count=10, **how):
    """Return the samples of `rows`."""
    return rows(count, **how)


def run(folder, *, samples=None, given=None, load=load, **how):
    """Make a cache of ten samples in three shards, or what is missing of it. how: as `make_target_cache` has it."""
    given = given or plan(samples_of() if samples is None else samples)
    return make_target_cache(folder, given.samples, load, **given.settings, **how)


def whole_tree(folder):
    """Return the bytes of each file of a cache but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def times(folder):
    """Return when each file and folder was changed, in nanoseconds."""
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def never(device):
    """Stand in for `load` where the target must not be loaded."""
    raise AssertionError("the target was loaded")


def has_shard(cache, shard):
    """Return whether a shard and its receipt are there."""
    name = f"shard-{shard:06d}"
    return (cache / f"{name}.safetensors").exists() and (cache / "sidecar" / f"{name}.json").exists()


@contextmanager
def disk(folder, size):
    """A file system in memory of a given size."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# --- what has no public name ------------------------------------------------------------------------------------------


def samples_in_memory(rows):
    """The samples of rows as a run holds them; what is no sample is refused."""
    from niels_gpt.eagle3.format.samples import Samples

    return Samples.of_rows(rows)


def samples_on_disk(folder):
    """The samples that a sidecar holds."""
    from niels_gpt.eagle3.format.samples import Samples

    return Samples.open(folder)


def planned(given):
    """The plan of a run."""
    from niels_gpt.eagle3.format.plan import make_plan

    return make_plan(samples=samples_in_memory(given.samples), **given.settings)


def recorded_plan(cache):
    """The plan that a cache was made by."""
    from niels_gpt.eagle3.format.plan import open_plan

    return open_plan(cache)


def estimated(folder, given, *, resume=False, **how):
    """What a run into a folder takes of the disk. how: as `estimate` has it."""
    from niels_gpt.eagle3.disk import estimate
    from niels_gpt.eagle3.resume import finished_shards

    made = planned(given)
    if resume:
        how["done"] = finished_shards(folder, made, resume=True)
    return estimate(folder, made, samples_in_memory(given.samples), **how)


def has_holes(folder):
    """Whether padding takes no room on the disk of a folder."""
    from niels_gpt.eagle3 import disk

    return disk.has_holes(folder)


def join(out, parts):
    """Join parts that were made in folders of their own."""
    from niels_gpt.eagle3.build import join

    return join(out, parts)


def seal(folder):
    """Finish a cache whose parts were made in one folder."""
    from niels_gpt.eagle3.build import seal

    return seal(folder)


def part_lock(folder, part):
    """The lock that a run of a part holds."""
    from niels_gpt.eagle3.partitions import part_lock

    return part_lock(folder, part)


def cache_lock(cache):
    """The lock that a run holds while it writes a cache."""
    from niels_gpt.storage.locks import file_lock

    return file_lock(cache / "sidecar" / "lock", "is being written", wait=False)


@contextmanager
def patched(**by):
    """Let a run call `by[name](real, ...)` in place of a step of it.

    forward: the target's pass over a batch; write, commit: of a shard; files: the bytes of the samples; lock: the
    folder's; room: the check of the disk; code: the check of the other parts' versions.
    """
    from niels_gpt.eagle3 import build, forward
    from niels_gpt.eagle3.format.samples import Samples
    from niels_gpt.eagle3.format.shard_writer import ShardWriter

    places = {
        "forward": (forward.DenseForward, "__call__"),
        "write": (ShardWriter, "write"),
        "commit": (ShardWriter, "commit"),
        "files": (Samples, "files"),
        "lock": (build, "file_lock"),
        "room": (build, "refuse_without_room"),
        "code": (build, "refuse_other_code"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, call in by.items():
            owner, attribute = places[name]
            patch.setattr(owner, attribute, _around(getattr(owner, attribute), call))
        yield


def _around(real, call):
    return lambda *given, **named: call(real, *given, **named)
