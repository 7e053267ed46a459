"""Foreign folders are safe to look at: (attack, command or reader) -> a documented error within 10 s and 1 GB.

Run: pytest tests/cache/test_attacks.py -s, or python tests/support/attacks.py test_attacks for a line of each meeting
"""

import gzip
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import LONG
from support.attacks import Attack, is_one_of
from support.bits_caches import give_bits
from support.disk import META_NAME, meta_bytes
from support.token_cache_probes import IMPORTS as IMPORTS
from support.token_cache_probes import PRETRAIN, ROLLOUTS, SFT
from support.token_cache_probes import PROBES as PROBES
from support.token_cache_probes import build as build

Make = Callable[[Path, Path], Any]
Change = Callable[[dict[str, Any]], Any]
CACHES = (PRETRAIN, SFT, ROLLOUTS, "tokenizer")
OF_PRETRAIN = ("reader pretrain*", "reader epoch", "reader evaluation", "show pretrain", "verify*", "export*")
OF_SFT = ("reader sft*", "show sft", "verify*")
OF_ROLLOUTS = ("reader rollouts*", "show rollouts", "locate rollouts", "verify*")
OF_MODEL = ("show pretrain", "show sft", "reader tokenizer", "verify*")  # a build trains another one


def version(root, key):
    return (root / key).resolve()


def replaced(key, name, how):
    """Put something else in the place of a file or folder of a version."""

    def make(root, outside):
        path = version(root, key) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        how(path)

    return make


def linked(key, name, target=""):
    """Put a link in the place of a file or folder of a version, by default to the good one outside."""

    def make(root, outside):
        to = target or version(outside, key) / name
        replaced(key, name, lambda path: path.symlink_to(to))(root, outside)

    return make


def a_socket(path):
    os.chdir(path.parent)  # its whole name may have 107 bytes only
    socket.socket(socket.AF_UNIX).bind(path.name)


def sparse(num_bytes, begin=b""):
    """Write a file that takes no disk beyond its beginning."""

    def write(path):
        path.write_bytes(begin)
        os.truncate(path, num_bytes)

    return write


def npy(count):
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def rewritten(key, change):
    """Change a meta.json as its author would, with a CRC-32 that is right."""

    def make(root, outside):
        path = version(root, key) / META_NAME
        meta = json.loads(path.read_bytes())
        change(meta)
        path.write_bytes(meta_bytes(meta))

    return make


def every(change):
    """Change every meta.json."""

    def make(root, outside):
        for key in CACHES:
            rewritten(key, change)(root, outside)

    return make


def spelled(begin, repeated=b"", times=0, end=b""):
    """Write other bytes in the place of every meta.json."""

    def make(root, outside):
        for key in CACHES:
            (version(root, key) / META_NAME).write_bytes(begin + repeated * times + end)

    return make


def copied(key, changes):
    """Make a cache for each change of meta.json, beside the good one."""

    def make(root, outside):
        for number, change in enumerate(changes):
            copy = f"{key.split('/')[0]}/k_{number}"
            shutil.copytree(version(root, key), root / copy)
            rewritten(copy, change)(root, outside)

    return make


def each_key(values):
    """Make a cache for each key of meta.json, in which that key has one of the values, in turn."""

    def make(root, outside):
        for key in (PRETRAIN, SFT):
            meta = json.loads((version(root, key) / META_NAME).read_bytes())
            names = [name for name in meta if name != "meta_crc32"]
            pairs = zip(names, itertools.cycle(values), strict=False)
            copied(key, [lambda meta, name=name, value=value: meta.update({name: value}) for name, value in pairs])(
                root, outside
            )

    return make


def named(group, name):
    """Give the first file of a group another name."""

    def change(meta):
        found = meta[group] if group == "checksums" else meta[group]["train"]
        (found[0] if isinstance(found, list) else found)["name"] = name

    return change


