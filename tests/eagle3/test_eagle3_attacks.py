"""Folders of EAGLE-3 caches that were made to harm: every command and reader ends with a documented error.

For its figures: python tests/support/attacks.py test_eagle3_attacks
"""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.attacks import Attack, Probe, is_one_of

IMPORTS = (
    "niels_gpt.eagle3.__main__",
    "niels_gpt.eagle3.cache",
    "niels_gpt.eagle3.build",
    "niels_gpt.eagle3.inspect.show",
    "niels_gpt.eagle3.inspect.stats",
    "niels_gpt.eagle3.inspect.verify",
    "eagle3_runs",
    "transformers.models.llama.modeling_llama",
)
EVERY = ("dataset", "verify", "stats", "inspect *", "convert", "resume")
HUGE = 20 * 10**9


def build(root):
    """A finished cache of ten samples in three shards: `top` with top-k, `c` without."""
    from support import eagle3_runs

    samples = eagle3_runs.samples_of()
    for name, changed in {"c": {}, "top": eagle3_runs.TOPK}.items():
        eagle3_runs.run(root / name, samples=samples, given=eagle3_runs.plan(samples, **changed))


# --- what meets it ----------------------------------------------------------------------------------------------------


def command(*arguments):
    """Return a call of the command line on the cache."""

    def call(root):
        from niels_gpt.commands.eagle3.tools import main

        return max(main([arguments[0], str(folder), *arguments[1:]]) for folder in caches(root))

    return call


def caches(root):
    """Return the folders that were attacked: c, or those made of it."""
    return sorted(root.glob("c-*")) or [root / "c"]


def each(read):
    """Return what reads every cache; what one of them raises is raised at the end, and has to be documented."""

    def call(root):
        refused = None
        for folder in caches(root):
            try:
                read(folder)
            except (ValueError, FileNotFoundError) as error:
                refused = error
        if refused is not None:
            raise refused

    return call


def read(folder):
    """Read every sample of a cache, and of the one with top-k beside it."""
    from niels_gpt.eagle3.cache import CachedEagle3Dataset

    for place in (folder, folder.parent / "top"):
        dataset = CachedEagle3Dataset(place)
        for number in range(min(len(dataset), 20)):
            _ = dataset[number]


def embeddings(folder):
    from niels_gpt.eagle3.cache import read_target_embeddings

    read_target_embeddings(folder)


def manifest(folder):
    from niels_gpt.eagle3.cache import read_manifest

    read_manifest(folder)


def recompute(folder):
    """Run samples through the target, as `verify --target` does."""
    from support import eagle3_runs

    from niels_gpt.eagle3.format.plan import read_record
    from niels_gpt.eagle3.inspect.recompute import Target, recomputed

    record = read_record(folder) or {}
    facts = record.get("target", {"name": "small"})
    target = Target(facts, eagle3_runs.load, {"device": "cpu", "threads": 1, "compute_dtype": "fp32"})
    found = recomputed(folder, target, k=2)
    if found.problems or found.note:
        raise ValueError("; ".join([*found.problems, found.note or ""]))


def resume(folder):
    from support import eagle3_runs

    eagle3_runs.run(folder, resume=True)


PROBES = {
    "manifest": Probe(each(manifest)),
    "embeddings": Probe(each(embeddings)),
    "dataset": Probe(each(read)),
    "verify": Probe(command("verify")),
    "inspect form": Probe(command("inspect")),
    "inspect json": Probe(command("inspect", "--json")),
    "inspect sample": Probe(command("inspect", "--sample", "5")),
    "stats": Probe(command("stats")),
    "recompute": Probe(each(recompute)),
    "convert": Probe(command("convert", "--format-version", "2"), writes=True),
    "resume": Probe(each(resume), writes=True),
}


# --- what is done to it -----------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


Make = Callable[[Path, Path], Any]


def at(name, do):
    """Return what does something to a file or folder of the cache; `do` takes its path, and that of the one outside."""
    return lambda root, outside: do(root / "c" / name, outside / "c" / name)


