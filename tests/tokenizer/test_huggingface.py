"""Tokenizers of Hugging Face: ids as the library's, texts come back, control tokens stay out of plain text."""

import contextlib
import json
import os
import pickle
import shutil
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import encoder_of
from support.errors import refused
from support.made_tokenizers import (
    MADE,
    REAL,
    SIZES,
    SMALL,
    any_tokenizer,
    made_tokenizer,
    sample_texts,
    write_tokenizer,
)

from niels_gpt.cache import sha256_file
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_end
from niels_gpt.tokenizers.files import tokenizer_files
from niels_gpt.tokenizers.huggingface import MAX_ADDED_TOKENS, HuggingFaceTokenizer

LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in MADE if name != "t5"]
EVERY = (*REAL, "t5", *SMALL, *LARGE)
ENDS = {"gpt2": "<|endoftext|>", "neox": "<|endoftext|>", "llama3": "<|end_of_text|>", "qwen2": "<|endoftext|>"}
ENDS |= {"gemma": "<eos>", "t5": "</s>"}
ENDS |= {f"small {name}": end for name, end in ENDS.items()}
MARKED = "a<|endoftext|>b <|im_start|>c</s> <eos> <|eot_id|><bos>\n<|end_of_text|> d <pad><|extra_4|>"
TEXTS = (
    "",
    " ",
    "one\n",
    "two  spaces,   three and        many\t\ttabs \n\n\n ends \r\n",
    "1 12 123 1234 12345 3.14159 2026-11-22",
    "don't DON'T we'll I'm they've it'S",
    "NUL \0 and \0\0, control \x01\x1f\x7f",
    "emoji \U0001f98a \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea, \u6f22\u5b57, \u041f\u0440\u0438\u0432",
    "<0x0A> <0x41>\ufdd0 \ufffd \U0010ffff",
    *sample_texts()[:20],
)


@pytest.fixture(scope="module", params=EVERY)
def name(request):
    """The name of each tokenizer; skips those that are not here."""
    any_tokenizer(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name):
    return load_tokenizer(any_tokenizer(name))


def reference(name):
    return tokenizers.Tokenizer.from_file(str(any_tokenizer(name) / "tokenizer.json"))


def test_ids_are_those_of_the_library_and_texts_come_back(name, tokenizer):
    texts = [*TEXTS, MARKED]
    expected = [each.ids for each in reference(name).encode_batch(texts, add_special_tokens=False)]
    assert [tokenizer.encode(text) for text in texts] == expected
    for num_threads in (1, 2):
        arrays = tokenizer.encode_batch(texts, num_threads=num_threads)
        assert [ids.tolist() for ids in arrays] == expected
        assert all(ids.dtype == np.int32 for ids in arrays)
    assert [tokenizer.decode(ids) for ids in expected] == texts


def test_a_marked_text_has_control_ids_and_its_plain_encoding_none(name, tokenizer):
    control = tokenizer.control_ids
    assert control.intersection(tokenizer.encode(MARKED))
    literals = [tokenizer.token(token_id) for token_id in sorted(control)]
    texts = [MARKED, *literals, *(f"x{literal}{literal} y" for literal in literals)]
    for text, ids in zip(texts, tokenizer.encode_plain(texts), strict=True):
        assert not control.intersection(ids.tolist()), text
        assert tokenizer.decode(ids.tolist()) == text


def test_texts_without_control_tokens_have_the_same_ids_in_a_plain_encoding(tokenizer):
    expected = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
    assert [ids.tolist() for ids in tokenizer.encode_plain(TEXTS)] == expected
    tokenizer.encode_plain([MARKED])  # which may open the model in another way
    assert [ids.tolist() for ids in tokenizer.encode_plain(TEXTS)] == expected


