"""Folders of native caches that were made to harm: every command and reader ends with a documented error.

For its figures: python tests/support/attacks.py test_native_attacks
"""

import os
import shutil
import struct

import pytest
import test_eagle3_attacks as published
from support.attacks import Attack, Probe
from test_eagle3_attacks import (
    HUGE,
    all_of,
    at,
    changed,
    command,
    each,
    file,
    header,
    linked,
    put,
    sparse,
    to_a_device,
)

IMPORTS = (*published.IMPORTS, "niels_gpt.eagle3.native", "niels_gpt.eagle3.derive", "niels_gpt.eagle3.exchange")
READERS = ("native", "dataset", "verify", "stats")


def build(root):
    """A finished native cache of ten samples in three shards, and another draft vocabulary."""
    from support import eagle3_runs

    from niels_gpt.eagle3.vocab import save_token_mapping

    samples = eagle3_runs.samples_of()
    eagle3_runs.run(root / "c", samples=samples, given=eagle3_runs.plan(samples, **eagle3_runs.FP8))
    save_token_mapping(root / "ids", [3, 1, 2], eagle3_runs.VOCAB)


# --- what meets it ----------------------------------------------------------------------------------------------------


def native(folder):
    """Read every sample, and a batch of some."""
    from niels_gpt.eagle3.native import NativeEagle3Dataset, native_batch

    dataset = NativeEagle3Dataset(folder)
    samples = [dataset[number] for number in range(min(len(dataset), 20))]
    native_batch(samples, selected_token_ids=dataset.manifest["selected_token_ids"])


def dataset(folder):
    from niels_gpt.eagle3.cache import CachedEagle3Dataset

    opened = CachedEagle3Dataset(folder)
    for number in range(min(len(opened), 20)):
        _ = opened[number]


def redraft(folder):
    from niels_gpt.commands.eagle3.tools import main

    out = folder.parent / f"{folder.name}.out"
    if main(["redraft", str(folder), str(out), "--draft-vocab-from", str(folder.parent / "ids")]):
        raise ValueError("redraft refused the cache, as its message says")


def resume(folder):
    from support import eagle3_runs

    samples = eagle3_runs.samples_of()
    eagle3_runs.run(folder, samples=samples, given=eagle3_runs.plan(samples, **eagle3_runs.FP8), resume=True)


PROBES = {
    "native": Probe(each(native)),
    "dataset": Probe(each(dataset)),
    "verify": Probe(command("verify")),
    "inspect form": Probe(command("inspect")),
    "inspect json": Probe(command("inspect", "--json")),
    "inspect sample": Probe(command("inspect", "--sample", "5")),
    "stats": Probe(command("stats")),
    "recompute": Probe(each(published.recompute)),
    "redraft": Probe(lambda root: redraft(root / "c"), writes=True),
    "resume": Probe(lambda root: resume(root / "c"), writes=True),
}


# --- what is done to it -----------------------------------------------------------------------------------------------

SHARD, WEIGHTS = "shard-000001.safetensors", "target_weights.safetensors"


def tensor(dtype, shape, begin, size):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


def starts(number):
    """Return what puts a number into the starts of a shard and gives its receipt the header as it is."""

    def make(root, _):
        from support.eagle3_damage import native_rows

        native_rows(root / "c", 1, "token_starts")[1] = list(struct.pack("<q", number))

    return make