def file(name, content):
    return at(name, lambda path, _: path.write_bytes(content()))


def sparse(name, head=b""):
    """Make a file a large one that takes no disk."""
    return at(name, lambda path, _: (path.write_bytes(head), os.truncate(path, HUGE)))


def linked(name):
    """Put a link to one outside in the place of a file or folder."""
    return at(name, lambda path, out: (path.rename(path.parents[name.count("/") + 1] / "moved"), path.symlink_to(out)))


def changed(name, change, cache="c"):
    """Return what changes a JSON file; a meta.json gets its checksum again, and the sha256 of a changed manifest."""

    def make(root, _):
        from niels_gpt.storage.fileio import canonical_json
        from niels_gpt.storage.meta_json import meta_bytes

        path = root / cache / name
        value = json.loads(path.read_bytes())
        change(value)
        path.write_bytes(meta_bytes(value) if name == "meta.json" else canonical_json(value))
        about = root / cache / "meta.json"
        if name == "manifest.json" and about.is_file():
            meta = json.loads(about.read_bytes())
            for record in meta["files"]:
                if record["name"] == name:
                    record |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            about.write_bytes(meta_bytes(meta))

    return make


def put(keys, value):
    """Return what sets a value, by the keys that lead to it."""
    *above, last = keys.split(".")

    def change(whole):
        for key in above:
            whole = whole[key]
        whole[last] = value

    return change


def all_of(*steps):
    """Return what does several things, one after the other."""

    def make(root, outside):
        for step in steps:
            step(root, outside)

    return make


def header(content):
    """Return the beginning of a safetensors file."""
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