def test_what_a_tokenizer_says_of_itself(name, tokenizer):
    vocab = reference(name).get_vocab(with_added_tokens=True)
    assert tokenizer.kind == "huggingface"
    assert tokenizer.vocab_size == max(vocab.values()) + 1 == SIZES.get(name, tokenizer.vocab_size)
    assert tokenizer.special_token_ids() == {}
    assert tokenizer.sha256 == sha256_file(any_tokenizer(name) / "tokenizer.json")
    end = document_end(tokenizer, ENDS[name])
    assert (
        end is not None
        and end.id == vocab[ENDS[name]] == tokenizer.token_id(end.token)
        and end.id in tokenizer.control_ids
    )
    assert tokenizer.unk_id == {"gemma": 3, "t5": 2}.get(name.removeprefix("small "))
    assert tokenizer.unk_id not in tokenizer.control_ids
    if name != "neox":  # which is a tokenizer.json alone
        assert document_end(tokenizer) == end == document_end(tokenizer, "eos")
    assert document_end(tokenizer, "none") is None
    with refused("E102", "sentinels", "--document-end"):
        document_end(tokenizer, "eot")
    with refused("E102", "'\\x1b[31m'"):
        document_end(tokenizer, "\x1b[31m")


def test_a_lone_surrogate_names_its_text(tokenizer):
    for call in (
        tokenizer.encode_batch,
        tokenizer.encode_plain,
        lambda texts: [tokenizer.encode(text) for text in texts],
    ):
        with refused("E304", "character 2", "'\\ud83d'"):
            call(["fine", "ab\ud83d"])


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for ids in ([-1], [0, tokenizer.vocab_size], np.array([1 << 40])):
        with refused("E409", "0 <= id", tokenizer.vocab_size):
            tokenizer.decode(ids)
    with refused("E102", "(2, 2)"):
        tokenizer.decode(np.zeros((2, 2), np.int64))
    assert tokenizer.decode(np.array(tokenizer.encode("a b"))) == "a b"


@pytest.mark.parametrize("made", ["t5", *SMALL, *LARGE])
@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_any_text_comes_back(made, text):
    tokenizer = _opened(made)
    expected = text.replace("\u2581", " ") if made.endswith(("t5", "gemma")) else text  # which stands for a space
    expected = unicodedata.normalize("NFC", text) if made.endswith("qwen2") else expected
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    ids = tokenizer.encode_plain([text])[0].tolist()
    assert not tokenizer.control_ids.intersection(ids)


_OPEN = {}


def _opened(made):
    if made not in _OPEN:
        _OPEN[made] = load_tokenizer(made_tokenizer(made))
    return _OPEN[made]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_pickled_copy_opens_the_same_file_and_refuses_a_changed_one(tmp_path):
    folder = write_tokenizer(tmp_path / "t", "t5")
    tokenizer = load_tokenizer(folder)
    packed = pickle.dumps(tokenizer)
    assert len(packed) < 1_000
    copy = pickle.loads(packed)
    assert copy.encode("a text") == tokenizer.encode("a text") and copy.eos_id == tokenizer.eos_id
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with refused("E402", path):
        pickle.loads(packed)
    with refused("E402", path):  # opened for the first time by this call
        tokenizer.encode_plain(["a text"])


def test_the_files_of_a_tokenizer(tmp_path, tiny_model_path):
    folder = write_tokenizer(tmp_path / "t", "t5")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    files = tokenizer_files(folder)
    assert list(files) == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert files == tokenizer_files(folder / "tokenizer.json")
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert tokenizer_files(tiny_model_path) == {"spm.model": tiny_model_path.read_bytes()}
    with refused("E401", "tokenizer.json", kind=FileNotFoundError):
        tokenizer_files(tmp_path)


