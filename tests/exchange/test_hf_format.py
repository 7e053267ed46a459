"""Parquet for `datasets`: what it reads of an export, and what an import reads of files like those it writes."""

from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from support import small_builds
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.errors import refused
from support.foreign import read_folder, small_limits, tokens_of

from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.exchange.names import MASK_NAMES
from niels_gpt.storage.errors import CacheError

ROWS = {"input_ids": [[5, 6, 7], [8], [9, 10]], "labels": [[-100, 6, 7], [-100], [-100, 10]]}


def ids_of(file):
    return np.concatenate(list(file.pieces())).tolist()


def loss_of(file):
    assert file.loss is not None
    return np.concatenate(list(file.loss())).tolist()


def saved(folder, columns, name="rows.parquet"):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name)
    return folder


def rows_of(out, split, tmp_path):
    return load_dataset(str(out), cache_dir=str(tmp_path / "hub"))[split]


@pytest.fixture(params=["pretrain", "wide", "sft", "templated"])
def cache(request, tmp_path):
    path, tokenizer = tmp_path / "cache", WideByteTokenizer() if request.param == "wide" else ByteTokenizer()
    {**vars(small_builds), "wide": small_builds.pretrain}[request.param](path, tokenizer=tokenizer)
    return tokens_of(path)


def test_datasets_reads_every_document_once_in_order(cache, tmp_path):
    with small_limits("hf", _GROUP_TOKENS=64):
        done = export_cache(cache.path, "hf", tmp_path / "out")
    assert done.tokens == sum(cache.meta["totals"][f"{split}_tokens"] for split in ("train", "val"))
    folder = read_folder(tmp_path / "out", "hf")
    for split, name in (("train", "train"), ("val", "validation")):
        rows, bounds = rows_of(tmp_path / "out", name, tmp_path), cache.bounds(split)
        stream = np.concatenate([file.ids for file in cache.files(split)])
        assert [len(ids) for ids in rows["input_ids"]] == np.diff(bounds).tolist()
        assert np.concatenate(rows["input_ids"]).tolist() == stream.tolist()
        assert rows["position_ids"][0] == list(range(int(bounds[1])))
        lines = (cache.folder / f"index/{split}_ids.txt").read_bytes().split(b"\n")[:-1]
        assert [name.encode("unicode_escape") for name in rows["id"]] == lines
        again = [file for file in folder.files if file.split == split]
        assert [each for file in again for each in ids_of(file)] == stream.tolist()
        ends = np.concatenate([np.diff(file.ends(), prepend=0) for file in again if file.ends])
        assert ends.tolist() == np.diff(bounds).tolist()
    pages = [pq.ParquetFile(file).num_row_groups for file in sorted((tmp_path / "out/data").glob("train*"))]
    assert max(pages) > 1


@pytest.mark.parametrize("build", [small_builds.sft, small_builds.templated])
def test_labels_are_the_targets_of_the_reader(build, tmp_path):
    meta = build(tmp_path / "cache")
    export_cache(tmp_path / "cache", "hf", tmp_path / "out")
    names = [tmp_path / "cache" / f"train_{name}" for name in ("tokens.bin", "idx.npy")]
    pad = meta.get("pad_id", ByteTokenizer().special_token_ids()["eot"])
    reader = SFTExampleDataset(*names, T=200, device="cpu", eot_id=pad)
    rows = rows_of(tmp_path / "out", "train", tmp_path)
    labels = {tuple(row["input_ids"]): row["labels"] for row in rows}
    x, y, masked = reader.get_batch(B=32, generator=torch.Generator().manual_seed(0))
    for row in range(32):
        whole = (int(x[row, 0]), *y[row].tolist())
        ids = next(whole[:end] for end in range(1, 202) if whole[:end] in labels)
        assert labels[ids] == [-100, *masked[row, : len(ids) - 1].tolist()]
    (file,) = (file for file in read_folder(tmp_path / "out", "hf").files if file.split == "train")
    assert sum(loss_of(file)) == meta["supervised_tokens"]["train"]


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_mask_in_place_of_labels(mask, tmp_path):
    """The first token of a row carries no loss, since nothing predicts it."""
    small_builds.sft(tmp_path / "cache")
    cache = tokens_of(tmp_path / "cache")
    export_cache(cache.path, "hf", tmp_path / "out", mask=mask)
    for split, name in (("train", "train"), ("val", "validation")):
        wanted = np.concatenate([part for file in cache.files(split) for part in file.loss()])
        rows = rows_of(tmp_path / "out", name, tmp_path)
        assert rows.column_names == ["id", "input_ids", mask]
        assert {row[0] for row in rows[mask]} == {0}
        assert [len(row) for row in rows[mask]] == np.diff(cache.bounds(split)).tolist()
        assert np.concatenate(rows[mask]).tolist() == wanted.tolist()
        again = [loss_of(file) for file in read_folder(tmp_path / "out", "hf").files if file.split == split]
        assert np.concatenate(again).tolist() == wanted.tolist()


def test_masks_are_refused_where_there_are_none(tmp_path):
    small_builds.sft(tmp_path / "chats")
    small_builds.pretrain(tmp_path / "text")
    with pytest.raises(ValueError, match="--to hf"):
        export_cache(tmp_path / "chats", "olmo", tmp_path / "out", mask="loss_mask")
    with pytest.raises(ValueError, match="loss_mask"):
        export_cache(tmp_path / "chats", "hf", tmp_path / "out", mask="labels")
    with refused("E220", tmp_path / "text", "pretrain"):
        export_cache(tmp_path / "text", "hf", tmp_path / "out", mask="loss_mask")
    small_builds.rollouts(tmp_path / "rollouts")
    with refused("E220", tmp_path / "rollouts", "rollouts"):
        export_cache(tmp_path / "rollouts", "hf", tmp_path / "out", mask="loss_mask")
    assert not (tmp_path / "out").exists()


