"""A tokenizer that fits on ten lines, so that a test's expected bytes can be worked out on paper: id = byte + 10."""


class ByteTokenizer:
    """One id for each utf-8 byte: "A" is [75]; ids 1 to 4 are the sentinels."""

    vocab_size = 300

    def special_token_ids(self):
        return {"sys": 1, "usr": 2, "asst": 3, "eot": 4}

    def encode(self, text):
        return [byte + 10 for byte in text.encode()]

    def decode(self, ids):
        return bytes(id - 10 for id in ids if 10 <= id < 266).decode(errors="ignore")