BIG_IDS = {"token_starts": tensor("I64", [2], 0, 16), "input_ids": tensor("U32", [HUGE // 4], 16, HUGE)}
MANY_ROWS = {"token_starts": tensor("I64", [10**9], 0, 8 * 10**9)}
BIG_WEIGHTS = {"embeddings": tensor("F32", [HUGE // 64, 16], 0, HUGE)}
ALL_FILES = (SHARD, WEIGHTS, "manifest.json", "sidecar/weights.json", "sidecar/samples.safetensors")


def every(name, fields):
    """Return what makes a cache, c-NUMBER, for each wrong value of each field."""

    def make(root, outside):
        pairs = [(field, value) for field in fields.split() for value in published.VALUES.values()]
        for number, (field, value) in enumerate(pairs):
            shutil.copytree(root / "c", root / f"c-{number}")
            changed(name, put(field, value), f"c-{number}")(root, outside)

    return make


ATTACKS = {
    "10**12 shards": Attack(changed("manifest.json", put("num_shards", 10**12)), READERS, "num_shards"),
    "a million shards": Attack(changed("manifest.json", put("num_shards", 10**6)), READERS, "shard"),
    "10**15 samples": Attack(changed("manifest.json", put("num_samples", 10**15)), READERS[:3], "samples"),
    "values of a width for the memory": Attack(changed("manifest.json", put("hidden_size", 2**40)), READERS),
    "tokens for the memory": Attack(changed("manifest.json", put("seq_length", 2**40)), ("dataset",)),
    "a vocabulary for the memory": Attack(changed("manifest.json", put("target_vocab_size", 2**50)), ("verify",)),
    "sparse shard": Attack(sparse(SHARD), READERS, "holes"),
    "sparse ids": Attack(sparse(SHARD, head=header(BIG_IDS)), READERS, "holes|offsets|header"),
    "sparse starts": Attack(sparse(SHARD, head=header(MANY_ROWS)), READERS, "holes|header"),
    "sparse weights": Attack(sparse(WEIGHTS, head=header(BIG_WEIGHTS)), ("verify", "stats", "dataset"), "holes"),
    **{f"starts of {number}": Attack(starts(number), READERS, "starts|sample") for number in (-1, 2**62)},
    **{
        f"long header of {name}": Attack(file(name, lambda: struct.pack("<Q", 90_000_000) + b"[" * 90_000_000), by)
        for name, by in ((SHARD, READERS), (WEIGHTS, ("verify", "stats", "dataset")))
    },
    "escapes": Attack(
        all_of(
            changed("manifest.json", put("target_model", "\x1b]0;mine\x07\x1b[2J")),
            changed("sidecar/plan.json", put("run.processor", "\x1b[2J")),
        )
    ),
    "escapes of a tensor's name": Attack(file(SHARD, lambda: header({"\x1b[2J": tensor("F32", [0], 0, 0)})), READERS),
    "escapes of a weight's name": Attack(
        file(WEIGHTS, lambda: header({"\x1b[2J": tensor("F32", [0], 0, 0)})), ("verify", "stats", "dataset")
    ),
    "nested": Attack(file("manifest.json", lambda: b"[" * 10**6), READERS),
    "pipe of a shard": Attack(at(SHARD, lambda path, _: (path.unlink(), os.mkfifo(path))), READERS, "regular file"),
    "pipe of weights": Attack(at(WEIGHTS, lambda path, _: (path.unlink(), os.mkfifo(path))), ("verify", "stats")),
    **{f"device {name}": Attack(at(name, to_a_device), ("verify",), "symbolic link") for name in ALL_FILES[:2]},
    **{
        f"link {name}": Attack(linked(name), ("verify", "redraft", "resume"), "symbolic link|as its message says")
        for name in (*ALL_FILES, "sidecar")
    },
    "manifest: numbers": Attack(every("manifest.json", "format_version num_samples num_shards hidden_size seq_length")),
    "manifest: more numbers": Attack(every("manifest.json", "target_vocab_size draft_vocab_size shard_bytes")),
    "manifest: lists": Attack(every("manifest.json", "aux_layer_ids selected_token_ids dtype aux_dtype target_model")),
    "manifest: targets": Attack(every("manifest.json", "targets enough_for made_for")),
    "manifest: head": Attack(every("manifest.json", "head head.norm head.eps head.logit_scale head.softcap head.tied")),
    "manifest: conventions": Attack(every("manifest.json", "conventions conventions.last_hidden head.compute_dtype")),
    "receipts": Attack(every("sidecar/shard-000001.json", "slots facts")),
    "a receipt that counts nothing": Attack(
        changed("sidecar/shard-000001.json", put("facts.aux_rows", None)), ("resume",), "aux_rows"
    ),
}


OTHER_FILES = {"sparse ids", "sparse starts", "sparse weights", f"long header of {WEIGHTS}", f"device {WEIGHTS}"}
OTHER_FILES |= {f"link {name}" for name in ALL_FILES[1:]}
"""Attacks that do to another file what one of the others does."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OTHER_FILES)) for n in ATTACKS])
def test_every_attack_meets_a_documented_error(attack_server, name):
    attack_server.check("test_native_attacks", name)
