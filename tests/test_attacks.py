"""Foreign folders are safe to look at: (attack, command or reader) -> a documented error within 10 s and 1 GB.

Run: pytest tests/test_attacks.py -s, or python tests/attacks.py test_attacks for a line of each meeting
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import Attack, Probe, Server, serving

from niels_gpt.fileio import META_NAME
from niels_gpt.records import meta_bytes

# --- what is attacked -------------------------------------------------------------------------------------------------

IMPORTS = (
    "torch",
    "sentencepiece",
    "niels_gpt.cache",
    "niels_gpt.sampling",
    "niels_gpt.cache.cli",
    "niels_gpt.recipes.run",
)
PRETRAIN, SFT, MODEL = "pretrain/notes", "sft/chats", "tokenizer/spm.model"
TEXTS = [f"Page {page}. The heron walks to the river and finds {page * 3} apples." for page in range(12)]


def build(root: Path) -> None:
    """Make tokenizer/, pretrain/notes of three versions and an unfinished build, sft/chats, and raw text beside them."""
    from niels_gpt.cache import cli

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


def command(*arguments: str) -> Callable[[Path], int]:
    """Return a call of the command line; ROOT and names below it stand for folders."""

    def call(root: Path) -> int:
        from niels_gpt.cache import cli

        return cli.main([str(root / argument[1:]) if argument[:1] == "@" else argument for argument in arguments])

    return call


def pretrain(io: Any) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        import torch

        from niels_gpt.cache import PretrainTokenStreamDataset

        dataset = PretrainTokenStreamDataset(root / PRETRAIN / "train", T=8, device="cpu", io=io)
        dataset.get_batch(B=64, generator=torch.Generator().manual_seed(0))

    return read


def sft(io: Any) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        import torch

        from niels_gpt.cache import SFTExampleDataset

        files = [root / SFT / f"train_{name}" for name in ("tokens.bin", "idx.npy")]
        dataset = SFTExampleDataset(*files, T=64, device="cpu", eot_id=_id("eot"), io=io)
        dataset.get_batch(B=64, generator=torch.Generator().manual_seed(0))

    return read


def _id(name: str) -> int:
    return {"sys": 3, "usr": 4, "asst": 5, "eot": 6}[name]


def epoch(root: Path) -> None:
    from niels_gpt.sampling import EpochStream

    for _ in EpochStream(root / PRETRAIN / "train", T=8, global_batch_size=8, seed=0, epochs=1):
        pass


def evaluation(root: Path) -> None:
    from niels_gpt.sampling import iter_eval

    for _ in iter_eval(root / PRETRAIN / "val", B=8, T=8):
        pass


def tokenizer(root: Path) -> None:
    from niels_gpt.tokenizer import load_tokenizer

    load_tokenizer(root / "tokenizer").encode("a text")


PROBES: dict[str, Probe] = {
    "list": Probe(command("list", "@")),
    "verify": Probe(command("verify", "@")),
    "verify --deep": Probe(command("verify", "@", "--deep")),
    "stats pretrain": Probe(command("stats", f"@{PRETRAIN}")),
    "stats sft": Probe(command("stats", f"@{SFT}")),
    "show pretrain": Probe(command("show", f"@{PRETRAIN}", "--at", "20")),
    "show sft": Probe(command("show", f"@{SFT}", "--at", "1")),
    "locate pretrain": Probe(command("locate", f"@{PRETRAIN}", "train", "20")),
    "locate sft": Probe(command("locate", f"@{SFT}", "train", "20")),
    "diff": Probe(command("diff", f"@{PRETRAIN}", f"@{SFT}")),
    "gc --dry-run": Probe(command("gc", "@", "--dry-run")),
    "reader pretrain, mmap": Probe(pretrain("mmap")),
    "reader pretrain, pread": Probe(pretrain("pread")),
    "reader sft, mmap": Probe(sft("mmap")),
    "reader sft, pread": Probe(sft("pread")),
    "reader epoch": Probe(epoch),
    "reader evaluation": Probe(evaluation),
    "reader tokenizer": Probe(tokenizer),
    "gc": Probe(command("gc", "@"), writes=True),
    "build": Probe(lambda root: command(*_build(root))(root), writes=True),
}

# --- the attacks ------------------------------------------------------------------------------------------------------

ATTACKS: dict[str, Attack] = {"none": Attack(lambda root, outside: None)}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("test_attacks") as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_folder_gives_a_documented_error_and_harms_nobody(server: Server, name: str) -> None:
    server.check(name)
