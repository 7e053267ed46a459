"""Tokenizers of Hugging Face for the tests: two real ones, and four in the manner of models with large vocabularies.

real_tokenizer("gpt2" | "neox")   the folder NIELS_GPT_TEST_MODELS has them; without it the test is skipped
made_tokenizer(name)              of MADE: a folder of tokenizer.json and tokenizer_config.json, made once in a process
made_tokenizer("small llama3")    the same with the learned ids alone, which opens in a twentieth of the time

A made one has the pre-tokenizer, the normalizer, the special tokens and the number of ids of its model. Its merges or
pieces are learned from the bundled sample; between the first and the last merges stand others of bytes or characters
that English text does not have, so that English text has ids near the end of the vocabulary.
"""

import atexit
import functools
import io
import json
import os
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.data.files import mirrors
from niels_gpt.special_tokens import find_reserved_literal

MADE = ("llama3", "qwen2", "gemma", "t5")
SMALL = ("small llama3", "small qwen2", "small gemma")
REAL = {"gpt2": "gpt2_tokenizer", "neox": "gpt_neox_tokenizer"}
SIZES = {"llama3": 128_256, "qwen2": 151_936, "gemma": 256_000, "t5": 1_100}
LEARNED = 2_000
"""Ids of a byte-level vocabulary before it is filled up."""

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_SPLIT = LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

Json = dict[str, Any]
Merges = list[tuple[str, str]]


def real_tokenizer(name):
    """Return the folder of a real tokenizer, of REAL; skips the test where NIELS_GPT_TEST_MODELS is not set."""
    models = os.environ.get("NIELS_GPT_TEST_MODELS")
    if not models or not (folder := Path(models) / REAL[name]).is_dir():
        pytest.skip(f"needs {REAL[name]} in the folder NIELS_GPT_TEST_MODELS")
    return folder


