"""Training is reproducible and says what it left out."""

import hashlib
import json
import logging
import shutil

import pytest
from support.commands import niels_gpt
from support.data_files import lines, write
from support.errors import refused

from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

WORDS = ["anchor", "basket", "candle", "drizzle", "engine", "fennel", "gravel"]
WORDS += ["hollow", "island", "jumper", "kettle", "lantern", "marble", "needle"]
TEXTS = [
    f"Line {number}: the {WORDS[number % 14]} and the {WORDS[number % 11]} by the {WORDS[number % 9]}.\nIt was warm.\n"
    for number in range(60)
]


def write_corpus(folder):
    """60 texts as .txt, .md, .jsonl and .jsonl.gz, below `folder`."""
    for number, text in enumerate(TEXTS[:20]):
        write(folder / "deep" / f"{number}.txt", text)
    write(folder / "deep" / "er" / "note.md", "".join(TEXTS[20:40]))
    rows = [{"text": text, "other": 1} for text in TEXTS[40:]]
    write(folder / "rows.jsonl", lines(*rows[:10]))
    write(folder / "rows.jsonl.gz", lines(*rows[10:]))
    return folder


def train(*arguments):
    return niels_gpt(*arguments, module="niels_gpt.train_tokenizer")


def run(folder, out_dir, *more):
    """Train on all files below `folder`; returns the meta."""
    done = train("--input_glob", f"{folder}/**/*.*", "--out_dir", out_dir, "--vocab_size", "320", *more)
    assert done.status == 0
    meta = json.loads((out_dir / "tokenizer_meta.json").read_bytes())
    return meta


def test_the_same_texts_give_the_same_model_and_meta_whatever_the_seed():
    first, second, other = (train_tokenizer(TEXTS, vocab_size=320, seed=seed) for seed in (42, 42, 7))
    assert first == second
    assert other.model == first.model
    assert {**other.meta, "seed": 42} == first.meta


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_vocabulary_has_the_size_asked_for_sentinels_included(model_type, tmp_path):
    trained = train_tokenizer(iter(TEXTS), vocab_size=320, model_type=model_type)
    tokenizer = load_tokenizer(write_tokenizer(trained, tmp_path / "new" / "folder").model_path)
    assert tokenizer.vocab_size == trained.meta["vocab_size"] == trained.meta["requested_vocab_size"] == 320
    assert tokenizer.special_token_ids() == trained.meta["special_token_ids"]
    assert tokenizer.sha256 == trained.meta["model_sha256"]
    assert tokenizer.decode(tokenizer.encode(" \0a\n\n  b\t")) == " \0a\n\n  b\t"


def test_a_small_corpus_gets_the_largest_vocabulary_it_allows_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        trained = train_tokenizer(TEXTS, vocab_size=16_000)
    size = trained.meta["vocab_size"]
    assert 320 < size < 16_000
    assert trained.meta["requested_vocab_size"] == 16_000
    assert caplog.messages == [f"the texts allow a vocabulary of {size} ids only, 16000 were asked for"]
    # That size is one to ask for: now nothing is short, and no second warning comes.
    assert train_tokenizer(TEXTS, vocab_size=size).meta["vocab_size"] == size
    assert len(caplog.messages) == 1


def test_the_counts_say_what_was_seen():
    texts = ["abc\n\n", "d\0e", "x\u2581y", f"no {SPECIAL_TOKENS[0]}", "nor <|eot|>", "", "\n"]
    meta = train_tokenizer(texts, vocab_size=300, trained_on=["a", "b"]).meta
    given_bytes = sum(len(text.encode()) for text in texts)
    assert {
        "documents": 7,
        "documents_with_reserved_literal": 2,
        "documents_with_u2581": 1,
        "pieces": 3,
        "bytes_given": given_bytes,
        "bytes_seen": 3 + 2 + 5,  # final line ends and NUL are not seen
        "share_seen": 10 / given_bytes,
        "trained_on": ["a", "b"],
        "lossless": True,
    }.items() <= meta.items()


def test_the_inputs_are_hashed_with_their_lengths():
    expected = hashlib.sha256()
    for text in ("ab", "c"):
        expected.update(len(text).to_bytes(8, "little") + text.encode())
    assert train_tokenizer(["ab", "c"], vocab_size=300).meta["inputs_sha256"] == expected.hexdigest()
    assert train_tokenizer(["a", "bc"], vocab_size=300).meta["inputs_sha256"] != expected.hexdigest()


def test_long_lines_are_seen(tmp_path):
    # SentencePiece by itself would leave out this line of 30,000 bytes, and its word with it.
    trained = train_tokenizer([*TEXTS, "Quetzalcoatl! " * 2_200], vocab_size=380)
    tokenizer = load_tokenizer(write_tokenizer(trained, tmp_path).model_path)
    assert trained.meta["share_seen"] > 0.99
    assert len(tokenizer.encode("Quetzalcoatl")) <= 2


