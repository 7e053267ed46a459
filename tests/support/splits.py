"""Small pretrain caches whose splits are checked against a rule applied to the whole stream."""

import hashlib
import json
import os
from typing import TYPE_CHECKING

import numpy as np

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.shards import Shards
from niels_gpt.engine import split
from support.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    pass

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # many builds, and each of them syncs its files
SPLITS = ("train", "val")


def letters(lengths):
    """Return documents of these lengths; document i repeats the i-th letter."""
    return [chr(ord("a") + number) * length for number, length in enumerate(lengths)]


def build(folder, documents, train, val, **extras):
    """Build a cache of texts, or of (split, text); returns its meta."""
    pairs = [document if isinstance(document, tuple) else (None, document) for document in documents]
    arguments = {"shard_bytes": 1 << 20, "seed": 0, "shuffle_buffer": None, **extras}
    return build_pretrain(
        pairs, folder, tokenizer=ByteTokenizer(), max_train_tokens=train, max_val_tokens=val, **arguments
    )


def hold_in_memory(patch, num_bytes):
    """Let a build hold so many bytes of documents in memory while it waits for both splits to have one."""
    patch.setattr(split, "_HELD_IN_MEMORY", num_bytes)


def die_at_document(patch, number):
    """Interrupt a build when it writes the batch of this document, or a later one."""
    written = Shards._add

    def add(shards, batch, *encoded):
        if batch.first >= number:
            raise KeyboardInterrupt
        return written(shards, batch, *encoded)

    patch.setattr(Shards, "_add", add)


def stored(cache, split):
    """Return the documents of a split, read with the document index."""
    shards = sorted((cache / split).glob("shard_*.bin"))
    ids = np.concatenate([np.zeros(0, dtype="<u2"), *(np.fromfile(shard, dtype="<u2") for shard in shards)])
    starts = np.load(cache / "index" / f"{split}_docs.npy")
    assert starts[0] == 0 and starts[-1] == len(ids)
    return [ByteTokenizer().decode(part) for part in np.split(ids, starts[1:-1])] if len(starts) > 1 else []


def key(text, seed=0):
    """Return the number that decides a text's split, as docs/formats.md has it."""
    return int(hashlib.sha256(f"{seed}\n{text}".encode(errors="surrogatepass")).hexdigest()[:16], 16)


def chat_key(messages, seed):
    """Return the key of a chat by docs/formats.md: that of a text, of its roles and contents as JSON."""
    turns = [[message["role"], message.get("content")] for message in messages]
    return key(json.dumps(turns, ensure_ascii=False, separators=(",", ":"), sort_keys=True), seed)


def obvious_splits(texts, share, seed=0):
    """Return the split of each text of a stream that is held whole: the slow oracle."""
    known = sorted({text for text in texts if text and "<|" not in text}, key=lambda text: key(text, seed))
    found = {text: "val" if key(text, seed) < share * 2**64 else "train" for text in known}
    if known and 0 < share < 1:
        if "val" not in found.values():
            found[known[0]] = "val"
        if "train" not in found.values():
            found[known[-1]] = "train"
    return found
