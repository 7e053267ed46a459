"""Foreign folders are safe to look at: (attack, command or reader) -> a documented error within 10 s and 1 GB.

Run: pytest tests/test_attacks.py -s, or python tests/attacks.py test_attacks for a line of each meeting
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import Attack, Probe, Server, serving

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, cli
from niels_gpt.fileio import META_NAME
from niels_gpt.records import meta_bytes
from niels_gpt.sampling import EpochStream, iter_eval
from niels_gpt.tokenizer import load_tokenizer

# --- what is attacked -------------------------------------------------------------------------------------------------

IMPORTS = ("sentencepiece", "niels_gpt.recipes.run", "niels_gpt.recipes.report", "niels_gpt.inspection.diff")
PRETRAIN, SFT, MODEL = "pretrain/notes", "sft/chats", "tokenizer/spm.model"
TEXTS = [f"Page {page}. The heron walks to the river and finds {page * 3} apples." for page in range(12)]


def build(root: Path) -> None:
    """Make tokenizer/, pretrain/notes and sft/chats of three versions, and the raw text that they are of."""
    (root / "raw").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (root / "raw" / f"{number}.txt").write_text(text)
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in TEXTS]
    (root / "raw" / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for seed in ("1", "2", "3"):
        assert cli.main([*_build(root), "--seed", seed]) == 0


def _build(root: Path) -> list[str]:
    own = ["--pretrain", f"notes={root}/raw/*.txt", "--sft", f"chats={root}/raw/chats.jsonl"]
    flags = ["--vocab-size", "300", "--shard-bytes", "600", "--threads", "1"]
    return ["build", "notes", "chats", *own, *flags, "--source-root", str(root / "raw"), "--cache-dir", str(root)]


# --- what meets it ----------------------------------------------------------------------------------------------------


def each(kind: str, call: Callable[[Path], Any]) -> Callable[[Path], int]:
    """Let a reader or a command meet every cache of a kind; the last error is the answer."""

    def meet(root: Path) -> int:
        status, last = 0, None
        for cache in sorted(root.glob(f"{kind}/[!.]*")):
            try:
                found = call(cache)
                status |= found if type(found) is int else 0
            except (ValueError, FileNotFoundError) as error:
                last = error
        if last is not None:
            raise last
        return status

    return meet


def command(name: str, *arguments: str) -> Callable[[Path], int]:
    def call(path: Path) -> int:
        return cli.main([name, str(path), *arguments])

    return call


def diff(cache: Path) -> int:
    versions = sorted((cache.parent / ".versions" / cache.name).glob("[0-9a-f]*"))
    return cli.main(["diff", str(cache), str(next((path for path in versions if path != cache.resolve()), cache))])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pretrain(io: Any) -> Callable[[Path], Any]:
    def read(cache: Path) -> None:
        PretrainTokenStreamDataset(cache / "train", T=8, device="cpu", io=io).get_batch(B=64, generator=generator())

    return read


def sft(io: Any) -> Callable[[Path], Any]:
    def read(cache: Path) -> None:
        files = [cache / f"train_{name}" for name in ("tokens.bin", "idx.npy")]
        SFTExampleDataset(*files, T=64, device="cpu", eot_id=6, io=io).get_batch(B=64, generator=generator())

    return read


PROBES: dict[str, Probe] = {
    "list": Probe(command("list")),
    "verify": Probe(command("verify")),
    "verify --deep": Probe(command("verify", "--deep")),
    **{f"stats {kind}": Probe(each(kind, command("stats"))) for kind in ("pretrain", "sft")},
    **{f"show {kind}": Probe(each(kind, command("show", "--at", "1"))) for kind in ("pretrain", "sft")},
    **{f"locate {kind}": Probe(each(kind, command("locate", "train", "20"))) for kind in ("pretrain", "sft")},
    **{f"diff {kind}": Probe(each(kind, diff)) for kind in ("pretrain", "sft")},
    **{f"reader pretrain, {io}": Probe(each("pretrain", pretrain(io))) for io in ("mmap", "pread")},
    **{f"reader sft, {io}": Probe(each("sft", sft(io))) for io in ("mmap", "pread")},
    "reader epoch": Probe(
        each("pretrain", lambda cache: list(EpochStream(cache / "train", T=8, global_batch_size=8, seed=0, epochs=1)))
    ),
    "reader evaluation": Probe(each("pretrain", lambda cache: list(iter_eval(cache / "train", B=8, T=8)))),
    "reader tokenizer": Probe(lambda root: load_tokenizer(root / "tokenizer").encode("a text")),
    "gc --dry-run": Probe(command("gc", "--dry-run")),
    "gc": Probe(command("gc"), writes=True),
    "build": Probe(lambda root: cli.main(_build(root)), writes=True),
}

# --- the attacks ------------------------------------------------------------------------------------------------------

Make = Callable[[Path, Path], Any]
Change = Callable[[dict[str, Any]], Any]
CACHES = (PRETRAIN, SFT, "tokenizer")
OF_PRETRAIN = ("reader pretrain*", "reader epoch", "reader evaluation", "show pretrain", "verify*")
OF_SFT = ("reader sft*", "show sft", "verify*")
OF_MODEL = ("show *", "reader tokenizer", "verify*")  # a build trains another one


def version(root: Path, key: str) -> Path:
    return (root / key).resolve()


def replaced(key: str, name: str, how: Callable[[Path], Any]) -> Make:
    """Put something else in the place of a file or folder of a version."""

    def make(root: Path, outside: Path) -> None:
        path = version(root, key) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        how(path)

    return make


def linked(key: str, name: str, target: str = "") -> Make:
    """Put a link in the place of a file or folder of a version, by default to the good one outside."""

    def make(root: Path, outside: Path) -> None:
        to = target or version(outside, key) / name
        replaced(key, name, lambda path: path.symlink_to(to))(root, outside)

    return make


def a_socket(path: Path) -> None:
    os.chdir(path.parent)  # its whole name may have 107 bytes only
    socket.socket(socket.AF_UNIX).bind(path.name)


def sparse(num_bytes: int, begin: bytes = b"") -> Callable[[Path], None]:
    """Write a file that takes no disk beyond its beginning."""

    def write(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, num_bytes)

    return write


def npy(count: int) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def rewritten(key: str, change: Change) -> Make:
    """Change a meta.json as its author would, with a CRC-32 that is right."""

    def make(root: Path, outside: Path) -> None:
        path = version(root, key) / META_NAME
        meta = json.loads(path.read_bytes())
        change(meta)
        path.write_bytes(meta_bytes(meta))

    return make


def every(change: Change) -> Make:
    """Change every meta.json."""

    def make(root: Path, outside: Path) -> None:
        for key in CACHES:
            rewritten(key, change)(root, outside)

    return make


def spelled(begin: bytes, repeated: bytes = b"", times: int = 0, end: bytes = b"") -> Make:
    """Write other bytes in the place of every meta.json."""

    def make(root: Path, outside: Path) -> None:
        for key in CACHES:
            (version(root, key) / META_NAME).write_bytes(begin + repeated * times + end)

    return make


def each_key(value: Any) -> Make:
    """Make a cache for each key of meta.json, beside the good ones, in which that key has another value."""

    def make(root: Path, outside: Path) -> None:
        for key in (PRETRAIN, SFT):
            folder = version(root, key)
            for name in json.loads((folder / META_NAME).read_bytes()):
                if name == "meta_crc32":
                    continue
                shutil.copytree(folder, root / key.split("/")[0] / f"k_{name}")
                rewritten(f"{key.split('/')[0]}/k_{name}", lambda meta, name=name: meta.update({name: value}))(
                    root, root
                )

    return make


def sized(key: str, name: str, num_bytes: int, begin: bytes = b"") -> Make:
    """Put a sparse file in the place of one, with records in meta.json that say so."""

    def change(meta: dict[str, Any]) -> None:
        groups = [*meta["shards"].values(), list(meta["index"].values()), list(meta.get("ids", {}).values())]
        for record in (record for group in groups for record in group if record["name"] == name):
            record["bytes"] = num_bytes
            record |= {"tokens": num_bytes // 2} if "tokens" in record else {}
            record |= {"entries": (num_bytes - len(begin)) // 8} if "entries" in record else {}
        for split in ("train", "val"):
            meta["totals"][f"{split}_tokens"] = sum(record["tokens"] for record in meta["shards"][split])

    def make(root: Path, outside: Path) -> None:
        replaced(key, name, sparse(num_bytes, begin))(root, outside)
        rewritten(key, change)(root, outside)

    return make


def commands(text: str) -> str:
    """Return a text with what commands a terminal: a title, a screen wiped, a line written over, letters turned."""
    return f"{text}\x1b]0;x\x07\x1b[2J\r\x9b\u202e\n"


def commanding(meta: dict[str, Any]) -> None:
    """Put what commands a terminal into every text that a command may print, and into new keys."""
    texts = ("dataset_name", "dataset_config", "split_rule", "trained_on", "origin", "normalization", "model_type")
    meta.update({key: commands("x") for key in texts})
    source = meta.get("source") if isinstance(meta.get("source"), dict) else {}
    about = {key: commands("x") for key in ("kind", "licence", "attribution", "revision", "name")}
    meta["source"] = {**source, **about, "counters": {commands("x"): 1}}
    meta["dropped"] = {commands("x"): 1}
    meta[commands("x")] = {commands("x"): commands("x")}


def commanding_names(root: Path, outside: Path) -> None:
    for name in (commands("x"), "a\x1b[2J"):
        shutil.copytree(version(root, PRETRAIN), root / "pretrain" / name)
        (version(root, PRETRAIN) / name).write_bytes(b"x")
        (root / "pretrain" / ".versions" / name).mkdir()


def deep_folder(path: Path) -> None:
    """Make a folder so deep that its last one has no path."""
    path.mkdir(parents=True)
    handle = os.open(path, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below


def old_version(root: Path) -> Path:
    now = version(root, PRETRAIN)
    return next(path for path in sorted(now.parent.glob("[0-9a-f]*")) if path != now)


def foreign_versions(root: Path, outside: Path) -> None:
    """Make folders of other programs with the names that a cache's have."""
    for name in ("building", "damaged", "building-0123456789ab", "0123456789ab", "fedcba987654", "adopted1", "link"):
        folder = root / "work" / ".versions" / "app" / name
        folder.mkdir(parents=True)
        (folder / "precious.txt").write_text("precious")
        if name.startswith(("0", "f", "a")):
            (folder / META_NAME).write_text('{"version": 3}')


