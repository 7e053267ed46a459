"""Every byte of the files of other tools, by hand for a cache of ten tokens, and what an import reads of them.

train is "A", "Hey" and "Z" in shards of four tokens, with an end behind each: "Hey" lies in both shards. val is "B".
"""

import gzip
import json
import struct

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.errors import refused
from support.foreign import read_folder as read
from support.small_caches import CHAT, build_caches, build_chats

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.exchange.exporting import export_cache

NARROW = {
    "train 0": "4b 00 04 00 52 00 6f 00",
    "train 1": "83 00 04 00 64 00 04 00",
    "val 0": "4c 00 04 00",
}
WIDE = {
    "train 0": "eb 86 01 00 a4 86 01 00 f2 86 01 00 0f 87 01 00",
    "train 1": "23 87 01 00 a4 86 01 00 04 87 01 00 a4 86 01 00",
    "val 0": "ec 86 01 00 a4 86 01 00",
}
SHARDS = {2: NARROW, 4: WIDE}
ENDS = {"train 0": [2, 4], "train 1": [2, 4], "val 0": [2]}
"""In tokens of the file; of train 1 the first is the rest of "Hey"."""
MEGATRON = {
    2: "4d 4d 49 44 49 44 58 00 00  01 00 00 00 00 00 00 00  08  02 00 00 00 00 00 00 00  03 00 00 00 00 00 00 00"
    "02 00 00 00 02 00 00 00  00 00 00 00 00 00 00 00  04 00 00 00 00 00 00 00"
    "00 00 00 00 00 00 00 00  01 00 00 00 00 00 00 00  02 00 00 00 00 00 00 00",
    4: "4d 4d 49 44 49 44 58 00 00  01 00 00 00 00 00 00 00  04  02 00 00 00 00 00 00 00  03 00 00 00 00 00 00 00"
    "02 00 00 00 02 00 00 00  00 00 00 00 00 00 00 00  08 00 00 00 00 00 00 00"
    "00 00 00 00 00 00 00 00  01 00 00 00 00 00 00 00  02 00 00 00 00 00 00 00",
}
HEADER = {
    2: "88 d8 34 01  01 00 00 00  04 00 00 00  00 00 00 00",
    4: "cb 99 9f 10  01 00 00 00  04 00 00 00  04 00 00 00",
}
BOS = {
    2: {"train 0": "00 04 00 00 04 04 00 00", "train 1": "04 04 00 00"},
    4: {"train 0": "00 04 00 00 08 04 00 00", "train 1": "08 04 00 00"},
}


@pytest.fixture(params=(2, 4))
def width(request):
    """Bytes of an id."""
    return int(request.param)


@pytest.fixture
def cache(tmp_path, width):
    """Build the cache of this page."""
    path = tmp_path / "cache" / "pretrain" / "notes"
    documents = [("train", "A"), ("train", "Hey"), ("train", "Z"), ("val", "B")]
    limits = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "val_frac": 0.2}
    build_pretrain(
        *(documents, path),
        tokenizer=ByteTokenizer() if width == 2 else WideByteTokenizer(),
        shard_bytes=4 * width,
        seed=0,
        document_end="eot",
        num_threads=0,
        **limits,
    )
    return path


def hexed(text):
    """Return the bytes of a text of hex digits."""
    return bytes.fromhex(text.replace(" ", ""))


