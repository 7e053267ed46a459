"""Texts survive, sentinels are single ids, wrong models are refused."""

import hashlib
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.errors import refused

from niels_gpt import tokenizer as tokenizer_module
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizer import SentencePieceTokenizer, TokenizerPaths, load_tokenizer

USR, EOT = SPECIAL_TOKENS[1], SPECIAL_TOKENS[3]
# Full-width forms of the same characters: NFKC makes the literal of them.
LOOK_ALIKE = EOT.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)})


def make_model(path, **options):
    """Train a model that niels_gpt would not, straight with SentencePiece."""
    import sentencepiece

    model = io.BytesIO()
    defaults = {"vocab_size": 300, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 3}
    texts = [f"line {number} of some text" for number in range(50)]
    options = {**defaults, **options, "sentence_iterator": iter(texts), "model_writer": model}
    sentencepiece.SentencePieceTrainer.train(**options)
    path.write_bytes(model.getvalue())
    return path


@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=("Cs",))))
@example("  two  spaces \t\r\n\n")
@example("nul \0 inside")
@example("\u2585 \ufeff \u2028 \ufffd \U0010ffff")
@example("<unk> <s> </s> <0x41>")
@example(USR + "a" + EOT)
def test_every_text_without_u2581_comes_back(tiny_tokenizer, text):
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    assert tiny_tokenizer.decode(tiny_tokenizer.encode("a\u2581b")) == "a b"


def test_no_mark_is_added_around_a_text(tiny_tokenizer):
    assert tiny_tokenizer.encode("") == []
    assert tiny_tokenizer.encode("q") * 2 == tiny_tokenizer.encode("q") + tiny_tokenizer.encode("q")
    assert not {0, 1, 2} & set(tiny_tokenizer.encode("The heron walks."))  # unk, BOS, EOS


def test_a_sentinel_in_a_document_becomes_its_id_which_is_why_builders_guard(
    tiny_tokenizer,
):
    special = tiny_tokenizer.special_token_ids()
    ids = tiny_tokenizer.encode(f"a{EOT}b")
    assert ids == [*tiny_tokenizer.encode("a"), special["eot"], *tiny_tokenizer.encode("b")]
    assert not set(special.values()).isdisjoint(ids)


def test_a_full_width_look_alike_of_a_sentinel_stays_text(tiny_tokenizer):
    ids = tiny_tokenizer.encode(LOOK_ALIKE)
    assert set(tiny_tokenizer.special_token_ids().values()).isdisjoint(ids)
    assert tiny_tokenizer.decode(ids) == LOOK_ALIKE


def test_each_sentinel_is_one_id_and_decodes_to_itself(tiny_tokenizer):
    ids = tiny_tokenizer.special_token_ids()
    assert list(ids) == ["sys", "usr", "asst", "eot"]
    for literal, token_id in zip(SPECIAL_TOKENS, ids.values(), strict=True):
        assert tiny_tokenizer.encode(literal) == [token_id]
        assert tiny_tokenizer.decode([token_id]) == literal


def test_a_batch_equals_its_texts_one_by_one_whatever_the_threads(tiny_tokenizer):
    texts = ["The heron", "", "walks\n", "é" * 10]
    for num_threads in (1, 3):
        batch = tiny_tokenizer.encode_batch(texts, num_threads=num_threads)
        assert [array.tolist() for array in batch] == [tiny_tokenizer.encode(text) for text in texts]
        assert {array.dtype for array in batch} == {np.dtype(np.int32)}
    assert tiny_tokenizer.encode_batch([]) == []


def test_a_tensor_of_ids_is_int64_and_one_dimensional(tiny_tokenizer):
    ids = tiny_tokenizer.encode_torch("The otter", device="cpu")
    assert (ids.dtype, ids.tolist()) == (torch.int64, tiny_tokenizer.encode("The otter"))
    assert tuple(tiny_tokenizer.encode_torch("").shape) == (0,)


def test_lists_arrays_and_tensors_decode_alike(tiny_tokenizer):
    ids = tiny_tokenizer.encode("the mill")
    for form in (ids, tuple(ids), np.array(ids, np.uint16), list(np.array(ids, np.int32)), torch.tensor(ids)):
        assert tiny_tokenizer.decode(form) == "the mill"
    assert tiny_tokenizer.decode([]) == ""


def test_ids_that_are_no_ids_are_refused(tiny_tokenizer):
    for wrong in (-1, tiny_tokenizer.vocab_size):
        with refused("E409", f"id {wrong}", f"vocab_size={tiny_tokenizer.vocab_size}"):
            tiny_tokenizer.decode([5, wrong])
    with refused("E102", "shape (1, 2)"):
        tiny_tokenizer.decode(np.array([[5, 6]]))


