"""A folder of another tool becomes a cache: tokens, borders, loss, text, and what is refused."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.data_files import write_parquet
from support.errors import refused
from support.foreign import MANIFEST_NAME, NAMES, WITH_LOSS

from niels_gpt.cache import PretrainTokenStreamDataset, read_meta
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.exchange.imports import import_cache
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.sampling import EpochStream
from niels_gpt.sampling.evaluation import bits_per_byte, iter_eval
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while it rains, and naïve cats sleep on".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[at % 7 : at % 7 + 3 + at % 9]) + f" {at}." for at in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(train_tokenizer(TEXTS, vocab_size=320, trained_on="a test"), folder)
    return folder


@pytest.fixture(scope="module")
def caches(model, tmp_path_factory):
    """A folder of caches with its tokenizer and pretrain/web, whose documents straddle shards."""
    root = tmp_path_factory.mktemp("caches")
    ensure_tokenizer(Settings(cache_dir=str(root), tokenizer=str(model)))
    build_pretrain(
        ((None, text) for text in TEXTS),
        root / "pretrain" / "web",
        tokenizer=load_tokenizer(root / "tokenizer"),
        max_train_tokens=None,
        max_val_tokens=None,
        val_frac=0.2,
        shard_bytes=400,
        seed=0,
        shuffle_buffer=None,
        document_end="eot",
    )
    return root


@pytest.fixture
def tokenizer(caches):
    return load_tokenizer(caches / "tokenizer")


def imported(source, caches, name="web", format="megatron", **arguments):
    return import_cache(source, name, format=format, cache_dir=caches, **arguments)


def write_bin(folder, **splits):
    folder.mkdir(exist_ok=True)
    for split, ids in splits.items():
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")
    return folder


@pytest.mark.parametrize("format", ["megatron", "datatrove", "olmo", "modded-nanogpt", "litdata"])
def test_an_exported_cache_is_imported_as_it_was(caches, tmp_path, format):
    export_cache(caches / "pretrain" / "web", format, tmp_path / "first")
    done = imported(tmp_path / "first", caches, name=f"web_{format.replace('-', '_')}", format=format)
    before, after = caches / "pretrain" / "web", done.path
    for split in ("train", "val"):
        for name in (f"index/{split}_docs.npy", *(f"{split}/{shard.name}" for shard in (before / split).iterdir())):
            assert (after / name).read_bytes() == (before / name).read_bytes(), name
    assert find_damage(after, deep=True) == []
    original, meta = load(before), done.meta
    assert meta["utf8_bytes"] == original["utf8_bytes"] and meta["document_end"] == original["document_end"]
    assert meta["roundtrip"]["differ"] == 0
    assert meta["imported"]["borders"] == ("rows" if format == "litdata" else "index")
    batches = []
    for cache in (before, after):
        data = PretrainTokenStreamDataset(cache / "train", T=16, device="cpu")
        batches.append(data.get_batch(B=4, generator=torch.Generator().manual_seed(3)))
    assert all(torch.equal(left, right) for left, right in zip(*batches, strict=True))
    export_cache(after, format, tmp_path / "second")
    names = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()]
    for name in names:
        if name.name != MANIFEST_NAME:
            assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def load(cache):
    return read_meta(str(cache / "meta.json"))


@pytest.mark.parametrize("copy", [False, True])
def test_an_export_that_was_changed_is_not_imported(caches, tmp_path, copy):
    export_cache(caches / "pretrain" / "web", "megatron", tmp_path / "out")
    path = tmp_path / "out" / "train_00001.bin"
    ids = np.fromfile(path, "<u2")
    path.unlink()
    ids[::-1].tofile(path)
    with refused("E221", "train_00001.bin", "sha256") as error:
        imported(tmp_path / "out", caches, f"changed_{copy}", copy=copy)
    assert error.value.code == "E221" and not (caches / "imported" / f"changed_{copy}").exists()
    (tmp_path / "out" / MANIFEST_NAME).unlink()
    done = imported(tmp_path / "out", caches, f"changed_{copy}", tokenizer=str(caches / "tokenizer"), copy=copy)
    assert find_damage(done.path, deep=True) == []


@pytest.mark.parametrize(
    ("kind", "format"), [*(("pretrain", name) for name in NAMES), *(("sft", name) for name in WITH_LOSS)]
)
def test_a_damaged_file_of_an_export_is_named(caches, tmp_path, tokenizer, kind, format):
    cache = caches / "pretrain" / "web"
    if kind == "sft":
        cache = tmp_path / "sft" / "chats"
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in TEXTS[:9]]
        build_sft(chats, cache, tokenizer=tokenizer, val_frac=0.3, seed=0, num_threads=0)
    out = tmp_path / "out"
    export_cache(cache, format, out)
    names = [record["name"] for record in json.loads((out / MANIFEST_NAME).read_bytes())["files"]]
    for name in names:
        content = (out / name).read_bytes()
        changed = bytearray(content)
        changed[-1 if name.endswith((".bin", ".ds", ".npy", ".loss")) else len(content) // 2] ^= 1
        (out / name).unlink()  # it may be a link to the cache's file
        (out / name).write_bytes(changed)
        with pytest.raises(CacheError) as error:
            imported(out, caches, "damaged", format)
        assert error.value.path == str(out / name), name
        (out / name).write_bytes(content)
    assert not (caches / "imported" / "damaged").exists()
    assert imported(out, caches, f"mended_{kind}_{format.replace('-', '_')}", format).meta["kind"] == kind


def test_damage_is_found_without_a_manifest_by_the_checksums_of_parquet_and_gzip(caches, tmp_path):
    ids = [[300 + at % 20 for at in range(90)]] * 4
    (tmp_path / "hf").mkdir()
    how = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "hf" / "train.parquet", **how)
    export_cache(caches / "pretrain" / "web", "olmo", tmp_path / "olmo")
    (tmp_path / "olmo" / MANIFEST_NAME).unlink()
    for format, name, at in (("hf", "train.parquet", 200), ("olmo", "train_00000.csv.gz", -6)):  # -8 to -4: the CRC-32
        content = bytearray((tmp_path / format / name).read_bytes())
        content[at] ^= 1
        (tmp_path / format / name).write_bytes(content)
        with refused("E221", name, "CRC"):
            imported(tmp_path / format, caches, "unsound", format, tokenizer=str(caches / "tokenizer"))


@pytest.mark.parametrize("lacking", [[], [0], [1], [0, 2], [3], [0, 3]], ids=str)
def test_documents_without_their_end_are_kept_counted_and_no_damage(caches, tmp_path, tokenizer, lacking):
    eot = tokenizer.special_token_ids()["eot"]
    rows = [tokenizer.encode(text) + [eot] * (at not in lacking) for at, text in enumerate(TEXTS[:4])]
    write_parquet(tmp_path / "rows" / "train.parquet", {"input_ids": rows})
    done = imported(tmp_path / "rows", caches, "lacking", "hf", tokenizer=str(caches / "tokenizer"))
    assert find_damage(done.path, deep=True) == []
    assert done.meta["docs"]["train"] == 4 and done.meta["noticed"].get("documents_without_end", 0) == len(lacking)
    is_as_a_build = lacking in ([], [3])  # where a budget cuts the last document
    assert (done.meta["document_end"] is not None) == is_as_a_build
    assert done.meta["cut"]["documents"] == (len(lacking) if is_as_a_build else 0)


@pytest.mark.parametrize("is_export", [True, False], ids=["an export", "no manifest"])
@pytest.mark.parametrize(
    ("harm", "remedy"),
    [
        (os.mkfifo, "Put a copy of the real file there"),
        (lambda path: path.symlink_to("/dev/zero"), "replace it by a copy"),
        (lambda path: path.symlink_to("val_00000.bin"), "replace it by a copy"),
    ],
    ids=["a FIFO", "a device", "a link"],
)
def test_a_token_file_that_is_none_is_named_and_no_build_as_its_remedy(caches, tmp_path, is_export, harm, remedy):
    export_cache(caches / "pretrain" / "web", "megatron", tmp_path / "out")
    if not is_export:
        (tmp_path / "out" / MANIFEST_NAME).unlink()
    path = tmp_path / "out" / "train_00000.bin"
    path.unlink()
    harm(path)
    with refused("E205", f"{path}: ", remedy) as error:
        imported(tmp_path / "out", caches, tokenizer=str(caches / "tokenizer"))
    assert "niels-gpt build" not in str(error.value) and MANIFEST_NAME not in str(error.value)


def test_a_source_that_is_not_there_is_named(caches, tmp_path):
    with refused("E105", "nowhere", kind=FileNotFoundError):
        imported(tmp_path / "nowhere", caches)


def test_files_without_borders_are_cut_at_the_end_of_documents(caches, tmp_path, tokenizer):
    eot, texts = tokenizer.special_token_ids()["eot"], ["the fox", "a lazy dog", "naïve cats"]
    ids = [token for text in texts for token in (*tokenizer.encode(text), eot)]
    source = write_bin(tmp_path / "bins", train=ids, val=tokenizer.encode("it rains"))
    done = imported(source, caches, "bins", "nanogpt", tokenizer=str(caches / "tokenizer"))
    meta = done.meta
    assert meta["docs"] == {"train": 3, "val": 1} and meta["imported"]["borders"] == "document_end"
    assert meta["utf8_bytes"] == {"train": sum(len(text.encode()) for text in texts), "val": len("it rains")}
    assert meta["noticed"] == {"documents_without_end": 1} and meta["cut"]["documents"] == 1
    assert (done.path / "index/train_ids.txt").read_text() == "train.bin#0\ntrain.bin#1\ntrain.bin#2\n"
    assert find_damage(done.path, deep=True) == []
    assert (source / "train.bin").samefile(done.path / "train/shard_00000.bin")
    assert done.linked_bytes == 2 * done.tokens
    copied = imported(source, caches, "copied", "nanogpt", tokenizer=str(caches / "tokenizer"), copy=True)
    assert copied.linked_bytes == 0 and copied.meta["content_sha256"] == meta["content_sha256"]
    assert len(list(EpochStream(done.path / "train", T=4, global_batch_size=1, seed=0, epochs=1))) > 0
    assert len(list(iter_eval(done.path / "val", T=4, B=1))) > 0
    assert bits_per_byte(5.0, done.path / "val") > 0


def test_an_import_without_the_length_of_its_text_refuses_bits_per_byte(caches, tmp_path, tokenizer):
    source = write_bin(tmp_path / "bins", train=[*tokenizer.encode("the fox"), tokenizer.unk_id, tokenizer.unk_id])
    whole, done = (
        imported(source, caches, name, "nanogpt", tokenizer=str(caches / "tokenizer"), utf8_bytes=name == "counted")
        for name in ("counted", "nobytes")
    )
    assert whole.meta["unknown_ids"] == done.meta["unknown_ids"] == 2 and whole.meta["utf8_bytes"]["train"] > 0
    assert "utf8_bytes" not in done.meta and done.meta["built"] == "partial" and find_damage(done.path, deep=True) == []
    with refused("E208", "--no-utf8-bytes"):
        bits_per_byte(5.0, done.path / "train")


def test_an_id_outside_the_vocabulary_is_named(caches, tmp_path):
    source = write_bin(tmp_path / "bins", train=[20, 21, 60000])
    with refused("E222", "token 2 is", "train.bin", "60000") as error:
        imported(source, caches, "outside", "nanogpt", tokenizer=str(caches / "tokenizer"))
    assert error.value.code == "E222" and not (caches / "imported" / "outside").exists()


def test_ids_of_another_tokenizer_are_warned_of_and_their_text_is_that_of_each_document(
    caches, tmp_path, tokenizer, caplog
):
    ids = torch.randint(10, tokenizer.vocab_size, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    ids[99] = ids[249] = tokenizer.special_token_ids()["eot"]
    done = imported(
        write_bin(tmp_path / "bins", train=ids), caches, "odd", "nanogpt", tokenizer=str(caches / "tokenizer")
    )
    assert done.meta["roundtrip"]["differ"] == done.meta["roundtrip"]["texts"]
    assert [record.code for record in caplog.records if hasattr(record, "code")] == ["W205"]
    texts = [tokenizer.decode(ids[begin:end]) for begin, end in ((0, 99), (100, 249), (250, 400))]
    assert done.meta["utf8_bytes"]["train"] == sum(len(text.encode()) for text in texts)