def content(folder):
    """Return all files of a folder but the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "niels_gpt.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def exported(cache, name, out):
    """Export, and return all files but the manifest."""
    export_cache(cache, name, out)
    return content(out)


def test_nanogpt_has_each_split_in_one_file(cache, tmp_path, width):
    files = exported(cache, "nanogpt", tmp_path / "out")
    assert set(files) == {"train.bin", "val.bin", "meta.pkl"}
    assert files["train.bin"] == hexed(SHARDS[width]["train 0"] + SHARDS[width]["train 1"])
    assert files["val.bin"] == hexed(SHARDS[width]["val 0"])
    found = read(tmp_path / "out", "nanogpt")
    assert [(file.split, file.tokens, file.itemsize, file.ends) for file in found.files] == [
        ("train", 8, width, None),
        ("val", 2, width, None),
    ]


def test_modded_nanogpt_has_a_header_and_places_of_documents(cache, tmp_path, width):
    files = exported(cache, "modded-nanogpt", tmp_path / "out")
    for number in (0, 1):
        head, ids = files[f"train_00000{number}.bin"][:1024], files[f"train_00000{number}.bin"][1024:]
        assert head == hexed(HEADER[width]) + bytes(1008)
        assert ids == hexed(SHARDS[width][f"train {number}"])
        assert files[f"train_00000{number}.bos.idx"] == hexed(BOS[width][f"train {number}"])
    assert len(files) == 6
    found = read(tmp_path / "out", "modded-nanogpt")
    assert [(file.ends().tolist(), file.continues) for file in found.files if file.ends] == [
        ([2, 4], False),
        ([2, 4], True),
        ([2], False),
    ]


def test_megatron_has_an_index_beside_each_shard(cache, tmp_path, width):
    files = exported(cache, "megatron", tmp_path / "out")
    assert set(files) == {
        f"{stem}.{end}" for stem in ("train_00000", "train_00001", "val_00000") for end in ("bin", "idx")
    }
    for number in (0, 1):
        assert files[f"train_0000{number}.bin"] == hexed(SHARDS[width][f"train {number}"])
        assert files[f"train_0000{number}.idx"] == hexed(MEGATRON[width])
    assert [file.continues for file in read(tmp_path / "out", "megatron").files] == [False, True, False]


def test_datatrove_has_a_folder_for_each_split(cache, tmp_path, width):
    files = exported(cache, "datatrove", tmp_path / "out")
    for key, ends in ENDS.items():
        split, number = key.split()
        name = f"{split}/0000{number}.ds"
        assert files.pop(name) == hexed(SHARDS[width][key])
        assert files.pop(f"{name}.index") == b"".join(end.to_bytes(8, "little") for end in ends)
        tokens = str(ends[-1])
        said = f"Unknown Tokenizer|{width}|{width}\n{tokens}\n{tokens}.00 T"
        assert files.pop(f"{name}.metadata") == said.encode()
    assert not files
    assert read(tmp_path / "out", "datatrove").tokenizer is None


def test_olmo_has_lines_of_starts_and_ends(cache, tmp_path, width):
    files = exported(cache, "olmo", tmp_path / "out")
    for number in (0, 1):
        assert files[f"train_0000{number}.npy"] == hexed(SHARDS[width][f"train {number}"])
        raw = files[f"train_0000{number}.csv.gz"]
        assert raw[:10] == hexed("1f 8b 08 00 00 00 00 00 00 ff") and gzip.decompress(raw) == b"0,2\n2,4\n"
    assert len(files) == 6
    assert [file.itemsize for file in read(tmp_path / "out", "olmo").files] == [width] * 3


def test_borders_tell_how_wide_ids_are_without_a_manifest(cache, tmp_path, width):
    for name in ("olmo", "datatrove"):
        export_cache(cache, name, tmp_path / name)
        for path in [*(tmp_path / name).rglob("*.metadata"), tmp_path / name / "niels_gpt.json"]:
            path.unlink()
        assert [file.itemsize for file in read(tmp_path / name, name).files] == [width] * 3


@pytest.mark.parametrize(
    ("name", "mask"), [("datatrove", "train/00000.ds.loss"), ("olmo", "label_mask/train_00000.npy")]
)
def test_chats_carry_their_masks(name, mask, tmp_path):
    build_chats(build_caches(tmp_path / "cache"), [CHAT, CHAT])
    files = exported(tmp_path / "cache/sft/chats", name, tmp_path / "out")
    assert files[mask] == bytes([0, 0, 0, 0, 1, 1]) * 2
    [file] = read(tmp_path / "out", name).files
    assert file.loss is not None and file.ends is not None and file.ends().tolist() == [6, 12]


@pytest.mark.parametrize("name", ["nanogpt", "modded-nanogpt", "megatron"])
def test_chats_are_refused_where_no_mask_fits(name, tmp_path):
    build_caches(tmp_path / "cache")
    with refused("E220", "loss") as error:
        export_cache(tmp_path / "cache/sft/chats", name, tmp_path / "out")
    assert "datatrove" in error.value.remedy and not (tmp_path / "out").exists()


# --- what others write ------------------------------------------------------------------------------------------------


def index(code, lengths, borders, width, modes=b""):
    """Return an .idx file of Megatron-LM."""
    starts = [width * sum(lengths[:number]) for number in range(len(lengths))]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(borders))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(borders)}q", *lengths, *starts, *borders) + modes


def megatron(folder, ids, raw):
    """Write one pair of files."""
    folder.mkdir(exist_ok=True)
    (folder / "data.bin").write_bytes(np.asarray(ids).tobytes())
    (folder / "data.idx").write_bytes(raw)
    return folder


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_of_every_width(code, dtype, tmp_path):
    ids = np.array([1, 2, 3, 4, 5, 6], dtype)
    raw = index(code, [1, 0, 2, 3], [0, 2, 2, 3, 4], ids.itemsize, modes=bytes(4))
    found = read(megatron(tmp_path / "data", ids, raw), "megatron")
    [file] = found.files
    assert file.ends is not None and file.ends().tolist() == [1, 3, 6]
    assert np.concatenate(list(file.pieces())).tolist() == [1, 2, 3, 4, 5, 6]
    assert (file.token_file is not None) == (code in (4, 8))
    assert dict(found.noticed) == {"modes_of_sequences_left_out": 4, "empty_documents": 1}


GOOD = index(8, [2, 4], [0, 1, 2], 2)
BROKEN = {
    "no header": b"PK",
    "cut": GOOD[:-1],
    "floats": index(7, [2, 4], [0, 1, 2], 2),
    "another version": GOOD[:9] + b"\x02" + GOOD[10:],
    "more sequences than bytes": GOOD[:18] + b"\xff" * 8 + GOOD[26:],
    "sequences that overlap": GOOD[:42] + struct.pack("<2q", 0, 2) + GOOD[58:],
    "a negative length": index(8, [-2, 8], [0, 1, 2], 2),
    "borders that do not ascend": index(8, [2, 4], [0, 2, 1], 2),
    "borders beyond": index(8, [2, 4], [0, 1, 9], 2),
    "other tokens": index(8, [2, 5], [0, 1, 2], 2),
    "nothing": b"",
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_a_broken_index_is_refused(raw, tmp_path):
    with refused("E221"):
        read(megatron(tmp_path / "data", np.arange(6, dtype="<u2"), raw), "megatron")


def header(*numbers):
    """Return a header of 1,024 bytes."""
    return struct.pack(f"<{len(numbers)}i", *numbers) + bytes(1024 - 4 * len(numbers))


IDS = bytes(range(12))
HOSTILE = {
    "a short header": ("modded-nanogpt", {"a.bin": header(20240520, 1, 6)[:500]}),
    "another magic": ("modded-nanogpt", {"a.bin": header(7, 1, 6) + IDS}),
    "more tokens than bytes": ("modded-nanogpt", {"a.bin": header(20240520, 1, 7) + IDS}),
    "a negative count": ("modded-nanogpt", {"a.bin": header(20240520, 1, -6) + IDS}),
    "ids of three bytes": ("modded-nanogpt", {"a.bin": header(278895051, 1, 4, 3) + IDS}),
    "places beyond": ("modded-nanogpt", {"a.bin": header(20240520, 1, 6) + IDS, "a.bos.idx": struct.pack("<i", 1036)}),
    "places between ids": (
        "modded-nanogpt",
        {"a.bin": header(20240520, 1, 6) + IDS, "a.bos.idx": struct.pack("<2i", 1024, 1027)},
    ),
    "places that fall": (
        "modded-nanogpt",
        {"a.bin": header(20240520, 1, 6) + IDS, "a.bos.idx": struct.pack("<2i", 1028, 1024)},
    ),
    "half an id": ("nanogpt", {"train.bin": IDS[:3]}),
    "the header of another format": ("nanogpt", {"train.bin": header(20240520, 1, 6) + IDS}),
    "no file": ("nanogpt", {"train.txt": IDS}),
    "only an empty file": ("nanogpt", {"train.bin": b""}),
    "no index": ("megatron", {"a.bin": IDS}),
    "ends that fall": ("datatrove", {"0.ds": IDS, "0.ds.index": struct.pack("<2Q", 6, 3)}),
    "ends beyond": ("datatrove", {"0.ds": IDS, "0.ds.index": struct.pack("<2Q", 3, 2**64 - 1)}),
    "half an end": ("datatrove", {"0.ds": IDS, "0.ds.index": bytes(9)}),
    "metadata of three bytes": ("datatrove", {"0.ds": IDS, "0.ds.metadata": b"gpt2|3\n6\n6.00 T"}),
    "metadata of other tokens": ("datatrove", {"0.ds": IDS, "0.ds.metadata": b"gpt2|2\n7\n7.00 T"}),
    "a short mask": ("datatrove", {"0.ds": IDS, "0.ds.loss": bytes(5)}),
    "a mask of other bytes": ("datatrove", {"0.ds": IDS, "0.ds.loss": bytes([0, 1, 2, 0, 0, 0])}),
    "a mask beside one of two": ("datatrove", {"0.ds": IDS, "0.ds.loss": bytes(6), "1.ds": IDS}),
    "an array of numpy": ("olmo", {"a.npy": b"\x93NUMPY" + IDS}),
    "no gzip": ("olmo", {"a.npy": IDS, "a.csv.gz": b"0,6\n"}),
    "a cut gzip": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"0,6\n")[:-9]}),
    "no numbers": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"start,end\n0,6\n")}),
    "documents that overlap": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"0,4\n3,6\n")}),
    "a document beyond": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"0,7\n")}),
    "lines without end": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"0,0\n" * 10_000)}),
    "one column": ("olmo", {"a.npy": IDS, "a.csv.gz": gzip.compress(b"0\n6\n")}),
}


def put(folder, files):
    """Write files."""
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


@pytest.mark.parametrize(("name", "files"), HOSTILE.values(), ids=HOSTILE)
def test_files_that_contradict_themselves_are_refused(name, files, tmp_path):
    with refused("E221"):
        read(put(tmp_path / "data", files), name)


@pytest.mark.parametrize("name", ["0.ds", "0.ds.index", "0.ds.metadata", "0.ds.loss"])
def test_no_link_is_followed(name, tmp_path):
    files = {"0.ds": IDS, "0.ds.index": struct.pack("<Q", 6), "0.ds.metadata": b"gpt2|2\n6\n6", "0.ds.loss": bytes(6)}
    folder = put(tmp_path / "data", files)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with refused("E205", name):
        read(folder, "datatrove")


def test_gaps_and_empty_documents_of_olmo_are_counted(tmp_path):
    lines = gzip.compress(b"1,3,an id,a source,9\n3,3\n3,5,x\n")
    files = {"part.npy": IDS, "part.csv.gz": lines}
    found = read(put(tmp_path / "data", files), "olmo", vocab_size=300)
    assert found.files[0].ends is not None and found.files[0].ends().tolist() == [1, 3, 5, 6]
    assert dict(found.noticed) == {"empty_documents": 1, "tokens_between_documents": 2}


def test_masks_of_open_instruct_are_found(tmp_path):
    files = {"token_ids_part_0000.npy": IDS, "labels_mask_part_0000.npy": bytes([0, 1] * 3)}
    [file] = read(put(tmp_path / "data", files), "olmo", vocab_size=300).files
    assert file.name == "token_ids_part_0000.npy" and file.loss is not None
    assert np.concatenate(list(file.loss())).tolist() == [False, True] * 3


def test_splits_and_order_are_those_of_the_names(tmp_path):
    names = ("web_10.bin", "web_9.bin", "web_val_0.bin", "web_test.bin", "other_0.bin")
    folder = put(tmp_path / "data", {**{name: IDS for name in names}, "empty.bin": b""})
    found = read(folder, "nanogpt")
    assert [(file.split, file.name) for file in found.files] == [
        ("train", "other_0.bin"),
        ("train", "web_9.bin"),
        ("train", "web_10.bin"),
        ("val", "web_val_0.bin"),
    ]
    assert dict(found.noticed) == {"files_of_a_test_split": 1, "empty_files": 1}
    assert [file.split for file in read(folder, "nanogpt", val_glob="other_*").files].count("val") == 1


def test_the_manifest_decides_the_order(cache, tmp_path):
    export_cache(cache, "olmo", tmp_path / "out")
    path = tmp_path / "out" / "niels_gpt.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"].reverse()
    path.write_text(json.dumps(manifest))
    (tmp_path / "out" / "more.npy").write_bytes(IDS)
    found = read(tmp_path / "out", "olmo")
    assert [file.name for file in found.files] == ["train_00001.npy", "train_00000.npy", "val_00000.npy"]
    assert dict(found.noticed) == {"files_not_in_the_manifest": 1}
