"""litdata's chunks and index.json: bytes on paper, what is read back, and what is refused."""

import json

import numpy as np
import pytest
from support.errors import refused
from support.foreign import read_folder
from support.number_caches import NumberTokenizer
from support.small_caches import build_caches, build_notes

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.storage.errors import CacheError

DOCUMENTS = ((None, "abc"), (None, "de"), (None, "fghij"))
CONFIG = {"compression": None, "data_format": ["no_header_tensor:20"], "item_loader": "TokensLoader"}


class WideTokenizer(NumberTokenizer):
    """Its ids have 32 bits."""

    vocab_size = 1 << 17


@pytest.fixture
def notes(tmp_path):
    """A cache of three documents in two shards of six and four tokens."""
    build_caches(tmp_path / "cache")
    return build_notes(tmp_path / "cache", DOCUMENTS, max_train_tokens=10, shard_bytes=12)


def tokens_of(file):
    return np.concatenate(list(file.pieces())).tolist()


def ends_of(file):
    assert file.ends is not None
    return file.ends().tolist()


def put_chunk(folder, items, kind="<u2", **config):
    """Write a folder as litdata's writer does, of one chunk."""
    folder.mkdir(parents=True, exist_ok=True)
    body = [np.array(item, dtype=kind).tobytes() for item in items]
    begin = 4 * (len(items) + 2)
    head = [len(items), *np.cumsum([begin, *map(len, body)])]
    (folder / "chunk-0-0.bin").write_bytes(np.array(head, dtype="<u4").tobytes() + b"".join(body))
    size, tokens = (folder / "chunk-0-0.bin").stat().st_size, sum(map(len, items))
    chunk = {"chunk_bytes": size, "chunk_size": len(items), "dim": tokens, "filename": "chunk-0-0.bin"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": CONFIG | config}))
    return folder


def test_a_chunk_has_the_bytes_on_paper(notes, tmp_path):
    out = tmp_path / "out"
    ids = [ord(letter) + 10 for letter in "abcdefghij"]
    export_cache(notes, "litdata", out)

    head = "03 00 00 00  14 00 00 00  1a 00 00 00  1e 00 00 00  20 00 00 00"
    first, second = (np.array(part, dtype="<u2").tobytes() for part in (ids[:6], ids[6:]))
    assert (out / "train/chunk-0-0.bin").read_bytes() == bytes.fromhex(head) + first
    head = "01 00 00 00  0c 00 00 00  14 00 00 00"
    assert (out / "train/chunk-0-1.bin").read_bytes() == bytes.fromhex(head) + second
    index = json.loads((out / "train/index.json").read_bytes())
    assert index["chunks"] == [
        {"chunk_bytes": 32, "chunk_size": 3, "dim": 6, "filename": "chunk-0-0.bin"},
        {"chunk_bytes": 20, "chunk_size": 1, "dim": 4, "filename": "chunk-0-1.bin"},
    ]
    assert index["config"]["data_format"] == ["no_header_tensor:20"]

    files = read_folder(out, "litdata").files
    assert [file.name for file in files] == ["train/chunk-0-0.bin", "train/chunk-0-1.bin"]
    assert [file.continues for file in files] == [False, True]
    assert [ends_of(file) for file in files] == [[3, 5, 6], [4]]
    assert [*tokens_of(files[0]), *tokens_of(files[1])] == ids


def test_ids_of_32_bits_are_int32_for_torch(tmp_path):
    limits = {"max_train_tokens": 5, "max_val_tokens": 0, "shuffle_buffer": None, "num_threads": 0}
    cache = tmp_path / "cache" / "pretrain" / "numbers"
    documents = [(None, "70000-70003"), (None, "5-7")]
    build_pretrain(documents, cache, tokenizer=WideTokenizer(), shard_bytes=80, seed=0, **limits)
    export_cache(cache, "litdata", tmp_path / "out")

    head = "02 00 00 00  10 00 00 00  1c 00 00 00  24 00 00 00"
    ids = "70 11 01 00  71 11 01 00  72 11 01 00  05 00 00 00  06 00 00 00"
    assert (tmp_path / "out/train/chunk-0-0.bin").read_bytes() == bytes.fromhex(head + ids)
    index = json.loads((tmp_path / "out/train/index.json").read_bytes())
    assert index["config"]["data_format"] == ["no_header_tensor:16"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("<u2", "no_header_numpy:5"),
        ("<i4", "no_header_tensor:16"),
        ("<i8", "no_header_tensor:18"),
        ("<u4", "no_header_numpy:6"),
    ],
)
def test_every_type_of_ids_is_read(tmp_path, kind, name):
    put_chunk(tmp_path / "train", [[1, 2, 3], [], [50_000]], kind, data_format=[name])
    put_chunk(tmp_path / "val", [[7]], kind, data_format=[name])
    put_chunk(tmp_path / "test", [[8]], kind, data_format=[name])

    found = read_folder(tmp_path, "litdata")

    assert [(file.split, tokens_of(file), ends_of(file)) for file in found.files] == [
        ("train", [1, 2, 3, 50_000], [3, 4]),
        ("val", [7], [1]),
    ]
    assert found.noticed == {"empty_documents": 1, "files_of_a_test_split": 1}


