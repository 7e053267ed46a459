"""Caches of ids of 32 bits: every reader gives what it gives of 16 bits; a contradiction about the width is refused."""

import json
import re
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits_caches import sealed
from support.byte_tokenizer import ByteTokenizer, WideByteTokenizer
from support.disk import META_NAME, content_sha256, file_records, meta_bytes, read_meta
from support.errors import refused
from support.fuzzed import written
from support.number_caches import number_cache
from support.small_caches import change_meta

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.engine.journal import HashedFile
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import locate, stats
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.sampling import EpochStream, MixtureStream, iter_eval
from niels_gpt.storage.fileio import sha256_file

MORE = WideByteTokenizer.more
KINDS = ("pretrain", "sft")
CHATS = [[{"role": "user", "content": q}, {"role": "assistant", "content": q.upper()}] for q in ("a", "bc", "def", "g")]


def built(root, tokenizer):
    """Build pretrain (40 tokens for train in shards of 16, 10 for val) and sft."""
    token_bytes = 2 if tokenizer.vocab_size < MORE else 4
    build_pretrain_cache(
        [chr(97 + number) * 5 for number in range(10)],
        root / "pretrain",
        tokenizer=tokenizer,
        max_train_tokens=40,
        max_val_tokens=10,
        shard_bytes=16 * token_bytes,
        seed=0,
        shuffle_buffer=None,
    )
    build_sft_cache(CHATS, root / "sft", tokenizer=tokenizer, val_frac=0.25, seed=0)
    return root


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return built(tmp_path_factory.mktemp("narrow"), ByteTokenizer())


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return built(tmp_path_factory.mktemp("wide"), WideByteTokenizer())


def seeded():
    return torch.Generator().manual_seed(0)


def stream(root, split="train", **changed):
    return EpochStream(root / "pretrain" / split, **{"T": 4, "global_batch_size": 3, "seed": 0, **changed})


def of_windows(root, io):
    data = PretrainTokenStreamDataset(root / "pretrain" / "train", T=4, device="cpu", io=io)
    return [data.get_batch(B=5, generator=seeded()), *(torch.from_numpy(data[i].ids.astype(np.int64)) for i in (0, 1))]


def of_examples(root, io):
    data = SFTExampleDataset.open(root / "sft", "train", T=5, io=io, over_length="truncate")
    return [data.get_batch(B=5, generator=seeded()), torch.from_numpy(data.example(1).astype(np.int64))]


def of_mixture(root, io):
    mixed = MixtureStream([stream(root, io=io), stream(root, "val", io=io)], [2, 1], seed=0)
    return [tuple(batch) for batch in islice(mixed, 4)]


READERS = {
    "get_batch": of_windows,
    "EpochStream": lambda root, io: [tuple(batch) for batch in stream(root, io=io, epochs=1, drop_last=True)],
    "MixtureStream": of_mixture,
    "iter_eval": lambda root, io: list(iter_eval(root / "pretrain" / "train", B=2, T=8, io=io)),
    "SFTExampleDataset": of_examples,
}


def flat(found):
    return found.flatten().tolist() if isinstance(found, torch.Tensor) else [id for part in found for id in flat(part)]


@pytest.mark.filterwarnings("ignore:.*T=5 loses")
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_the_ids_of_16_bits_and_the_difference(narrow, wide, name, io):
    expected, found = (flat(READERS[name](root, io)) for root in (narrow, wide))
    # -100 is no target, and 0 pads the last window of an evaluation
    assert found == [id if id in (-100, 0) else id + MORE for id in expected] and max(found) > MORE


def test_a_cache_of_32_bits_says_so_and_is_good(wide):
    for kind in KINDS:
        meta = json.loads((wide / kind / META_NAME).read_text())
        assert meta["token_dtype"] == "uint32-le" and meta["vocab_size"] == MORE + 300
        assert find_damage(wide / kind, deep=True) == []
    assert "40 tokens in 8 documents" in dict(stats(wide / "pretrain"))["train"]
    told = locate(wide / "pretrain", None, split="train", position=20, num_tokens=3)
    assert "train/shard_00001.bin, bytes 16 to 20" in told
    (shard,) = {path.stat().st_size for path in (wide / "pretrain" / "train").iterdir()} - {32}
    assert shard == 64


def test_an_id_above_the_vocabulary_is_refused_when_it_is_served_and_named_by_verify(wide, tmp_path):
    with written(files_of(wide / "pretrain")) as folder:
        path = folder / "train" / "shard_00001.bin"
        tokens = np.fromfile(path, dtype="<u4")
        tokens[3] = MORE + 300
        tokens.tofile(path)
        sealed(folder, read_meta(folder))  # as a builder with a fault would write it
        place = r"token 3 at byte 12 is id 100300, expected ids below vocab_size 100300"
        with pytest.raises(CacheError, match=place):
            list(iter_eval(folder / "train", B=1, T=4))
        (problem,) = [damage for damage in find_damage(folder, deep=True) if "is id 100300" in damage.problem]
        assert (problem.file, problem.offset, problem.end) == ("train/shard_00001.bin", 12, 16)
        assert verify(folder, Limits(), names=["ids_below_vocab_size"])["ids_below_vocab_size"].problems


