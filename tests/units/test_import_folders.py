"""What an import asks of a folder: order and splits by names, its manifest, and no way out of it."""

import json

import numpy as np
import pytest
from support.errors import refused

from niels_gpt.exchange.foreign import names_below, read_manifest, read_pieces, split_of

RECORD = {"name": "a.bin", "bytes": 4, "sha256": "0" * 64, "split": "train", "of": [{"name": "s", "continues": False}]}
MANIFEST = {
    "kind": "export",
    "manifest_version": 1,
    "format": "nanogpt",
    "cache": {"source": {}, "vocab_size": 300, "tokenizer_sha256": None},
    "files": [RECORD],
}


def test_files_are_in_natural_order_and_hidden_ones_are_left_out(tmp_path):
    for name in ("part10.bin", "part2.bin", "b/1.bin", "b/.cache/2.bin", ".x.bin", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert names_below(tmp_path, ".bin") == ["b/1.bin", "part2.bin", "part10.bin"]
    (tmp_path / "out").symlink_to("/etc")
    with refused("E205", "out"):
        names_below(tmp_path, ".bin")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train_00000.bin", "train"),
        ("fineweb_val_000000.bin", "val"),
        ("validation-00000-of-00001.parquet", "val"),
        ("dev/0.bin", "val"),
        ("interval.bin", "train"),
        ("latest.bin", "train"),
        ("x/test.bin", None),
    ],
)
def test_names_say_the_split(name, split):
    assert split_of(name) == split
    assert split_of(name, "*") == "val" and split_of(name, "other*") == "train"


def test_a_file_is_read_in_pieces_and_no_link_is_followed(tmp_path):
    np.arange(3_000_000, dtype="<i4").tofile(tmp_path / "a")
    pieces = list(read_pieces(tmp_path / "a", np.dtype("<i4"), offset=8, count=2_999_997))
    assert len(pieces) > 1 and np.array_equal(np.concatenate(pieces), np.arange(2, 2_999_999))
    (tmp_path / "link").symlink_to("a")
    for path, count, code in ((tmp_path / "link", -1, "E205"), (tmp_path / "a", 3_000_001, "E203")):
        with refused(code, path.name):
            next(read_pieces(path, np.dtype("<i4"), count=count))


def changed(**keys):
    return MANIFEST | keys


@pytest.mark.parametrize(
    "manifest",
    [
        changed(kind="push"),
        changed(manifest_version=2),
        changed(format="megatron"),
        changed(cache=[]),
        changed(cache={"source": {}, "vocab_size": -1}),
        changed(cache={"source": {"licence": 3}}),
        changed(cache={"source": {}, "vocab_size": 300, "document_end": {"id": 300, "token": "x"}}),
        changed(files=[RECORD | {"name": "../a.bin"}]),
        changed(files=[RECORD | {"name": "/a.bin"}]),
        changed(files=[RECORD | {"bytes": 6}]),
        changed(files=[RECORD | {"split": "test"}]),
        changed(files=[RECORD | {"of": [{"name": "s"}]}]),
        changed(files=[RECORD, RECORD]),
    ],
    ids=lambda manifest: next(f"{key}" for key in manifest if manifest[key] != MANIFEST[key]),
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path, manifest):
    (tmp_path / "a.bin").write_bytes(b"1234")
    assert read_manifest(tmp_path, "nanogpt") is None
    (tmp_path / "niels_gpt.json").write_text(json.dumps(MANIFEST))
    assert read_manifest(tmp_path, "nanogpt") == MANIFEST
    (tmp_path / "niels_gpt.json").write_text(json.dumps(manifest))
    with refused("E221", "niels_gpt.json"):
        read_manifest(tmp_path, "nanogpt")