SHARD, EMBEDDINGS, SAMPLES = "shard-000001.safetensors", "target_embeddings.safetensors", "sidecar/samples.safetensors"
JSON_FILES = ("manifest.json", "meta.json", "sidecar/plan.json", "sidecar/shard-000001.json", "sidecar/embeddings.json")
to_a_device = lambda path, _: (path.unlink(), path.symlink_to("/dev/zero"))  # noqa: E731
many_shards = lambda value: value.update(num_samples=10**12, shard_size=1)  # noqa: E731
MANY = all_of(*(changed("manifest.json", many_shards, cache) for cache in ("c", "top")))
READ = ("dataset", "verify", "stats")
WRITERS = ("verify", "convert", "resume")
NINETY_MB = 90_000_000
BIG_SAMPLES = {
    "ids": {"dtype": "I32", "shape": [HUGE // 5], "data_offsets": [0, HUGE // 5 * 4]},
    "loss_mask": {"dtype": "U8", "shape": [HUGE // 5], "data_offsets": [HUGE // 5 * 4, HUGE]},
}
ALL_FILES = (*JSON_FILES, "sidecar/batches.jsonl", "sidecar/ids.txt", SAMPLES, SHARD, EMBEDDINGS)

ATTACKS = {
    "10**12 shards": Attack(MANY, EVERY, "1,000,000,000,000 shards"),
    "a million shards": Attack(changed("manifest.json", put("shard_size", 10**3)), EVERY[:1], "shards|samples"),
    "a million samples a shard": Attack(changed("manifest.json", put("num_samples", 10**15)), ("dataset", "verify")),
    "sparse samples": Attack(sparse(SAMPLES, head=header(BIG_SAMPLES)), ("verify", "recompute"), "holes"),
    "sparse names": Attack(sparse("sidecar/ids.txt"), ("verify",), "holes"),
    "names of nothing": Attack(file("sidecar/ids.txt", lambda: b"\n" * (1 << 24)), ("verify",), "names"),
    "sparse shard": Attack(sparse(SHARD), READ, "holes"),
    "sparse embeddings": Attack(sparse(EMBEDDINGS), ("embeddings", "verify"), "holes"),
    **{
        f"long header of {name}": Attack(
            file(name, lambda: struct.pack("<Q", NINETY_MB) + b"[" * NINETY_MB), by, "header"
        )
        for name, by in ((SHARD, READ), (EMBEDDINGS, ("embeddings", "verify")), (SAMPLES, ("verify", "recompute")))
    },
    "a vocabulary for the memory": Attack(
        changed("manifest.json", put("draft_vocab_size", 10**9), "top"), ("dataset",), "draft_vocab_size"
    ),
    "threads": Attack(changed("sidecar/plan.json", put("run.threads", 10**9)), ("recompute", "resume"), "run.threads"),
    "batches of nothing": Attack(
        file("sidecar/batches.jsonl", lambda: b"[" + b"[8,[]]," * 10**6 + b"[8,[]]]\n" * 3),
        ("recompute",),
        "batches|rows",
    ),
    "escapes": Attack(changed("manifest.json", put("target_model", "\x1b]0;mine\x07\x1b[2J")), ()),
    "escapes in the plan": Attack(changed("sidecar/plan.json", put("run.processor", "\x1b[2J")), ()),
    **{f"nested {name}": Attack(file(name, lambda: b"[" * 10**6)) for name in JSON_FILES},
    **{
        f"44 MB of {name}": Attack(file(name, lambda: b'{"a": [' + b"[]," * (14 << 20) + b"0]}"))
        for name in JSON_FILES[:4]
    },
    **{
        f"pipe {name}": Attack(at(name, lambda path, _: (path.unlink(), os.mkfifo(path))), ("verify",), "regular file")
        for name in ALL_FILES
    },
    **{f"device {name}": Attack(at(name, to_a_device), ("resume",), "symbolic link") for name in ALL_FILES},
    **{f"link {name}": Attack(linked(name), WRITERS, "symbolic link") for name in (*ALL_FILES, "sidecar")},
    "link of the lock": Attack(linked("sidecar/lock"), WRITERS[1:], "symbolic link"),
}
VALUES = {"null": None, "text": "x", "negative": -1, "huge": 10**30}
MORE_VALUES = {"bool": True, "list": [1], "object": {"a": 1}, "float": 0.5}
FIELDS = {
    "manifest.json": "format_version target_vocab_size draft_vocab_size seq_length dtype num_samples shard_size "
    "aux_hidden_dim aux_layer_ids selected_token_ids target_model",
    "sidecar/plan.json": "kind format_version manifest target target.revision tokenizer tokenizer.pad_id source "
    "dropped altered samples samples.count run run.device run.compute_dtype batches batches.batch_size",
    "sidecar/shard-000001.json": "samples bytes slots xxh3_128 facts shard header_sha256",
    "meta.json": "kind files content_sha256 plan_sha256 totals",
}


def every_value(name, field, values):
    """Return what makes a cache, c-KIND, for each wrong value of a field."""

    def make(root, outside):
        for kind, value in values.items():
            shutil.copytree(root / "c", root / f"c-{kind}")
            changed(name, put(field, value), f"c-{kind}")(root, outside)

    return make


ATTACKS |= {
    f"{name}: {field}{which}": Attack(every_value(name, field, values))
    for name, fields in FIELDS.items()
    for field in fields.split()
    for which, values in (("", VALUES), (" of other types", MORE_VALUES))
}
ATTACKS["manifest.json: aux_layer_ids is 5"] = Attack(
    changed("manifest.json", put("aux_layer_ids", 5)), ("verify", "manifest"), "aux_layer_ids"
)


HARMS = ("44 MB of *", "sparse *", "long header of *", "nested *", "pipe *", "device *", "link *.json*", "link s*")
HARMS += ("* of other types",)
KEPT = ("* manifest.json", "sparse shard", f"* {SHARD}", "link sidecar")
OTHERS = {name for name in ATTACKS if is_one_of(name, HARMS) and not is_one_of(name, KEPT)}
"""Attacks that do to another file, or with another value, what one of the rest does."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OTHERS)) for n in ATTACKS])
def test_every_attack_meets_a_documented_error(attack_server, name):
    attack_server.check("test_eagle3_attacks", name)
