"""Every damage is named with its file and bytes, a flipped bit with the bit, and no good file is blamed.

Run: pytest tests/test_verify_damage.py
"""

import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from niels_gpt.build.describe import Source, content_sha256
from niels_gpt.build.pretrain import build_pretrain, build_stub
from niels_gpt.build.sft import build_sft
from niels_gpt.cache import cli
from niels_gpt.fileio import canonical_json
from niels_gpt.inspection import damage as module
from niels_gpt.inspection.checksums import flipped_bit
from niels_gpt.inspection.contents import Damage
from niels_gpt.inspection.damage import find_damage
from niels_gpt.inspection.verify import Limits, verify
from niels_gpt.recipes.plan import RECIPES, ensure_tokenizer
from niels_gpt.records import file_records, meta_bytes
from niels_gpt.settings import Settings

BLOCK = 65_536
EOT, ASST, USR = 4, 3, 2


@pytest.fixture
def pretrain(tmp_path: Path) -> Path:
    """Return an open version: 90 documents of about 1,000 tokens in two shards for train, some for val."""
    letters = random.Random(3)
    texts = ["".join(letters.choices("abcdefgh", k=letters.randrange(900, 1_100))) for _ in range(90)]
    return pretrain_of(tmp_path, texts)


def pretrain_of(root: Path, texts: list[str], **arguments: Any) -> Path:
    path = root / "c" / "pretrain" / "notes"
    chosen = {"max_train_tokens": 80_000, "max_val_tokens": 8_000, "shard_bytes": 140_000, "append_eot": True}
    fixed = {"tokenizer": ByteTokenizer(), "seed": 0, "shuffle_buffer": None}
    build_pretrain(((None, text) for text in texts), path, **fixed, **{**chosen, **arguments})
    return path.resolve()


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    """Return an open version: 300 chats of two to six messages, and offsets of more than one block."""
    return sft_of(tmp_path, chats(300))


def chats(count: int) -> list[list[dict[str, str]]]:
    lengths = random.Random(4)
    return [
        [
            {"role": ("user", "assistant")[turn % 2], "content": "x" * lengths.randrange(200)}
            for turn in range(lengths.choice([2, 4, 6]))
        ]
        for _ in range(count)
    ]


def sft_of(root: Path, examples: list[list[dict[str, str]]]) -> Path:
    path = root / "c" / "sft" / "chats"
    build_sft(examples, path, tokenizer=ByteTokenizer(), val_frac=0.1, seed=0)
    return path.resolve()


@pytest.fixture
def tokenizer(settings: Settings) -> Path:
    """Return an open version of a real model."""
    return ensure_tokenizer(settings).path.resolve()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, byte: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def describe(folder: Path, *, old: bool = False, **keys: Any) -> None:
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


def put(path: Path, place: int, value: int, dtype: str = "<u2", header: int = 0) -> None:
    content = bytearray(path.read_bytes())
    size = np.dtype(dtype).itemsize
    content[header + place * size : header + (place + 1) * size] = np.array([value], dtype=dtype).tobytes()
    path.write_bytes(content)


def test_no_damage_is_found_in_a_good_cache(settings: Settings) -> None:
    for build in (ensure_tokenizer, *RECIPES.values()):
        outcome = build(settings)
        for deep in (False, True):
            assert find_damage(outcome.path, deep=deep) == [], outcome.key


