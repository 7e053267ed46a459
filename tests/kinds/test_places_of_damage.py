"""Damage is reported with its bytes; what a document and an example may hold; what no foreign meta.json judges."""

import hashlib
import json
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.disk import canonical_json, content_sha256, file_records, meta_bytes
from support.looking import blocks_of
from support.small_caches import put_token

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.kinds.files import Damage
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.tokenizer import ensure_tokenizer

BLOCK = 65_536
EOT, ASST, USR = 4, 3, 2


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """pretrain/notes: 90 documents of about 1,000 tokens in two shards for train, some for val. sft/chats: 300 chats of
    two to six messages, whose offsets take more than one block."""
    root, letters = tmp_path_factory.mktemp("good"), random.Random(3)
    pretrain_of(root, ["".join(letters.choices("abcdefgh", k=letters.randrange(900, 1_100))) for _ in range(90)])
    build_sft(chats(300), root / "sft" / "chats", tokenizer=ByteTokenizer(), val_frac=0.1, seed=0)
    return root


@pytest.fixture
def copied(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "c", symlinks=True))


@pytest.fixture
def pretrain(copied):
    """Return a copied version."""
    return (copied / "pretrain" / "notes").resolve()


@pytest.fixture
def sft(copied):
    """Return a copied version."""
    return (copied / "sft" / "chats").resolve()


def pretrain_of(root, texts, **arguments):
    path = root / "pretrain" / "notes"
    chosen = {"max_train_tokens": 80_000, "max_val_tokens": 8_000, "shard_bytes": 140_000, "document_end": "eot"}
    fixed = {"tokenizer": ByteTokenizer(), "seed": 0, "shuffle_buffer": None}
    build_pretrain(((None, text) for text in texts), path, **fixed, **{**chosen, **arguments})
    return path.resolve()


def chats(count):
    lengths = random.Random(4)
    return [
        [
            {"role": ("user", "assistant")[turn % 2], "content": "x" * lengths.randrange(200)}
            for turn in range(lengths.choice([2, 4, 6]))
        ]
        for _ in range(count)
    ]


@pytest.fixture
def tokenizer(settings):
    """Return an open version of a real model."""
    return ensure_tokenizer(settings).path.resolve()


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path, byte, bit):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def put_offset(path, place, value):
    offsets = np.load(path)
    offsets[place] = value
    np.save(path, offsets)


def describe(folder, *, old=False, **keys):
    """Write a meta.json that fits the files as they are now, as a builder with a mistake would have; then set keys."""
    meta = json.loads((folder / "meta.json").read_bytes())
    if old:
        for name in ("ids", "checksums", "meta_crc32"):
            meta.pop(name, None)
        for name in ("crc32.bin", "train_ids.txt", "val_ids.txt"):
            (folder / "index" / name).unlink()
    for record in file_records(meta):
        content = (folder / record["name"]).read_bytes()
        if record["name"] == "index/crc32.bin":
            covered = [(folder / other["name"]).read_bytes() for other in file_records(meta) if other != record]
            crcs = [zlib.crc32(file[at : at + BLOCK]) for file in covered for at in range(0, len(file), BLOCK)]
            content = np.array(crcs, dtype="<u4").tobytes()
            (folder / record["name"]).write_bytes(content)
        record["sha256"], record["bytes"] = hashlib.sha256(content).hexdigest(), len(content)
    meta["content_sha256"] = content_sha256(file_records(meta))
    meta |= keys
    (folder / "meta.json").write_bytes(canonical_json(meta) if old else meta_bytes(meta))


@pytest.mark.parametrize("read_bytes", [64, 4_096])
def test_where_the_reading_is_cut_does_not_matter(pretrain, sft, read_bytes):
    with blocks_of(read_bytes=read_bytes):
        assert find_damage(pretrain, deep=True) == find_damage(sft, deep=True) == []


@pytest.mark.parametrize("kind", ["pretrain", "sft", "tokenizer"])
def test_a_flipped_bit_anywhere_is_reported_with_its_file_and_block(kind, request):
    folder = request.getfixturevalue(kind)
    draw, files = random.Random(6), files_of(folder)
    assert len(files) == {"pretrain": 9, "sft": 8, "tokenizer": 2}[kind]
    for number in range(36):
        path = files[number % len(files)]
        name, size, bit = path.relative_to(folder).as_posix(), path.stat().st_size, draw.randrange(8)
        byte = draw.randrange(size)
        flip(path, byte, bit)
        found = find_damage(folder, deep=True)
        assert {damage.file for damage in found} == {name}, (name, byte, bit, found)
        assert any(damage.offset <= byte < damage.end for damage in found) or name == "meta.json"
        if name not in ("spm.model", "meta.json"):  # those have no block checksums
            entry = 4 if name == "index/crc32.bin" else BLOCK
            start, end = byte // entry * entry, min(size, byte // entry * entry + entry)
            assert (start, end) in [(damage.offset, damage.end) for damage in found], (name, byte, bit, found)
        flip(path, byte, bit)
    assert find_damage(folder, deep=True) == []


