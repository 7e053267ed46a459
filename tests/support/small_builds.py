"""Builds of a few batches and shards, in which everything happens that may happen to a document."""

import hashlib
import json
import os
import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.build_templated import build_templated_sft
from niels_gpt.chat import Chat
from niels_gpt.engine import build as engine_build
from niels_gpt.engine import losses, meta, stream
from niels_gpt.engine.meta import Source
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.storage.locks import file_lock, refuse_if_held
from niels_gpt.storage.versions import build_lock
from niels_gpt.tokenizers.protocol import PROBE
from support.byte_tokenizer import ByteChats, ByteTokenizer
from support.disk import file_records

Item = tuple[Any, ...]
BATCH_ITEMS = 5
VOCABULARY = 30
"""Of rollouts."""
SHARD_BYTES = 240
"""Tokens of 120 bytes of text; a document has 16 at most, an end-of-text included."""


class Counted(ByteTokenizer):
    """A tokenizer that remembers what it was asked for."""

    def __init__(self):
        self.texts = []

    def encode(self, text):
        if text not in (PROBE, "a\u2581b"):  # of the build's identity, and whether U+2581 is lost
            self.texts.append(text)
        return super().encode(text)


@contextmanager
def another_version():
    """Let builds be those of another version of the program, whose unfinished builds this one does not go on with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta, "_DIGESTS", 1)
        yield


def documents(seed, count=90):
    """Return (split, text, id): some hold a sentinel, are empty, or hold half a surrogate pair."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        text = f"{number}:" + "".join(chance.choices("abcdef é", k=chance.randint(1, 9)))
        text = {5: f"{number}<|eot|>", 11: "", 20: f"{number}\ud800"}.get(number % 12 if number != 20 else 20, text)
        found.append((None, text, f"page\n{number}"))
    return found