@pytest.mark.parametrize("read_bytes", [64, 4_096])
def test_where_the_reading_is_cut_into_pieces_does_not_matter(
    pretrain: Path, sft: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", read_bytes)
    assert find_damage(pretrain, deep=True) == find_damage(sft, deep=True) == []


@pytest.mark.parametrize("kind", ["pretrain", "sft", "tokenizer"])
def test_a_hundred_flipped_bits_are_named_with_their_files_bytes_and_bits(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    draw, files = random.Random(6), files_of(folder)
    assert len(files) == {"pretrain": 9, "sft": 8, "tokenizer": 2}[kind]
    for number in range(100):
        path = files[number % len(files)]
        name, byte, bit = path.relative_to(folder).as_posix(), draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, byte, bit)
        found = find_damage(folder, deep=True)
        assert {damage.file for damage in found} == {name}, (name, byte, bit, found)
        if name != "spm.model":  # it has no block checksums
            exact = [damage for damage in found if (damage.offset, damage.end) == (byte, byte + 1)]
            assert f"bit {bit} of byte {byte} is flipped" in exact[0].problem, (name, byte, bit, found)
        flip(path, byte, bit)
    assert find_damage(folder, deep=True) == []


@pytest.mark.parametrize("kind", ["pretrain", "sft", "tokenizer"])
def test_a_file_that_was_cut_or_is_gone_is_named_by_a_quick_look(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    draw = random.Random(7)
    for path in files_of(folder):
        whole, name = path.read_bytes(), path.relative_to(folder).as_posix()
        for size in sorted({0, 1, draw.randrange(len(whole)), len(whole) - 1}):
            path.write_bytes(whole[:size])
            found = find_damage(folder, deep=False)
            assert [damage.file for damage in found] == [name], (size, found)
            if name != "meta.json":
                assert found[0] == Damage(
                    name, size, len(whole), f"{size} bytes, expected {len(whole)} by its meta.json"
                )
        path.unlink()
        assert [(damage.file, "no such file" in damage.problem) for damage in find_damage(folder, deep=False)] == [
            (name, True)
        ]
        path.write_bytes(whole)


def test_every_bit_of_the_checksum_of_meta_json_and_of_its_line_is_found(tokenizer: Path) -> None:
    path = tokenizer / "meta.json"
    start = path.read_bytes().index(b'  "meta_crc32"')
    for byte in range(start, start + len(b'  "meta_crc32": "12345678",\n')):
        for bit in range(8):
            flip(path, byte, bit)
            (found,) = find_damage(tokenizer, deep=True)
            assert (found.file, found.offset, found.end) == ("meta.json", byte, byte + 1)
            flip(path, byte, bit)


def test_the_place_of_a_flipped_bit_is_read_from_the_checksum_alone() -> None:
    draw = random.Random(1)
    for num_bytes in (1, 7, 1_000, BLOCK, BLOCK + 1, 5 * BLOCK + 333):
        content = draw.randbytes(num_bytes)
        for byte in {0, num_bytes - 1, draw.randrange(num_bytes)}:
            bit = draw.randrange(8)
            changed = content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]
            assert flipped_bit(zlib.crc32(content) ^ zlib.crc32(changed), num_bytes) == (byte, bit)
    assert flipped_bit(zlib.crc32(b"abcd") ^ zlib.crc32(b"abzz"), 4) is None
    assert flipped_bit(zlib.crc32(bytes(2)) ^ zlib.crc32(b"\1\0"), 1) is None  # a place before the first byte


def test_blocks_that_differ_are_byte_ranges_and_neighbours_are_one(pretrain: Path) -> None:
    path = pretrain / "train" / "shard_00000.bin"
    content = bytearray(path.read_bytes())
    assert len(content) == 140_000
    content[100:300] = bytes(200)
    content[BLOCK + 5 : BLOCK + 9] = b"\0\0\0\0"
    content[2 * BLOCK + 1] ^= 0x40
    path.write_bytes(content)
    first, second = [damage for damage in find_damage(pretrain, deep=True) if "sha256" in damage.problem]
    assert (first.offset, first.end) == (0, 2 * BLOCK) and "bytes 0 to 131072 differ" in first.problem
    assert (second.offset, second.end) == (2 * BLOCK + 1, 2 * BLOCK + 2) and "bit 6 of byte" in second.problem


def test_an_error_that_only_looks_like_one_flipped_bit_is_a_range(pretrain: Path) -> None:
    """Three bits whose checksum is the one of a fourth: the sha256 of the file has the last word."""
    path, content = pretrain / "train" / "shard_00001.bin", bytearray()
    content += path.read_bytes()
    syndromes = {}
    for place in range(8 * 2_000):
        changed = bytearray(len(content))
        changed[place // 8] = 1 << place % 8
        syndromes[place] = zlib.crc32(changed) ^ zlib.crc32(bytes(len(content)))
    by_value = {value: place for place, value in syndromes.items()}
    places = list(syndromes)
    pairs: dict[int, tuple[int, int]] = {}
    draw = random.Random(2)
    for _ in range(400_000):
        a, b = draw.sample(places, 2)
        value = syndromes[a] ^ syndromes[b]
        if value in pairs and len({a, b, *pairs[value]}) == 4:
            break
        pairs[value] = (a, b)
    else:
        pytest.fail("no four bits that cancel were drawn")
    for place in (a, b, pairs[value][0]):
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    assert by_value[syndromes[pairs[value][1]]] == pairs[value][1]
    (found,) = [damage for damage in find_damage(pretrain, deep=True) if "sha256" in damage.problem]
    assert (found.offset, found.end) == (0, len(content)) and "is flipped" not in found.problem


def test_damaged_checksums_are_their_own_damage_and_not_the_files(sft: Path) -> None:
    path = sft / "index" / "crc32.bin"
    content = bytearray(path.read_bytes())
    content[4:8] = b"abcd"
    path.write_bytes(content)
    (found,) = find_damage(sft, deep=True)
    assert (found.file, found.offset, found.end) == ("index/crc32.bin", 4, 8)


def test_a_meta_json_that_differs_by_more_than_a_bit_is_named_and_nothing_else_is_judged_by_it(sft: Path) -> None:
    path = sft / "meta.json"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"kind": "sft"', b'"kind": "sxx"'))
    (found,) = find_damage(sft, deep=True)
    assert (found.file, found.offset, found.end) == ("meta.json", 0, len(raw))
    assert "another meta_crc32 than its bytes have" in found.problem
    path.write_bytes(raw.replace(b'"kind":', b'"kind",'))
    (found,) = find_damage(sft, deep=True)
    assert found.file == "meta.json" and "is flipped" not in found.problem
    assert found.offset == raw.index(b'"kind":') + len(b'"kind"') and "not JSON" in found.problem
    path.write_bytes(raw.replace(b'"kind"', b'"\xffind"'))
    (found,) = find_damage(sft, deep=True)
    assert found.offset == raw.index(b'"kind"') + 1 and "not JSON" in found.problem
    lines = raw.splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"meta_crc32" not in line))
    (found,) = find_damage(sft, deep=True)
    assert found.file == "meta.json" and "no meta_crc32" in found.problem


