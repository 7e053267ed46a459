"""Lengths of documents, and tokens with loss of each example, against a drawing and against a walk over the tokens."""

import re
import subprocess
import sys

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer, build
from support.errors import refused
from support.looking import blocks_of

from niels_gpt.cache import build_sft_cache, read_meta
from niels_gpt.cache.build_pretrain import build_stub
from niels_gpt.cache.documents import lengths, supervised_counts
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.look import stats

SYS, USR, ASST, EOT = 1, 2, 3, 4
A, B = 75, 76

Chat = list[dict[str, str]]


def chat(*texts):
    """Return a chat whose user speaks first."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def sft(path, chats, tokenizer=None, **arguments):
    """Build an sft cache; returns its resolved folder and its meta."""
    build_sft_cache(chats, str(path), tokenizer=tokenizer or ByteTokenizer(), **{"seed": 0, "val_frac": 0, **arguments})
    return path.resolve(), read_meta(str(path / "meta.json"))


def obvious_count(ids, asst_id, eot_id):
    """Walk one example token by token: the slow oracle."""
    inside, count = False, 0
    for token in ids:
        count += inside
        inside = (inside or token == asst_id) and token != eot_id
    return count


def test_lengths_of_documents_are_their_tokens_and_of_none_there_are_none(tmp_path):
    meta, cache = build(tmp_path / "own", ["A", "BCD", "EF" * 6]), (tmp_path / "own").resolve()  # shards of ten tokens
    for split, expected in (("train", [1, 3, 12]), ("val", [])):
        found = lengths(cache, meta, split)
        assert found.dtype == np.int64 and found.shape == (len(expected),) and found.tolist() == expected
    meta = build_stub(tmp_path / "s", tokenizer=ByteTokenizer(), source=Source(), seed=0, shard_bytes=20)
    assert not (tmp_path / "s" / "index").exists()
    assert [len(lengths((tmp_path / "s").resolve(), meta, split)) for split in ("train", "val")] == [0, 0]
    shown = dict(stats(tmp_path / "s"))
    assert shown["cache"].endswith("(pretrain, not built)") and shown["train"] == shown["val"] == "empty"


def test_an_index_that_does_not_end_with_the_tokens_and_a_cut_token_file_are_errors(tmp_path):
    meta = build(tmp_path / "own", ["A", "BCD"])
    np.save(tmp_path / "own" / "index" / "train_docs.npy", np.array([0, 2]))
    with refused("E201", "token 2", "4"):
        lengths((tmp_path / "own").resolve(), meta, "train")
    cache, meta = sft(tmp_path / "sft", [chat("A", "B")])
    (cache / "train_tokens.bin").write_bytes(b"\x02\0")
    for function in (lengths, supervised_counts):
        with refused("E203", "2 bytes", "12"):
            function(cache, meta, "train")


def test_the_drawn_examples(tmp_path):
    """usr A eot asst B eot: two with loss. usr A eot asst eot: one. usr A eot asst BB eot usr A eot asst B eot: five.

    In the order of the chats, whatever their lengths are: a cache without val does not shuffle.
    """
    cache, meta = sft(tmp_path / "sft", [chat("A", "B"), chat("A", ""), chat("A", "BB", "A", "B")])
    first, second = [USR, A, EOT, ASST, B, EOT], [USR, A, EOT, ASST, EOT]
    third = [USR, A, EOT, ASST, B, B, EOT, USR, A, EOT, ASST, B, EOT]
    assert np.fromfile(cache / "train_tokens.bin", "<u2").tolist() == first + second + third
    assert lengths(cache, meta, "train").tolist() == [6, 5, 13]
    found = supervised_counts(cache, meta, "train")
    assert found.dtype == np.int64 and found.tolist() == [2, 1, 5]
    assert (cache / "val_tokens.bin").stat().st_size == 0
    for found in (lengths(cache, meta, "val"), supervised_counts(cache, meta, "val")):
        assert found.dtype == np.int64 and found.shape == (0,)


@pytest.mark.parametrize("batch_tokens", [1, 64, 2**16])
def test_counts_are_those_of_a_walk_over_each_example(tmp_path, tiny_tokenizer, batch_tokens):
    """Batches of one example, of some, and of all give the same; meta.json, which the builder counted, agrees."""
    words = ["the", "heron", "walks", "to", "the", "river", "and", "finds", "three", "letters"]
    chats = [chat(*(" ".join(words[: (7 * row + turn) % 11]) for turn in range(2 + row % 4))) for row in range(60)]
    cache, meta = sft(tmp_path / "sft", chats, tiny_tokenizer, val_frac=0.2)
    special = tiny_tokenizer.special_token_ids()
    for split, examples in (("train", 45), ("val", 15)):
        tokens, starts = np.fromfile(cache / f"{split}_tokens.bin", "<u2"), np.load(cache / f"{split}_idx.npy")
        rows = np.split(tokens, starts[1:])
        assert lengths(cache, meta, split).tolist() == [len(row) for row in rows]
        with blocks_of(counted_tokens=batch_tokens):
            found = supervised_counts(cache, meta, split)
        assert found.tolist() == [obvious_count(row.tolist(), special["asst"], special["eot"]) for row in rows]
        assert len(found) == examples and found.sum() == meta["supervised_tokens"][split]


def test_the_summary_says_what_a_cache_holds_on_paper(tmp_path):
    cache, _ = sft(tmp_path / "sft", [chat("A", "B"), chat("CC", "DDDD"), chat("E", "FF")], val_frac=0.4)
    shown = dict(stats(cache))
    assert shown["cache"] == f"{cache} (sft, built)"
    assert shown["licence"] == shown["attribution"] == shown["source"] == "not stated"
    assert shown["dropped"] == shown["left out by the loader"] == "none"
    examples = [int(re.findall(r"([0-9]+) example", shown[split])[0]) for split in ("train", "val")]
    assert examples == [2, 1]
    tokens = [int(shown[split].split()[0]) for split in ("train", "val")]
    assert sum(tokens) == 3 * 4 + len("ABCCDDDDEFF")  # each chat has two roles and two end-of-texts


def test_the_summary_of_what_is_no_cache_is_an_error(tmp_path):
    with refused("E105", tmp_path, kind=FileNotFoundError):
        stats(tmp_path)
    (tmp_path / "meta.json").write_text('{"kind": "photo"}')
    with refused("E208", "'photo'", "pretrain, sft"):
        stats(tmp_path)
    (tmp_path / "meta.json").write_text('{"kind": "pretrain", "built": 1}')
    with refused("E202", "built is 1"):
        stats(tmp_path)


def test_inspection_never_loads_torch(tmp_path):
    """Neither when it is imported nor when it counts: torch takes seconds and hundreds of megabytes."""
    cache, _ = sft(tmp_path / "sft", [chat("A", "B")])
    program = (
        "import sys; from pathlib import Path; from niels_gpt.cache import read_meta\n"
        "from niels_gpt.cache import documents; from niels_gpt.kinds import look; cache = Path(sys.argv[1])\n"
        "look.stats(cache)\n"
        "print(documents.supervised_counts(cache, read_meta(cache / 'meta.json'), 'train'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(cache)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2] False"
