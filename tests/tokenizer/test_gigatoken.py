"""gigatoken gives the ids of the library that a tokenizer was made for, in bounded memory; where it does not, a build
stops and names the document. Needs the extra `fast`; real text is a mirror's, of NIELS_GPT_TEST_DATA."""

import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from support import LONG, TESTS, engines
from support.byte_tokenizer import ByteTokenizer
from support.engines import FIRST_COMPARED, ONE_COMPARED_OF, PIECE_BYTES
from support.errors import refused
from support.made_tokenizers import MADE, REAL, SMALL, any_tokenizer, made_tokenizer, sample_texts, write_tokenizer
from support.tiny_texts import TINY_TEXTS

from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer
from niels_gpt.tokenizers.engine import EngineDifference, compared_keys, num_compared, open_engine

pytest.importorskip("gigatoken", reason="needs the extra fast")

LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in MADE if name != "t5"]
BPE = ("gpt2", "neox", *SMALL, *LARGE)
NEW_LETTERS = "\u088f \ua7ce \U00010940 \U000323b0"  # of Unicode 17
UNORDERED_MARKS = "a\u1df6\u05a2 \u1ad3\u073b a\u0302\u0323 \u1100\u1161 \u212b"


@pytest.fixture(scope="module", params=BPE)
def tokenizer(request):
    return load_tokenizer(any_tokenizer(request.param))


@pytest.fixture(scope="module")
def llama():
    return load_tokenizer(made_tokenizer("small llama3"))


def assert_ids_of_reference(tokenizer, texts):
    engine, reference = open_engine(tokenizer, "gigatoken"), open_engine(tokenizer, "reference")
    assert engine.name == "gigatoken"
    for at in range(0, len(texts), 512):
        part = texts[at : at + 512]
        found, expected = engine.encode(part, first=0), reference.encode(part, first=0)
        assert all(map(np.array_equal, found, expected))
        assert found[1].dtype == np.int64 and found[0].dtype.kind in "iu"


def odd_texts(tokenizer, seed, number):
    """Yield texts of few characters, of random code points, and of literals of the tokenizer's control tokens."""
    generator = random.Random(seed)
    literals = [tokenizer.token(token_id) for token_id in sorted(tokenizer.control_ids)[:8]]
    alphabets = [
        " \n\t\r\u00a0\u3000ab1.",
        "'sdtmlrveSDTMLRVE \u2019",
        "0123456789\u0660\u00bd\u2167,. ",
        "e\u0301a\u0308\u200d\U0001f98a\u2581\ufeff\0\u0323\uac00\u11a8",
        [*literals, "<", ">", " ", "a", "\n", *(literal[1:] for literal in literals), *SPECIAL_TOKENS],
    ]
    for index in range(number):
        if index % 6 == 5:
            codes = (generator.randrange(0x110000 if generator.random() < 0.3 else 0x3100) for _ in range(50))
            yield "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        else:
            yield "".join(generator.choices(alphabets[index % 6], k=generator.randrange(60)))


# --- the same ids -----------------------------------------------------------------------------------------------------


def test_odd_texts_have_the_references_ids(tokenizer):
    texts = [*odd_texts(tokenizer, 1, 3000), NEW_LETTERS, UNORDERED_MARKS, "", "\0", "\ufffd" * 3, "x" * 20_000]
    assert_ids_of_reference(tokenizer, [text.encode() for text in (*texts, *sample_texts())])


def test_letters_of_a_newer_unicode_are_left_to_the_reference():
    tokenizer = load_tokenizer(any_tokenizer("gpt2"))
    texts = [f"{letter}'s{letter}'S ".encode() for letter in NEW_LETTERS.split()]
    fast, reference = engines.gigatoken(tokenizer), open_engine(tokenizer, "reference")
    assert not any(np.array_equal(fast.encode([text])[0], reference.encode([text], first=0)[0]) for text in texts)
    assert all(fast.may_differ(text) for text in texts)
    assert_ids_of_reference(tokenizer, texts)