def test_chunks_of_several_workers_are_read_in_the_order_of_the_index(tmp_path):
    put_chunk(tmp_path, [[1, 2]])
    (tmp_path / "chunk-0-0.bin").rename(tmp_path / "chunk-1-0.bin")
    index = json.loads((tmp_path / "index.json").read_bytes())
    other = put_chunk(tmp_path, [[3, 4]])
    index["chunks"][0]["filename"] = "chunk-1-0.bin"
    index["chunks"].append({**index["chunks"][0], "filename": "chunk-0-0.bin"})
    (other / "index.json").write_text(json.dumps(index))

    assert [tokens_of(file) for file in read_folder(tmp_path, "litdata").files] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"compression": "zstd"}, "compression"),
        ({"encryption": {"algorithm": "fernet", "level": "chunk"}}, "encryption"),
        ({"item_loader": "PyTreeLoader"}, "TokensLoader"),
        ({"data_format": ["no_header_tensor:1"]}, "data_format"),
        ({"data_format": ["int", "str"]}, "data_format"),
        ({"data_format": 3}, "data_format"),
    ],
)
def test_what_is_no_folder_of_tokens_is_refused_by_name(tmp_path, config, word):
    put_chunk(tmp_path, [[1, 2]], **config)
    with refused("E221", "index.json", word):
        read_folder(tmp_path, "litdata")


@pytest.mark.parametrize("at", [0, 4, 8, 12])
def test_another_header_is_refused(tmp_path, at):
    path = put_chunk(tmp_path, [[1, 2], [3]]) / "chunk-0-0.bin"
    raw = bytearray(path.read_bytes())
    raw[at : at + 4] = (0xFFFFFFFF if at == 0 else int.from_bytes(raw[at : at + 4], "little") + 1).to_bytes(4, "little")
    path.write_bytes(raw)
    with refused("E221", "chunk-0-0.bin"):
        read_folder(tmp_path, "litdata")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("filename", "../chunk-0-0.bin"),
        ("filename", "absent.bin"),
        ("chunk_bytes", 1),
        ("dim", None),
        ("dim", 2**31),
        ("chunk_size", -1),
        ("filename", ".."),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, key, value):
    index = json.loads((put_chunk(tmp_path, [[1, 2]]) / "index.json").read_bytes())
    index["chunks"][0][key] = value
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CacheError):
        read_folder(tmp_path, "litdata")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"config": [], "chunks": 1}',
        b'{"config": {"data_format": ["no_header_tensor:20"]}, "chunks": 3}',
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, raw):
    (tmp_path / "index.json").write_bytes(raw)
    with refused("E221"):
        read_folder(tmp_path, "litdata")


def test_a_chunk_that_is_a_link_is_refused(tmp_path):
    folder = put_chunk(tmp_path / "data", [[1, 2]])
    (folder / "chunk-0-0.bin").rename(tmp_path / "elsewhere")
    (folder / "chunk-0-0.bin").symlink_to(tmp_path / "elsewhere")
    with refused("E205"):
        read_folder(folder, "litdata")


def test_a_folder_without_an_index_is_refused(tmp_path):
    with refused("E221", "index.json"):
        read_folder(tmp_path, "litdata")