def test_files_without_meta_json_are_of_the_dtype_that_is_given(wide):
    with written({name: raw for name, raw in files_of(wide / "pretrain").items() if name != META_NAME}) as folder:
        split, dtypes = folder / "train", ("uint32", None, "uint16")
        lengths = [PretrainTokenStreamDataset(split, T=4, device="cpu", dtype=each)._split.lengths for each in dtypes]
        assert [int(each.sum()) for each in lengths] == [40, 80, 80]
        assert next(iter(EpochStream(split, T=4, global_batch_size=1, seed=0, dtype="uint32"))).x.min() > MORE
        with refused("E102", "dtype='<u4", "uint16", "uint32"):
            PretrainTokenStreamDataset(split, T=4, device="cpu", dtype="<u4")
        # Ids of 16 bits, two taken for one, are mostly no id of any vocabulary.
        (split / "shard_00000.bin").write_bytes(np.full(64, 40_000, dtype="<u2").tobytes())
        with refused("E409", "shard_00000.bin: token ", "2**31", "have 16 bits") as error:
            next(iter(iter_eval(split, B=1, T=4, dtype="uint32")))
        assert "damaged" not in str(error.value)


NO_ID = r"token \d+ at byte \d+ is id \d+, expected ids below 2\*\*31"


@pytest.mark.parametrize("meta", [None, {"made_by": "another tool", "token_dtype": "uint32-le"}])
def test_ids_that_no_vocabulary_has_are_refused_by_the_reader_of_chats_too(wide, tmp_path, meta):
    """Its labels were cut to 2**31 - 1."""
    source, folder = wide / "sft" / "train_tokens.bin", tmp_path / "sft"
    folder.mkdir()
    ids = np.fromfile(source, dtype="<u4")
    starts = np.load(source.with_name("train_idx.npy"))
    np.save(folder / "train_idx.npy", starts)
    asst, eot = (WideByteTokenizer().special_token_ids()[name] for name in ("asst", "eot"))
    ids[np.flatnonzero(ids == asst)[0] + 1] = 2**31 + 77
    ids.tofile(folder / source.name)
    if meta is not None:
        (folder / META_NAME).write_text(json.dumps(meta))
    data = SFTExampleDataset(
        tokens_path=folder / source.name,
        idx_path=folder / "train_idx.npy",
        T=30,
        device="cpu",
        eot_id=eot,
        asst_id=asst,
        dtype="uint32",
    )
    with pytest.raises(CacheError, match=NO_ID):
        data.get_batch(B=64, generator=seeded())
    with pytest.raises(CacheError, match=NO_ID):
        data.example(0)


def test_a_dtype_that_meta_json_contradicts_is_an_error(narrow, wide):
    for root, wrong, right in ((narrow, "uint32", "uint16"), (wide, "uint16", "uint32")):
        said = rf"meta\.json: token_dtype is '{right}-le', but dtype='{wrong}' was given"
        openings = [
            lambda root=root, **dtype: stream(root, **dtype),
            lambda root=root, **dtype: PretrainTokenStreamDataset(root / "pretrain/train", T=1, device="cpu", **dtype),
            lambda root=root, **dtype: iter_eval(root / "pretrain/val", B=1, T=1, **dtype),
            lambda root=root, **dtype: SFTExampleDataset.open(root / "sft", "train", T=9, **dtype),
        ]
        for opening in openings:
            opening(dtype=right)
            with pytest.raises(CacheError, match=said):
                opening(dtype=wrong)


def test_caches_of_both_widths_are_mixed_unless_their_tokenizers_are_known_to_differ(tmp_path):
    narrow = number_cache(tmp_path / "pretrain" / "narrow", tokenizer="ab" * 32)
    wide = tmp_path / "wide" / "train"
    wide.mkdir(parents=True)
    np.arange(100, dtype="<u4").tofile(wide / "shard_00000.bin")
    common = {"T": 4, "global_batch_size": 4, "seed": 0}
    streams = [EpochStream(narrow, **common), EpochStream(wide, dtype="uint32", **common)]
    rows = {batch.x.dtype for batch in islice(MixtureStream(streams, [1, 1], seed=0), 9)}
    assert rows == {torch.int64}
    (wide.parent / META_NAME).write_text(
        json.dumps({"token_dtype": "uint32-le", "vocab_size": 100_000, "tokenizer_sha256": "cd" * 32})
    )
    streams = [EpochStream(narrow, **common), EpochStream(wide, **common)]
    with refused("E402") as error:
        MixtureStream(streams, [1, 1], seed=0)
    assert {"abababababab", "cdcdcdcdcdcd"} <= set(re.findall("(?:ab|cd){6}", str(error.value)))


# --- contradictions ---------------------------------------------------------------------------------------------------