@pytest.mark.slow
def test_marks_in_another_order_are_left_to_the_reference():
    tokenizer = load_tokenizer(made_tokenizer("qwen2"))
    assert all(engines.gigatoken(tokenizer).may_differ(f"a{pair}".encode()) for pair in UNORDERED_MARKS.split())
    generator = random.Random(2)
    marks = [chr(code) for code in (*range(0x300, 0x370), *range(0x1AB0, 0x1B00), *range(0x1DC0, 0x1E00), 0x5A2, 0x73B)]
    assert_ids_of_reference(tokenizer, [f"a{''.join(generator.choices(marks, k=3))}".encode() for _ in range(1000)])


@pytest.fixture(scope="module", params=["identity", "llama 2"])
def sentencepiece_bpe(request, tmp_path_factory):
    import sentencepiece

    path = tmp_path_factory.mktemp("bpe") / "spm.model"
    if request.param == "identity":  # as this project trains them, with the sentinels
        path.write_bytes(train_tokenizer(TINY_TEXTS, vocab_size=600, model_type="bpe").model)
        return load_tokenizer(path)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TINY_TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=3,
    )
    path.write_bytes(model.getvalue())
    return load_tokenizer(path, sentinels="optional")


def test_sentencepiece_bpe_has_the_ids_of_sentencepiece(sentencepiece_bpe):
    texts = [*odd_texts(sentencepiece_bpe, 3, 3000), "<s> </s> <unk> <0x41>", NEW_LETTERS, UNORDERED_MARKS, ""]
    assert_ids_of_reference(sentencepiece_bpe, [text.encode() for text in (*texts, *TINY_TEXTS)])


def documents_of_mirror(max_bytes):
    """Return documents of the mirror, some of each file until there are so many bytes."""
    root = os.environ.get("NIELS_GPT_TEST_DATA")
    if not root:
        pytest.skip("NIELS_GPT_TEST_DATA names no mirror of real text")
    paths = [path for path in sorted(Path(root).rglob("*")) if path.suffix in (".txt", ".md", ".jsonl", ".parquet")]
    assert paths
    found = []
    for path in paths:
        left = max_bytes // len(paths)
        for text in texts_of_file(path):
            left -= len(text)
            if left < 0:
                break
            found.append(text)
    return found