def test_links_are_for_snapshots_of_the_hub(tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in made_tokenizer("t5").iterdir():
        (snapshot / path.name).symlink_to(path)
    for call in (load_tokenizer, tokenizer_files):
        with refused("E205", snapshot / "tokenizer.json", "link", "pass --follow-links"):
            call(snapshot)
    assert load_tokenizer(snapshot, follow_links=True).eos_id == 1
    assert load_tokenizer(snapshot / "tokenizer.json").eos_id == 1
    with refused("E205", snapshot / "tokenizer.json", "link"):
        load_tokenizer(snapshot / "tokenizer.json", follow_links=False)
    assert len(tokenizer_files(snapshot, follow_links=True)) == 2


def test_a_folder_of_both_kinds_needs_its_meta(tmp_path, tiny_model_path):
    folder = write_tokenizer(tmp_path / "t", "t5")
    shutil.copy(tiny_model_path, folder / "spm.model")
    with refused("E403", folder, "both", "spm.model", "tokenizer.json"):
        load_tokenizer(folder)
    for kind in ("sentencepiece", "huggingface"):
        (folder / "meta.json").write_text(json.dumps({"tokenizer_kind": kind}))
        assert load_tokenizer(folder).kind == kind


@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model"])
def test_a_model_with_the_name_that_it_has_on_the_hub(tmp_path, tiny_model_path, file):
    shutil.copy(tiny_model_path, tmp_path / file)
    assert load_tokenizer(tmp_path).sha256 == load_tokenizer(tiny_model_path).sha256


@pytest.mark.parametrize(
    ("config", "tokens_map", "eos"),
    [
        (None, None, None),
        ({}, {"eos_token": "</s>"}, 1),
        ({"eos_token": None}, {"eos_token": {"content": "<pad>"}}, 0),
        ({"eos_token": {"content": "</s>"}}, {"eos_token": "<pad>"}, 1),
        ({"eos_token": "not a token"}, None, None),
        ({"eos_token": "not a token"}, {"eos_token": "</s>"}, 1),
        ({"eos_token": 7}, None, None),
    ],
)
def test_the_end_of_a_text(tmp_path, config, tokens_map, eos):
    folder = write_tokenizer(tmp_path / "t", "t5")
    (folder / "tokenizer_config.json").unlink()
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens_map)):
        if content is not None:
            (folder / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id == eos
    if eos is None:
        with refused("E102", "--document-end ", "</s>", "--document-end none"):
            document_end(tokenizer)
    if eos is None and config and isinstance(config["eos_token"], str):
        with refused("E102", "eos_token", "'not a token'"):
            document_end(tokenizer, "eos")


def test_a_byte_order_mark_before_the_json_changes_no_id(tmp_path):
    path = write_tokenizer(tmp_path / "t", "t5") / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    tokenizer, plain = load_tokenizer(path), load_tokenizer(made_tokenizer("t5"))
    assert [tokenizer.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]
    assert tokenizer.sha256 == sha256(path.read_bytes()).hexdigest() != plain.sha256


@pytest.mark.parametrize("part", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_part_of_a_tokenizer_names_the_file_that_has_the_model(tmp_path, part):
    (tmp_path / part).write_text("{}")
    with refused("E403", tmp_path / part, "tokenizer.json", "Sent"):
        load_tokenizer(tmp_path / part)
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused("E403", tmp_path / part, tmp_path / "tokenizer.json"):
        load_tokenizer(tmp_path / part)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}], "pair": []}
    bos["special_tokens"] = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    folder = write_tokenizer(
        tmp_path / "t", "t5", truncation=cut, padding={**pad, "pad_token": "<pad>"}, post_processor=bos
    )
    tokenizer, plain = load_tokenizer(folder), load_tokenizer(made_tokenizer("t5"))
    for text in ("a", "a longer text of several words, one after the other"):
        assert tokenizer.encode(text) == plain.encode(text) == tokenizer.encode_plain([text])[0].tolist()


def test_dropout_which_merges_at_random_is_switched_off(tmp_path):
    model = json.loads((made_tokenizer("small llama3") / "tokenizer.json").read_text())["model"]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", "small llama3", model={**model, "dropout": 0.5}))
    expected = load_tokenizer(made_tokenizer("small llama3")).encode(TEXTS[-1])
    assert all(tokenizer.encode(TEXTS[-1]) == expected for _ in range(5))
    assert tokenizer.encode_plain([TEXTS[-1]])[0].tolist() == expected


