"""A tokenizer that fits on ten lines, so that a test's expected bytes can be worked out on paper: id = byte + 10.

And the one-line cache that several tests build with it.
"""

import numpy as np

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.chat import ChatTokenizer, EncodedChat, RefusedChat


class ByteTokenizer:
    """One id for each utf-8 byte: "A" is [75]; ids 1 to 4 are the sentinels."""

    vocab_size = 300

    def special_token_ids(self):
        return {"sys": 1, "usr": 2, "asst": 3, "eot": 4}

    def encode(self, text):
        return [byte + 10 for byte in text.encode()]

    def decode(self, ids):
        return bytes(id - 10 for id in ids if 10 <= id < 266).decode(errors="ignore")


class WideByteTokenizer(ByteTokenizer):
    """Every id of ByteTokenizer, and 100,000 more: ids of 32 bits, none of which is right in 16."""

    more = 100_000
    vocab_size = more + ByteTokenizer.vocab_size

    def special_token_ids(self):
        return {name: self.more + id for name, id in super().special_token_ids().items()}

    def encode(self, text):
        return [self.more + id for id in super().encode(text)]

    def decode(self, ids):
        return super().decode([id - self.more for id in ids])


def encoded_chat(ids, mask, *noted):
    """What a chat tokenizer gives of a chat. noted: a token is of two sides, what happened, turns without loss."""
    return EncodedChat(ids, mask, *noted)


def refused_chat(reason, found):
    """What a chat tokenizer gives of a chat that cannot be used."""
    return RefusedChat(reason, found)


class ByteChats(ChatTokenizer):
    """A template on five lines: each turn is its role's id, its text and 4; the words of the assistant carry loss."""

    name, sha256, template_sha256, mask_by, loss_on = "bytes", "0" * 64, "1" * 64, "prefix", "assistant"
    pad_id, special_token_ids = 0, [None, 4, 0, None]

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = self.tokenizer.vocab_size

    def encode_chats(self, chats):
        return [self.encoded(chat) for chat in chats]

    def encoded(self, chat):
        ids, mask = list[int](), list[int]()
        for message in chat.messages:
            if "<|" in message["content"]:
                return RefusedChat("special_text", f"a message of chat {chat.name!r} holds a special token")
            text = self.tokenizer.encode(message["content"])
            ids += [{"system": 1, "user": 2, "assistant": 3}[message["role"]], *text, 4]
            mask += [0, *[int(message["role"] == "assistant")] * (len(text) + 1)]
        return EncodedChat(ids, mask)


def build(path, texts, num_tokens=30, shard_bytes=20):
    """Build a cache of some texts whose val split is empty."""
    return build_pretrain(
        ((None, text) for text in texts),
        path,
        tokenizer=ByteTokenizer(),
        max_train_tokens=num_tokens,
        max_val_tokens=0,
        shard_bytes=shard_bytes,
        seed=0,
        shuffle_buffer=None,
    )


def train_text(path):
    """Return the train split of a cache as text."""
    ids = np.concatenate([np.fromfile(shard, dtype="<u2") for shard in sorted((path / "train").iterdir())])
    return ByteTokenizer().decode(ids)