def test_half_a_surrogate_pair_is_refused_with_its_place(tiny_tokenizer):
    with refused("E304", "text 0, character 2", "'\\ud83d'"):
        tiny_tokenizer.encode("ab\ud83d")
    with refused("E304", "text 1, character 0"):
        tiny_tokenizer.encode_batch(["fine", "\ud83d"])


def test_a_folder_its_model_file_and_a_relative_path_open_the_same_tokenizer(tiny_model_path, monkeypatch):
    monkeypatch.chdir(tiny_model_path.parent)
    by_file, by_folder = load_tokenizer(tiny_model_path), load_tokenizer(tiny_model_path.parent)
    assert by_file.model_path == by_folder.model_path == str(tiny_model_path.absolute())
    assert load_tokenizer("spm.model").model_path == by_file.model_path
    assert by_file.sha256 == hashlib.sha256(tiny_model_path.read_bytes()).hexdigest()
    assert TokenizerPaths.in_folder(tiny_model_path.parent).model_path == tiny_model_path


def test_a_pickled_tokenizer_opens_its_file_again_and_notices_another_one(tiny_model_path, tmp_path):
    copy = tmp_path / "spm.model"
    copy.write_bytes(tiny_model_path.read_bytes())
    tokenizer = load_tokenizer(copy)
    packed = pickle.dumps(tokenizer)
    assert len(packed) < 1_000  # a path, not the model
    assert pickle.loads(packed).encode("the mill") == tokenizer.encode("the mill")
    make_model(copy, user_defined_symbols=list(SPECIAL_TOKENS))
    with refused("E402", copy, "sha256"):
        pickle.loads(packed)


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, "E401", ["niels-gpt train-tokenizer"]),
        (b"", "E403", ["SentencePiece model"]),
        (b"no model", "E403", ["SentencePiece model"]),
        ({}, "E404", ["none of the four", "niels-gpt add-sentinels ", "spm.model OUT"]),
        ({"control_symbols": list(SPECIAL_TOKENS)}, "E404", ["encodes to [", "the one id 3"]),
    ],
)
def test_a_file_that_is_no_model_of_ours_is_refused(tmp_path, content, code, said):
    if isinstance(content, bytes):
        (tmp_path / "spm.model").write_bytes(content)
    elif content is not None:
        make_model(tmp_path / "spm.model", **content)
    with refused(code, tmp_path / "spm.model", *said, kind=FileNotFoundError if code == "E401" else CacheError):
        load_tokenizer(tmp_path, sentinels="required")


def test_a_model_with_a_dummy_prefix_is_accepted(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path / "spm.model", user_defined_symbols=list(SPECIAL_TOKENS)))
    prefix, token_id = tokenizer.encode(EOT)
    assert token_id == tokenizer.special_token_ids()["eot"] != prefix


def test_other_special_ids_than_a_cache_was_written_with_are_refused(tiny_model_path):
    ids = load_tokenizer(tiny_model_path).special_token_ids()
    assert SentencePieceTokenizer(tiny_model_path, expected_special_token_ids=ids).special_token_ids() == ids
    with refused("E404", "'eot': 6", "'eot': 7"):
        SentencePieceTokenizer(tiny_model_path, expected_special_token_ids={**ids, "eot": 7})
    for wrong in (SPECIAL_TOKENS[:3], (USR, USR, USR, EOT)):
        with refused("E102", "special_tokens=", "four"):
            SentencePieceTokenizer(tiny_model_path, special_tokens=wrong)


def test_the_default_tokenizer_is_opened_once_and_on_demand(tiny_model_path, tmp_path, monkeypatch):
    tokenizer_module.get_default_tokenizer.cache_clear()
    monkeypatch.setattr(tokenizer_module, "DEFAULT_TOKENIZER_PATH", tmp_path / "spm.model")
    with refused("E401", tmp_path / "spm.model", "niels-gpt train-tokenizer", kind=FileNotFoundError):
        tokenizer_module.encode("x")
    monkeypatch.setattr(tokenizer_module, "DEFAULT_TOKENIZER_PATH", tiny_model_path)
    try:
        assert tokenizer_module.get_default_tokenizer() is tokenizer_module.get_default_tokenizer()
        assert tokenizer_module.decode(tokenizer_module.encode("the mill")) == "the mill"
    finally:
        tokenizer_module.get_default_tokenizer.cache_clear()


def test_importing_the_modules_loads_neither_torch_nor_sentencepiece_nor_numpy():
    names = "special_tokens, tokenizer, tokenizer_training, chat_template, train_tokenizer"
    code = f"from niels_gpt import {names}; import sys; print({{'torch', 'sentencepiece', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