def test_what_datasets_saves_is_read(tmp_path):
    rows = Dataset.from_dict(ROWS)
    DatasetDict({"train": rows, "validation": rows.select([2]), "test": rows}).save_to_disk(str(tmp_path / "disk"))
    folder = read_folder(tmp_path / "disk", "hf")
    assert [(file.split, ids_of(file), loss_of(file)) for file in folder.files] == [
        ("train", [5, 6, 7, 8, 9, 10], [False, True, True, False, False, True]),
        ("val", [9, 10], [False, True]),
    ]
    assert folder.noticed == {"files_of_a_test_split": 1}


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint16(), pa.int32()])
@pytest.mark.parametrize("mask", ["loss_mask", "assistant_masks", "completion_mask"])
def test_masks_and_widths(kind, mask, tmp_path):
    masks = [[0, 1, 1], [0], [0, 1]]
    columns = {"input_ids": pa.array(ROWS["input_ids"], pa.large_list(kind)), mask: masks}
    folder = read_folder(saved(tmp_path, columns), "hf")
    assert (ids_of(folder.files[0]), sum(loss_of(folder.files[0]))) == ([5, 6, 7, 8, 9, 10], 3)


def test_padding_and_empty_rows_are_left_out_and_counted(tmp_path):
    columns = {
        "input_ids": [[0, 5, 6], [], [0, 0], [7, 8, 0]],
        "attention_mask": [[0, 1, 1], [], [0, 0], [1, 1, 0]],
        "labels": [[-100, -100, 6], [], [-100, -100], [-100, 8, -100]],
        "id": ["a", "b", "c", "d"],
    }
    folder = read_folder(saved(tmp_path, columns), "hf")
    (file,) = folder.files
    assert file.ends is not None and file.ids is not None
    assert (ids_of(file), file.ends().tolist(), loss_of(file)) == ([5, 6, 7, 8], [2, 4], [False, True, False, True])
    assert list(file.ids()) == ["a", "d"]
    assert folder.noticed == {"padding_tokens": 4, "empty_rows": 2}


def test_labels_that_mask_nothing_say_nothing(tmp_path):
    folder = read_folder(saved(tmp_path, {"input_ids": [[5, 6]], "labels": [[5, 6]]}), "hf")
    assert folder.files[0].loss is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, "input_ids"),
        ({"input_ids": [5]}, "lists"),
        ({"input_ids": [[0.5]]}, "integers"),
        ({"input_ids": [[5, None]]}, "nulls"),
        ({"input_ids": [["a"]]}, "integers"),
        ({"input_ids": [[5, 6]], "labels": [[6, -100]]}, "not shifted"),
        ({"input_ids": [[5, 6]], "labels": [[5]]}, "row 0 has 1 values"),
        ({"input_ids": [[5, 6]], "loss_mask": [[0, 2]]}, "0 or 1"),
        ({"input_ids": pa.array([], pa.list_(pa.int32()))}, "no rows"),
    ],
)
def test_other_rows_are_refused(columns, words, tmp_path):
    with refused("E221", tmp_path, words):
        read_folder(saved(tmp_path, columns), "hf")


def test_a_small_file_of_a_huge_row_is_refused_before_it_is_decoded(
    tmp_path,
):
    ids = pa.array([[7] * 1001], pa.list_(pa.int32()))  # a few bytes: runs of one code
    with small_limits("hf", MAX_ROW=1000), refused("E221", "1,001 values"):
        read_folder(saved(tmp_path, {"input_ids": ids}), "hf")


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_an_arrow_file_is_read_whole_and_of_a_cut_or_lying_one_nothing(tmp_path, compression):
    rows, path = pa.table({"input_ids": [[7] * 900, [8] * 900], "name": ["a", "b"]}), tmp_path / "a.arrow"
    rows = rows.set_column(1, "name", rows["name"].dictionary_encode())
    with pa.ipc.new_stream(path, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(rows)
        stream.write_table(rows)
    assert [file.tokens for file in read_folder(tmp_path, "hf").files] == [3_600]
    whole = path.read_bytes()
    assert [sum(map(len, file.pieces())) for file in read_folder(tmp_path, "hf").files] == [3_600]
    for at in range(0, len(whole) - 8, 97):  # whatever a byte says, it is read or refused
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with suppress(CacheError):
            read_folder(tmp_path, "hf")
    path.write_bytes(whole[: len(whole) // 2])
    with refused("E221", path, "whole"):
        read_folder(tmp_path, "hf")


def test_a_mask_in_some_files_alone_a_cut_file_and_a_link_are_refused(tmp_path):
    folder = saved(tmp_path / "some", ROWS, "a.parquet")
    saved(folder, {"input_ids": [[5]]}, "b.parquet")
    with refused("E221", "b.parquet", "labels"):
        read_folder(folder, "hf")
    whole = (folder / "a.parquet").read_bytes()
    (folder / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with refused("E221", "b.parquet", "whole"):
        read_folder(folder, "hf")
    (folder / "b.parquet").unlink()
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    with refused("E205", "b.parquet"):
        read_folder(folder, "hf")
