"""The scripts of examples/ that train a draft, imported; and a small target with chats and caches for them."""

import importlib
import json
import sys

import pytest

from niels_gpt.eagle3.models import write_small_target
from support import ROOT
from support.commands import niels_gpt

SCRIPTS = ("eagle3_draft", "save_eagle3_draft", "train_eagle3_draft", "train_dflash_draft", "small_target")
ANSWERS = ["The heron walks to the mill.", "It was windy that day, so the otter stayed.", "Why? Pebbles!"]


def imported(name):
    """Yield a script as a module; it is forgotten at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module(name)
        for each in SCRIPTS:
            patch.delitem(sys.modules, each, raising=False)


def small_run(folder, tokenizer):
    """Write a target of random weights, ten chats, and their caches in fp32; return the folder."""
    write_small_target(folder / "target", tokenizer)
    chats = [[("user", f"Page {page}?"), ("assistant", ANSWERS[page % 3] * (1 + page % 2))] for page in range(10)]
    turns = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    for name, count in (("chats", 10), ("held_out", 3)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in turns[-count:]))
    what = f"--target-model {folder}/target --input-data {folder}/chats.jsonl --dtype fp32 --seq-length 48"
    for name, form in (("cache", "1"), ("native", "native")):
        how = f"--output-dir {folder}/{name} --format {form} --draft-vocab-size 200 --threads 1 --device cpu"
        assert niels_gpt(*f"{what} {how}".split(), module="niels_gpt.eagle3.precompute").status == 0
    return folder