def untouched(root: Path) -> bool:
    return len(list((root / "work").rglob("precious.txt"))) in (0, 7)


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
    ("tokenizer", "spm.model", OF_MODEL),
    ("tokenizer", META_NAME, ("reader sft*", "reader pretrain*", "list", "verify*")),
]
NO_FILE: dict[str, Callable[[str, str], Make]] = {
    "a link to a good one outside": linked,
    "a link to /dev/zero": lambda key, name: linked(key, name, "/dev/zero"),
    "a link in a circle": lambda key, name: linked(key, name, Path(name).name),
    "a FIFO": lambda key, name: replaced(key, name, os.mkfifo),
    "a socket": lambda key, name: replaced(key, name, a_socket),
    "a folder": lambda key, name: replaced(key, name, os.mkdir),
}
NOT_A_FILE_AS = (f"{PRETRAIN}/{META_NAME}", f"{SFT}/train_idx.npy", "tokenizer/spm.model")
ATTACKS: dict[str, Attack] = {
    "none": Attack(lambda root, outside: None),
    **{
        f"{what} as {key}/{name}": Attack(make(key, name), refused_by)
        for what, make in NO_FILE.items()
        for key, name, refused_by in PLACES
        if what.startswith("a link to a good") or f"{key}/{name}" in NOT_A_FILE_AS
    },
    "24 GB of offsets": Attack(sized(SFT, "train_idx.npy", 128 + 24 * 10**9, npy(3 * 10**9)), OF_SFT),
    "24 GB of documents": Attack(
        sized(PRETRAIN, "index/train_docs.npy", 128 + 24 * 10**9, npy(3 * 10**9)), ("verify*", "locate pretrain")
    ),
    "24 GB of source ids": Attack(sized(PRETRAIN, "index/train_ids.txt", 24 * 10**9), ("verify*",)),
    "24 GB of tokens": Attack(sized(PRETRAIN, "train/shard_00000.bin", 24 * 10**9), ("verify*",)),
    "24 GB of chats": Attack(sized(SFT, "train_tokens.bin", 24 * 10**9), ("verify*",)),
    "24 GB of model": Attack(replaced("tokenizer", "spm.model", sparse(24 * 10**9)), OF_MODEL),
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
        }.items()
    },
    **{
        f"meta.json: {what} up to the limit": Attack(
            spelled(b'{"a": [', raw, (1 << 19) - 9, b"[]]}"), ("verify*", "stats *", "list")
        )
        for what, raw in {"lists": b"[],", "objects": b"{},"}.items()
    },
    "many lines of a CRC-32": Attack(
        lambda root, outside: (version(root, PRETRAIN) / META_NAME).write_bytes(
            b'{\n  "kind": "pretrain"' + b',\n  "meta_crc32": "01234567"' * 10**5 + b"\n}"
        ),
        ("reader pretrain*", "verify*", "list"),
    ),
    "24 GB of meta.json": Attack(
        lambda root, outside: [sparse(24 * 10**9)(version(root, key) / META_NAME) for key in CACHES],
        ("reader pretrain*", "reader sft*", "list", "verify*", "stats *"),
    ),
    **{f"every key is {value!r}": Attack(each_key(value)) for value in (None, 10**90, "x", {"train": {"train": {}}})},
    "counts of 10**12": Attack(
        every(
            lambda meta: meta.update(
                num_shards=10**12,
                totals=dict.fromkeys(meta.get("totals", {}), 10**12),
                docs={"train": 10**12, "val": 10**12},
                examples_read=10**12,
                vocab_size=65536,
            )
        ),
        ("verify*",),
    ),
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
    "commands of a terminal in texts": Attack(every(commanding)),
    "commands of a terminal in names": Attack(commanding_names),
    "a deep old version": Attack(lambda root, outside: deep_folder(old_version(root) / "deep")),
    "a deep version": Attack(lambda root, outside: deep_folder(version(root, PRETRAIN) / "deep")),
    "a deep folder": Attack(lambda root, outside: deep_folder(root / "pretrain" / "deep")),
    "a deep build": Attack(
        lambda root, outside: deep_folder(root / "pretrain" / ".versions" / "notes" / "building" / "deep")
    ),
    "folders of another program": Attack(foreign_versions),
    "a lock that is a file outside": Attack(
        lambda root, outside: [
            ((path / "lock").unlink(), os.link(outside / "raw" / "chats.jsonl", path / "lock"))
            for path in (root / "pretrain" / ".versions" / "notes", root / ".versions" / "tokenizer")
        ],
        ("build",),
    ),
    **{
        f"a lock that is {what}": Attack(
            lambda root, outside, how=how: [
                ((path / "lock").unlink(), how(path / "lock"))
                for path in (root / "pretrain" / ".versions" / "notes", root / ".versions" / "tokenizer")
            ],
            ("build",),
        )
        for what, how in {"a FIFO": os.mkfifo, "a folder": os.mkdir}.items()
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


def remove(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("test_attacks") as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_folder_gives_a_documented_error_and_harms_nobody(server: Server, name: str) -> None:
    server.check(name)