def test_every_bit_of_the_checksum_of_meta_json_and_of_its_line_is_found(tokenizer):
    path = tokenizer / "meta.json"
    start = path.read_bytes().index(b'  "meta_crc32"')
    for byte in range(start, start + len(b'  "meta_crc32": "12345678",\n')):
        for bit in range(8):
            flip(path, byte, bit)
            (found,) = find_damage(tokenizer, deep=False)
            assert found.file == "meta.json"
            flip(path, byte, bit)
    describe(tokenizer, tokenizer_sha256="0" * 64)
    assert "tokenizer_sha256 is not the sha256 of spm.model" in find_damage(tokenizer, deep=False)[0].problem


def test_blocks_that_differ_are_byte_ranges_and_neighbours_are_one(tmp_path):
    words = random.Random(1).choices("abcdefgh", k=160_000)
    folder = pretrain_of(tmp_path, ["".join(words)], max_train_tokens=160_000, max_val_tokens=0, shard_bytes=320_000)
    path = folder / "train" / "shard_00000.bin"
    content = bytearray(path.read_bytes())
    assert 4 * BLOCK < len(content) < 5 * BLOCK
    for byte in (100, BLOCK + 4, 3 * BLOCK + 2):
        content[byte] ^= 0x01
    path.write_bytes(content)
    first, second = find_damage(folder, deep=True)
    assert (first.offset, first.end) == (0, 2 * BLOCK) and "bytes 0 to 131072 differ" in first.problem
    assert (second.offset, second.end) == (3 * BLOCK, 4 * BLOCK)


MORE_THAN_A_BIT = [
    (b'"kind": "sft"', b'"kind": "sxx"', None, "another meta_crc32 than its bytes have"),
    (b'"kind":', b'"kind",', len(b'"kind"'), "not JSON"),
    (b'"kind"', b'"\xffind"', 1, "not JSON"),
    (b'  "meta_crc32"', b'  "other"', None, "no meta_crc32"),
]


@pytest.mark.parametrize(("old", "new", "place", "problem"), MORE_THAN_A_BIT)
def test_a_meta_json_that_differs_by_more_than_a_bit_is_named_and_nothing_else_is_judged_by_it(
    sft, old, new, place, problem
):
    raw = (sft / "meta.json").read_bytes()
    (sft / "meta.json").write_bytes(raw.replace(old, new))
    (found,) = find_damage(sft, deep=True)
    assert found.file == "meta.json" and problem in found.problem
    assert found.offset == (0 if place is None else raw.index(old) + place)
    assert place is not None or "another" not in problem or found.end == len(raw)


def test_a_cache_of_an_older_builder_is_judged_by_its_sha256_alone(pretrain):
    describe(pretrain, old=True)
    assert find_damage(pretrain, deep=True) == []
    name = "train/shard_00001.bin"
    flip(pretrain / name, 76, 0)
    (found,) = find_damage(pretrain, deep=True)
    assert found[:3] == (name, 0, (pretrain / name).stat().st_size) and "sha256" in found.problem
    flip(pretrain / name, 76, 0)
    meta = json.loads((pretrain / "meta.json").read_bytes())
    meta["shards"]["train"][0]["sha256"] = "0" * 64
    (pretrain / "meta.json").write_bytes(canonical_json(meta))
    found = find_damage(pretrain, deep=True)
    assert {damage.file for damage in found} == {"meta.json"} and "train/shard_00000.bin" in found[-1].problem


IN_ORDER = [
    # a a a a eot b b b | b eot c c c c eot
    (["aaaa", "bbbb", "cccc"], {"shard_bytes": 16}, 0, 6, ASST, "token 6 is the sentinel asst inside document 1"),
    (["aaaa", "bbbb", "cccc"], {"shard_bytes": 16}, 1, 1, 75, "token 1 ends document 1, expected an end-of-text"),
    (["aaaa", "bbbb"], {"document_end": "none"}, 0, 3, EOT, "token 3 is the sentinel eot inside document 0"),
]


