"""Engines give the ids that the tokenizer gives, text by text, whatever the tokenizer is."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.tiny_texts import TINY_TEXTS

from niels_gpt.tokenizers.engine import EngineDifference, open_engine

TEXTS = (*TINY_TEXTS, "", "naïve 漢字 🦊", "nul \0 inside", "  ")


def assert_ids_of_tokenizer(engine, tokenizer, texts=TEXTS):
    ids, lengths = engine.encode([text.encode() for text in texts], first=0)
    assert lengths.dtype == np.int64 and ids.ndim == 1 and ids.dtype.kind in "iu"
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    assert [part.tolist() for part in parts] == [list(tokenizer.encode(text)) for text in texts]


def test_the_reference_of_sentencepiece_is_the_tokenizer_itself(tiny_tokenizer):
    engine = open_engine(tiny_tokenizer, "reference")
    assert engine.name == "sentencepiece"
    assert_ids_of_tokenizer(engine, tiny_tokenizer)


def test_a_tokenizer_with_encode_alone_has_an_engine():
    engine = open_engine(ByteTokenizer())
    assert engine.name == "encode"
    assert_ids_of_tokenizer(engine, ByteTokenizer())


class OfAnotherLibrary(ByteTokenizer):
    def encode_batch(self, texts, add_special_tokens=True):
        return [[*self.encode(text), 0] for text in texts]


def test_an_encode_batch_of_another_kind_is_not_used():
    assert_ids_of_tokenizer(open_engine(OfAnotherLibrary()), ByteTokenizer())


@pytest.mark.parametrize("ids", [[1.7, 2.0], [[1, 2]], ["1"], [True], [1 << 70]])
def test_ids_that_are_no_integers_are_refused(ids):
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text: ids
    with refused("E409", "integers", kind=ValueError):
        open_engine(tokenizer).encode([b"a"], first=0)


def test_no_texts_have_no_ids(tiny_tokenizer):
    ids, lengths = open_engine(tiny_tokenizer, "reference").encode([], first=7)
    assert (len(ids), lengths.tolist()) == (0, [])


def test_an_engine_is_pickled_and_shared_by_threads(tiny_tokenizer):
    engine = pickle.loads(pickle.dumps(open_engine(tiny_tokenizer, "reference")))
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(assert_ids_of_tokenizer, engine, tiny_tokenizer) for _ in range(8)]:
            done.result()


def test_an_unknown_choice_is_refused(tiny_tokenizer):
    with refused("E102", "'fastest'", "auto, gigatoken, reference"):
        open_engine(tiny_tokenizer, "fastest")


def test_the_error_of_a_difference_gets_the_documents_id_and_survives_a_process():
    error = EngineDifference("tokenizer.json", 15, "token 7 is 51, expected 262").named(12, "'page 3', \"The heron\"")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.number == 12 and copy.code == "E410"
    assert str(copy).startswith(
        "tokenizer.json: document 12 of the source ('page 3', \"The heron\"): token 7 is 51, exp"
    )
    assert "--engine reference" in copy.remedy
