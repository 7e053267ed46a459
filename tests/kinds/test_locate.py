"""From a token's place to its document: number, source id, offset, file and text, against the texts that were given."""

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.disk import read_meta, write_meta
from support.errors import refused

from niels_gpt.cache.build_pretrain import build_pretrain, build_stub
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.look import locate, locate_data


class SavedByteTokenizer(ByteTokenizer):
    """A byte tokenizer whose ids no model file is known of, as a decoder."""

    sha256 = "0" * 64


TOKENIZER = SavedByteTokenizer()
DOCUMENTS = [(None, "abcdefgh", "web/first"), (None, "ij\nklm", "a line\nend, é"), (None, "nopqrstuvwxyz", None)]


@pytest.fixture
def notes(tmp_path):
    """Return a cache of three documents, 27 tokens in shards of ten, without val."""
    path = tmp_path / "pretrain" / "notes"
    fixed = {"max_train_tokens": 27, "max_val_tokens": 0, "shard_bytes": 20, "seed": 0}
    build_pretrain(DOCUMENTS, path, tokenizer=ByteTokenizer(), shuffle_buffer=None, **fixed)
    return path


def rows(text):
    """Return the named lines of an answer, and what follows them as `shown`."""
    head, _, shown = text.partition("\n\n")
    return {**dict(line.split(":", 1) for line in head.split("\n")), "shown": shown}


def at(cache, position, split="train", num_tokens=2_000):
    found = rows(locate(cache, TOKENIZER, split=split, position=position, num_tokens=num_tokens))
    return {name: value.strip() for name, value in found.items()}


def test_every_token_of_a_pretrain_split_is_found_in_its_document(notes):
    stream = [(number, place) for number, (_, text, _) in enumerate(DOCUMENTS) for place in range(len(text))]
    assert len(stream) == 27
    for position, (number, place) in enumerate(stream):
        found, text = at(notes, position), DOCUMENTS[number][1]
        assert found["document"] == f"{number} of 3, {len(text)} tokens"
        assert found["offset in it"] == f"{place} tokens"
        start = 2 * (position % 10)
        assert found["file"] == f"train/shard_{position // 10:05d}.bin, bytes {start} to {start + 2}"
        assert found["token"].endswith(f"id {ord(text[place]) + 10} {text[place]!r}")
        assert found["shown"] == f"{text[:place]}[[{text[place]}]]{text[place + 1 :]}".strip()


def test_source_ids_are_those_of_the_loader_else_the_number_of_the_text_and_may_be_absent(notes):
    assert [at(notes, position)["source id"] for position in (0, 8, 14)] == ["web/first", "a line\\nend, é", "2"]
    (notes / "index" / "train_ids.txt").write_bytes(b"web/first\n")
    with refused("E201", "train_ids.txt", "bytes 0 to 10"):
        at(notes, 20)
    assert np.load(notes / "index" / "train_docs.npy").tolist() == [0, 8, 14, 27]
    meta = read_meta(notes)
    write_meta(notes, {name: meta[name] for name in meta.keys() - {"ids", "checksums", "meta_crc32"}})
    assert at(notes, 3)["source id"] == "not recorded"


def test_a_long_document_is_cut_around_the_token_and_says_so(notes):
    found = at(notes, 20, num_tokens=5)
    assert found["text"].endswith("tokens 4 to 9 of its 13") and found["shown"] == "rs[[t]]uv"
    assert at(notes, 14, num_tokens=5)["shown"] == "[[n]]opqr"
    assert at(notes, 26, num_tokens=5)["shown"] == "vwxy[[z]]"
    assert "of its" not in at(notes, 20, num_tokens=13)["text"]


def test_an_example_is_found_with_its_sentinels_by_their_short_names(tmp_path):
    chats = [
        (name, [{"role": "user", "content": question}, {"role": "assistant", "content": "A" + question}])
        for name, question in (("tree/1", "b"), ("tree/2", "cc"), ("tree/3", "ddd"))
    ]
    build_sft(chats, tmp_path / "sft" / "c", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    found = at(tmp_path / "sft" / "c", 7 + 3 + 1)  # usr b eot asst A b eot | usr c c eot asst ...
    assert found["example"] == "1 of 3, 9 tokens" and found["source id"] == "tree/2"
    assert found["file"] == "train_tokens.bin, bytes 22 to 24" and found["token"].endswith("id 3 '<|asst|>'")
    assert found["shown"] == "<|usr|>cc<|eot|>\n[[<|asst|>]]Acc<|eot|>"


def test_a_token_that_is_half_a_character_is_marked_with_the_other_half(tmp_path, tiny_tokenizer):
    text = "a 雪 b"
    path = tmp_path / "pretrain" / "snow"
    fixed = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 200, "seed": 0}
    build_pretrain([("train", text, None)], path, tokenizer=tiny_tokenizer, shuffle_buffer=None, **fixed)
    ids = tiny_tokenizer.encode(text)
    marked = [
        locate(path, tiny_tokenizer, split="train", position=place, num_tokens=99).partition("\n\n")[2]
        for place in range(len(ids))
    ]
    assert all(line.replace("[[", "").replace("]]", "") == text for line in marked)
    assert sum("雪" in line.partition("[[")[2].partition("]]")[0] for line in marked) == 3


class Long(SavedByteTokenizer):
    """A tokenizer in which each token is a text of a million characters."""

    def decode(self, ids):
        return "x" * (1_000_000 * len(ids))


def test_the_text_around_a_token_is_bounded_in_lines_and_whole_as_data(notes):
    text = locate(notes, Long(), split="train", position=20, num_tokens=2_000)
    assert len(text) < 20_000 and text.count(" more characters; --json has them all") == 4
    assert "\n5,996,000 more characters; --json has them all ... xxx" in text
    found = locate_data(notes, Long(), split="train", position=20)
    assert [len(found[f"text_{name}"]) for name in ("before", "at", "after")] == [6_000_000, 1_000_000, 6_000_000]


def test_without_a_tokenizer_ids_stand_in_the_place_of_text(notes):
    found = rows(locate(notes, None, split="train", position=9, num_tokens=3))
    assert found["shown"] == "115 [[116]] 20" and found["token"].endswith("id 116")


@pytest.mark.parametrize("position", [-1, 27, 10**30])
def test_a_position_out_of_range_is_an_error_that_gives_the_range(notes, position):
    with refused("E106", "notes/train", "27 tokens", "0 to 26"):
        at(notes, position)


def test_empty_splits_stubs_and_what_is_no_cache_are_errors(notes, tmp_path):
    with refused("E106", "notes/val"):
        at(notes, 0, split="val")
    build_stub(tmp_path / "g", tokenizer=ByteTokenizer(), source=Source(name="g"), seed=0, shard_bytes=20)
    with refused("E106", "g/train"):
        at(tmp_path / "g", 0)
    with refused("E102", "split 'test'", "train, val"):
        at(notes, 0, split="test")
    with refused("E102", "num_tokens=0"):
        at(notes, 0, num_tokens=0)
    (tmp_path / "t").mkdir()
    write_meta(tmp_path / "t", {"kind": "tokenizer", "meta_crc32": ""})
    with refused("E208", "'tokenizer'", "pretrain or sft"):
        at(tmp_path / "t", 0)
