"""A cache that somebody made to harm its reader: nothing outside it is opened, and the error says what is wrong.

Every attack meets the readers, verify, and the commands list and stats, while an audit hook of the interpreter writes
down each file and folder that is opened. Run: pytest tests/test_hostile_caches.py
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import ByteTokenizer

from niels_gpt.cache import (
    CacheError,
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    cli,
    read_meta,
)
from niels_gpt.cache.meta import find_meta
from niels_gpt.fileio import META_NAME, canonical_json, sha256_file
from niels_gpt.inspection.verify import Limits, verify
from niels_gpt.records import checked_name, file_records, meta_bytes, path_inside

Attack = Callable[[Path, Path], Any]
"""Takes the folder of the version that is attacked, and a folder that nobody may look into."""

# --- what was opened --------------------------------------------------------------------------------------------------

_OPENED: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _OPENED is not None and event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike):
            _OPENED.append(os.fsdecode(path))


sys.addaudithook(_note)  # stays until the process ends, and does nothing while the list is None


@contextmanager
def watched(forbidden: Path) -> Iterator[None]:
    """Fail if a file or folder below `forbidden` is opened in the block, through links too."""
    global _OPENED
    _OPENED = opened = []
    try:
        yield
    finally:
        _OPENED = None
    inside = [path for path in opened if Path(os.path.realpath(path)).is_relative_to(forbidden)]
    # A link that was refused by open itself (O_NOFOLLOW) was not followed.
    assert not [path for path in inside if not Path(path).is_symlink()], f"{inside} lie in {forbidden}"


def test_the_audit_hook_sees_what_is_opened(tmp_path: Path) -> None:
    (tmp_path / "bait").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to(tmp_path)
    for how in (Path.read_bytes, np.memmap, os.listdir, lambda path: os.close(os.open(path, os.O_RDONLY))):
        place = tmp_path if how is os.listdir else tmp_path / "link" / "bait"
        with pytest.raises(AssertionError, match="lie in"), watched(tmp_path):
            how(place)


# --- the caches and what meets them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with tokenizer/, pretrain/notes (train: 3 shards of 10 tokens; val: 1) and sft/chats."""
    root = tmp_path_factory.mktemp("hostile") / "cache"
    (root / "tokenizer").mkdir(parents=True)
    (root / "tokenizer" / "spm.model").write_bytes(b"a model")
    tokenizer = ByteTokenizer()
    tokenizer.model_path = str(root / "tokenizer" / "spm.model")
    sha256 = sha256_file(tokenizer.model_path)
    about = {"kind": "tokenizer", "tokenizer_sha256": sha256, "vocab_size": 300}
    special = {"special_token_ids": tokenizer.special_token_ids()}
    files = [{"name": "spm.model", "bytes": 7, "sha256": sha256}]
    (root / "tokenizer" / META_NAME).write_bytes(meta_bytes({**about, **special, "files": files}))
    build_pretrain_cache(
        ["b" * 10, "a" * 30],
        str(root / "pretrain" / "notes"),
        tokenizer=tokenizer,
        max_train_tokens=30,
        max_val_tokens=10,
        shard_bytes=20,
        seed=0,
        shuffle_buffer=None,
    )
    # 4 x 6 tokens
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": "a"}] for question in "qrst"]
    build_sft_cache(chats, str(root / "sft" / "chats"), tokenizer=tokenizer, val_frac=0.5, seed=0)
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A copy of the caches that a test may attack."""
    shutil.copytree(built, tmp_path / "cache", symlinks=True)
    return tmp_path / "cache"


@pytest.fixture
def outside(tmp_path: Path, root: Path) -> Path:
    """A folder with good files of the same caches, beside them: whoever is led there finds what it looks for."""
    for key in ("pretrain/notes", "sft/chats", "tokenizer"):
        shutil.copytree((root / key).resolve(), tmp_path / "outside" / key)
    (tmp_path / "outside" / "secret.bin").write_bytes(b"\x50\0" * 10)
    return (tmp_path / "outside").resolve()


def open_pretrain(root: Path) -> PretrainTokenStreamDataset:
    return PretrainTokenStreamDataset(str(root / "pretrain" / "notes" / "train"), T=4, device="cpu")


def open_sft(root: Path) -> SFTExampleDataset:
    files = [str(root / "sft" / "chats" / f"train_{name}") for name in ("tokens.bin", "idx.npy")]
    return SFTExampleDataset(*files, T=5, device="cpu", eot_id=4)


def draw(dataset: Any) -> int:
    """Return the largest id of a batch."""
    return max(int(part.max()) for part in dataset.get_batch(B=8, generator=torch.Generator().manual_seed(0)))


READERS = {"pretrain/notes": open_pretrain, "sft/chats": open_sft}


def refused_by_the_reader(root: Path, key: str) -> str:
    """Return the message with which a reader refuses a cache; "" if it does not."""
    try:
        assert draw(READERS[key](root)) < 300
    except (CacheError, FileNotFoundError) as error:
        return str(error)
    return ""


def meet(root: Path, key: str, outside: Path) -> None:
    """Let everything that looks into caches meet this one."""
    with watched(outside):
        for deep in (False, True):
            try:
                verify(root / key, Limits(deep=deep))
            except CacheError as error:  # a meta.json that cannot be read
                assert META_NAME in str(error)
        assert cli.main(["list", str(root)]) in (0, 1)
        assert cli.main(["stats", str(root / key)]) in (0, 1)


@pytest.mark.parametrize("key", READERS)
def test_the_caches_are_good_before_they_are_attacked(root: Path, outside: Path, key: str) -> None:
    assert refused_by_the_reader(root, key) == "" and not any(verify(root / key, Limits(deep=True)).values())
    assert cli.main(["list", str(root)]) == cli.main(["stats", str(root / key)]) == 0
    with watched(outside):
        draw(READERS[key](root))


# --- what a meta.json says --------------------------------------------------------------------------------------------

DIGEST = "0" * 64
BAD_NAMES = [
    "../../../../outside/secret.bin",
    "train/../../../../../outside/secret.bin",
    "train/../train/shard_00000.bin",
    "./train/shard_00000.bin",
    "train/./shard_00000.bin",
    "train//shard_00000.bin",
    "train/",
    "/etc/hostname",
    "//etc/hostname",
    "",
    ".",
    "..",
    "...\0",
    "train/shard\x00",
    "train\\shard_00000.bin",
    "..\\..\\outside",
    "train/shard\n00000.bin",
    "train/\x1b[2Jshard",
    "train/\x7f",
    "train/\u202enib.exe",
    "train/\ud800",
    "train/" + "x" * 256,
    "/".join(["x" * 200] * 9),
]
NO_NAMES = [None, True, 3, 0.5, [], ["train/shard_00000.bin"], {"name": "x"}]
BAD_COUNTS = [-1, 2**63, 10**90, True, False, 20.0, 0.5, "20", None, [20], {}]
BAD_DIGESTS = [None, 3, True, [], "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, DIGEST + "\n", "٠" * 64]


def record(**parts: Any) -> dict[str, Any]:
    return {"name": "train/shard_00000.bin", "bytes": 20, "tokens": 10, "sha256": DIGEST, **parts}


@pytest.mark.parametrize("name", [*BAD_NAMES, *NO_NAMES])
def test_a_name_that_is_none_of_a_file_in_the_cache_is_refused(tmp_path: Path, name: Any) -> None:
    message = r"^w/meta.json: shards\.val\[1\]\.name is .{1,80}, expected the relative path of a file inside the cache"
    with pytest.raises(CacheError, match=message):
        file_records({"shards": {"val": [record(), record(name=name)]}}, "w/meta.json")
    with pytest.raises(CacheError, match="a file's name is"):
        path_inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b", "...", "..a", ".hidden", "a b", "naïve/漢字.bin", "x" * 255, "-rf", "~"])
def test_other_names_are_good(tmp_path: Path, name: str) -> None:
    assert checked_name(name, "name", "meta.json") == name and path_inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("part", ["bytes", "tokens", "entries", "block_bytes"])
@pytest.mark.parametrize("number", BAD_COUNTS)
def test_a_count_that_is_no_integer_from_0_to_2_63_is_refused(part: str, number: Any) -> None:
    with pytest.raises(
        CacheError, match=rf"^meta\.json: index\.train\.{part} is .{{1,80}}, expected an integer from 0"
    ):
        file_records({"index": {"train": record(**{part: number})}})


@pytest.mark.parametrize("digest", BAD_DIGESTS)
def test_a_sha256_that_is_not_64_lower_case_hex_digits_is_refused(digest: Any) -> None:
    with pytest.raises(CacheError, match=r"^meta\.json: checksums\.sha256 is .{1,80}, expected 64 lower-case hex"):
        file_records({"checksums": record(sha256=digest)})


MALFORMED: list[tuple[Any, str]] = [
    ([], "the whole is [], expected an object"),
    (None, "the whole is None, expected an object"),
    ({"shards": None}, "shards is None, expected an object"),
    ({"shards": [record()]}, "shards is [{"),
    ({"shards": {"train": record()}}, "shards.train is {"),
    ({"shards": {"train": ["shard"]}}, "shards.train[0] is 'shard', expected an object"),
    ({"shards": {"train": [record(), []]}}, "shards.train[1] is [], expected an object"),
    ({"shards": {"train": [{"name": "a", "sha256": DIGEST}]}}, "expected a record with bytes"),
    ({"shards": {"train": [{"name": "a", "bytes": 1}]}}, "expected a record with sha256"),
    ({"shards": {"train": [{"bytes": 1, "sha256": DIGEST}]}}, "expected a record with name"),
    ({"index": {"train": [record()]}}, "index.train is [{"),
    ({"ids": 5}, "ids is 5, expected an object"),
    ({"ids": {"val": None}}, "ids.val is None, expected an object"),
    ({"checksums": None}, "checksums is None, expected an object"),
    ({"files": {}}, "files is {}, expected a list"),
    ({"files": [record(name="meta.json")]}, "files[0].name is 'meta.json', expected a file other than meta.json"),
    ({"files": [record(), record()]}, "files[1].name is 'train/shard_00000.bin', expected a file other than"),
    ({"shards": {"train": [record()]}, "checksums": record()}, "checksums.name is 'train/shard_00000.bin'"),
    ({"shards": {"train": [record(name="x" * 10**6)]}}, "shards.train[0].name is 'xxx"),
    ({"shards": {"train": list(range(10**6))}}, "shards.train[0] is 0, expected an object"),
    ({"index": {"train": list(range(10**6))}}, "index.train is [0, 1, 2, 3, ...]"),
]


@pytest.mark.parametrize(("meta", "message"), MALFORMED)
def test_records_of_another_shape_are_refused_by_a_short_message(meta: Any, message: str) -> None:
    with pytest.raises(CacheError, match=r"^w: .*, expected .*\. Rebuild the cache: python -m") as caught:
        file_records(meta, "w")
    assert message in str(caught.value) and len(str(caught.value)) < 320


def test_records_come_in_the_order_of_the_checksums() -> None:
    def named(name: str) -> dict[str, Any]:
        return record(name=name)

    meta = {
        "files": [named("9"), named("10")],
        "checksums": named("8"),
        "ids": {"val": named("7"), "train": named("6")},
        "index": {"val": named("5"), "train": named("4")},
        "shards": {"val": [named("3")], "train": [named("1"), named("2")]},
    }
    assert [found["name"] for found in file_records(meta)] == [str(number) for number in range(1, 11)]
    assert file_records({}) == file_records({"shards": {}, "index": {}}) == []


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """Change a meta.json as its author would, with a CRC-32 that is right."""

    def attack(version: Path, outside: Path) -> None:
        meta = read_meta(str(version / META_NAME))
        change(meta)
        (version / META_NAME).write_bytes(meta_bytes(meta))

    return attack


def spelled(old: bytes, new: bytes) -> Attack:
    """Replace bytes of a meta.json without a CRC-32."""

    def attack(version: Path, outside: Path) -> None:
        meta = read_meta(str(version / META_NAME))
        raw = canonical_json({key: value for key, value in meta.items() if key != "meta_crc32"})
        assert old in raw
        (version / META_NAME).write_bytes(raw.replace(old, new, 1))

    return attack


def put(key: str, value: Any) -> Attack:
    return rewritten(lambda meta: meta.update({key: value}))


def named(group: str, name: Any) -> Attack:
    """Give the first file of a group another name."""

    def change(meta: dict[str, Any]) -> None:
        found = meta[group] if group == "checksums" else meta[group]["train"]
        (found[0] if isinstance(found, list) else found)["name"] = name

    return rewritten(change)


WRONG_TYPES = {
    "vocab_size": [0, -1, 65537, 2**63, 10**90, True, 300.0, "300", [300], {}],
    "special_token_ids": [3, "eot", [1, 2, 3, 4], True],
    "tokenizer_sha256": [3, "f", True, ["f" * 64], "F" * 64],
    "built": [None, 1, 0, "true", [], {}, 0.0],
    "token_dtype": [None, "uint32-le", "<u2", 2, []],
    "format_version": [None, 2, "1", True, 1.0, []],
    "shards": [None, 3, [], "train", {"train": None}, {"train": {}}],
    "index": [None, 3, []],
}
SPECIAL_IDS = [300, -1, True, 4.0, "4", None, [4], 2**64]


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG_TYPES for value in WRONG_TYPES[name]])
def test_a_key_of_the_wrong_type_is_refused_by_its_name(root: Path, key: str, name: str, value: Any) -> None:
    put(name, value)((root / key).resolve(), root)
    message = refused_by_the_reader(root, key)
    assert f"{META_NAME}: {name}" in message and "expected" in message and "python -m" in message


@pytest.mark.parametrize("value", SPECIAL_IDS)
@pytest.mark.parametrize("sentinel", ["asst", "eot"])
def test_a_sentinel_id_that_is_none_of_the_vocabulary_is_refused(root: Path, sentinel: str, value: Any) -> None:
    ids = {**ByteTokenizer().special_token_ids(), sentinel: value}
    put("special_token_ids", ids)((root / "sft" / "chats").resolve(), root)
    assert f"special_token_ids.{sentinel} is " in refused_by_the_reader(root, "sft/chats")


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("about", [{"tokenizer_sha256": 3}, {"tokenizer_sha256": []}])
def test_a_hostile_meta_json_of_the_tokenizer_is_refused_too(root: Path, key: str, about: Any) -> None:
    put("tokenizer_sha256", about["tokenizer_sha256"])(root / "tokenizer", root)
    assert "tokenizer_sha256 is" in refused_by_the_reader(root, key)


@pytest.mark.parametrize("key", READERS)
def test_other_tools_keys_are_let_be(root: Path, key: str) -> None:
    version = (root / key).resolve()
    rewritten(lambda meta: meta.update(author=["x"], files_seen=-1, itos={"0": "a"}))(version, root)
    assert refused_by_the_reader(root, key) == ""
    (version / META_NAME).write_bytes(b'{"vocab_size": null, "stoi": {"a": 0}}')
    assert refused_by_the_reader(root, key) == ""
    (version / META_NAME).unlink()
    assert refused_by_the_reader(root, key) == ""


ATTACKS: dict[str, Attack] = {
    **{
        f"shard named {name!r:.30}": named("shards", name) for name in [*BAD_NAMES, *NO_NAMES] if name != "train/\ud800"
    },
    **{
        f"{group} named {name!r:.30}": named(group, name)
        for group in ("index", "ids", "checksums")
        for name in (BAD_NAMES[0], "/etc/hostname", META_NAME, 3)
    },
    "a shard of the other split": named("shards", "val/shard_00000.bin"),
    "a shard that is a folder": named("shards", "index"),
    "a shard below a file": named("shards", "meta.json/x"),
    "sizes of 2**62": rewritten(lambda meta: meta["shards"]["train"][0].update(bytes=2**62, tokens=2**61)),
    "index of 2**62": rewritten(lambda meta: meta["index"]["train"].update(bytes=2**62, entries=2**59)),
    "totals of 2**62": rewritten(lambda meta: meta["totals"].update(train_tokens=2**62)),
    "no totals": rewritten(lambda meta: meta.pop("totals")),
    "totals in a list": put("totals", []),
    "built in a list": put("built", []),
    "no shards": put("shards", {}),
    "a key twice": spelled(b'  "built"', b'  "vocab_size": 65536,\n  "built"'),
    "deep nesting": spelled(b'"seed": 0', b'"seed": ' + b"[" * 100_000 + b"]" * 100_000),
    "a million digits": spelled(b'"seed": 0', b'"seed": ' + b"9" * 1_000_000),
    "NaN": spelled(b'"seed": 0', b'"seed": NaN'),
    "half a pair": spelled(b"train", rb"\ud800"),
    "not utf-8": spelled(b"train", b"\xff"),
    "an old CRC-32": lambda version, outside: (version / META_NAME).write_bytes(
        (version / META_NAME).read_bytes().replace(b'"seed": 0', b'"seed": 1')
    ),
}
_LET_BE = ("totals of 2**62", "no totals", "totals in a list", "index of 2**62")  # a reader does not go by them
REFUSED_BY_BOTH = [name for name in ATTACKS if name not in _LET_BE]


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_meta_json_leads_nobody_outside(root: Path, outside: Path, key: str, attack: str) -> None:
    ATTACKS[attack]((root / key).resolve(), outside)
    with watched(outside):
        message = refused_by_the_reader(root, key)
    if attack in REFUSED_BY_BOTH:
        assert str((root / key).resolve()) in message and len(message) < 500
    meet(root, key, outside)


# --- links ------------------------------------------------------------------------------------------------------------


def linked(name: str, target: str) -> Attack:
    """Put a link in the place of a file or folder of the version."""

    def attack(version: Path, outside: Path) -> None:
        path = version / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        path.symlink_to(outside / target)

    return attack


LINKS: dict[str, dict[str, Attack]] = {
    "pretrain/notes": {
        "a shard": linked("train/shard_00001.bin", "pretrain/notes/train/shard_00001.bin"),
        "a shard, to nowhere": linked("train/shard_00001.bin", "nowhere"),
        "a split": linked("train", "pretrain/notes/train"),
        "meta.json": linked(META_NAME, f"pretrain/notes/{META_NAME}"),
    },
    "sft/chats": {
        "the tokens": linked("train_tokens.bin", "sft/chats/train_tokens.bin"),
        "the offsets": linked("train_idx.npy", "sft/chats/train_idx.npy"),
        "the offsets, in a circle": lambda version, outside: linked("train_idx.npy", "")(version, version),
        "meta.json": linked(META_NAME, f"sft/chats/{META_NAME}"),
    },
}
UNREAD: dict[str, Attack] = {  # files that verify and stats read, the readers do not
    "index": linked("index", "pretrain/notes/index"),
    "index/train_docs.npy": linked("index/train_docs.npy", "pretrain/notes/index/train_docs.npy"),
    "index/train_ids.txt": linked("index/train_ids.txt", "pretrain/notes/index/train_ids.txt"),
    "index/crc32.bin": linked("index/crc32.bin", "pretrain/notes/index/crc32.bin"),
}


@pytest.mark.parametrize(("key", "what"), [(key, what) for key in LINKS for what in LINKS[key]])
def test_a_link_out_of_the_cache_is_refused_and_not_followed(root: Path, outside: Path, key: str, what: str) -> None:
    LINKS[key][what]((root / key).resolve(), outside)
    with watched(outside):
        message = refused_by_the_reader(root, key)
    assert "a symbolic link, expected a file or folder of the cache's own" in message and "cp -rL" in message
    meet(root, key, outside)


@pytest.mark.parametrize("what", UNREAD)
def test_a_link_in_the_place_of_an_index_is_not_followed(root: Path, outside: Path, what: str) -> None:
    UNREAD[what]((root / "pretrain" / "notes").resolve(), outside)
    meet(root, "pretrain/notes", outside)
    assert verify(root / "pretrain" / "notes", Limits(deep=True))["files_match_meta"] != []


@pytest.mark.parametrize("key", READERS)
def test_a_link_is_refused_where_there_is_no_meta_json_too(root: Path, outside: Path, key: str) -> None:
    version = (root / key).resolve()
    (version / META_NAME).unlink()
    assert refused_by_the_reader(root, key) == ""
    name = "train/shard_00001.bin" if key == "pretrain/notes" else "train_tokens.bin"
    linked(name, f"{key}/{name}")(version, outside)
    with watched(outside):
        assert "a symbolic link" in refused_by_the_reader(root, key)


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("name", ["tokenizer", f"tokenizer/{META_NAME}"])
def test_a_tokenizer_that_is_a_link_out_of_the_cache_is_not_read(
    root: Path, outside: Path, key: str, name: str
) -> None:
    linked(name, name)(root, outside)
    with watched(outside):
        assert "a symbolic link" in refused_by_the_reader(root, key)
    meet(root, key, outside)


def test_a_model_that_is_a_link_out_of_the_cache_is_not_read(root: Path, outside: Path) -> None:
    linked("tokenizer/spm.model", "tokenizer/spm.model")(root, outside)
    for key in READERS:
        meet(root, key, outside)
    with watched(outside):
        assert verify(root / "tokenizer", Limits())["files_match_meta"] != []


def test_a_link_within_the_folder_of_caches_is_a_version_and_is_read(root: Path) -> None:
    (root / ".versions" / "tokenizer").mkdir(parents=True)
    (root / "tokenizer").rename(root / ".versions" / "tokenizer" / "0123456789ab")
    (root / "tokenizer").symlink_to(".versions/tokenizer/0123456789ab")
    assert find_meta(root / "tokenizer") is not None and refused_by_the_reader(root, "sft/chats") == ""


@pytest.mark.parametrize("key", READERS)
def test_a_public_name_that_leads_out_of_the_folder_is_not_listed(root: Path, outside: Path, key: str) -> None:
    linked(key, key)(root, outside)
    with watched(outside):
        assert cli.main(["list", str(root)]) == 1
        with pytest.raises(CacheError, match="expected one to a version below"):
            find_meta(root / key)


@pytest.mark.parametrize("key", READERS)
def test_a_public_name_in_a_circle_is_an_error_of_a_cache(root: Path, key: str) -> None:
    (root / key).unlink()
    (root / key).symlink_to((root / key).name)
    assert refused_by_the_reader(root, key) != ""


def test_a_folder_of_links_of_ones_own_is_read_by_the_names_that_one_gives(root: Path, tmp_path: Path) -> None:
    """The cache is what the links stand for; only what lies in it must not be a link."""
    (tmp_path / "mine").symlink_to(root / "pretrain" / "notes" / "train")
    assert PretrainTokenStreamDataset(str(tmp_path / "mine"), T=4, device="cpu").meta is not None
    os.chdir(root / "pretrain" / "notes" / "train")
    assert PretrainTokenStreamDataset(".", T=4, device="cpu").meta is not None


@pytest.mark.parametrize("name", [META_NAME, "train/shard_00000.bin"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_not_waited_for(root: Path, outside: Path, name: str) -> None:
    path = (root / "pretrain" / "notes").resolve() / name
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: not a regular file" in refused_by_the_reader(root, "pretrain/notes")
    meet(root, "pretrain/notes", outside)


# --- ids --------------------------------------------------------------------------------------------------------------


def poison(path: Path, token: int, id: int) -> None:
    ids = np.fromfile(path, dtype="<u2")
    ids[token] = id
    path.write_bytes(ids.tobytes())


@pytest.mark.parametrize("id", [300, 65535])
def test_an_id_outside_the_vocabulary_is_never_served_by_the_pretrain_reader(root: Path, id: int) -> None:
    path = (root / "pretrain" / "notes").resolve() / "train" / "shard_00001.bin"
    poison(path, 7, id)
    dataset, generator = open_pretrain(root), torch.Generator().manual_seed(0)
    served = refused = 0
    for _ in range(50):
        try:
            x, y = dataset.get_batch(B=1, generator=generator)
        except CacheError as error:
            refused += 1
            assert f"{path}: token 7 at byte 14 is id {id}, expected ids below vocab_size 300" in str(error)
        else:
            served += 1
            assert max(int(x.max()), int(y.max())) < 300
    assert served and refused


@pytest.mark.parametrize("id", [300, 65535])
def test_an_id_outside_the_vocabulary_is_never_served_by_the_sft_reader(root: Path, id: int) -> None:
    path = (root / "sft" / "chats").resolve() / "train_tokens.bin"
    poison(path, 6 + 1, id)  # the second token of the second example
    dataset, generator = open_sft(root), torch.Generator().manual_seed(0)
    message = f"{path}: token 7 at byte 14 is id {id}, expected ids below vocab_size 300"
    assert dataset.example(0).tolist()[0] == 2
    with pytest.raises(CacheError, match=re.escape(message)):
        dataset.example(1)
    served = refused = 0
    for _ in range(50):
        try:
            parts = dataset.get_batch(B=1, generator=generator)
        except CacheError as error:
            refused += 1
            assert message in str(error)
        else:
            served += 1
            assert max(int(part.max()) for part in parts) < 300
    assert served and refused


def test_an_example_that_is_not_there_is_an_index_error(root: Path) -> None:
    for row in (-1, 2, 10**20):
        with pytest.raises(IndexError, match="there are 2"):
            open_sft(root).example(row)


def test_without_a_vocabulary_all_ids_are_served(root: Path) -> None:
    path = (root / "pretrain" / "notes").resolve()
    for token in range(10):
        poison(path / "train" / "shard_00001.bin", token, 65535)
    (path / META_NAME).unlink()
    assert draw(open_pretrain(root)) == 65535


@pytest.mark.parametrize("arguments", [{"eot_id": 300}, {"eot_id": -1}, {"eot_id": 4, "asst_id": 70000}])
def test_a_given_id_outside_the_vocabulary_is_a_value_error(root: Path, arguments: dict[str, int]) -> None:
    files = [str(root / "sft" / "chats" / f"train_{name}") for name in ("tokens.bin", "idx.npy")]
    with pytest.raises(ValueError, match=r"_id=-?\d+: expected an id of the vocabulary, 0 to 299") as caught:
        SFTExampleDataset(*files, T=4, device="cpu", **arguments)
    assert not isinstance(caught.value, CacheError)
