"""Three caches of a few tokens each, whose bytes are known: tokenizer/, pretrain/notes and sft/chats."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache import write_meta
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.storage.fileio import sha256_file
from support.byte_tokenizer import ByteTokenizer
from support.disk import META_NAME, content_sha256
from support.power_loss import tree_of
from support.small_builds import quick_folder

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
"""Six tokens: usr q eot asst a eot; the last two are supervised."""


class SavedByteTokenizer(ByteTokenizer):
    """A byte tokenizer with a model file, so that its caches say whose ids they hold."""

    def __init__(self, root):
        self.model_path = str(root / "tokenizer" / "spm.model")


def build_caches(root):
    """Build tokenizer/, pretrain/notes (train: 3 shards of 10 tokens, no val) and sft/chats (train: 3 examples)."""
    model = root / "tokenizer" / "spm.model"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"a model")
    record = {"name": "spm.model", "bytes": 7, "sha256": sha256_file(model)}
    about = {"kind": "tokenizer", "tokenizer_sha256": record["sha256"], "vocab_size": ByteTokenizer.vocab_size}
    about |= {"special_token_ids": ByteTokenizer().special_token_ids(), "files": [record]}
    about |= {"content_sha256": content_sha256([record]), "meta_crc32": ""}
    write_meta(str(model.parent / META_NAME), about)
    build_notes(root)
    build_chats(root)
    return root


@functools.cache
def built_caches():
    """Return what `build_caches` makes, which it does once."""
    with quick_folder() as folder:
        return tree_of(build_caches(folder / "cache"))


def build_notes(root, documents=((None, "a" * 30),), **arguments):
    """Build pretrain/notes: 30 tokens for train and none for val unless the arguments say otherwise."""
    path = root / "pretrain" / "notes"
    chosen = {"max_train_tokens": 30, "max_val_tokens": 0, "shard_bytes": 20, "seed": 0, "shuffle_buffer": None}
    build_pretrain(documents, path, tokenizer=SavedByteTokenizer(root), **{**chosen, **arguments})
    return path


def build_chats(root, examples=(CHAT,) * 3, val_frac=0, name="chats"):
    """Build sft/NAME."""
    path = root / "sft" / name
    build_sft(examples, path, tokenizer=SavedByteTokenizer(root), val_frac=val_frac, seed=0)
    return path


def change_meta(cache, **keys):
    """Set keys of a cache's meta.json, as its author would: with a CRC-32 that is right."""
    path = cache / META_NAME
    write_meta(str(path), {**json.loads(path.read_bytes()), **keys})


def put_token(path, position, token):
    """Write one id into a token file."""
    tokens = np.fromfile(path, dtype="<u2")
    tokens[position] = token
    tokens.tofile(path)


Damage = Callable[[Path], Any]
"""What is done to a file."""


def cut(num_bytes):
    """Keep the first bytes of a file; a negative number: all but the last ones."""
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def put(content):
    """Replace a file's content."""
    return lambda path: path.write_bytes(content)


def save(values, dtype="<i8"):
    """Replace a file by a .npy file of these values."""
    return lambda path: np.save(path, np.array(values, dtype=dtype))