@pytest.mark.parametrize("made", ["t5", "small qwen2", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_threads_may_encode_plainly_at_the_same_time(made):
    expected = load_tokenizer(made_tokenizer(made)).encode_plain([MARKED] * 3)
    for _ in range(5 if made == "t5" else 1):
        fresh = load_tokenizer(made_tokenizer(made))
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _, one=fresh: one.encode_plain([MARKED] * 3), range(8)))
        assert all(np.array_equal(ids, expected[0]) for arrays in found for ids in arrays)


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = load_tokenizer(made_tokenizer("small qwen2"))
    token_id = tokenizer.token_id("<tool_call>")
    assert (
        token_id in tokenizer.encode("a <tool_call> b") and token_id in tokenizer.encode_plain(["a <tool_call> b"])[0]
    )
    assert token_id not in tokenizer.control_ids
    assert tokenizer.token_id("no token") is None


# --- damaged and hostile files ----------------------------------------------------------------------------------------


def _with(at, value):
    """Return a function that sets a value, by its path with dots, in a tokenizer.json."""

    def change(content):
        *path, last = at.split(".")
        inner = content
        for key in path:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        if isinstance(inner, list):
            inner[int(last)] = value
        else:
            inner[last] = value

    return change


def _with_many_added(content):
    token, first = content["added_tokens"][0], len(content["model"]["vocab"])
    content["added_tokens"] += [
        {**token, "id": first + number, "content": f"<{number}>"} for number in range(MAX_ADDED_TOKENS)
    ]


def _replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(steps):
    return {"type": "Sequence", "normalizers": steps}