def files_of(cache):
    folder = cache.resolve()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewritten(folder, token_bytes):
    """Write the token files in ids of so many bytes, with true records of them; token_dtype stays as it is."""
    meta = json.loads((folder / META_NAME).read_text())
    before = 4 if meta["token_dtype"] == "uint32-le" else 2
    meta["shard_bytes"] = meta.get("shard_bytes", 0) // before * token_bytes
    for records in meta["shards"].values():
        for record in records:
            path = folder / record["name"]
            np.fromfile(path, dtype=f"<u{before}").astype(f"<u{token_bytes}").tofile(path)
            record |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    name = meta["checksums"]["name"]
    records = [record for record in file_records(meta) if record["name"] != name]
    crcs = b"".join(checksums(folder / record["name"]) for record in records)
    (folder / name).write_bytes(crcs)
    meta["checksums"] |= {"bytes": len(crcs), "sha256": sha256_file(folder / name)}
    meta["content_sha256"] = content_sha256([*records, meta["checksums"]])
    (folder / META_NAME).write_bytes(meta_bytes(meta))


def checksums(path):
    file = HashedFile(path, keep=path.stat().st_size, sha256=sha256_file(path))
    file.close()
    return file.checksums()


def read_all(kind, folder):
    """Yield what opens each split in every way and reads all of its tokens."""
    for split in ("train", "val"):
        for io in ("mmap", "pread"):
            way = {"io": io}
            if kind == "sft":
                yield lambda split=split, way=way: [
                    data.example(row)
                    for data in [SFTExampleDataset.open(folder, split, T=9, **way)]
                    for row in range(len(data))
                ]
            else:
                yield lambda split=split, way=way: PretrainTokenStreamDataset(
                    folder / split, T=1, device="cpu", **way
                ).get_batch(B=200, generator=seeded())
                yield lambda split=split, way=way: list(
                    EpochStream(folder / split, T=1, global_batch_size=1, seed=0, epochs=1, **way)
                )
                yield lambda split=split, way=way: list(iter_eval(folder / split, B=9, T=1, **way))


@settings(derandomize=True, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    is_wide=st.booleans(),
    token_bytes=st.sampled_from([None, 2, 4]),
    token_dtype=st.sampled_from([None, None, "uint16-le", "uint32-le", "absent"]),
    vocab_size=st.sampled_from([None, None, 300, 65_536, 65_537, MORE + 300, 2**31, 2**31 + 1]),
    wrong_id=st.booleans(),
)
def test_verify_passes_if_and_only_if_every_reader_reads_the_cache(
    narrow,
    wide,
    kind,
    is_wide,
    token_bytes,
    token_dtype,
    vocab_size,
    wrong_id,
):
    """Files of another width than meta.json says, or a token_dtype or vocab_size that is not theirs; and a wrong id."""
    with written(files_of((wide if is_wide else narrow) / kind)) as folder:
        path = folder / META_NAME
        if token_bytes is not None:
            rewritten(folder, token_bytes)
        meta = json.loads(path.read_text())
        if token_dtype is not None:
            meta["token_dtype"] = token_dtype
        if token_dtype == "absent":
            del meta["token_dtype"]
        if vocab_size is not None:
            meta["vocab_size"] = vocab_size
        path.write_bytes(meta_bytes(meta))
        width = token_bytes or (4 if is_wide else 2)
        if wrong_id:
            shard = folder / meta["shards"]["train"][0]["name"]
            tokens = np.fromfile(shard, dtype=f"<u{width}")
            tokens[5] = np.iinfo(tokens.dtype).max
            tokens.tofile(shard)
            rewritten_meta(folder, meta, shard)
        says, ids = meta.get("token_dtype", "uint16-le"), meta["vocab_size"]
        sentinels_fit = max(meta["special_token_ids"].values()) < ids
        opens = (says == "uint16-le") == (width == 2) == (ids <= 65_536) and ids <= 2**31 and sentinels_fit
        reads = opens and not (wrong_id and tokens[5] >= ids)
        refusals = [error for opening in read_all(kind, folder) if (error := refusal_of(opening)) is not None]
        assert (not refusals) == reads, refusals
        assert (find_damage(folder, deep=False) == []) == opens
        assert (find_damage(folder, deep=True) == []) == reads
        assert bool(verify(folder, Limits(), names=["readers_open"])["readers_open"].problems) != opens


def refusal_of(opening):
    try:
        opening()
    except CacheError as error:
        return error
    return None


def rewritten_meta(folder, meta, changed):
    """Record the sha256 of a changed file, and the checksums of all."""
    for record in meta["shards"]["train"]:
        if folder / record["name"] == changed:
            record["sha256"] = sha256_file(changed)
    name = meta["checksums"]["name"]
    records = [record for record in file_records(meta) if record["name"] != name]
    (folder / name).write_bytes(b"".join(checksums(folder / record["name"]) for record in records))
    meta["checksums"]["sha256"] = sha256_file(folder / name)
    change_meta(folder, **{**meta, "content_sha256": content_sha256([*records, meta["checksums"]])})