def test_max_bytes_cuts_the_document_that_passes_it_and_reads_no_further():
    read = []

    def texts():
        for text in ("abcd", "ef\u20acgh", "never"):
            read.append(text)
            yield text

    progress = []
    trained = train_tokenizer(texts(), vocab_size=300, max_bytes=8, progress=lambda *now: progress.append(now))
    assert read == ["abcd", "ef\u20acgh"]
    assert trained.meta["bytes_given"] == 6  # "abcd" and "ef": the euro sign's three bytes would be nine in all
    assert progress == [(1, 4, 8), (2, 6, 8)]


def test_an_error_of_the_texts_comes_through():
    def texts():
        yield from TEXTS
        raise ConnectionError("the line went dead")

    with pytest.raises(ConnectionError, match="the line went dead"):
        train_tokenizer(texts(), vocab_size=320)


def test_nothing_to_train_on_is_refused():
    for texts in ([], ["", "\n"], ["<|eot|>"]):
        with refused("E406", f"{len(texts)} documents"):
            train_tokenizer(texts)
    with refused("E406", "vocab_size=263", " need 30"):  # fewer than characters
        train_tokenizer(TEXTS, vocab_size=263)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("vocab_size", 65_537), ("vocab_size", 0), ("model_type", "word"), ("normalization", "none")),
        *(("character_coverage", 0.0), ("max_bytes", 0)),
    ],
)
def test_a_bad_argument_is_refused_by_name(name, value):
    with refused("E102", f"{name}={value!r}"):
        train_tokenizer(TEXTS, **{name: value})


def test_nmt_nfkc_is_said_to_lose_text_and_lets_look_alikes_through(tmp_path):
    trained = train_tokenizer(TEXTS, vocab_size=320, normalization="nmt_nfkc")
    tokenizer = SentencePieceTokenizer(write_tokenizer(trained, tmp_path).model_path)
    assert trained.meta["lossless"] is False
    assert tokenizer.decode(tokenizer.encode("  the\n\ncat ")) == "the cat"
    look_alike = SPECIAL_TOKENS[3].translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)})
    ids = tokenizer.encode(look_alike)
    assert not set(tokenizer.special_token_ids().values()).isdisjoint(ids)


def test_the_same_files_in_another_folder_give_the_same_files(tmp_path, monkeypatch):
    here = write_corpus(tmp_path / "here")
    there = tmp_path / "quite" / "another" / "place"
    shutil.copytree(here, there)
    meta = run(here, tmp_path / "a")
    assert run(there, tmp_path / "b") == meta
    assert (tmp_path / "a" / "spm.model").read_bytes() == (tmp_path / "b" / "spm.model").read_bytes()
    assert meta["documents"] == 20 + 1 + 20
    assert meta["input_files"][:2] == ["deep/0.txt", "deep/1.txt"]
    assert meta["input_globs"] == ["**/*.*"]
    monkeypatch.chdir(here)
    assert train("--input_glob", "**/*.*", "--out_dir", tmp_path / "c", "--vocab_size", "320").status == 0
    assert json.loads((tmp_path / "c" / "tokenizer_meta.json").read_bytes()) == meta


def test_the_report_tells_size_share_and_sha_and_a_file_that_two_patterns_match_is_read_once(tmp_path):
    folder = write_corpus(tmp_path / "in")
    patterns = ["--input_glob", f"{folder}/**/*.*", "--input_glob", f"{folder}/rows.jsonl"]
    said = train(*patterns, "--out_dir", tmp_path / "out", "--vocab_size", "9000").out
    meta = json.loads((tmp_path / "out" / "tokenizer_meta.json").read_bytes())
    assert f"vocabulary: {meta['vocab_size']} ids, sha256 {meta['model_sha256']}" in said
    assert "fewer than the 9000 asked for" in said
    assert "trained on 41 documents from 23 files" in said


def test_a_pattern_without_match_fails_with_a_message(tmp_path):
    done = train("--input_glob", f"{tmp_path}/*.txt", "--out_dir", tmp_path / "out")
    assert done.status == 1 and "no file matches --input-glob" in done.err
    assert not (tmp_path / "out").exists()


def test_a_missing_field_fails_with_the_fields_there_are(tmp_path):
    folder = write_corpus(tmp_path / "in")
    done = train("--input_glob", f"{folder}/*.jsonl", "--out_dir", tmp_path, "--text-field", "body")
    assert done.status == 1
    assert "row 1: expected text in the field 'body', found NoneType; its fields are other, text" in done.err


def test_bytes_that_are_no_utf8_are_replaced(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 " * 30)
    meta = run(tmp_path, tmp_path / "out")
    assert meta["bytes_given"] == 30 * len("caf\ufffd ".encode())


@pytest.mark.parametrize("arguments", [[], ["--input_glob", "x", "--vocab_size", "many"], ["--no_such_flag"]])
def test_usage_errors_exit_with_2(arguments):
    assert train(*arguments).status == 2