def test_a_cache_of_an_older_builder_is_judged_by_its_sha256_alone(pretrain: Path) -> None:
    describe(pretrain, old=True)
    assert find_damage(pretrain, deep=True) == []
    name = "train/shard_00001.bin"
    flip(pretrain / name, 76, 0)
    (found,) = find_damage(pretrain, deep=True)
    assert found[:3] == (name, 0, (pretrain / name).stat().st_size) and "sha256" in found.problem
    flip(pretrain / name, 76, 0)
    path = pretrain / "meta.json"
    path.write_bytes(path.read_bytes().replace(b'"sha256": "', b'"sha256": "0', 1))
    assert {damage.file for damage in find_damage(pretrain, deep=True)} == {"meta.json"}


def test_the_sha256_that_is_wrong_in_an_old_meta_json_is_not_the_files_damage(pretrain: Path) -> None:
    describe(pretrain, old=True)
    meta = json.loads((pretrain / "meta.json").read_bytes())
    meta["shards"]["train"][0]["sha256"] = "0" * 64
    (pretrain / "meta.json").write_bytes(canonical_json(meta))
    found = find_damage(pretrain, deep=True)
    assert {damage.file for damage in found} == {"meta.json"} and "train/shard_00000.bin" in found[-1].problem


def test_an_id_outside_the_vocabulary_is_named_with_its_token_and_bytes(pretrain: Path) -> None:
    name = "train/shard_00001.bin"
    put(pretrain / name, 50, 300)
    put(pretrain / name, 60, 65_535)
    total = (pretrain / name).stat().st_size // 2
    describe(pretrain)
    (found,) = find_damage(pretrain, deep=True)
    assert found[:3] == (name, 100, 102)
    assert found.problem == (f"token 50 is id 300, expected ids below vocab_size 300; 2 of {total:,} tokens are not")
    assert find_damage(pretrain, deep=False) == []