def texts_of_file(path):
    """Yield the texts of a file: strings in the rows of a table, the lines of another one."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        names = [field.name for field in table.schema if pyarrow.types.is_string(field.type)]
        yield from (text.encode() for name in names for text in table[name].to_pylist() if text)
    else:
        text = path.read_bytes().decode(errors="replace").encode()
        yield from text.split(b"\n" if path.suffix == ".jsonl" else b"\n\n\n")


def test_documents_of_the_mirror_have_the_references_ids(tokenizer):
    assert_ids_of_reference(tokenizer, documents_of_mirror(1_000_000))


@pytest.mark.real_text
def test_every_document_of_the_mirror_has_the_references_ids(tokenizer):
    """In the short form the first ones of each file."""
    assert_ids_of_reference(tokenizer, documents_of_mirror(1 << 40 if LONG else 10_000_000))


@pytest.mark.slow
def test_a_line_of_megabytes_has_the_references_ids(tokenizer):
    texts, size = " ".join(sample_texts()), 20_000_000 if LONG else 4_000_000
    assert_ids_of_reference(tokenizer, [(texts * (size // len(texts) + 1)).replace("\n", " ").encode()])


# --- which tokenizers -------------------------------------------------------------------------------------------------


def test_auto_takes_gigatoken_where_it_knows_the_model(llama):
    assert open_engine(llama).name == "gigatoken"
    assert open_engine(llama, "reference").name == "tokenizers"


def unusable(name, folder):
    """Return a tokenizer that gigatoken cannot encode with."""
    if name == "own object":
        return ByteTokenizer()
    if name == "unigram model":
        (folder / "spm.model").write_bytes(train_tokenizer(TINY_TEXTS, vocab_size=400).model)
        return load_tokenizer(folder / "spm.model")
    if name == "normalized model":
        trained = train_tokenizer(TINY_TEXTS, vocab_size=400, model_type="bpe", normalization="nfkc")
        (folder / "spm.model").write_bytes(trained.model)
        return load_tokenizer(folder / "spm.model")
    if name == "unigram json":
        return load_tokenizer(made_tokenizer("t5"))
    content = json.loads((made_tokenizer("small llama3") / "tokenizer.json").read_text())
    change = {
        "lower case": {"normalizer": {"type": "Lowercase"}},
        "unknown pattern": {"pre_tokenizer": {"type": "Whitespace"}},
        "suffix": {"model": {**content["model"], "end_of_word_suffix": "</w>"}},
        "whole words": {"added_tokens": [{**content["added_tokens"][0], "single_word": True}]},
        "other ids": {"pre_tokenizer": other_pattern(content["pre_tokenizer"])},
    }[name]
    if name == "whole words":
        change["added_tokens"] += content["added_tokens"][1:]
    return load_tokenizer(write_tokenizer(folder / "changed", "small llama3", **change))


def other_pattern(pre_tokenizer):
    """Return a pre-tokenizer that gigatoken opens and takes for another one: it splits bytes by a second pattern."""
    pattern, byte_level = pre_tokenizer["pretokenizers"]
    return {"type": "Sequence", "pretokenizers": [pattern, {**byte_level, "use_regex": True}]}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own object", "ByteTokenizer is neither a tokenizer.json"),
        ("unigram model", "only BPE"),
        ("normalized model", "normalizes text"),
        ("unigram json", "'Unigram', not BPE"),
        ("lower case", "normalizes text by 'Lowercase'"),
        ("unknown pattern", "does not know it"),
        ("suffix", "suffix"),
        ("whole words", "single_word"),
        ("other ids", "on a test text gigatoken and tokenizers differ"),
    ],
)
def test_what_it_does_not_know_is_the_references_or_an_error_with_the_reason(name, reason, tmp_path, caplog):
    tokenizer = unusable(name, tmp_path)
    with caplog.at_level(logging.INFO, logger="niels_gpt"):
        assert {open_engine(tokenizer).name for _ in range(2)} < {"tokenizers", "sentencepiece", "encode"}
    said = [record.getMessage() for record in caplog.records if "encodes" in record.getMessage()]
    is_expected = name in ("own object", "unigram model")  # no such tokenizer is one that gigatoken knows
    assert all(reason.removeprefix("on a test text ") in each for each in said)
    assert len(said) == (0 if is_expected else 2 if name == "other ids" else 1)
    assert ["W410"] * 2 * (name == "other ids") == [
        r.code for r in caplog.records if r.levelname == "WARNING" and "engine" in r.name
    ]
    with refused("E411", reason, "reference", kind=ValueError):
        open_engine(tokenizer, "gigatoken")


def test_without_the_extra_the_reference_encodes_and_the_error_says_what_to_install():
    program = f"""
import sys
sys.modules["gigatoken"] = None
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.engine import open_engine
tokenizer = load_tokenizer({str(made_tokenizer("small llama3"))!r})
print(open_engine(tokenizer).name)
try:
    open_engine(tokenizer, "gigatoken")