@pytest.mark.parametrize(("texts", "arguments", "shard", "place", "id", "problem"), IN_ORDER)
def test_a_sentinel_inside_a_document_and_an_end_without_one_are_found(
    tmp_path, texts, arguments, shard, place, id, problem
):
    folder, name = pretrain_of(tmp_path, texts, max_val_tokens=0, **arguments), f"train/shard_0000{shard}.bin"
    assert find_damage(folder, deep=True) == []
    put_token(folder / name, place, id)
    describe(folder)
    assert find_damage(folder, deep=True) == [Damage(name, 2 * place, 2 * place + 2, problem)]


def with_edges(tmp_path, key, places):
    """Return a good cache of two documents, whose tokens at `places` are the ordinary one of a key of meta.json."""
    folder = pretrain_of(tmp_path, ["aaaa", "bbbb"], max_val_tokens=0)
    for place in places:
        put_token(folder / "train/shard_00000.bin", place, 75)
    describe(folder, **{key: {"id": 75, "token": "A"}})
    assert find_damage(folder, deep=True) == []
    return folder


@pytest.mark.parametrize(
    ("key", "places", "stray", "problem"),
    [
        ("document_end", (4, 9), 1, "token 1 is the token 'A' (75), which ends documents, inside document 0"),
        ("document_start", (0, 5), 7, "token 7 is the token 'A' (75), which begins documents, inside document 1"),
    ],
)
def test_an_ordinary_token_at_the_edge_of_documents_is_found_inside_one(tmp_path, key, places, stray, problem):
    folder, name = with_edges(tmp_path, key, places), "train/shard_00000.bin"
    put_token(folder / name, stray, 75)
    describe(folder)
    assert find_damage(folder, deep=True) == [Damage(name, 2 * stray, 2 * stray + 2, problem)]


def test_a_document_without_the_token_that_begins_documents_is_found(tmp_path):
    folder, name = with_edges(tmp_path, "document_start", (0, 5)), "train/shard_00000.bin"
    put_token(folder / name, 5, 76)
    describe(folder)
    assert find_damage(folder, deep=True) == [Damage(name, 10, 12, "token 5 begins document 1, expected 'A' (75)")]


