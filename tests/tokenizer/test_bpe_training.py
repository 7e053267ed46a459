"""A byte-level BPE tokenizer trained here: the same bytes from the same texts, and every text comes back."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.made_tokenizers import sample_texts

from niels_gpt.commands.main import main
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, find_reserved_literal
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer
from niels_gpt.tokenizers.document_tokens import document_end
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer

SIZE = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    trained = train_tokenizer(sample_texts(), kind="bpe", vocab_size=SIZE, trained_on="the sample")
    return write_tokenizer(trained, tmp_path_factory.mktemp("bpe")).model_path.parent


@pytest.fixture(scope="module")
def tokenizer(folder):
    opened = load_tokenizer(folder, sentinels="required")
    assert isinstance(opened, HuggingFaceTokenizer)
    return opened


def test_what_is_written(folder, tokenizer):
    assert sorted(os.listdir(folder)) == ["tokenizer.json", "tokenizer_meta.json"]
    meta = json.loads((folder / "tokenizer_meta.json").read_text())
    texts = sample_texts()
    left_out = [text for text in texts if find_reserved_literal(text)]
    assert meta["tokenizer_kind"] == tokenizer.kind == "huggingface"
    assert meta["vocab_size"] == meta["requested_vocab_size"] == tokenizer.vocab_size == SIZE
    assert (
        meta["special_token_ids"]
        == tokenizer.special_token_ids()
        == dict(zip(SPECIAL_TOKEN_NAMES, range(4), strict=True))
    )
    assert meta["model_sha256"] == tokenizer.sha256
    assert (meta["documents"], meta["documents_with_reserved_literal"]) == (len(texts), len(left_out)) and left_out
    assert meta["bytes_given"] == sum(len(text.encode()) for text in texts)
    assert meta["bytes_seen"] == meta["bytes_given"] - sum(len(text.encode()) for text in left_out)
    assert meta["lossless"] is True and meta["model_type"] == "bpe"
    unigram = train_tokenizer(texts, vocab_size=SIZE)
    assert unigram.meta["inputs_sha256"] == meta["inputs_sha256"] and unigram.meta["tokenizer_kind"] == "sentencepiece"
    assert unigram.meta.keys() - meta.keys() == {"pieces", "sentencepiece_version"}


def test_texts_have_fewer_ids_than_bytes_and_the_sentinels_are_special(tokenizer):
    text = sample_texts()[1]
    assert len(tokenizer.encode(text)) < 0.5 * len(text.encode())
    chat = f"{SPECIAL_TOKENS[1]}a text{SPECIAL_TOKENS[3]}"
    assert tokenizer.encode(chat)[0] == 1 and tokenizer.encode(chat)[-1] == 3
    assert not tokenizer.control_ids.intersection(tokenizer.encode_plain([chat])[0].tolist())
    end = document_end(tokenizer)
    assert end is not None and end.id == 3
    digits = [tokenizer.decode([each]) for each in tokenizer.encode("123456 x")]
    assert all(len(each.strip()) <= 3 for each in digits)


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_depend_neither_on_threads_nor_on_the_hash_seed(tmp_path):
    """Most words occur equally often, so that nearly every merge is one of many equally frequent pairs."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh\u00e9\u6f22", k=6)) for _ in range(3_000)]
    texts = [" ".join(drawn.sample(words, 50)) for _ in range(40)] * 2
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import hashlib, json, sys\n"
        "from niels_gpt.tokenizer_training import train_tokenizer\n"
        "texts = json.load(open(sys.argv[1]))\n"
        "trained = train_tokenizer(texts, kind='bpe', vocab_size=2_000)\n"
        "print(trained.meta['vocab_size'], hashlib.sha256(trained.model).hexdigest())\n"
    )
    found = set()
    for threads, seed in (("1", "0"), ("2", "1"), ("4", "2"), ("2", "3")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path / "texts.json")]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 1 and next(iter(found)).startswith("2000 ")


def test_a_vocabulary_above_16_bits():
    drawn = random.Random(0)
    text = " ".join("".join(drawn.choices("abcdefghijklmnop", k=9)) for _ in range(26_000))
    trained = train_tokenizer([text, text], kind="bpe", vocab_size=70_000)
    assert trained.meta["vocab_size"] == 70_000


def test_too_little_text_gives_a_smaller_vocabulary_and_a_warning(caplog):
    trained = train_tokenizer(["few words, few words"], kind="bpe", vocab_size=5_000)
    assert trained.meta["vocab_size"] < 300
    assert [record.code for record in caplog.records] == ["W408"]


@pytest.mark.parametrize("part", ["ab", "\0\1", " \n", "__", "漢字"])
def test_a_word_of_thousands_of_letters_is_cut(part):
    pieces = [part * 2_000] * 3
    whole, cut = (train_tokenizer(texts, kind="bpe", vocab_size=300) for texts in (["".join(pieces)], pieces))
    assert whole.model == cut.model and whole.meta["bytes_seen"] == cut.meta["bytes_seen"]


def test_max_bytes_is_the_limit_of_what_is_read():
    read = []

    def texts():
        for text in ("a" * 90, "b\u6f22" * 10, "never"):
            read.append(text)
            yield text

    trained = train_tokenizer(texts(), kind="bpe", vocab_size=300, max_bytes=102)
    assert trained.meta["bytes_given"] == trained.meta["bytes_seen"] == 102 and len(read) == 2


@pytest.mark.parametrize(
    ("texts", "how", "found", "code"),
    [
        ([], {}, "0 documents of 0 bytes", "E406"),
        (["", SPECIAL_TOKENS[0]], {}, " left out for a reserved literal", "E406"),
        (["a"], {"vocab_size": 259}, "expected 260", "E102"),
        (["a"], {"vocab_size": 1 << 25}, "expected 260", "E102"),
        (["a"], {"normalization": "nfkc"}, "kind='sentencepiece'", "E102"),
        (["a"], {"kind": "wordpiece"}, "sentencepiece, bpe", "E102"),
    ],
)
def test_what_cannot_be_trained(texts, how, found, code):
    with refused(code, found, kind=ValueError):
        train_tokenizer(texts, **{"kind": "bpe", "vocab_size": 300, **how})


def test_an_error_of_the_texts_is_raised_unchanged():
    def texts():
        yield "a text"
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        train_tokenizer(texts(), kind="bpe", vocab_size=300)


def test_the_command_and_a_folder_that_has_the_other_kind(tmp_path, tiny_model_path, capsys):
    (tmp_path / "a.txt").write_text("a text of some words, and some words more\n" * 20)
    out = tmp_path / "out"
    how = ["train-tokenizer", "--input-glob", str(tmp_path / "*.txt"), "--out-dir", str(out), "--vocab-size", "300"]
    assert main([*how, "--kind", "bpe"]) == 0
    assert "tokenizer.json" in capsys.readouterr().out
    assert load_tokenizer(out).vocab_size <= 300
    first = (out / "tokenizer.json").read_bytes()
    assert main([*how, "--kind", "bpe"]) == 0
    assert (out / "tokenizer.json").read_bytes() == first
    assert main(how) == 1
    assert "error[E504]" in capsys.readouterr().err
    assert sorted(os.listdir(out)) == ["tokenizer.json", "tokenizer_meta.json"]