HOSTILE = {
    "empty": b"",
    "no json": b"no model",
    "truncated": b'{"version": "1.0", "added_tok',
    "an array": b"[1, 2]",
    "another object": b'{"a": 1}',
    "nested deeply": b'{"added_tokens":' + b"[" * 100_000,
    "no model": _with("model", None),
    "a model of another type": _with("model.type", "\x1b[31mX"),
    "vocabulary empty": _with("model.vocab", []),
    "vocabulary of numbers": _with("model.vocab", [1, 2]),
    "vocabulary huge id": _with("model", {"type": "BPE", "vocab": {"a": 0, "b": 1 << 31}, "merges": []}),
    "vocabulary negative id": _with("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "merges of nothing": _with("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
    "unknown id outside": _with("model.unk_id", 1 << 30),
    "two pieces of one id": _with("model", {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}),
    "added huge id": _with("added_tokens.3.id", 1 << 31),
    "added after a gap": _with("added_tokens.3", {"content": "<new>", "id": 5_000, "special": True}),
    "added without an id": _with("added_tokens.3", {"content": "<new>"}),
    "added is a number": _with("added_tokens.3", 7),
    "added are an object": _with("added_tokens", {}),
    "added are many": _with_many_added,
    "normalizer": _with("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
    "charsmap": _with("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a text 10,000 times as long": _with("normalizer", _replace({"String": " "}, "x" * 10_000)),
    "a text 10**8 times as long": _with("normalizer", _sequence([_replace({"String": "a"}, "a" * 100)] * 4)),
    "a text of nothing": _with("normalizer", _sequence([_replace({"Regex": ""}, "x")] * 7)),
    "a text with a long beginning": _with("normalizer", {"type": "Prepend", "prepend": "x" * 100}),
    "1,000 steps": _with("normalizer", _sequence([{"type": "NFC"}] * 1_000)),
    "a text by way of NFKC": _with(
        "normalizer",
        _sequence([_replace({"String": "b"}, "\uff42" * 10), {"type": "NFKC"}, _replace({"String": "b"}, "b" * 10)]),
    ),
    "a text of intervals that are swapped": _with("normalizer", _sequence([_replace({"Regex": "z{3,0}"}, "x")] * 7)),
    "a text of intervals that are optional": _with("normalizer", _sequence([_replace({"Regex": "z{1}?"}, "x")] * 7)),
    "a decoder of 10,000 times": _with("decoder", _replace({"String": "e"}, "e" * 10_000)),
    "a template of 1,000 pieces": _with(
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}] * 1_000,
            "pair": [],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
    ),
    "eos file": None,
}


def test_a_normalizer_of_many_small_replacements_is_no_bomb(tmp_path):
    folder = write_tokenizer(tmp_path / "t", "t5")
    content = json.loads((folder / "tokenizer.json").read_text())
    words = {"…": "...", "½": "1/2", "ﬁ": "fi", "œ": "oe", "æ": "ae", "ß": "ss", "™": "(tm)", "№": "No."}
    steps = [_replace({"String": one}, text) for one, text in words.items()]
    steps += [
        _replace({"Regex": one}, " ") for one in (" {2,}", r"\s+", "[\u2028\u2029]", "\t", r"\p{Zs}+", "[^\\S ]", "_+")
    ]
    content["normalizer"] = _sequence(steps)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = "".join(words) + "\u2028a__b"
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert HuggingFaceTokenizer(folder).encode(text) == expected


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_file_is_refused(tmp_path, case):
    folder = write_tokenizer(tmp_path / "t", "t5")
    path, change = folder / "tokenizer.json", HOSTILE[case]
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif change is None:
        (folder / "tokenizer_config.json").write_bytes(b"[" * 100_000)
    else:
        content = json.loads(path.read_text())
        for token in content["added_tokens"]:
            token.update(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
        change(content)
        path.write_text(json.dumps(content))
    with refused("E403", folder) as caught:
        HuggingFaceTokenizer(folder)
    assert str(caught.value).isprintable(), "what a file holds must not reach a terminal unescaped"


def test_files_that_are_too_large_or_no_files_are_refused(tmp_path):
    folder = write_tokenizer(tmp_path / "t", "t5")
    os.truncate(folder / "tokenizer_config.json", 1 << 24)
    with refused("E206", "tokenizer_config.json"):
        load_tokenizer(folder, follow_links=True)
    os.truncate(folder / "tokenizer.json", 1 << 28)
    with refused("E206", "tokenizer.json"):
        load_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with refused("E205", folder / "tokenizer.json", "regular"):  # and does not wait for a writer
        load_tokenizer(folder / "tokenizer.json")
    with refused("E401", tmp_path / "none", kind=FileNotFoundError):
        load_tokenizer(tmp_path / "none")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    "put", [os.mkfifo, os.mkdir, lambda path: (Path(path).touch(), os.truncate(path, (1 << 23) - 1))]
)
def test_what_is_no_file_of_a_tokenizer_is_to_be_removed_from_its_folder(tmp_path, put, name):
    folder = write_tokenizer(tmp_path / "t", "t5")
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    for call in (tokenizer_files, load_tokenizer)[: 1 if name.endswith("jinja") else 2]:
        with refused("E205", folder / name, "Remove"):
            call(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("eos", "fails"), [("\u2581the", True), ("<unk>", False)])
def test_an_eos_that_is_a_word_or_the_unknown_token(tmp_path, eos, fails):
    folder = write_tokenizer(tmp_path / "t", "gemma")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = load_tokenizer(folder)
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(refused("E305", "'\\u2581the'", "eos"))
        (ids,) = tokenizer.encode_plain([f"<eos> the {eos} end"])
    if not fails:
        assert tokenizer.decode(ids.tolist()) == f"<eos> the {eos} end" and tokenizer.eos_id not in ids.tolist()


def test_a_text_that_a_model_cannot_encode_is_an_error_with_a_code(tmp_path):
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", "t5", model=model, added_tokens=[]))
    with refused("E408", "tokenizer.json", "cannot encode"):
        tokenizer.encode("b")
    assert tokenizer.encode("a") == [0]
    encoder = encoder_of(tokenizer)
    assert encoder.loses_u2581 and encoder.encode(["a"]).ids.tolist() == [0]
    with refused("E408", "document 8 of the source", "cannot encode"):
        encoder.encode(["a", "b"], first=7)