def chats(seed, count=40):
    """Return (id, messages): some hold a sentinel, have no reply, or are no chats at all."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        texts = [f"{number}:" + "".join(chance.choices("abcdef ", k=chance.randint(1, 9))) for _ in range(2)]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        if number % 12 == 5:
            messages[0]["content"] = f"{number}<|usr|>"
        elif number % 12 == 7:
            del messages[1]
        elif number == 20:
            messages = [3]
        found.append((f"chat {number}", messages))
    return found


def batches_of(patch, items=BATCH_ITEMS, chars=None, ahead_chars=None):
    """Let builds encode batches of so many documents or characters, and take so many characters ahead."""
    patch.setattr(stream, "BATCH_ITEMS", items)
    if chars is not None:
        patch.setattr(stream, "BATCH_CHARS", chars)
    if ahead_chars is not None:
        patch.setattr(stream, "AHEAD_CHARS", ahead_chars)


def encode_with(patch, engine):
    """Let builds encode with this engine."""
    for place in ("build_pretrain", "build_sft"):
        patch.setattr(f"niels_gpt.cache.{place}.open_engine", lambda *of, **how: engine)


def locked(path, *, wait=False):
    """Hold the lock of the cache at a path, as its builder does; gives the folder of its versions."""
    return build_lock(path, wait=wait)


def locked_file(path, *, wait=False):
    """Hold a lock file of something called c."""
    return file_lock(path, "c", "is being built", wait=wait)


def look_at_lock(path):
    """Raise CacheError if somebody holds a lock file; no lock is kept."""
    refuse_if_held(path, "c")


def compare_less(patch, **limits):
    """Let builds compare fewer `texts`, `num_bytes` of them, and `ids` of a text with what they decode to."""
    names = {"texts": "ROUNDTRIP_TEXTS", "num_bytes": "ROUNDTRIP_BYTES", "ids": "_COMPARED_IDS"}
    for limit, value in limits.items():
        patch.setattr(losses, names[limit], value)


def log_always(patch):
    """Let builds say how far they are at every batch."""
    patch.setattr(engine_build, "_LOG_SECONDS", 0.0)


def counting(items, counters):
    """Yield the items as a loader does that counts what it reads."""
    for item in items:
        counters["rows"] = counters.get("rows", 0) + 1
        yield item


def pretrain(path, seed=0, *, items=None, **changed):
    """Build a pretrain cache of five shards or so: shuffled, some documents dropped, two cut, not all read."""
    counters = {}
    items = counting(documents(seed) if items is None else items, counters)
    arguments = {
        "tokenizer": ByteTokenizer(),
        "max_train_tokens": 380,
        "max_val_tokens": 100,
        "shard_bytes": SHARD_BYTES,
        "seed": seed,
        "shuffle_buffer": 8,
        "document_end": "eot",
        "num_threads": 0,
        "source": Source(name="small", counters=counters),
        "checkpoint_seconds": 0,
    }
    return build_pretrain(items, path, **{**arguments, **changed})


def sft(path, seed=0, *, items=None, **changed):
    """Build an sft cache of both splits."""
    counters = {}
    items = counting(chats(seed) if items is None else items, counters)
    arguments = {
        "tokenizer": ByteTokenizer(),
        "val_frac": 0.2,
        "seed": seed,
        "num_threads": 0,
        "source": Source(name="small", counters=counters),
        "checkpoint_seconds": 0,
    }
    return build_sft(items, path, **{**arguments, **changed})


def templated(path, seed=0, *, items=None, tokenizer=None, **changed):
    """Build an sft cache of both splits by another chat template, with loss bits."""
    counters = {}
    tokenizer = tokenizer or ByteTokenizer()
    arguments = {
        "tokenizer": tokenizer,
        "chat_tokenizer": ByteChats(tokenizer),
        "val_frac": 0.2,
        "seed": seed,
        "num_threads": 0,
        "source": Source(name="small", counters=counters),
        "checkpoint_seconds": 0,
    }
    read = (Chat(*item) for item in counting(chats(seed) if items is None else items, counters))
    return build_templated_sft(read, path, **{**arguments, **changed})


def rollout_groups(seed, count=40):
    """Return groups with every field; some samples have a bad form, and some groups no good one."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        prompt, samples = chance.choices(range(VOCABULARY), k=3), []
        for _ in range(chance.randint(1, 4)):
            ids = [*prompt, *chance.choices(range(VOCABULARY), k=chance.randint(1, 5))]
            scores = [round(-chance.random(), 3) for _ in ids[3:]]
            samples.append(Rollout(ids, 3, None, scores, chance.random(), reward=float(number)))
        if number % 12 == 5:
            samples = [replace(each, logprobs=each.logprobs[1:]) for each in samples]
        elif number % 12 == 7:
            samples[0] = replace(samples[0], ids=[*prompt, VOCABULARY], logprobs=[-1.0])
        found.append(RolloutGroup(f"page\n{number}", samples))
    return found


def rollouts(
    path,
    seed=0,
    *,
    items=None,
    num_threads=0,
    tokenizer=None,
    **changed,
):
    """Build a rollout cache of both splits. Nothing is encoded: threads and a tokenizer that counts have no work."""
    counters = {}
    groups = counting(rollout_groups(seed) if items is None else items, counters)
    arguments = {
        "vocab_size": VOCABULARY,
        "val_frac": 0.2,
        "seed": seed,
        "source": Source(name="small", counters=counters),
        "checkpoint_seconds": 0,
    }
    return build_rollouts(groups, path, **{**arguments, **changed})


BUILDERS = {"pretrain": pretrain, "sft": sft, "templated": templated, "rollouts": rollouts}
ITEMS = {"pretrain": documents, "sft": chats, "templated": chats, "rollouts": rollout_groups}


@contextmanager
def quick_folder():
    """Make a folder in memory where that can be: these builds wait for nothing but fsync."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        yield Path(name)


def whole_version(path):
    """Return the content sha256 of a committed cache, after a look at every byte of every file that its meta names."""
    folder = path.resolve(strict=True)
    meta = json.loads((folder / "meta.json").read_bytes())
    for record in file_records(meta):
        content = (folder / record["name"]).read_bytes()
        assert len(content) == record["bytes"], f"{record['name']}: {len(content)} bytes, expected {record['bytes']}"
        assert hashlib.sha256(content).hexdigest() == record["sha256"], record["name"]
    assert folder.name == meta["content_sha256"][:12]
    return str(meta["content_sha256"])