@functools.cache
def made_tokenizer(name):
    """Return the folder of a made tokenizer, of MADE or SMALL."""
    family = name.removeprefix("small ")
    size = SIZES.get(name)
    tokenizer, config = {"llama3": _llama_3, "qwen2": _qwen_2, "gemma": _gemma, "t5": _t5}[family](size)
    folder = Path(tempfile.mkdtemp(prefix=f"tokenizer-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def any_tokenizer(name):
    """Return the folder of a tokenizer of REAL, MADE or SMALL."""
    return real_tokenizer(name) if name in REAL else made_tokenizer(name)


def write_tokenizer(folder, name, **changes):
    """Copy a made tokenizer with some keys of its tokenizer.json changed; return the folder."""
    shutil.copytree(made_tokenizer(name), folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


# --- byte level -------------------------------------------------------------------------------------------------------


def _llama_3(size):
    reserved = iter(f"<|reserved_special_token_{n}|>" for n in range(256))
    special = ["<|begin_of_text|>", "<|end_of_text|>", *(next(reserved) for _ in range(4)), "<|start_header_id|>"]
    special += ["<|end_header_id|>", next(reserved), "<|eot_id|>", *(next(reserved) for _ in range(246))]
    tokenizer = _byte_level(size and size - len(special), LLAMA_3_SPLIT, ignore_merges=True)
    first = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] = [_added(token, first + at) for at, token in enumerate(special)]
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def _qwen_2(size):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(11))]
    tokens = [*special, "<tool_call>", "</tool_call>", *(f"<|extra_{n}|>" for n in range(11, 288))]
    tokenizer = _byte_level(size and size - len(tokens), QWEN_2_SPLIT, ignore_merges=False)
    first = len(tokenizer["model"]["vocab"])
    tokenizer["normalizer"] = {"type": "NFC"}
    tokenizer["added_tokens"] = [
        _added(token, first + at, special="tool_call" not in token) for at, token in enumerate(tokens)
    ]
    return tokenizer, {"bos_token": None, "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}}


def _byte_level(size, split, *, ignore_merges):
    alphabet, merges = _learned(split)
    high = [letter for letter in alphabet if letter > "\u0100"][:40]
    longer = (pair for pair in product(high, repeat=2))
    triples = ((a + b, c) for a, b, c in product(high, repeat=3))
    quadruples = ((a + b + c, d) for a, b, c, d in product(high, repeat=4))
    vocab, merges = _filled(alphabet, merges, (pair for each in (longer, triples, quadruples) for pair in each), size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return _tokenizer(
        {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern, byte_level]},
        decoder=byte_level,
    )


@functools.cache
def _learned(split):
    """Return the alphabet of bytes and the merges that the library learns from the sample."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sample_texts(), trainer)
    return sorted(pre_tokenizers.ByteLevel.alphabet()), _merges(tokenizer)


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def _gemma(size):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learner.train_from_iterator(sample_texts(), trainers.BpeTrainer(vocab_size=LEARNED, show_progress=False))
    merges = _merges(learner)
    single = sorted({letter for token in learner.get_vocab() for letter in token})
    rare = [chr(0x4E00 + n) for n in range(505)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    first = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *single, *rare]
    vocab, merges = _filled(first, merges, product(rare, repeat=2), size)
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": True}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    tokenizer = _tokenizer(
        {**model, "byte_fallback": True},
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        pre_tokenizer=split,
        decoder=_SENTENCEPIECE_DECODER,
        added_tokens=[_added(token, at) for at, token in enumerate(special)],
    )
    return tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>"}


def _t5(_):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample_texts()),
        model_writer=model,
        vocab_size=1_000,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        num_threads=1,
        minloglevel=3,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    # A byte piece is for what has no piece: its score keeps its literal, such as <0x0A>, out of ordinary text.
    scores = [-1_000.0 if processor.is_byte(at) else processor.get_score(at) for at in ids]
    extra = [f"<extra_id_{n}>" for n in range(99, -1, -1)]
    pieces = [*([processor.id_to_piece(at), scores[at]] for at in ids), *([token, 0.0] for token in extra)]
    special = [(at, piece[0]) for at, piece in enumerate(pieces) if at < 3 or at >= len(ids)]
    tokenizer = _tokenizer(
        {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": True},
        pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True},
        decoder=_SENTENCEPIECE_DECODER,
        added_tokens=[_added(token, at) for at, token in special],
    )
    return tokenizer, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


_SENTENCEPIECE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


# --- parts ------------------------------------------------------------------------------------------------------------


def sample_texts():
    """Return the documents of the bundled sample of FineWeb-Edu."""
    path = mirrors.SAMPLE_DIR / "HuggingFaceFW" / "fineweb-edu" / "train-00000.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _filled(first, merges, fill, size):
    """Return a vocabulary and its merges: half of `merges`, some of `fill` up to `size` ids, the other half."""
    early, late = merges[: len(merges) // 2], merges[len(merges) // 2 :]
    vocab = {token: at for at, token in enumerate(dict.fromkeys(first))}
    for left, right in early:
        vocab.setdefault(left + right, len(vocab))
    later = {left + right for left, right in late} - vocab.keys()
    kept = list(early)
    for left, right in _new(fill, vocab, later) if size else ():
        if len(vocab) + len(later) == size:
            break
        vocab[left + right] = len(vocab)
        kept.append((left, right))
    for left, right in late:
        vocab.setdefault(left + right, len(vocab))
    assert size in (None, len(vocab)), len(vocab)
    return vocab, [*kept, *late]


def _new(fill, vocab, later):
    return (
        (left, right)
        for left, right in fill
        if left in vocab and left + right not in vocab and left + right not in later
    )


def _merges(tokenizer):
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _added(token, token_id, *, special=True):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": special}


def _tokenizer(model, **parts):
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        **parts,
        "model": model,
    }


def sentencepiece_model(path, **how):
    """Train a SentencePiece model without the sentinels on texts of the sample; how: arguments of the trainer."""
    import sentencepiece

    defaults = {
        "vocab_size": 600,
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>"],
        "control_symbols": ["<mask>"],
        "num_threads": 1,
        "minloglevel": 3,
    }
    texts = [text for text in sample_texts() if find_reserved_literal(text) is None][:40]
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **(defaults | how))
    return path
