"""Documents as columns: a cache does not depend on how a loader, the builder or its threads group them."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LONG
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.power_loss import tree_of
from support.small_builds import batches_of, encode_with
from support.splits import IN_MEMORY, key, stored

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.documents import DocumentBatch
from niels_gpt.engine.meta import Source
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.codes import code_of
from niels_gpt.tokenizers.engine import EngineDifference

TEXTS = [f"{number} " + "the mill é " * (number * 5 % 4) for number in range(45)]
TEXTS[3], TEXTS[11], TEXTS[12], TEXTS[30] = "", "a <|eot|> in it", "\u2581 a mark", TEXTS[29]


class Loader:
    """A source of files in miniature: it counts rows, leaves out every seventh, and can begin at any row."""

    def __init__(self, cuts, stop=None):
        """cuts: where batches end, in documents; None: no batches. stop: fail after so many documents."""
        self.cuts = None if cuts is None else sorted({*cuts, len(TEXTS)})
        self.stop = stop
        self.counters = {}
        self.position = {}
        self.source = Source("rows", provenance={"fingerprint": "f"}, counters=self.counters, position=self.position)

    def rows(self):
        """Yield documents: number, text, and the counters as of it."""
        begin, counters = self.position.get("row", 0), self.counters
        for row, text in enumerate(TEXTS, 1):
            if row > begin:
                counters["rows"] = row
                if row % 7 == 0:
                    counters["left_out"] = counters.get("left_out", 0) + 1
                if self.stop is not None and row > self.stop:
                    raise ConnectionError("the line is cut")
                yield row, text, dict(counters)
        counters["at_the_end"] = 1

    def __iter__(self):
        """Yield documents, or batches of them."""
        if self.cuts is None:
            for row, text, _ in self.rows():
                self.position["row"] = row
                yield None, text, f"row {row}"
            return
        held = []
        for row in self.rows():
            held.append(row)
            if row[0] in self.cuts:
                yield batch_of(held)
                held = []


def batch_of(rows):
    counters = [(number, counts) for number, (_, _, counts) in enumerate(rows)]
    return DocumentBatch(
        texts=[text.encode() for _, text, _ in rows],
        ids=[f"row {row}" for row, _, _ in rows],
        counters=[(0, counters[0][1]), *(b for a, b in pairwise(counters) if a[1] != b[1])],
        position={"row": np.array([row for row, _, _ in rows])},
    )


def build(path, loader, **changed):
    fixed = {"max_train_tokens": 500, "max_val_tokens": 120, "shard_bytes": 200, "seed": 1, "checkpoint_seconds": 0}
    more = {"tokenizer": ByteTokenizer(), "document_end": "eot", "num_threads": 0, "shuffle_buffer": None}
    return build_pretrain(loader, path, source=loader.source, **{**fixed, **more, **changed})


CUTS = st.none() | st.lists(st.integers(1, len(TEXTS)), max_size=12)
LIMITS = st.sampled_from([(500, 120), (10**6, 10**5), (200, 10**5), (600, 0)])


@settings(derandomize=True, max_examples=60 if LONG else 20)
@given(
    cuts=st.lists(CUTS, min_size=3, max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=3, max_size=3),
    threads=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    stops=st.lists(st.integers(1, len(TEXTS)), min_size=2, max_size=2).map(sorted),
    buffer=st.sampled_from([None, 4, 100]),
    limits=LIMITS,
)
def test_no_grouping_and_no_interruption_changes_a_byte(cuts, sizes, threads, stops, buffer, limits):
    how = {"shuffle_buffer": buffer, "max_train_tokens": limits[0], "max_val_tokens": limits[1]}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, pytest.MonkeyPatch.context() as patch:
        batches_of(patch, 1)
        expected = build(Path(name, "whole", "c"), Loader(None), **how)
        for cut, (items, chars), number, stop in zip(cuts, sizes, threads, [*stops, None], strict=True):
            batches_of(patch, items, chars=chars)
            try:
                found = build(Path(name, "again", "c"), Loader(cut, stop), num_threads=number, **how)
            except ConnectionError:
                assert stop is not None
        assert found == expected
        assert tree_of(Path(name, "again")) == tree_of(Path(name, "whole"))


def test_counters_are_those_of_the_last_document_that_is_needed(tmp_path):
    meta = build(tmp_path / "c", Loader([]), max_train_tokens=150, max_val_tokens=0)
    read = meta["documents_read"]
    assert 6 < read < 30 and meta["source"]["counters"] == {"rows": read, "left_out": read // 7}
    meta = build(tmp_path / "d", Loader([]), max_train_tokens=None, max_val_tokens=None, val_frac=0.1)
    assert meta["source"]["counters"] == {"rows": 45, "left_out": 6, "at_the_end": 1}


def test_a_resumed_source_of_batches_begins_with_the_last_document(tmp_path, caplog, monkeypatch):
    batches_of(monkeypatch, 4)
    with refused("E601", kind=ConnectionError):
        build(tmp_path / "c", Loader(range(3, 45, 3), stop=24))
    read = []
    loader = Loader(range(5, 45, 5))
    rows = loader.rows
    loader.rows = lambda: (row for row in rows() if read.append(row[0]) is None)
    with caplog.at_level("INFO"):
        build(tmp_path / "c", loader)
    assert "are not read again" in caplog.text and read[0] == 24


def test_the_splits_of_batches_may_be_named(tmp_path):
    batches = [DocumentBatch([b"a", b"b"], ["1", "2"], "train"), DocumentBatch([b"c"], ["3"], "val")]
    how = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 20, "seed": 0}
    build_pretrain(batches, tmp_path / "c", tokenizer=ByteTokenizer(), shuffle_buffer=None, **how)
    assert stored(tmp_path / "c", "train") == ["a", "b"] and stored(tmp_path / "c", "val") == ["c"]
    with refused("E102", "document 0", "1 texts", "2 ids"):
        build_pretrain(
            [DocumentBatch([b"a"], ["1", "2"])], tmp_path / "d", tokenizer=ByteTokenizer(), shuffle_buffer=None, **how
        )
    with refused("E102", "document 2", "'test'"):
        build_pretrain(
            [batches[0], DocumentBatch([b"c"], ["3"], "test")],
            tmp_path / "d",
            tokenizer=ByteTokenizer(),
            shuffle_buffer=None,
            **how,
        )


def test_an_error_of_the_source_is_raised_as_it_is_and_no_thread_is_left(tmp_path):
    import threading

    for threads in (0, 2):
        with pytest.raises(ConnectionError, match="the line is cut"):
            build(tmp_path / str(threads), Loader([7], stop=20), num_threads=threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


GOOD = {"texts": [b"a", b"b"], "ids": ["1", "2"], "position": {"row": [1, 2]}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"texts": [b"a", b"ab\xff"]}, "document 3: the text of '2' is not UTF-8 at byte 2"),
        ({"texts": [b"a", b"\xed\xa0\x80"]}, "document 3: the text of '2' is not UTF-8"),
        ({"texts": ["a", b"b"]}, "document 2: its text is a str, expected bytes"),
        ({"ids": ["1", 2]}, "document 3: its id is a int"),
        ({"position": {"file": [0, 0], "row": [1]}}, "document 3: it has no position"),
        ({"counters": [(1, {})]}, r"document 2: the counters of its batch are from the documents \[1\] on"),
        ({"counters": []}, "document 2: the counters"),
        ({"counters": [(0, {}), (3, {}), (1, {})]}, "document 2: the counters"),
    ],
)
def test_a_callers_batch_is_checked(tmp_path, wrong, message):
    how = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 20, "seed": 0}
    how |= {"tokenizer": ByteTokenizer(), "shuffle_buffer": None, "val_frac": 0.1}
    batches = [DocumentBatch(**GOOD), DocumentBatch(**{**GOOD, **wrong})]
    with pytest.raises(ValueError, match=message) as caught:
        build_pretrain(batches, tmp_path / "c", **how)
    assert code_of(caught.value) == "E304" and not (tmp_path / "c").exists()
    with refused("E304", "document 1: its id"):
        build_pretrain([(None, "a"), (None, "b", 7)], tmp_path / "c", **how)


def test_a_chat_on_which_an_engine_differs_has_its_own_number(tmp_path, monkeypatch):
    class Differing:
        name = "gigatoken"

        def encode(self, texts, *, first):
            for number, text in enumerate(texts, first):
                if text == b"no 12":
                    raise EngineDifference("model", number, "gigatoken and tokenizers differ at token 0")
            return np.zeros(len(texts), dtype=np.uint32) + 10, np.ones(len(texts), dtype=np.int64)

    encode_with(monkeypatch, Differing())
    turns = [[{"role": "user", "content": "yes?"}, {"role": "assistant", "content": f"no {n}"}] for n in range(20)]
    with refused("E410", "document 12 ", kind=EngineDifference) as caught:
        build_sft(turns, tmp_path / "c", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    assert caught.value.number == 12


def test_the_document_on_which_an_engine_differs_is_named(tmp_path, monkeypatch):
    class Differing:
        name = "gigatoken"

        def encode(self, texts, *, first):
            for number, text in enumerate(texts, first):
                if text.startswith(b"17 "):
                    raise EngineDifference("model", number, "gigatoken and tokenizers differ at token 0")
            return np.zeros(len(texts), dtype=np.uint32) + 10, np.ones(len(texts), dtype=np.int64)

    encode_with(monkeypatch, Differing())
    for threads in (0, 1):
        with refused("E410", "document 17 ", "'row 18'", "'17 the mill"):
            build(tmp_path / str(threads), Loader([9, 30]), num_threads=threads, max_train_tokens=10**6)


class Plain(ByteTokenizer):
    """Gives a control id for each `<|end|>` in a text, but for `encode_plain`; it has no sentinels."""

    control_ids = frozenset({299})

    def special_token_ids(self):
        return {}

    def encode(self, text):
        parts = [super(Plain, self).encode(part) for part in text.split("<|end|>")]
        return [id for number, part in enumerate(parts) for id in ([299, *part] if number else part)]

    def encode_plain(self, texts):
        return [np.array(super(Plain, self).encode(text)) for text in texts]

    def token(self, token_id):
        return "<|end|>" if token_id == 299 else ""


def test_a_special_token_in_a_text_is_dropped_refused_or_encoded_as_text(tmp_path):
    texts = [(None, "abc"), (None, "a<|end|>b"), (None, "<|eot|>"), (None, "d")]
    how = {"max_train_tokens": 100, "max_val_tokens": 0, "shard_bytes": 400, "seed": 0}
    how |= {"shuffle_buffer": None, "tokenizer": Plain()}
    dropped = build_pretrain(texts, tmp_path / "c", **how)
    assert dropped["dropped"] == {"special_in_text": 1} and stored(tmp_path / "c", "train") == ["abc", "<|eot|>", "d"]
    kept = build_pretrain(texts, tmp_path / "d", on_special="text", **how)
    assert kept["dropped"] == {} and kept["noticed"] == {"special_as_text": 1}
    assert stored(tmp_path / "d", "train") == [text for _, text in texts]
    with refused("E305", "document '1'", "<|end|>", "--on-special text"):
        build_pretrain(texts, tmp_path / "e", on_special="raise", **how)
    with refused("E102", "encode_plain"):
        build_pretrain(texts, tmp_path / "f", **{**how, "tokenizer": ByteTokenizer(), "on_special": "text"})


def test_a_text_that_is_dropped_for_a_special_token_is_no_splits_document(tmp_path):
    """The text with the lowest key would be the one document of val, if it were not dropped."""
    kept = [str(number) for number in range(8)]
    lowest = min((f"{number}<|end|>" for number in range(99)), key=key)
    assert key(lowest) < min(map(key, kept))
    how = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 400, "seed": 0}
    documents = [(None, text) for text in (lowest, *kept)]
    meta = build_pretrain(documents, tmp_path / "c", tokenizer=Plain(), shuffle_buffer=None, val_frac=1e-9, **how)
    assert (meta["docs"], meta["dropped"]) == ({"train": 7, "val": 1}, {"special_in_text": 1})


def test_a_sentinel_as_text_has_no_sentinels_id(tmp_path, tiny_tokenizer):
    text = f"a {SPECIAL_TOKENS[0]} b"
    how = {"max_train_tokens": 1000, "max_val_tokens": 0, "shard_bytes": 4000, "seed": 0}
    meta = build_pretrain(
        [(None, text), (None, "c")],
        tmp_path / "c",
        tokenizer=tiny_tokenizer,
        shuffle_buffer=None,
        on_special="text",
        **how,
    )
    ids = np.fromfile(tmp_path / "c" / "train" / "shard_00000.bin", dtype="<u2")
    assert meta["noticed"] == {"special_as_text": 1} and not np.isin(ids, list(tiny_tokenizer.control_ids)).any()
