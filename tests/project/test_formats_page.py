"""docs/formats.md as a specification: its worked example has the real bytes, and its least cache is read."""

import hashlib
import json
import re
import subprocess

import numpy as np
import pytest
import torch
from support import ROOT
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta
from niels_gpt.engine.split import chat_text
from niels_gpt.sampling import EpochStream

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
NPY_HEADER = 128


def example_files(heading):
    """Return the bytes that the worked example shows of each file, below the sentence that begins with `heading`."""
    text = PAGE[PAGE.index(heading) :]
    block = text[text.index("```text\n") + 8 : text.index("\n```\n")]
    return {name: bytes.fromhex(digits) for name, digits in (line.split(maxsplit=1) for line in block.splitlines())}


def content(cache, name):
    raw = (cache / name).read_bytes()
    return raw[NPY_HEADER:] if name.endswith(".npy") else raw


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture
def pretrain(tmp_path):
    build_pretrain_cache(
        ["A", "Hi", "B", "Yes"],
        tmp_path / "pretrain",
        tokenizer=ByteTokenizer(),
        max_train_tokens=100,
        max_val_tokens=100,
        shard_bytes=8,
        seed=0,
        shuffle_buffer=None,
        document_end="eot",
    )
    return tmp_path / "pretrain"


def test_the_bytes_of_the_worked_pretrain_cache_are_the_real_ones(pretrain):
    shown = example_files("The `pretrain` cache has the four documents")
    assert {name: content(pretrain, name) for name in shown} == shown
    meta = read_meta(str(pretrain / "meta.json"))
    files = {
        path.relative_to(pretrain.resolve()).as_posix() for path in pretrain.resolve().rglob("*") if path.is_file()
    }
    assert files == {*shown, "meta.json"}
    assert f"content_sha256  {meta['content_sha256']}\n" in PAGE
    (shown_meta,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert json.loads(shown_meta).items() <= meta.items()


def test_the_bytes_of_the_worked_cache_of_32_bits_are_the_real_ones(pretrain, tmp_path):
    build_pretrain_cache(
        ["A", "Hi", "B", "Yes"],
        tmp_path / "wide",
        tokenizer=WideByteTokenizer(),
        max_train_tokens=100,
        max_val_tokens=100,
        shard_bytes=16,
        seed=0,
        shuffle_buffer=None,
        document_end="eot",
    )
    shown = example_files("The same cache of ids of 32 bits")
    shards = {path.relative_to(tmp_path / "wide").as_posix() for path in (tmp_path / "wide").rglob("*.bin")}
    assert shown.keys() == shards - {"index/crc32.bin"}
    assert {name: content(tmp_path / "wide", name) for name in shown} == shown
    assert read_meta(str(tmp_path / "wide" / "meta.json"))["token_dtype"] == "uint32-le"
    unchanged = [f"index/{split}_{name}" for split in ("train", "val") for name in ("docs.npy", "ids.txt")]
    assert all(content(pretrain, name) == content(tmp_path / "wide", name) for name in unchanged)


def test_the_bytes_of_the_worked_sft_cache_are_the_real_ones(tmp_path):
    chats = [chat("Hi", "Yes"), chat("A", "B")]
    build_sft_cache(chats, tmp_path / "sft", tokenizer=ByteTokenizer(), val_frac=0.5, seed=0)
    shown = example_files("The `sft` cache has two chats")
    assert {name: content(tmp_path / "sft", name) for name in shown} == shown
    data = SFTExampleDataset.open(tmp_path / "sft", "train", T=5)
    masked = data.get_batch(B=1, generator=torch.Generator().manual_seed(0))[2]
    assert masked.tolist() == [[-100, -100, -100, 0x4C, 4]]


def test_the_command_of_the_page_computes_the_content_sha256(pretrain):
    (command,) = re.findall(r"^cd VERSION && (.*)$", PAGE, re.MULTILINE)
    done = subprocess.run(["bash", "-c", command], cwd=pretrain, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == read_meta(str(pretrain / "meta.json"))["content_sha256"]


def record(folder, name, **counts):
    raw = (folder / name).read_bytes()
    return {"name": name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), **counts}


def least_meta(kind, **keys):
    """Return a meta.json with the keys that the page calls the least, and one that no reader knows."""
    meta = {
        "kind": kind,
        "format_version": 1,
        "built": True,
        "token_dtype": "uint16-le",
        "tokenizer_sha256": None,
        "vocab_size": 300,
        "special_token_ids": {"sys": 1, "usr": 2, "asst": 3, "eot": 4},
        "content_sha256": "0" * 64,
        "made_by": "a writer in another language",
        **keys,
    }
    listed = PAGE[PAGE.index("The least that a meta.json MUST have") :].split("A writer in another language")[0]
    assert {*re.findall(r"`(\w+)`", listed)} >= {*meta} - {"made_by"}
    return json.dumps(meta, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def test_the_least_cache_of_another_writer_is_read(tmp_path):
    web, chats = tmp_path / "web", tmp_path / "chats"
    (web / "train").mkdir(parents=True)
    chats.mkdir()
    np.arange(10, 30, dtype="<u2").tofile(web / "train" / "shard_00000.bin")
    shards = [record(web, "train/shard_00000.bin", tokens=20)]
    (web / "meta.json").write_text(least_meta("pretrain", shards={"train": shards, "val": []}))
    np.array([2, 75, 4, 3, 76, 4], dtype="<u2").tofile(chats / "train_tokens.bin")
    np.save(chats / "train_idx.npy", np.array([0], dtype="<i8"))
    tokens, index = record(chats, "train_tokens.bin", tokens=6), record(chats, "train_idx.npy", entries=1)
    (chats / "meta.json").write_text(least_meta("sft", shards={"train": [tokens]}, index={"train": index}))

    generator = torch.Generator().manual_seed(0)
    x, y = PretrainTokenStreamDataset(web / "train", T=4, device="cpu").get_batch(B=2, generator=generator)
    assert torch.equal(y, x + 1)
    batches = list(EpochStream(web / "train", T=4, global_batch_size=2, seed=0, epochs=1))
    assert sorted(int(row[0]) for batch in batches for row in batch.x) == [10, 14, 18, 22]
    x, y, masked = SFTExampleDataset.open(chats, "train", T=5).get_batch(B=1, generator=generator)
    assert x.tolist() == [[2, 75, 4, 3, 76]] and masked.tolist() == [[-100, -100, -100, 76, 4]]


def test_the_texts_and_keys_of_chats_on_the_page_are_the_real_ones():
    rows = re.findall(r"^\| .+ \| `(\[\[.*\]\])` \| 0x([0-9a-f]{16}) \|$", PAGE, re.MULTILINE)
    for text, digits in rows:
        assert hashlib.sha256(f"0\n{text}".encode()).hexdigest()[:16] == digits
        assert chat_text([tuple(turn) for turn in json.loads(text)]).decode() == text
    assert len(rows) == 3