def test_a_sentinel_inside_a_document_and_an_end_without_one_are_found(tmp_path: Path) -> None:
    folder = pretrain_of(tmp_path, ["aaaa", "bbbb", "cccc"], max_val_tokens=0, shard_bytes=16)
    name = "train/shard_00000.bin"  # a a a a eot b b b | b eot c c c c eot
    put(folder / name, 6, ASST)
    describe(folder)
    (found,) = find_damage(folder, deep=True)
    assert found == Damage(name, 12, 14, "token 6 is the sentinel asst inside document 1")
    put(folder / name, 6, 75)
    put(folder / "train" / "shard_00001.bin", 1, 75)
    describe(folder)
    (found,) = find_damage(folder, deep=True)
    assert found == Damage("train/shard_00001.bin", 2, 4, "token 1 ends document 1, expected an end-of-text")


def test_a_document_that_met_its_budget_needs_no_end_of_text_and_no_other_lacks_one(tmp_path: Path) -> None:
    folder = pretrain_of(tmp_path, ["aaaa", "bbbb"], max_train_tokens=8, max_val_tokens=0)
    assert json.loads((folder / "meta.json").read_bytes())["cut"]["documents"] == 1
    assert find_damage(folder, deep=True) == []
    describe(folder, cut={"documents": 0, "tokens": 0})
    (found,) = find_damage(folder, deep=True)
    assert found.problem == "token 7 ends document 1, expected an end-of-text"


def test_a_cache_without_end_of_texts_has_no_sentinel_at_all(tmp_path: Path) -> None:
    folder = pretrain_of(tmp_path, ["aaaa", "bbbb"], max_val_tokens=0, append_eot=False)
    assert find_damage(folder, deep=True) == []
    put(folder / "train" / "shard_00000.bin", 3, EOT)
    describe(folder)
    (found,) = find_damage(folder, deep=True)
    assert found.problem == "token 3 is the sentinel eot inside document 0"


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
def test_an_example_that_is_not_role_ids_end_is_found(tmp_path: Path, place: int, value: int, problem: str) -> None:
    path = tmp_path / "c" / "sft" / "chats"
    build_sft([CHAT] * 3, path, tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    folder = path.resolve()
    assert find_damage(folder, deep=True) == []
    put(folder / "train_tokens.bin", place, value)
    describe(folder)
    found = find_damage(folder, deep=True)[0]
    assert found.file == "train_tokens.bin" and found.problem.endswith(problem)
    assert place <= found.offset // 2 <= place + 3


def test_a_wrong_number_of_tokens_with_loss_is_a_damage_of_meta_json(sft: Path) -> None:
    meta = json.loads((sft / "meta.json").read_bytes())
    described = {**meta["supervised_tokens"], "val": meta["supervised_tokens"]["val"] + 1}
    describe(sft, supervised_tokens=described)
    (found,) = find_damage(sft, deep=True)
    assert found.file == "meta.json" and f"but {described['val'] - 1} tokens carry loss" in found.problem


def test_offsets_that_do_not_ascend_or_do_not_end_right_are_found_at_their_entry(pretrain: Path, sft: Path) -> None:
    index = pretrain / "index" / "train_docs.npy"
    before = int(np.load(index)[4])
    put(index, 5, before, "<i8", header=128)
    describe(pretrain)
    found = find_damage(pretrain, deep=True)[0]
    assert found == Damage("index/train_docs.npy", 168, 176, f"entry 5 is {before}, expected more than {before}")
    put(sft / "val_idx.npy", 0, 1, "<i8", header=128)
    describe(sft)
    found = find_damage(sft, deep=True)[0]
    assert found == Damage("val_idx.npy", 128, 136, "entry 0 is 1, expected 0")
    last = len(np.load(sft / "train_idx.npy")) - 1
    put(sft / "val_idx.npy", 0, 0, "<i8", header=128)
    put(sft / "train_idx.npy", last, 10**9, "<i8", header=128)
    describe(sft)
    found = find_damage(sft, deep=True)[0]
    assert found.offset == 128 + 8 * last and f"entry {last} is 1000000000, expected less than" in found.problem


def test_the_header_of_an_offsets_file_is_seen_by_a_quick_look(sft: Path) -> None:
    flip(sft / "train_idx.npy", 30, 1)
    (found,) = find_damage(sft, deep=False)
    assert (found.file, found.offset, found.end) == ("train_idx.npy", 30, 128)


def test_source_ids_are_as_many_as_documents_and_ascii(sft: Path) -> None:
    path = sft / "index" / "train_ids.txt"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\xc3\xa9\n", *lines[5:]]))
    describe(sft)
    foreign, count = find_damage(sft, deep=True)
    assert (foreign.offset, foreign.problem) == (len(b"".join(lines[:3])), "not ASCII")
    assert f"{len(lines) - 1:,} lines, expected {len(lines):,}" in count.problem


ACCOUNTS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("train_tokens", lambda meta: meta["train_tokens"] + 1, "train_tokens is"),
    ("docs", lambda meta: {**meta["docs"], "val": 0}, "docs.val is 0"),
    ("documents_read", lambda meta: 0, "documents_read is 0"),
    ("vocab_size", lambda meta: 0, "vocab_size is 0, expected 1 to 65,536"),
    ("special_token_ids", lambda meta: {"eot": 4}, "expected an id of the 300 for each sentinel"),
    ("content_sha256", lambda meta: "0" * 64, "but the files it names give"),
]