def test_a_document_that_met_its_budget_needs_no_end_of_text_and_no_other_lacks_one(tmp_path):
    folder = pretrain_of(tmp_path, ["aaaa", "bbbb"], max_train_tokens=8, max_val_tokens=0)
    assert json.loads((folder / "meta.json").read_bytes())["cut"]["documents"] == 1
    assert find_damage(folder, deep=True) == []
    describe(folder, cut={"documents": 0, "tokens": 0})
    (found,) = find_damage(folder, deep=True)
    assert found.problem == "token 7 ends document 1, expected an end-of-text"


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "aa"}]
"""usr q eot asst a a eot: seven tokens."""


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (0, 75, "begins example 0, expected the sentinel of a role"),
        (2, 75, "is a sentinel out of turn in example 0: a role, ids, an eot"),  # seen at the next role, token 3
        (4, EOT, "is a sentinel out of turn in example 0: a role, ids, an eot"),
        (4, USR, "is a sentinel out of turn in example 0: a role, ids, an eot"),
        (20, 75, "ends the last example, expected an end-of-text"),
        (3, 75, "is a sentinel out of turn in example 0: a role, ids, an eot"),
    ],
)
def test_an_example_that_is_not_role_ids_end_is_found(tmp_path, place, value, problem):
    path = tmp_path / "c" / "sft" / "chats"
    build_sft([CHAT] * 3, path, tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    folder = path.resolve()
    assert find_damage(folder, deep=True) == []
    put_token(folder / "train_tokens.bin", place, value)
    describe(folder)
    found = find_damage(folder, deep=True)[0]
    assert found.file == "train_tokens.bin" and found.problem.endswith(problem)
    assert place <= found.offset // 2 <= place + 3


def test_offsets_that_do_not_ascend_or_do_not_end_right_are_found_at_their_entry(pretrain, sft):
    docs, last = int(np.load(pretrain / "index" / "train_docs.npy")[4]), len(np.load(sft / "train_idx.npy")) - 1
    for folder, name, entry, value, said in (
        (pretrain, "index/train_docs.npy", 5, docs, f"more than {docs}"),
        (sft, "val_idx.npy", 0, 1, "0"),
        (sft, "train_idx.npy", last, 10**9, "less than"),
    ):
        before = int(np.load(folder / name)[entry])
        put_offset(folder / name, entry, value)
        describe(folder)
        found = find_damage(folder, deep=True)[0]
        assert found[:3] == (name, 128 + 8 * entry, 136 + 8 * entry)
        assert found.problem.startswith(f"entry {entry} is {value}, expected {said}")
        put_offset(folder / name, entry, before)


def test_the_header_of_an_offsets_file_is_seen_by_a_quick_look(sft):
    flip(sft / "train_idx.npy", 30, 1)
    (found,) = find_damage(sft, deep=False)
    assert (found.file, found.offset, found.end) == ("train_idx.npy", 30, 128)


def test_source_ids_are_as_many_as_documents_and_ascii(sft):
    path = sft / "index" / "train_ids.txt"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\xc3\xa9\n", *lines[5:]]))
    describe(sft)
    foreign, count = find_damage(sft, deep=True)
    assert (foreign.offset, foreign.problem) == (len(b"".join(lines[:3])), "not ASCII")
    assert f"{len(lines) - 1:,} lines, expected {len(lines):,}" in count.problem
    path.write_bytes(b"".join(lines)[:-1])
    describe(sft)
    assert "the last line has no end" in find_damage(sft, deep=True)[0].problem


ACCOUNTS = [
    ("train_tokens", lambda meta: meta["train_tokens"] + 1, "train_tokens is"),
    ("docs", lambda meta: {**meta["docs"], "val": 0}, "docs.val is 0"),
    ("documents_read", lambda meta: 0, "documents_read is 0"),
    ("vocab_size", lambda meta: 0, "vocab_size is 0, expected 1 to 65,536"),
    ("special_token_ids", lambda meta: {"eot": 4}, "expected an id of the 300 for each sentinel"),
    ("content_sha256", lambda meta: "0" * 64, "but the files it names give"),
]


@pytest.mark.parametrize(("key", "value", "problem"), ACCOUNTS, ids=[case[0] for case in ACCOUNTS])
def test_what_does_not_add_up_in_meta_json_is_found_at_its_line(pretrain, key, value, problem):
    describe(pretrain, **{key: value(json.loads((pretrain / "meta.json").read_bytes()))})
    (found,) = find_damage(pretrain, deep=False)
    assert found.file == "meta.json" and problem in found.problem
    assert (pretrain / "meta.json").read_bytes()[found.offset : found.end].startswith(f'  "{key}":'.encode())


@pytest.mark.parametrize("deep", [False, True])
def test_the_meta_json_of_another_cache_is_the_only_damage(tmp_path, pretrain, deep):
    other = pretrain_of(tmp_path / "other", ["abcd" * number for number in range(400, 440)])
    copy = tmp_path / "copy"
    shutil.copytree(pretrain, copy)
    for foreign in ((other / "meta.json").read_bytes(), b'{"vocab_size": 65, "itos": {"0": "a"}}'):
        for folder in (pretrain, copy):
            (folder / "meta.json").write_bytes(foreign)
            (found,) = find_damage(folder, deep=deep)
            assert found.file == "meta.json" and (found.offset, found.end) == (0, len(foreign))
            assert "of another cache" in found.problem or "not of a cache of this project" in found.problem


def test_files_that_nobody_names_links_and_pipes_are_reported_and_not_opened(pretrain, tmp_path):
    outside = tmp_path / "outside.bin"
    shard = pretrain / "train" / "shard_00000.bin"
    outside.write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(outside)
    (pretrain / "more").symlink_to(tmp_path)
    (pretrain / "val" / "notes.txt").write_bytes(b"mine")
    (pretrain / "val" / "shard_00000.bin").unlink()
    os.mkfifo(pretrain / "val" / "shard_00000.bin")
    (pretrain / ".meta.json.0123abcd.tmp").write_bytes(b"{")  # of a writer that was killed
    found = {damage.file: damage.problem for damage in find_damage(pretrain, deep=True)}
    assert found.keys() == {"train/shard_00000.bin", "more", "val/notes.txt", "val/shard_00000.bin"}
    assert found["val/shard_00000.bin"].startswith("not a regular file")
    assert found["train/shard_00000.bin"].startswith("a symbolic link")
    assert found["more"].startswith("a symbolic link") and found["val/notes.txt"].startswith("a file that")


def test_a_public_link_that_leads_nowhere_is_a_damage(tmp_path):
    (tmp_path / "gone").symlink_to(".versions/gone/0123456789ab")
    (tmp_path / "round").symlink_to("round")
    for name in ("gone", "round"):
        (found,) = find_damage(tmp_path / name, deep=True)
        assert found.file == "meta.json"


def test_a_deep_look_reports_how_far_it_is(pretrain):
    seen = []
    find_damage(pretrain, deep=True, progress=lambda *numbers: seen.append(numbers))
    total = sum(path.stat().st_size for path in files_of(pretrain) if path.name != "meta.json")
    assert seen[-1] == (8, total, total) and [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
