"""Texts of a mirror, with each tokenizer of Hugging Face: they come back from their ids, without a control id.

Run: NIELS_GPT_TEST_DATA=MIRROR pytest -m real_text tests/tokenizer
"""

import os
import unicodedata
from itertools import islice

import pytest
from support import LONG
from support.made_tokenizers import MADE, REAL, any_tokenizer
from support.real_text import training_texts

from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.real_text,
    pytest.mark.skipif("NIELS_GPT_TEST_DATA" not in os.environ, reason="NIELS_GPT_TEST_DATA names no mirror"),
]
NORMALIZED = {"neox": "NFC", "qwen2": "NFC", "gemma": "\u2581", "t5": "\u2581"}
"""What a tokenizer changes before it encodes: a text becomes NFC; U+2581, which stands for a space, becomes one."""
BATCH = 2_000
EVERY = 1 if LONG else 8
"""Of how many texts of a source one is taken."""


def mirror_texts():
    """Yield documents and messages of every source of the mirror."""
    for texts in training_texts(Settings(source_root=os.environ["NIELS_GPT_TEST_DATA"])):
        yield from islice(texts, 0, None, EVERY)


@pytest.mark.parametrize("name", [*REAL, *MADE])
def test_texts_come_back(name):
    tokenizer = load_tokenizer(any_tokenizer(name))
    control, texts, read = tokenizer.control_ids, mirror_texts(), 0
    while batch := list(islice(texts, BATCH)):
        arrays = tokenizer.encode_batch(batch, num_threads=2)
        for text, ids in zip(batch, arrays, strict=True):
            back = tokenizer.decode(ids.tolist())
            assert back == text or back == _normalized(name, text), text[:200]
            if not control.isdisjoint(ids.tolist()):
                assert any(tokenizer.token(each) in text for each in control)
                plain = tokenizer.encode_plain([text])[0].tolist()
                assert control.isdisjoint(plain) and tokenizer.decode(plain) == back
        read += len(batch)
    assert read > 1_000


def _normalized(name, text):
    form = NORMALIZED.get(name)
    return unicodedata.normalize("NFC", text) if form == "NFC" else text.replace(form or "\u2581", " ")