OTHER_TYPES = (None, 10**90, "x", {"train": {"train": {}}})
BAD_NAMES = ("../../../../outside/pretrain/notes/recipe.json", "/etc/hostname", META_NAME, 3)
REFUSED = (
    *(named(group, name) for group in ("shards", "index", "ids", "checksums") for name in BAD_NAMES),
    named("shards", "val/shard_00000.bin"),
    named("shards", "index"),
    named("shards", "meta.json/x"),
    lambda meta: meta["shards"]["train"][0].update(bytes=2**62, tokens=2**61),
    lambda meta: meta.update(built=[]),
    lambda meta: meta.update(shards={}),
)
NOT_READ = (
    lambda meta: meta["index"]["train"].update(bytes=2**62, entries=2**59),
    lambda meta: meta["totals"].update(train_tokens=2**62),
    lambda meta: meta.pop("totals"),
    lambda meta: meta.update(totals=[]),
)


def sized(key, name, num_bytes, begin=b""):
    """Put a sparse file in the place of one, with records in meta.json that say so."""

    def change(meta):
        groups = [*meta["shards"].values(), list(meta["index"].values()), list(meta.get("ids", {}).values())]
        for record in (record for group in groups for record in group if record["name"] == name):
            record["bytes"] = num_bytes
            record |= {"tokens": num_bytes // 2} if "tokens" in record else {}
            record |= {"entries": (num_bytes - len(begin)) // 8} if "entries" in record else {}
        for split in ("train", "val"):
            meta["totals"][f"{split}_tokens"] = sum(record["tokens"] for record in meta["shards"][split])

    def make(root, outside):
        replaced(key, name, sparse(num_bytes, begin))(root, outside)
        rewritten(key, change)(root, outside)

    return make


def commands(text):
    """Return a text with what commands a terminal: a title, a screen wiped, a line written over, letters turned."""
    return f"{text}\x1b]0;x\x07\x1b[2J\r\x9b\u202e\n"


def commanding(meta):
    """Put what commands a terminal into every text that a command may print, and into new keys."""
    texts = ("dataset_name", "dataset_config", "split_rule", "trained_on", "origin", "normalization", "model_type")
    meta.update({key: commands("x") for key in texts})
    source = meta.get("source") if isinstance(meta.get("source"), dict) else {}
    about = {key: commands("x") for key in ("kind", "licence", "attribution", "revision", "name")}
    meta["source"] = {**source, **about, "counters": {commands("x"): 1}}
    meta["dropped"] = {commands("x"): 1}
    meta[commands("x")] = {commands("x"): commands("x")}


def with_bits(make):
    """Give the chats, and those outside, loss bits before they are attacked."""

    def after(root, outside):
        for place in (root, outside):
            give_bits(version(place, SFT))
        make(root, outside)

    return after


def deep_folder(path):
    """Make a folder so deep that its last one has no path."""
    path.mkdir(parents=True)
    handle = os.open(path, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below


def foreign_versions(root, outside):
    """Make folders of other programs with the names that a cache's have."""
    for name in ("building", "damaged", "building-0123456789ab", "0123456789ab", "fedcba987654", "adopted1", "link"):
        folder = root / "work" / ".versions" / "app" / name
        folder.mkdir(parents=True)
        (folder / "precious.txt").write_text("precious")
        if name.startswith(("0", "f", "a")):
            (folder / META_NAME).write_text('{"version": 3}')


def counting(meta):
    """Let a meta.json claim 10**12 of everything."""
    meta["totals"] = dict.fromkeys(meta.get("totals", {}), 10**12)
    meta.update(num_shards=10**12, examples_read=10**12, docs={"train": 10**12, "val": 10**12}, vocab_size=65536)


PLACES = [
    (PRETRAIN, "train/shard_00000.bin", OF_PRETRAIN),
    (PRETRAIN, "train", OF_PRETRAIN),
    (PRETRAIN, META_NAME, (*OF_PRETRAIN, "list", "stats pretrain", "locate pretrain", "diff pretrain")),
    (PRETRAIN, "index", ("verify*", "stats pretrain", "locate pretrain", "diff pretrain")),
    (PRETRAIN, "index/train_docs.npy", ("verify*", "stats pretrain", "locate pretrain", "diff pretrain")),
    (PRETRAIN, "index/train_ids.txt", ("verify*", "locate pretrain", "diff pretrain")),
    (PRETRAIN, "index/crc32.bin", ("verify*",)),
    (SFT, "train_tokens.bin", (*OF_SFT, "locate sft", "diff sft", "stats sft")),
    (SFT, "train_idx.npy", (*OF_SFT, "locate sft", "diff sft", "stats sft")),
    *((ROLLOUTS, name, OF_ROLLOUTS) for name in ("train_tokens.bin", "train_loss.bin", "index/train_groups.npy")),
    ("tokenizer", "spm.model", OF_MODEL),
    ("tokenizer", META_NAME, ("reader sft*", "reader pretrain*", "list", "verify*")),
]
NO_FILE = {
    "a link to a good one outside": (linked, "symbolic link"),
    "a link to /dev/zero": (lambda key, name: linked(key, name, "/dev/zero"), "symbolic link"),
    "a link in a circle": (lambda key, name: linked(key, name, Path(name).name), "symbolic link"),
    "a FIFO": (lambda key, name: replaced(key, name, os.mkfifo), "not a regular file"),
    "a socket": (lambda key, name: replaced(key, name, a_socket), "not a regular file"),
    "a folder": (lambda key, name: replaced(key, name, os.mkdir), ""),
}
NOT_A_FILE_AS = (f"{PRETRAIN}/{META_NAME}", f"{SFT}/train_idx.npy", "tokenizer/spm.model")
ATTACKS = {
    "none": Attack(lambda root, outside: None),
    **{
        f"{what} as {key}/{name}": Attack(make(key, name), refused_by, words)
        for what, (make, words) in NO_FILE.items()
        for key, name, refused_by in PLACES
        if what.startswith("a link to a good") or f"{key}/{name}" in NOT_A_FILE_AS
    },
    **{
        f"a link out as {key}/{name} without meta.json": Attack(
            lambda root, outside, key=key, name=name: (
                linked(key, name)(root, outside),
                (version(root, key) / META_NAME).unlink(),
            ),
            (f"reader {key.split('/')[0]}*",),
            "symbolic link.*cp -rL",
        )
        for key, name in ((PRETRAIN, "train/shard_00000.bin"), (SFT, "train_tokens.bin"))
    },
    **{
        f"{what} as {PRETRAIN}/train/shard_00001.bin": Attack(
            lambda root, outside, how=how: how(version(root, PRETRAIN) / "train" / "shard_00001.bin"),
            ("reader pretrain*", "verify*", "export*"),
            "shard_00001.bin",
        )
        for what, how in {
            "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
            "two bytes less": lambda path: os.truncate(path, path.stat().st_size - 2),
        }.items()
    },
    "24 GB of offsets": Attack(sized(SFT, "train_idx.npy", 128 + 24 * 10**9, npy(3 * 10**9)), OF_SFT),
    "24 GB of documents": Attack(
        sized(PRETRAIN, "index/train_docs.npy", 128 + 24 * 10**9, npy(3 * 10**9)), ("verify*", "locate pretrain")
    ),
    "24 GB of source ids": Attack(sized(PRETRAIN, "index/train_ids.txt", 24 * 10**9), ("verify*",)),
    "24 GB of tokens": Attack(sized(PRETRAIN, "train/shard_00000.bin", 24 * 10**9), ("verify*",)),
    "24 GB of chats": Attack(sized(SFT, "train_tokens.bin", 24 * 10**9), ("verify*",)),
    "24 GB of groups": Attack(
        sized(ROLLOUTS, "index/train_groups.npy", 128 + 24 * 10**9, npy(3 * 10**9)), OF_ROLLOUTS, "a sparse file"
    ),
    "24 GB of rollouts": Attack(sized(ROLLOUTS, "train_tokens.bin", 24 * 10**9), OF_ROLLOUTS),
    "24 GB of model": Attack(replaced("tokenizer", "spm.model", sparse(24 * 10**9)), OF_MODEL),
    **{
        f"{what} as {SFT}/train_loss.bits": Attack(with_bits(how), OF_SFT, words)
        for what, how, words in (
            ("a link to a good one outside", linked(SFT, "train_loss.bits"), "symbolic link"),
            ("24 GB", replaced(SFT, "train_loss.bits", sparse(24 * 10**9)), "sparse file|24,?000,?000,?000 bytes"),
        )
    },
    **{
        f"meta.json: {what}": Attack(spelled(*raw), ("reader pretrain*", "reader sft*", "list", "verify*", "stats *"))
        for what, raw in {
            "empty": (b"",),
            "not utf-8": (b'{"kind": "\xff"}',),
            "a million digits": (b'{"kind": "pretrain", "seed": ', b"9", 10**6, b"}"),
            "an exponent": (b'{"kind": "pretrain", "seed": 1e999999}',),
            "NaN": (b'{"kind": NaN}',),
            "a key twice": (b'{"kind": "pretrain", "kind": "sft"}',),
            "half a pair": (rb'{"kind": "\ud800"}',),
            "deep lists": (b'{"kind": ', b"[", 10**6, b"]" * 10**6 + b"}"),
            "deep objects": (b"", b'{"a":', 10**6, b"1" + b"}" * 10**6),
            "too many lists": (b'{"a": [', b"[],", 11 << 20, b"[]]}"),
            "many lines of a CRC-32": (b'{\n  "kind": "pretrain"', b',\n  "meta_crc32": "01234567"', 10**5, b"\n}"),
        }.items()
    },
    "24 GB of meta.json": Attack(
        lambda root, outside: [sparse(24 * 10**9)(version(root, key) / META_NAME) for key in CACHES],
        ("reader pretrain*", "reader sft*", "list", "verify*", "stats *"),
    ),
    **{f"every key is of another type, {turn}": Attack(each_key(OTHER_TYPES[turn : turn + 2])) for turn in (0, 2)},
    "wrong names and sizes": Attack(
        copied(PRETRAIN, REFUSED),
        ("reader pretrain*", "verify*"),
        f"{len(REFUSED)} of {len(REFUSED) + 1}: |k_0: 1 damage",
    ),
    "wrong names and sizes of chats": Attack(copied(SFT, REFUSED[-6:]), ("reader sft*",), "6 of 7: "),
    "wrong numbers that readers do not use": Attack(copied(PRETRAIN, NOT_READ), ("verify*", "stats pretrain")),
    "counts of 10**12": Attack(every(counting), ("verify*",)),
    "entries of 10**12": Attack(
        every(lambda meta: [record.update(entries=10**12) for record in meta.get("index", {}).values()]), ("verify*",)
    ),
    "names outside": Attack(
        every(
            lambda meta: [
                record.update(name=f"../../../../../outside/{key}/{record['name']}")
                for key, group in (("sft/chats", meta.get("index", {})), ("pretrain/notes", meta.get("ids", {})))
                for record in group.values()
            ]
        ),
        ("verify*", "stats *"),
    ),
    **{
        f"{what} as raw/{name}": Attack(replaced("raw", name, how), refused_by, "pipe, a device|bytes")
        for name, refused_by in (("steps.jsonl", ("tree *",)), ("left_out.list", ("reader exclusion",)))
        for what, how in {
            "a FIFO": os.mkfifo,
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "24 GB": sparse(24 * 10**9),
        }.items()
        if (what, name) != ("24 GB", "steps.jsonl")  # read to its end, as a build would
    },
    "3 GB of one row in 3 MB": Attack(
        lambda root, outside: (root / "raw/steps.jsonl.gz").write_bytes(gzip.compress(b"1," * 2**25) * 48),
        ("tree *",),
        "holds no rollouts",
    ),
    "commands of a terminal in texts": Attack(every(commanding)),
    "commands of a terminal in names": Attack(
        lambda root, outside: [
            (
                shutil.copytree(version(root, PRETRAIN), root / "pretrain" / name),
                (version(root, PRETRAIN) / name).write_bytes(b"x"),
                (root / "pretrain" / ".versions" / name).mkdir(),
            )
            for name in (commands("x"), "a\x1b[2J")
        ]
    ),
    "deep old versions": Attack(
        lambda root, outside: [
            deep_folder(path / "deep")
            for path in version(root, PRETRAIN).parent.glob("[0-9a-f]*")
            if path != version(root, PRETRAIN)
        ]
    ),
    "a deep version": Attack(lambda root, outside: deep_folder(version(root, PRETRAIN) / "deep")),
    "a deep folder": Attack(lambda root, outside: deep_folder(root / "pretrain" / "deep")),
    **{
        f"a deep {name}": Attack(
            lambda root, outside, name=name: deep_folder(root / "pretrain" / ".versions" / "notes" / name / "deep")
        )
        for name in ("building", "building-0123456789ab")
    },
    "a FIFO as .runs": Attack(
        lambda root, outside: (shutil.rmtree(root / ".runs"), os.mkfifo(root / ".runs")), ("build",), "E205.*: rm /"
    ),
    "folders of another program": Attack(foreign_versions),
    **{
        f"a lock that is {what}": Attack(
            lambda root, outside, how=how: [
                ((path / "lock").unlink(), how(path / "lock", outside))
                for path in (root / "pretrain" / ".versions" / "notes", root / ".versions" / "tokenizer")
            ],
            ("build",),
        )
        for what, how in {
            "a file outside": lambda path, outside: os.link(outside / "raw" / "chats.jsonl", path),
            "a FIFO": lambda path, outside: os.mkfifo(path),
            "a folder": lambda path, outside: path.mkdir(),
        }.items()
    },
    **{
        f"{name} is {what}": Attack(
            lambda root, outside, how=how, name=name: [
                (remove(path / name), how(path / name)) for path in (root / "pretrain" / ".versions" / "notes", root)
            ]
        )
        for name in ("recipe.json", ".runs/pretrain.notes.jsonl")
        for what, how in {
            "a FIFO": os.mkfifo,
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "deep": lambda path: path.write_bytes(b"[" * 10**6),
            "24 GB": sparse(24 * 10**9),
        }.items()
    },
}

SLOW = {
    f"meta.json: {what} up to the limit": Attack(
        spelled(b'{"a": [', raw, (1 << 19) - 9, b"[]]}"), ("verify*", "stats *", "list")
    )
    for what, raw in {"objects": b"{},", **({"lists": b"[],"} if LONG else {})}.items()
}
ATTACKS |= SLOW


def remove(path):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)


WRITERS = ["gc", "build"]
READ_BY_NO_WRITER = (
    *(f"a {what} as */*/[!m]*" for what in ("link [!o]*", "[Ffs]*")),
    *("24 GB of [!m]*", "24 GB as *", "wrong *"),
)
"""Attacks on files of a cache beside meta.json: a build and gc read none of these."""
LARGE = ("24 GB of [!o]*", "24 GB as *", "*json is 24 GB", "meta.json: deep objects", "a deep [bf]*", "every key *, 2")
"""Attacks of which another kind is among the others."""


def marked(name):
    large = [pytest.mark.slow] * is_one_of(name, LARGE)
    return pytest.param(name, marks=[pytest.mark.faults] if name in SLOW else large)


@pytest.mark.parametrize("name", [*map(marked, ATTACKS)])
def test_a_hostile_folder_gives_a_documented_error_and_harms_nobody(attack_server, name):
    left_out = WRITERS if is_one_of(name, READ_BY_NO_WRITER) else []
    attack_server.check("test_attacks", name, [probe for probe in PROBES if probe not in left_out])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if is_one_of(name, READ_BY_NO_WRITER)])
def test_a_build_and_gc_are_not_harmed_by_what_they_do_not_read(attack_server, name):
    attack_server.check("test_attacks", name, WRITERS)
