"""The same bytes from any number and kind of workers, in bounded memory, whatever happens to one of them."""

import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.power_loss import tree_of
from support.small_builds import batches_of

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.engine import stream as source_module
from niels_gpt.engine.stream import InOrder
from niels_gpt.tokenizer import load_tokenizer

TEXTS = [f"Note {number}: " + "the otter walks to the mill. " * (number * 7 % 5) for number in range(200)]
TEXTS[60:64] = ["", "naïve 漢字 🙂", "half \ud800 a pair", "a <|eot|> in a text"]


@pytest.fixture(autouse=True)
def many_batches(monkeypatch):
    batches_of(monkeypatch, 9)


def build_text(path, texts, *, tokenizer, **arguments):
    common = {
        "max_train_tokens": 9000,
        "max_val_tokens": 700,
        "shuffle_buffer": 20,
        "document_end": "eot",
    }
    documents = ((None, text) for text in texts)
    return build_pretrain(documents, path, tokenizer=tokenizer, shard_bytes=2048, seed=1, **{**common, **arguments})


def build_both(folder, tokenizer, **workers):
    """Build a cache of each kind below a folder; returns all its files."""
    build_text(folder / "text", TEXTS, tokenizer=tokenizer, **workers)
    chats = [
        [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": text}]
        for number, text in enumerate(TEXTS)
    ]
    build_sft(chats, folder / "chats", tokenizer=tokenizer, val_frac=0.1, seed=1, **workers)
    return tree_of(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tiny_tokenizer):
    """Both caches, encoded in this thread and in one batch."""
    tree = build_both(tmp_path_factory.mktemp("expected"), tiny_tokenizer, num_threads=0)
    names = {name.split("/", 3)[-1] for name in tree}
    assert {"train/shard_00003.bin", "val/shard_00000.bin", "train_tokens.bin", "val_tokens.bin"} <= names
    metas = [content for name, content in tree.items() if isinstance(content, bytes) and name.endswith("meta.json")]
    assert len(metas) == 2 and all(b'"sentinel_in_text": 1' in meta for meta in metas)
    return tree


class Immediate(Executor):
    """An executor of no library: it does not know its number of workers, and works in `submit`."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def process_pool(num_workers, method="forkserver", **arguments):
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["niels_gpt.engine.stream"])
    return ProcessPoolExecutor(num_workers, mp_context=context, **arguments)


@pytest.mark.parametrize(
    "executor_of",
    [
        pytest.param(Immediate, id="any executor"),
        pytest.param(lambda: ThreadPoolExecutor(1), id="1 thread"),
        pytest.param(lambda: ThreadPoolExecutor(3), id="3 threads"),
        pytest.param(lambda: process_pool(2, "spawn"), id="2 spawned"),
        pytest.param(lambda: process_pool(1), id="1 of a forkserver"),
        pytest.param(lambda: process_pool(4), id="4 of a forkserver", marks=pytest.mark.faults),
    ],
)
def test_an_executor_gives_the_same_bytes_and_stays_open(expected, folder, tiny_tokenizer, executor_of):
    with executor_of() as executor:
        assert build_both(folder / "c", tiny_tokenizer, executor=executor) == expected
        assert executor.submit(int, "3").result() == 3


@pytest.mark.parametrize(
    ("threads", "items", "chars"), [(1, 9, 10**9), (4, 9, 10**9), (2, 1, 10**9), (2, 10**9, 300), (2, 10**9, 10**9)]
)
def test_threads_of_the_build_and_the_size_of_its_batches_do_not_matter(
    expected,
    folder,
    tiny_tokenizer,
    monkeypatch,
    threads,
    items,
    chars,
):
    batches_of(monkeypatch, items, chars=chars)
    assert build_both(folder / "c", tiny_tokenizer, num_threads=threads) == expected


def batches_from(texts):
    chunks = source_module.chunked(texts, {}, None, len)
    return source_module.batches(chunks, texts=lambda items: [[text] for text in items])


def test_the_order_is_kept_when_later_batches_are_done_first(monkeypatch):
    batches_of(monkeypatch, 1)
    done = []
    last_is_done = threading.Event()

    def work(payload, first):
        (text,) = payload
        if text == "0":
            assert last_is_done.wait(60)
        done.append(text)
        if text == "3":  # two workers, and two batches for each: the last one that is given out beside the first
            last_is_done.set()
        return text.upper()

    with ThreadPoolExecutor(2) as executor:
        found = list(InOrder[str, str](work, executor)(batches_from(map(str, range(20)))))
    assert [result for _, result in found] == [str(number) for number in range(20)]
    assert [batch.payload for batch, _ in found] == [[str(number)] for number in range(20)]
    assert done[:4] == ["1", "2", "3", "0"]


def ahead_of(executor, texts):
    """Return how many texts were read from the source beyond the one in hand, for each result: the slowest consumer."""
    taken = []
    done = []
    found = []

    def source():
        for text in texts:
            taken.append(text)
            yield text

    def work(payload, first):
        done.extend(payload)

    for number, _ in enumerate(InOrder[str, None](work, executor)(batches_from(source()))):
        found.append(len(taken) - number - 1)
    assert len(taken) == len(done) == len(found) == len(texts)
    return found


@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_are_read_only_two_a_worker_ahead(num_workers, monkeypatch):
    batches_of(monkeypatch, 1)
    with ThreadPoolExecutor(num_workers) as executor:
        found = ahead_of(executor, ["some text"] * 50)
    assert max(found) == found[0] == 2 * num_workers - 1  # a batch is complete with its last item


def test_batches_are_taken_only_so_many_characters_ahead(monkeypatch):
    batches_of(monkeypatch, 1, ahead_chars=100)
    with ThreadPoolExecutor(8) as executor:
        # Three of 30 are given out; the fourth, which would make 120, waits.
        assert set(ahead_of(executor, ["x" * 30] * 40)[:-3]) == {3}
        # One that is too long for the bound goes alone: it, and the one that waits for it.
        assert set(ahead_of(executor, ["x" * 101] * 40)[:-1]) == {1}


def test_a_build_reads_its_source_only_some_batches_ahead_of_what_it_writes(tmp_path):
    taken = 0
    ahead = []

    def chats():
        nonlocal taken
        for taken in range(1, 501):
            yield [{"role": "assistant", "content": f"text {taken}"}]

    def progress(examples, tokens, expected):
        ahead.append(taken - examples)

    arguments = {"tokenizer": ByteTokenizer(), "val_frac": 0, "seed": 0, "num_threads": 2}
    build_sft(chats(), tmp_path / "c", progress=progress, **arguments)
    # Two threads: four batches of nine, less the one in hand; the source ends after 500.
    assert max(ahead) == ahead[0] == 3 * 9 and len(ahead) == 56


def note_opens(path, log):
    """Write a line for each time that this process opens a file from now on: the initializer of a worker."""

    def hook(event, arguments):
        if event == "open" and str(arguments[0]) == path:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, f"{os.getpid()}\n".encode())
            os.close(handle)

    sys.addaudithook(hook)


def test_a_worker_opens_the_tokenizer_once_for_all_its_batches(tmp_path, tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)
    about = (tokenizer.model_path, str(tmp_path / "log"))
    with process_pool(2, initializer=note_opens, initargs=about) as executor:
        for name in ("one", "two"):
            meta = build_text(tmp_path / name, TEXTS, tokenizer=tokenizer, executor=executor)
            assert meta["documents_read"] > 100  # more than ten batches of nine
    opened = (tmp_path / "log").read_text().split()
    assert 1 <= len(opened) <= 2 and len(set(opened)) == len(opened)


class Mortal(ByteTokenizer):
    """Kills the worker process that encodes a text with "deadly"."""

    def __init__(self, signalled):
        self.signalled, self.parent = signalled, os.getpid()

    def encode(self, text):
        if "deadly" in text and os.getpid() != self.parent:
            if self.signalled:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        return ByteTokenizer().encode(text)


LIVELY = [f"text {number:03d}" for number in range(150)]
DEADLY = [f"{text}, deadly" if number == 70 else text for number, text in enumerate(LIVELY)]
PLAIN = {"shuffle_buffer": None, "max_train_tokens": 10**6, "max_val_tokens": 10**5}


@pytest.mark.parametrize("signalled", [False, True], ids=["exit", "SIGKILL"])
def test_a_worker_that_dies_is_an_error_that_names_its_documents_and_the_build_resumes_without_it(
    tmp_path, caplog, signalled
):
    caplog.set_level(logging.INFO)
    arguments = {"tokenizer": Mortal(signalled), "checkpoint_seconds": 0, **PLAIN}
    with process_pool(2) as executor, refused("E506", "died", kind=RuntimeError) as error:
        build_text(tmp_path / "found" / "c", DEADLY, executor=executor, **arguments)
    found = re.search(r"(\d+) batches were in work, from documents (\d+) to (\d+) \(.* '(.*)'\)", str(error.value))
    assert found is not None
    number, first, last = map(int, found.groups()[:3])
    assert 1 <= number <= 4 and first <= 70 < first + number * 9 and last == first + 8
    assert found[4] == f"text {first:03d}"
    assert not (tmp_path / "found" / "c").exists() and multiprocessing.active_children() == []
    caplog.clear()
    build_text(tmp_path / "found" / "c", DEADLY, num_threads=2, **arguments)
    assert f"resuming after {first} documents of an earlier run" in caplog.text
    build_text(tmp_path / "whole" / "c", DEADLY, tokenizer=ByteTokenizer(), num_threads=0, **PLAIN)
    assert tree_of(tmp_path / "found") == tree_of(tmp_path / "whole")


class NotUnpickled(Exception):
    """Python cannot make it again from its one argument."""

    def __init__(self, what, number):
        super().__init__(f"{what} {number}")


class NotPickled(Exception):
    """Holds what no other process can have."""

    def __init__(self, message):
        super().__init__(message)
        self.held = lambda: message


ERRORS = {
    "ValueError": lambda: ValueError("number 70"),
    "NotUnpickled": lambda: NotUnpickled("number", 70),
    "NotPickled": lambda: NotPickled("number 70"),
}


class Refusing(ByteTokenizer):
    """Raises an error for one text, and counts the calls for it in a file."""

    def __init__(self, log, error="ValueError"):
        self.log, self.error = log, error

    def encode(self, text):
        if "deadly" in text:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
            raise ERRORS[self.error]()
        return ByteTokenizer().encode(text)


@pytest.mark.parametrize("kind", ["caller", "threads", "executor", "processes"])
def test_a_tokenizers_error_is_not_tried_again(tmp_path, caplog, kind):
    caplog.set_level(logging.WARNING)
    tokenizer = Refusing(tmp_path / "log")
    before = set(threading.enumerate())
    with refused("E102", "number 70"):
        if kind in ("caller", "threads"):
            build_text(tmp_path / "c", DEADLY, tokenizer=tokenizer, num_threads=0 if kind == "caller" else 2)
        else:
            with process_pool(1) if kind == "processes" else ThreadPoolExecutor(2) as executor:
                try:
                    build_text(tmp_path / "c", DEADLY, tokenizer=tokenizer, executor=executor)
                finally:
                    assert executor.submit(int, "3").result() == 3
    assert len((tmp_path / "log").read_text().split()) == 1
    assert caplog.text == "" and set(threading.enumerate()) <= before
    assert multiprocessing.active_children() == []


def test_an_error_of_a_worker_comes_back_with_its_type_and_text(tmp_path):
    expected = {"ValueError": (ValueError, "E102", "number 70")}
    for name in ("NotUnpickled", "NotPickled"):
        expected[name] = (RuntimeError, "E506", f"{name}: number 70")
    with process_pool(1) as executor:
        for error, (kind, code, text) in expected.items():
            with refused(code, kind=kind) as caught:
                tokenizer = Refusing(tmp_path / "log", error)
                build_text(tmp_path / "c", DEADLY, tokenizer=tokenizer, executor=executor, **PLAIN)
            assert str(caught.value) == text
        assert executor.submit(int, "3").result() == 3  # the pool is alive


def test_full_budgets_and_a_source_that_breaks_leave_no_thread_and_nothing_in_work(tmp_path):
    def texts():
        yield from LIVELY
        raise OSError("upstream broke")

    arguments = {"tokenizer": ByteTokenizer(), "max_train_tokens": 500, "max_val_tokens": 50}
    before = set(threading.enumerate())
    build_text(tmp_path / "a", map("some text {}".format, itertools.count()), num_threads=4, **arguments)
    with pytest.raises(OSError, match="upstream broke"):
        build_text(tmp_path / "broken", texts(), tokenizer=ByteTokenizer(), num_threads=2, **PLAIN)
    assert set(threading.enumerate()) <= before
    with ThreadPoolExecutor(4) as executor:
        build_text(tmp_path / "b", map("some text {}".format, itertools.count()), executor=executor, **arguments)
        assert executor.submit(int, "3").result() == 3


def test_work_that_has_not_started_is_cancelled_when_the_consumer_leaves(monkeypatch):
    batches_of(monkeypatch, 1)
    go_on = threading.Event()
    started = []

    def work(payload, first):
        started.extend(payload)
        assert payload == ["0"] or go_on.wait(60)

    with ThreadPoolExecutor(2) as executor:  # after the first batch, three are given out: one a worker, and one waits
        with closing(InOrder[str, None](work, executor)(batches_from(map(str, range(20))))) as found:
            next(found)
        go_on.set()
    assert started[0] == "0" and set(started) <= {"0", "1", "2"}


def test_a_model_that_was_replaced_meanwhile_is_refused_in_a_worker(tmp_path, tiny_model_path):
    model = tmp_path / "spm.model"
    model.write_bytes(tiny_model_path.read_bytes())
    tokenizer = load_tokenizer(model)
    model.write_bytes(tiny_model_path.read_bytes() + b"\xfa\x07\x00")  # a field of no meaning: as good a model
    with process_pool(1) as executor, refused("E402", "spm.model"):
        build_text(tmp_path / "c", TEXTS, tokenizer=tokenizer, executor=executor)