except ValueError as error:
    print(error.code, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    name, refusal = done.stdout.splitlines()
    assert name == "tokenizers"
    assert refusal.startswith("E901 ") and "pip install 'niels-gpt[fast]'" in refusal


def test_a_model_that_changed_since_it_was_opened_is_refused(tmp_path):
    shutil.copytree(made_tokenizer("small llama3"), tmp_path / "copy")
    tokenizer = load_tokenizer(tmp_path / "copy")
    with open(tmp_path / "copy" / "tokenizer.json", "a") as file:
        file.write("\n")
    with refused("E402", tmp_path / "copy" / "tokenizer.json"):
        open_engine(tokenizer)


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def different(llama, tmp_path_factory):
    """Return gigatoken with a model that lacks the reference's last merge, " tadpole" say, compared with it."""
    content = json.loads(Path(llama.model_path).read_text())
    merges = content["model"]["merges"]
    folder = write_tokenizer(
        tmp_path_factory.mktemp("other") / "llama3",
        "small llama3",
        model={**content["model"], "merges": merges[:-1], "ignore_merges": False},
    )
    return engines.compared(engines.gigatoken(load_tokenizer(folder)), llama)


@pytest.fixture(scope="module")
def word(llama):
    """Return the word of the last merge."""
    left, right = json.loads(Path(llama.model_path).read_text())["model"]["merges"][-1]
    return (left + right).replace("\u0120", " ")


def digests_of(texts):
    """Return digests that choose no text; the first ones of a stream are compared all the same."""
    return np.zeros(len(texts), dtype=np.uint64)


def test_a_difference_names_the_document_the_tokens_and_the_text(different, word):
    texts = [b"A heron walks.", b"An otter.", f"One, two,{word} and more".encode(), f"Again{word}".encode()]
    different.compare(texts[:2], digests_of(texts[:2]), first=0)
    with refused("E410", kind=EngineDifference) as caught:
        different.compare(texts, digests_of(texts), first=40)
    assert caught.value.number == 42
    message = str(caught.value)
    assert "gigatoken and tokenizers differ at token" in message and word.strip()[:4] in message
    assert "--engine reference" in caught.value.remedy


def test_the_first_hundred_texts_and_a_share_of_the_pieces_are_compared(different, word):
    texts = [f"{number}{word} and so on".encode() for number in range(4000)]
    digests = np.arange(1, 4001, dtype=np.uint64) * np.uint64(ONE_COMPARED_OF) - np.uint64(2)
    digests[::1000] += np.uint64(1)  # the highest remainder chooses a text of one piece

    def stopped(first, start, stop):
        try:
            different.compare(texts[start:stop], digests[start:stop], first=first)
        except EngineDifference as error:
            return error.number - first + start
        return None

    assert stopped(FIRST_COMPARED - 1, 1, 2) == 1
    assert [stopped(FIRST_COMPARED, at, at + 1) for at in (0, 1, 999, 1000, 1001)] == [0, None, None, 1000, None]
    assert stopped(FIRST_COMPARED, 1, 4000) == 1000, "batches do not change which ones"
    with ThreadPoolExecutor(4) as threads:
        numbers = threads.map(lambda at: stopped(5000, at, at + 100), range(0, 4000, 100))
        assert {number for number in numbers if number is not None} == {0, 1000, 2000, 3000}


def test_a_long_text_is_compared_in_small_pieces_from_all_over_it(different, word):
    """For equal work many texts show more than a few whole ones, and the reference takes up to 130 times a text's size
    in memory."""
    long = "A heron w\u00e4lks by the mill.\n".encode() * 90_000
    pieces = -(-len(long) // PIECE_BYTES)
    with engines.texts_of_the_reference() as sizes:
        for at in range(0, ONE_COMPARED_OF * pieces, 997 * ONE_COMPARED_OF // 3):  # whatever piece the digest names
            different.compare([b"short", long], np.array([1, at], dtype=np.uint64), first=FIRST_COMPARED)
    assert len(sizes) > 5 and min(sizes) >= PIECE_BYTES - 4 and max(sizes) <= 2 * PIECE_BYTES + 8
    last = np.array([(pieces - 1) * ONE_COMPARED_OF], dtype=np.uint64)
    with refused("E410", kind=EngineDifference) as caught:
        different.compare([long + word.encode()], last, first=700)
    assert caught.value.number == 700


def test_the_number_of_pieces_is_their_share_whatever_the_sizes():
    generator = np.random.default_rng(0)
    for size in (1, 900, PIECE_BYTES, 30_000, 5_000_000):
        digests = generator.integers(0, 1 << 64, 200_000, dtype=np.uint64, endpoint=False)
        counts = num_compared(np.full(len(digests), size), digests, np.arange(100, 200_100))
        expected = len(digests) * -(-size // PIECE_BYTES) / ONE_COMPARED_OF
        assert counts.sum() == pytest.approx(expected, abs=5 * expected**0.5)
    none = np.zeros(3, dtype=np.uint64)
    assert num_compared(np.array([0, 1, 1]), none, np.array([98, 99, 100])).tolist() == [0, 1, 0]


@pytest.mark.parametrize(("num_pieces", "rate"), [(0, None), (100, 33), (2995, 1000), (29_956, 10_000)])
def test_meta_says_which_rate_of_faults_so_many_pieces_find(num_pieces, rate):
    assert compared_keys(num_pieces) == {"pieces": num_pieces, "finds_one_in": rate}
    assert rate is None or 1 - (1 - 1 / rate) ** num_pieces == pytest.approx(0.95, abs=0.005)


def test_the_texts_of_the_opening_do_not_depend_on_chance(llama):
    program = "from support.engines import probe_texts; import hashlib; " + (
        "print(hashlib.sha256(b'|'.join(probe_texts(['<a>']))).hexdigest())"
    )
    command = [sys.executable, "-c", program]
    run = [subprocess.run(command, capture_output=True, check=True, cwd=TESTS).stdout for _ in range(2)]
    assert run[0] == run[1] and len(engines.probe_texts(["<a>"])) > 150


# --- threads, processes, memory ---------------------------------------------------------------------------------------


def encode_there(engine, texts):
    ids = engine.encode(texts, first=0)[0].tolist()
    return ids


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_encodes_after_a_fork_and_after_pickling(llama, method):
    engine = open_engine(llama, "gigatoken")
    texts = [text.encode() for text in TINY_TEXTS]
    here = engine.encode(texts, first=0)[0].tolist()
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as process:
        assert process.submit(encode_there, engine, texts).result(timeout=60) == here
    assert pickle.loads(pickle.dumps(engine)).encode(texts, first=0)[0].tolist() == here


def test_a_process_is_not_stopped_by_a_lock_that_was_held_at_the_fork(llama):
    fast = engines.gigatoken(llama, max_growth=0)
    engine = engines.compared(fast, llama)
    engines.locks_of(fast)[os.getpid()] = held = threading.Lock()
    held.acquire()
    reopened = fast.times_reopened
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        engine.encode([b"word " * 400_000], first=0)
        os._exit(0 if fast.times_reopened > reopened else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_get_the_same_ids_while_it_is_opened_again_and_again(llama):
    engine = engines.gigatoken(llama, max_growth=1 << 14)
    generator = random.Random(0)
    batches = [[generator.randbytes(300_000).hex().encode()] for _ in range(10)]
    other = engines.gigatoken(llama)
    expected = [other.encode(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        for found, right in zip(threads.map(engine.encode, batches), expected, strict=True):
            assert all(map(np.array_equal, found, right))
    assert engine.times_reopened >= 1


def test_memory_that_is_not_of_the_cache_makes_it_wait_longer_each_time():
    memory = engines.growing_memory(8 << 20)
    kept = []
    for _ in range(256):
        kept.append(b"x" * (1 << 20))
        memory.is_full(1 << 20)
    assert 2 <= memory.times_reopened <= 6, "the allowed growth doubles"


WORDS = """
import random, resource, string, sys
from niels_gpt.tokenizer import load_tokenizer
from support import engines
engine = engines.gigatoken(load_tokenizer(sys.argv[1]))
generator = random.Random(0)
letters = string.ascii_lowercase if sys.argv[2] == "latin" else [chr(code) for code in range(0x4E00, 0x9000)]
def text():
    return " ".join("".join(generator.choices(letters, k=generator.randint(3, 9))) for _ in range(600)).encode()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
engine.encode([text()])
before, encoded = peak(), 0
while encoded < int(sys.argv[3]):
    texts = [text() for _ in range(50)]
    encoded += sum(map(len, texts))
    engine.encode(texts)
print((peak() - before) // 1024, engine.times_reopened)
"""


@pytest.mark.slow
@pytest.mark.skipif(not engines.sees_its_size(), reason="a process cannot see its size here")
@pytest.mark.parametrize(("name", "letters"), [*product(REAL, ["latin", "chinese"])][: None if LONG else 1])
def test_words_never_seen_before_take_150_mb_at_most(name, letters):
    arguments = [str(any_tokenizer(name)), letters, str(100_000_000)]
    command = [sys.executable, "-c", WORDS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS)
    grown, reopened = map(int, done.stdout.split())
    assert grown <= 150, "MiB"
    assert reopened >= 3


def test_a_sentencepiece_model_that_is_not_bpe_keeps_its_engine(tiny_tokenizer):
    assert open_engine(tiny_tokenizer).name == "sentencepiece"