@pytest.mark.parametrize(("key", "value", "problem"), ACCOUNTS, ids=[case[0] for case in ACCOUNTS])
def test_what_does_not_add_up_in_meta_json_is_found_at_its_line(
    pretrain: Path, key: str, value: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    describe(pretrain, **{key: value(json.loads((pretrain / "meta.json").read_bytes()))})
    (found,) = find_damage(pretrain, deep=False)
    assert found.file == "meta.json" and problem in found.problem
    assert (pretrain / "meta.json").read_bytes()[found.offset : found.end].startswith(f'  "{key}":'.encode())


@pytest.mark.parametrize("value", [None, 3, [], {"train": 3}, {"train": [{}]}, {"train": [{"name": "../x"}]}])
def test_a_malformed_meta_json_is_a_damage_and_never_an_error(pretrain: Path, value: Any) -> None:
    for key in ("shards", "index", "totals", "docs", "special_token_ids", "checksums", "ids", "kind", "dropped"):
        meta = json.loads((pretrain / "meta.json").read_bytes())
        (pretrain / "meta.json").write_bytes(meta_bytes({**meta, key: value}))
        for deep in (False, True):
            assert "meta.json" in {damage.file for damage in find_damage(pretrain, deep=deep)}, key
        (pretrain / "meta.json").write_bytes(meta_bytes(meta))


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("tokenizer_sha256", lambda meta: 16_000, "tokenizer_sha256 is 16000"),
    ("tokenizer_sha256", lambda meta: {}, "tokenizer_sha256 is {}"),
    ("tokenizer_sha256", lambda meta: None, "tokenizer_sha256 is not there"),
    ("tokenizer_sha256", lambda meta: "e" * 64, "ids of tokenizer eeeeeeeeeeee, expected tokenizer"),
    ("utf8_bytes", lambda meta: {**meta["utf8_bytes"], "val": -1}, "utf8_bytes.val is -1"),
    ("utf8_bytes", lambda meta: {"val": 3}, "no utf8_bytes of a pretrain split train"),
    ("built", lambda meta: 1, "built is 1"),
    ("built", lambda meta: False, "built is false, but it names files that hold something"),
    ("format_version", lambda meta: True, "format_version is True"),
]


@pytest.mark.parametrize(("key", "value", "problem"), REFUSED)
def test_what_readers_refuse_is_a_damage_and_is_listed(
    settings: Settings, capsys: pytest.CaptureFixture[str], key: str, value: Any, problem: str
) -> None:
    tokenizer, path = ensure_tokenizer(settings).path, RECIPES["pretrain/roam"](settings).path
    meta = json.loads((path / "meta.json").read_bytes())
    meta[key] = value(meta)
    if meta[key] is None:
        del meta[key]
    (path / "meta.json").write_bytes(meta_bytes(meta))
    for deep in (False, True):
        (found,) = find_damage(path, deep=deep)
        assert found.file == "meta.json" and problem in found.problem
    assert cli.main(["list", str(tokenizer.parent)]) == 1
    _, good, bad = capsys.readouterr().out.splitlines()
    assert good.split()[:2] == ["tokenizer", "built"]
    assert f"refused: meta.json: {problem}"[:40] in bad
    assert cli.main(["list", "--json", str(tokenizer.parent)]) == 1
    good_row, bad_row = json.loads(capsys.readouterr().out)
    assert good_row["refused"] is None and problem in bad_row["refused"] and bad_row["state"] == "refused"


def test_another_tokenizer_beside_a_cache_is_its_damage(settings: Settings) -> None:
    tokenizer, path = ensure_tokenizer(settings).path, RECIPES["pretrain/roam"](settings).path
    meta = json.loads((tokenizer / "meta.json").read_bytes())
    (tokenizer / "meta.json").write_bytes(meta_bytes({**meta, "tokenizer_sha256": "e" * 64}))
    (found,) = find_damage(path, deep=False)
    assert "the readers refuse it" in found.problem and "expected tokenizer eeeeeeeeeeee" in found.problem
    assert verify(path, Limits())["readers_open"] != []
    (tokenizer / "meta.json").write_bytes(b"{")
    (found,) = find_damage(path, deep=False)
    assert "tokenizer/meta.json: not JSON" in found.problem


@pytest.mark.parametrize("deep", [False, True])
def test_the_meta_json_of_another_cache_is_its_own_damage_and_not_the_files(
    tmp_path: Path, pretrain: Path, deep: bool
) -> None:
    other = pretrain_of(tmp_path / "other", ["abcd" * number for number in range(400, 440)])
    copy = tmp_path / "copy"
    shutil.copytree(pretrain, copy)
    for foreign in ((other / "meta.json").read_bytes(), b'{"vocab_size": 65, "itos": {"0": "a"}}'):
        for folder in (pretrain, copy):
            (folder / "meta.json").write_bytes(foreign)
            (found,) = find_damage(folder, deep=deep)
            assert found.file == "meta.json" and (found.offset, found.end) == (0, len(foreign))
            assert "of another cache" in found.problem or "not of a cache of this project" in found.problem


def test_files_that_nobody_names_and_links_are_reported_and_not_followed(pretrain: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    shard = pretrain / "train" / "shard_00000.bin"
    outside.write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(outside)
    (pretrain / "more").symlink_to(tmp_path)
    (pretrain / "val" / "notes.txt").write_bytes(b"mine")
    (pretrain / ".meta.json.0123abcd.tmp").write_bytes(b"{")  # of a writer that was killed
    found = {damage.file: damage.problem for damage in find_damage(pretrain, deep=True)}
    assert found.keys() == {"train/shard_00000.bin", "more", "val/notes.txt"}
    assert found["train/shard_00000.bin"].startswith("a symbolic link")
    assert found["more"].startswith("a symbolic link") and found["val/notes.txt"].startswith("a file that")


def test_a_public_link_that_leads_nowhere_is_a_damage(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(".versions/gone/0123456789ab")
    (tmp_path / "round").symlink_to("round")
    for name in ("gone", "round"):
        (found,) = find_damage(tmp_path / name, deep=True)
        assert found.file == "meta.json"


def test_a_stub_has_no_damage(tmp_path: Path) -> None:
    build_stub(tmp_path / "g", tokenizer=ByteTokenizer(), source=Source(name="g"), seed=0, shard_bytes=20)
    assert find_damage(tmp_path / "g", deep=True) == find_damage(tmp_path / "g", deep=False) == []


def test_a_deep_look_reports_how_far_it_is(pretrain: Path) -> None:
    seen: list[tuple[int, int, int | None]] = []
    find_damage(pretrain, deep=True, progress=lambda *numbers: seen.append(numbers))
    total = sum(path.stat().st_size for path in files_of(pretrain) if path.name != "meta.json")
    assert seen[-1] == (8, total, total) and [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_file_that_may_not_be_read_is_a_damage(pretrain: Path) -> None:
    path = pretrain / "val" / "shard_00000.bin"
    path.unlink()
    os.mkfifo(path)
    (found,) = find_damage(pretrain, deep=True)
    assert found.file == "val/shard_00000.bin" and "not a regular file" in found.problem
