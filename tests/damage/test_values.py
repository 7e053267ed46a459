"""Values that no builder writes: who meets one names its file and key, and the figures that it found."""

import hashlib
import json
import math
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import LONG
from support.disk import meta_bytes, write_meta
from support.eagle3_damage import native_put, native_rows, put, stored
from support.errors import refused
from support.harms import entry, file, flip, keys, npy, number, resummed, saved, sealed, watched
from support.kinds import KINDS, calls, fresh, judged

TOKENS, IDX, SHARD = "train_tokens.bin", "train_idx.npy", "train/shard_00001.bin"
MANIFEST, FIRST, SECOND = "manifest.json", "shard-000000.safetensors", "shard-000001.safetensors"


def undescribed(harm):
    """Harm files of other tools: there is no meta.json."""
    return lambda folder: (harm(folder), (folder / "meta.json").unlink())


def of_key(name, change):
    """Set a key of meta.json to what becomes of its value."""
    return lambda folder: keys(**{name: change(json.loads((folder / "meta.json").read_bytes())[name])})(folder)


def manifest(**changed):
    """Set keys of a manifest, those of an object in it as OBJECT__KEY; ... removes one. meta.json gets its sha256."""

    def write(folder):
        whole = json.loads((folder / MANIFEST).read_bytes())
        for name, value in changed.items():
            part, _, key = name.rpartition("__")
            (whole[part] if part else whole)[key] = value
        without = {name: value for name, value in whole.items() if value is not ...}
        (folder / MANIFEST).write_text(json.dumps(without))
        meta = json.loads((folder / "meta.json").read_bytes())
        (record,) = (each for each in meta["files"] if each["name"] == MANIFEST)
        raw = (folder / MANIFEST).read_bytes()
        record |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (folder / "meta.json").write_bytes(meta_bytes(meta))

    return write


def tensors(name, change):
    """Change the tensors of a file; None removes one."""

    def write(folder):
        old = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        save_file({key: tensor for key, tensor in (old | change(old)).items() if tensor is not None}, folder / name)

    return write


def added(tensor, at, more):
    """Add to one number of a tensor of the first shard."""

    def change(old):
        old[tensor].view(-1)[at] += more
        return {}

    return tensors(FIRST, change)


def as_the_first(folder):
    """Let the second sample of the first group of rollouts be the first one: all numbers of the index fit."""
    ids = np.fromfile(folder / TOKENS, "<u4")
    ids[4] = ids[3]
    ids.tofile(folder / TOKENS)


def of_holes(folder):
    """Write a header that is true to its size, and holes."""
    shapes = {name: ("I64", 8, [2]) for name in ("token_starts", "aux_starts", "row_starts")}
    shapes |= {"log_normalizers": ("F32", 4, [0]), "argmax_ids": ("U32", 4, [0]), "input_ids": ("U32", 4, [2**23])}
    shapes |= {"aux_hidden_states": ("BF16", 2, [0, 3, 16]), "last_hidden_states": ("BF16", 2, [0, 16])}
    header, end = {}, 0
    for name, (dtype, size, shape) in {**shapes, "loss_bits": ("U8", 1, [2**20])}.items():
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / FIRST).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / FIRST, 8 + len(text) + end)


def last_bit(old):
    """Return a mask of the last bit, which stands for no token."""
    return torch.tensor([*[0] * (len(old["loss_bits"]) - 1), 0x80], dtype=torch.uint8)


# --- what readers refuse: kind, what is done, code and figures --------------------------------------------------------

OFFSETS = {
    "empty": ("E203", b"", "b''"),
    "a zip": ("E203", b"PK\x03\x04" + bytes(200)),
    "a pickle": ("E203", b"\x80\x04]q\x00."),
    "cut": ("E203", npy("(3,)")[:-8], "144 bytes", "152", "3 entries"),
    "longer": ("E203", npy("(3,)") + b"12345678", "160 bytes", "152"),
    "32 bits": ("E201", saved([0, 6, 12], "<i4"), "<i4", "(3,)", "int64"),
    "big-endian": ("E201", saved([0, 6, 12], ">i8"), ">i8", "(3,)", "int64"),
    "floats": ("E201", saved([0, 6, 12], "<f8"), "<f8", "(3,)", "int64"),
    "objects": ("E201", saved([0, None], "O"), "|O", "(2,)", "int64"),
    "two dimensions": ("E201", saved([[0, 6, 12]]), "(1, 3)", "int64"),
    "no dimension": ("E201", saved(0), "()", "int64"),
    "no example": ("E203", saved([]), "no example"),
    "not from 0": ("E201", saved([6, 12]), "at 6", "expected 0"),
    "twice the same": ("E201", saved([0, 6, 6]), "entry 2"),
    "beyond 64 bits": ("E201", saved([0, 2**63 - 1, -(2**63)]), "entry 2"),
    "beyond the tokens": ("E203", saved([0, 6, 570]), "offset 570", "569 tokens", TOKENS),
    "version 3": ("E203", npy("(3,)", version=b"\x03\x00")),
    "version 0": ("E203", npy("(3,)", version=b"\x00\x00")),
    "a record": ("E203", npy("(3,)", descr="[('a', '<i8')]")),
    "code": ("E203", npy("(3,)", descr="__import__('os')")),
    **{f"shape {shape[:9]}": ("E203", npy(shape)) for shape in ("(-3,)", "(3, -1)", "(3.5,)", "(" * 50)},
    "2 ** 60": ("E203", npy("(1152921504606846976,)"), "152 bytes", "9223372036854775936"),
    "beyond 2 ** 64": ("E201", npy("(18446744073709551619,)"), "(18446744073709551619,)"),
    "3 * 10 ** 15": ("E203", npy("(3000000000000000,)"), "152 bytes", "24000000000000128"),
    "2 ** 32 squared": ("E201", npy("(4294967296, 4294967296)"), "(4294967296, 4294967296)"),
    "fortran": ("E201", npy("(1, 3)", fortran="True"), "(1, 3)"),
    "a short header": ("E203", b"\x93NUMPY\x01\x00\xff\xff{'descr': '<i8', "),
    "a header of 4 GB": ("E203", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr': '<i8', "),
}
"""Files of offsets of other tools: code, content, and figures of the error."""
READ = {
    **{
        f"offsets: {name}": ("sft", undescribed(file(IDX, content)), code, IDX, *found)
        for name, (code, content, *found) in OFFSETS.items()
    },
    "offsets beyond the tokens": ("sft", file(IDX, saved([*range(10), 570])), "E203", IDX, "569 tokens"),
    "no token, undescribed": ("pretrain", undescribed(file(SHARD, b"")), "E203", SHARD, "empty"),
    "half a token, undescribed": ("pretrain", undescribed(file(SHARD, b"123")), "E203", SHARD, "3 bytes"),
    "an id outside": (
        "pretrain",
        number(SHARD, 1, 300, "<u2"),
        "E409",
        SHARD,
        "token 1",
        "byte 2",
        "300",
        "vocab_size 300",
    ),
    "an id outside an sft cache": (
        "sft",
        number(TOKENS, 7, 65_535, "<u2"),
        "E409",
        TOKENS,
        "token 7",
        "byte 14",
        "65535",
    ),
    "meta.json: a newline more": (
        "pretrain",
        lambda folder: file("meta.json", (folder / "meta.json").read_bytes() + b"\n")(folder),
        "E202",
        "meta.json",
        "CRC-32",
    ),
    "pretrain: no shards": ("pretrain", keys(shards={}), "E202", "meta.json", "shards", "train"),
    "pretrain: no shard": ("pretrain", keys(shards={"train": []}), "E204", "train", "no shard"),
    "sft: no shards": ("sft", keys(shards={}), "E209", "meta.json", TOKENS),
    **{
        f"{kind}: built is false": (kind, keys(built=False), "E207", "meta.json", "built is false")
        for kind in ("pretrain", "sft")
    },
    **{
        f"sft: {name} is {str(value)[:9]}": (
            "sft",
            of_key("special_token_ids", lambda ids, name=name, value=value: ids | {name: value}),
            "E202",
            "meta.json",
            f"special_token_ids.{name} is ",
        )
        for name in ("asst", "eot")
        for value in (300, -1, True, 4.0, "4", None, [4], 2**64)
    },
    **{
        f"rollouts: {table} {column} {more}": (
            "rollouts",
            entry(f"index/train_{table}.npy", 3 * width + column, more),
            "E203",
            "index/train_",
        )
        for table, width, numbers in (("groups", 9, (-1, 1, 2**62)), ("samples", 5, (-(2**62), 2**62)))
        for column in range(width)
        for more in numbers
    },
    "rollouts: another index": ("rollouts", as_the_first, "E203", "index/train_groups.npy", "group 0", "5 tokens", "4"),
    "rollouts: nan": (
        "rollouts",
        number("train_logprobs.bin", 0, float("nan"), "<f4"),
        "E203",
        "train_logprobs.bin",
        "sample 0",
        "group 0",
    ),
    "rollouts: inf": (
        "rollouts",
        number("train_reward.bin", 0, float("inf"), "<f4"),
        "E203",
        "train_reward.bin",
        "sample 0",
        "group 0",
    ),
    "rollouts: no target": (
        "rollouts",
        number("train_loss.bin", 0, 0, "u1"),
        "E203",
        "train_loss.bin",
        "sample 0",
        "group 0",
        "0 targets",
        "expected 2",
    ),
    "rollouts: a target in a prompt": (
        "rollouts",
        number("train_loss.bin", 0, 0b11001101, "u1"),
        "E203",
        "train_loss.bin",
        "sample 0",
        "group 0",
        "prompt",
    ),
    "rollouts: a field that is not there": (
        "rollouts",
        keys(fields={"advantages": "token"}),
        "E202",
        "train_advantages.bin",
    ),
    "rollouts: an unknown field": ("rollouts", keys(fields={"../x": "token"}), "E202", "fields", "logprobs"),
    "rollouts: a field by something else": (
        "rollouts",
        keys(fields={"logprobs": "sample"}),
        "E202",
        "fields",
        "logprobs",
    ),
    "rollouts: no fields": ("rollouts", keys(fields=None), "E202", "fields is None"),
    "rollouts: another kind": ("rollouts", keys(kind="sft"), "E202", "kind is 'sft'", "'rollouts'"),
    "rollouts: another width": (
        "rollouts",
        keys(token_dtype="uint16-le"),
        "E202",
        "meta.json",
        "token_dtype",
        "49 tokens",
    ),
    "rollouts: no totals": ("rollouts", keys(totals={}), "E202", "totals.train_groups is None"),
    "rollouts: no files": ("rollouts", keys(files=[]), "E202", "train_"),
    "rollouts: a file outside": (
        "rollouts",
        keys(files=[{"name": "../x", "bytes": 1, "sha256": "0" * 64}]),
        "E202",
        "meta.json",
        "../x",
    ),
    **{
        f"native: {name}": ("native", change, "E701", FIRST, *found)
        for name, change, *found in (
            ("starts fall", added("aux_starts", 1, 10**3), "starts"),
            ("starts begin later", added("row_starts", 0, 1), "starts"),
            ("starts end later", added("row_starts", -1, 1), "starts"),
            ("negative starts", added("token_starts", 1, -(10**3)), "starts"),
            (
                "no token",
                tensors(
                    FIRST,
                    lambda old: {"token_starts": old["token_starts"][[0, 0, *range(2, len(old["token_starts"]))]]},
                ),
                "sample 0",
                "0 tokens",
            ),
            (
                "no loss",
                tensors(FIRST, lambda old: {"loss_bits": torch.zeros_like(old["loss_bits"])}),
                "sample 0",
                "loss bits",
            ),
            (
                "int64",
                tensors(FIRST, lambda old: {"input_ids": old["input_ids"].long()}),
                "header",
                "'input_ids' int64",
            ),
            (
                "a wider state",
                tensors(FIRST, lambda old: {"aux_hidden_states": old["aux_hidden_states"].repeat(1, 1, 2)}),
                "header",
                ", 3, 32]",
            ),
            ("one more", tensors(FIRST, lambda old: {"more": torch.zeros(1)}), "header", "'more'"),
            ("one less", tensors(FIRST, lambda old: {"token_starts": None}), "token_starts"),
            (
                "no sample",
                tensors(FIRST, lambda old: {f"{part}_starts": torch.tensor([0]) for part in ("token", "aux", "row")}),
                "0 samples",
            ),
            (
                "a header of 2 MB",
                file(FIRST, (2_000_000).to_bytes(8, "little") + b"{" + b" " * 1_999_999),
                "2,000,000 bytes",
            ),
            (
                "NaN in the header",
                file(FIRST, (51).to_bytes(8, "little") + b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
                "NaN",
            ),
            (
                "metadata",
                lambda folder: save_file(load_file(folder / FIRST), folder / FIRST, metadata={"\x1b[31mred": "no"}),
                "metadata",
            ),
        )
    },
    **{
        f"native manifest: {name}={value!r}": (
            "native",
            manifest(**{name: value}),
            "E701",
            MANIFEST,
            name.replace("__", "."),
            *found,
        )
        for name, value, *found in (
            ("hidden_size", True),
            ("hidden_size", 10**8, "100000000", "16,777,216"),
            ("num_shards", ..., "missing"),
            ("aux_dtype", "fp4", "'fp4'", "bf16, fp16, fp32, fp8"),
            ("dtype", ["bf16"]),
            ("aux_layer_ids", [1, 1]),
            ("aux_layer_ids", []),
            ("draft_vocab_size", 3, "expected"),
            ("conventions__shift", "left", "'left'", "none"),
            ("head__eps", True, "True"),
            ("head", [], "missing"),
            ("input_data", 3),
            ("selected_token_ids", [50] * 12, "39"),
        )
    },
    "native: holes": ("native", of_holes, "E203", FIRST, "holes"),
    "native: bits behind the end": (
        "native",
        tensors(SECOND, lambda old: {"loss_bits": old["loss_bits"] | last_bit(old)}),
        "E701",
        SECOND,
        "loss_bits",
    ),
    "native manifest: more samples": ("native", manifest(num_samples=11), "E701", "10 samples", "11"),
    "native manifest: more shards": (
        "native",
        manifest(num_shards=4),
        "E702",
        "shard-000003.safetensors",
        "10 samples",
        "4 shards",
        "3 shard",
    ),
    "dense manifest: more samples": (
        "dense",
        manifest(num_samples=13),
        "E702",
        "shard-000003.safetensors",
        "13 samples",
        "4 shards",
        "3 shard",
    ),
    "dense manifest: fewer samples": (
        "dense",
        manifest(num_samples=8),
        "E702",
        SECOND.replace("1", "2"),
        "8 samples",
        "2 shards",
        "3 shard",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_reader_refuses_a_value_by_its_file_and_what_it_found(tmp_path, name):
    kind, harm, code, *found = READ[name]
    cache = fresh(kind, tmp_path / "caches")
    harm(cache.resolve())
    resummed(cache.resolve())
    with watched(tmp_path), refused(code, *found) as caught:
        for _ in KINDS[kind].read(cache):
            pass
    assert "\x1b" not in str(caught.error)


# --- what verify tells: kind, what is done, file and figures of one problem -------------------------------------------


def changed(name, old, new):
    """Replace some bytes of a file."""

    def write(folder):
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return write


def nested(name, **of_record):
    """Set keys of a record in an object of meta.json: OBJECT.SPLIT."""
    group, split = name.split(".")
    return of_key(group, lambda value: value | {split: value[split] | of_record})


def ids(change):
    """Change the lines of source ids of a split."""
    name = "index/train_ids.txt"
    return sealed(lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())))


QUICK = {
    "documents that do not ascend": (
        "pretrain",
        sealed(entry("index/train_docs.npy", 5, -47)),
        "train_docs.npy",
        "do not ascend at entry 5",
    ),
    "documents that end early": (
        "pretrain",
        sealed(entry("index/train_docs.npy", 10, -1)),
        "train_docs.npy",
        "473",
        "474",
    ),
    "another byte": ("sft", changed("meta.json", b'"kind": "sft"', b'"kind": "sxx"'), "meta.json", "meta_crc32"),
    "no JSON": ("sft", changed("meta.json", b'"kind":', b'"kind",'), "meta.json", "JSON"),
    "no utf-8": ("sft", changed("meta.json", b'"kind"', b'"\xffind"'), "meta.json", "JSON"),
    "no CRC-32": ("sft", changed("meta.json", b'  "meta_crc32"', b'  "other"'), "meta.json", "no meta_crc32"),
    "the header of offsets": ("sft", lambda folder: flip(folder / IDX, 30, 1), IDX, "int64"),
    "train_tokens": (
        "pretrain",
        of_key("train_tokens", lambda count: count + 1),
        "meta.json",
        "train_tokens",
        "475",
        "474",
    ),
    "totals": (
        "pretrain",
        of_key("totals", lambda totals: totals | {"val_tokens": 95}),
        "meta.json",
        "totals.val_tokens",
        "95",
        "94",
    ),
    "docs": ("pretrain", of_key("docs", lambda docs: docs | {"val": 0}), "meta.json", "docs.val is 0"),
    "documents_read": ("pretrain", keys(documents_read=0), "meta.json", "documents_read is 0"),
    "vocab_size": ("pretrain", keys(vocab_size=0), "meta.json", "vocab_size is 0", "65,536"),
    "special_token_ids": ("pretrain", keys(special_token_ids={"eot": 4}), "meta.json", "special_token_ids", "300"),
    "content_sha256": ("pretrain", keys(content_sha256="0" * 64), "meta.json", "content_sha256", "000000"),
    "index.train.bytes": ("pretrain", nested("index.train", bytes=224), "meta.json", "index.train.bytes is 224", "216"),
    "index.train.entries": (
        "pretrain",
        nested("index.train", entries=12),
        "meta.json",
        "index.train.bytes is 216",
        "224",
    ),
    "ids.val.entries": ("pretrain", nested("ids.val", entries=3), "meta.json", "ids.val.entries is 3", "2"),
    "checksums.bytes": (
        "sft",
        of_key("checksums", lambda record: record | {"bytes": 28}),
        "meta.json",
        "checksums.bytes is 28",
        "24",
    ),
    "val_examples": ("sft", keys(val_examples=2), "meta.json", "val_examples is 2", "1"),
    "examples_read": ("sft", keys(examples_read=13), "meta.json", "examples_read is 13", "12"),
    "duplicates": ("sft", keys(duplicates={"train": 11, "val": 0}), "meta.json", "duplicates.train is 11"),
    "loss_bits": (
        "sft with bits",
        nested("loss_bits.train", bytes=48),
        "meta.json",
        "loss_bits.train.bytes",
        "48",
        "47",
    ),
    "tokenizer_sha256": ("tokenizer", keys(tokenizer_sha256="0" * 64), "meta.json", "tokenizer_sha256", "spm.model"),
    "rollouts: totals": (
        "rollouts",
        of_key("totals", lambda totals: totals | {"train_groups": 11}),
        "meta.json",
        "train_groups",
        "11",
        "10",
    ),
    "rollouts: loss_tokens": (
        "rollouts",
        keys(loss_tokens={"train": 41, "val": 8}),
        "meta.json",
        "loss_tokens.train is 41",
        "40",
    ),
    "rollouts: groups_read": ("rollouts", keys(groups_read=13), "meta.json", "groups_read is 13", "12"),
    "rollouts: samples_read": ("rollouts", keys(samples_read=25), "meta.json", "samples_read is 25", "24"),
    "draft_vocab_size": ("draft vocabulary", keys(draft_vocab_size=41), "40", "41"),
}
"""What a quick look tells."""
AUX, IDS = "aux_hidden_states", "input_ids"


def flipped(form_field, shard=1, sample=2):
    return lambda folder: stored(folder, shard, form_field).__setitem__(
        (sample, 0, 0), stored(folder, shard, form_field)[sample, 0, 0] ^ 1
    )


def no_top_k(folder):
    """An id outside the draft's vocabulary, one twice, and probabilities that rise."""
    put(folder, "target_probs_indices", 1, 0, 1, 12)
    twice = stored(folder, 0, "target_probs_indices")[1, 2]
    twice[4:8] = twice[:4]
    values = stored(folder, 0, "target_probs_values")[1, 5]
    values[:] = values.view("u2")[::-1].copy().view("u1")


def puts(*numbers):
    """Write several numbers: field, sample, slot, column and value."""
    return lambda folder: [put(folder, *each) for each in numbers]


def native(*place):
    return lambda folder: native_put(folder, *place)


NAN, INF = float("nan"), float("inf")
SAMPLE_1, SAMPLE_4, SAMPLE_5 = (f"sample {number} ('chat\\n{number}')" for number in (1, 4, 5))
EMBEDDINGS, WEIGHTS = "target_embeddings.safetensors", "target_weights.safetensors"
DEEP = {
    "an id outside": ("pretrain", sealed(number(SHARD, 50, 300, "<u2")), SHARD, "token 50", "300"),
    "tokens with loss": ("sft", keys(supervised_tokens={"train": 525, "val": 50}), "meta.json", "49 tokens", "50"),
    "bits with loss": (
        "sft with bits",
        keys(supervised_tokens={"train": 183, "val": 18}),
        "meta.json",
        "184 tokens",
        "183",
    ),
    "source ids that are no ASCII": ("sft", ids(lambda raw: b"\xc3\xa9" + raw), "train_ids.txt", "ASCII"),
    "too few source ids": ("sft", ids(lambda raw: raw.partition(b"\n")[2]), "train_ids.txt", "10 lines", "11"),
    "source ids without an end": ("sft", ids(lambda raw: raw[:-1]), "train_ids.txt", "last line"),
    "rollouts: another index": ("rollouts", sealed(as_the_first), "index/train_groups.npy", "group 0"),
    **{
        f"{kind}: a flipped bit of {field}": (
            kind,
            flipped(field),
            SECOND,
            "sample 2 of the shard",
            "sample 6 ('chat\\n6')",
            "--resume",
        )
        for kind, fields in (("dense", ("target_probs",)), ("topk", ("target_probs_indices", "target_probs_values")))
        for field in (IDS, AUX, "position_mask", *fields)
    },
    **{
        f"{value} in a state": (
            "dense",
            puts((AUX, 5, 1, 18, value), (AUX, 5, 3, 0, value)),
            SECOND,
            SAMPLE_5,
            f"{AUX} of block 3 is {value}",
            "slot 1",
            "column 18",
            "2 slots",
        )
        for value in (NAN, INF, -INF)
    },
    **{
        f"fp8: a flipped bit of {tensor}": (
            "fp8",
            lambda folder, tensor=tensor: flip_row(folder, tensor),
            SECOND,
            "It is sample ",
        )
        for tensor in (IDS, AUX, "aux_scales", "last_hidden_states", "log_normalizers", "argmax_ids")
    },
    "native: a bit behind the end": (
        "native",
        tensors(SECOND, lambda old: {"loss_bits": old["loss_bits"] | last_bit(old)}),
        SECOND,
        "bits after the last token",
    ),
    "nan in probabilities": (
        "dense",
        puts(("target_probs", 8, 0, 3, NAN)),
        "shard-000002.safetensors",
        "sample 8",
        "target_probs is nan",
        "slot 0",
    ),
    **{
        f"another {name}": (
            "dense",
            lambda folder, name=name: put(folder, name, 1, 4, 0, 9),
            FIRST,
            SAMPLE_1,
            f"{name} is 9",
            "slot 4",
            "sidecar/samples.safetensors",
            "1 slot",
        )
        for name in (IDS, "attention_mask", "loss_mask")
    },
    "a sum above 1": ("dense", puts(("target_probs", 1, 6, 2, 0.9)), FIRST, SAMPLE_1, "sum to", "slot 6"),
    "a negative probability": ("dense", puts(("target_probs", 1, 6, 2, -0.5)), FIRST, SAMPLE_1, "-0.5", "slot 6"),
    "an id outside the draft": ("topk", no_top_k, FIRST, SAMPLE_1, "id 12", "slot 0", "0 to 11"),
    "an id twice": ("topk", no_top_k, FIRST, SAMPLE_1, "twice", "slot 2"),
    "probabilities that rise": ("topk", no_top_k, FIRST, SAMPLE_1, "target_probs_values", "slot 5"),
    "a position without loss": (
        "dense",
        lambda folder: behind(folder, "position_mask", -1, True),
        FIRST,
        "position_mask",
        "loss_mask is 0",
    ),
    "a state behind the tokens": (
        "dense",
        lambda folder: behind(folder, AUX, 0, 0.5),
        FIRST,
        f"{AUX} is not zero",
        "tokens",
    ),
    "an embedding": (
        "dense",
        tensors(EMBEDDINGS, lambda old: {"weight": nan_at(old["weight"], 7, 3)}),
        EMBEDDINGS,
        "token 7",
    ),
    "a weight": (
        "native",
        tensors(WEIGHTS, lambda old: {"lm_head": nan_at(old["lm_head"], 7, 3)}),
        WEIGHTS,
        "lm_head of token 7",
    ),
    "no weight": ("native", tensors(WEIGHTS, lambda old: {"lm_head": None}), WEIGHTS, "lm_head", "[40, 16]"),
    **{
        f"{kind}: {tensor} is {value}": (kind, native(4, tensor, 0, 0, value), SECOND, SAMPLE_4, said, *found)
        for kind, tensor, value, said, *found in (
            ("native", AUX, NAN, f"{AUX} of block 1 is nan", "token 0"),
            ("fp8", AUX, NAN, f"{AUX} of block 5 is nan", "token 0"),
            ("fp8", "aux_scales", INF, "aux_scales of block 5 is inf", "token 0"),
            ("fp8", "aux_scales", -1, "aux_scales", "token 0", "none below 0"),
            ("native", "last_hidden_states", -INF, "last_hidden_states is -inf", "token 1"),
            ("native", "log_normalizers", NAN, "log_normalizers is nan", "token 1"),
            ("native", "log_normalizers", 5, "log_normalizers is 5", "token 1", "expected 3"),
            ("native", "input_ids", 39, "input_ids is 39", "token 0", "sidecar"),
            ("native", "argmax_ids", 40, "argmax_ids is 40", "token 1", "below 40"),
            ("native", "argmax_ids", 30, "argmax_ids is 30", "token 1", "higher by"),
        )
    },
    **{
        f"{kind} manifest: {name}={value}": (kind, manifest(**{name: value}), *found)
        for kind, name, value, *found in (
            ("dense", "dtype", "fp16", FIRST, AUX, "bfloat16 [24, 48]", "float16 [24, 48]"),
            ("dense", "seq_length", 25, FIRST, "int64 [24]", "int64 [25]"),
            ("dense", "selected_token_ids", [0] * 12, MANIFEST, "12 ids", "1 different"),
            ("dense", "selected_token_ids", [*range(11), 40], MANIFEST, "1 beyond the target's 40"),
            ("dense", "selected_token_ids", None, MANIFEST, "selected_token_ids is None", "12"),
            ("dense", "aux_hidden_dim", 51, EMBEDDINGS, "40 rows", "float32 [17]"),
            ("dense", "shard_size", 0, MANIFEST, "shard_size is 0"),
            ("native", "dtype", "fp16", FIRST, "'last_hidden_states' bfloat16", "'last_hidden_states' float16"),
            ("native", "hidden_size", 17, WEIGHTS, "[40, 16]", "[40, 17]"),
            ("native", "aux_layer_ids", [1, 3], FIRST, ", 3, 16]", ", 2, 16]"),
            ("native", "num_samples", 11, "10 samples", "expected 11"),
            ("native", "num_shards", 4, "shard-000003.safetensors", "no such file"),
            ("native", "num_shards", 2, "shard-000002.safetensors", "too many"),
            ("native", "target_vocab_size", 41, WEIGHTS, "[40, 16]", "[41, 16]"),
            ("native", "head__norm", "layer", "argmax_ids", "higher by", WEIGHTS),
            ("native", "head__norm", "none", "log_normalizers is "),
            ("native", "head__logit_scale", 2.0, "log_normalizers is "),
            ("native", "head__tied", True, "log_normalizers is "),
        )
    },
}
"""What a deep look tells, and of a token cache a quick one does not."""


def behind(folder, field, more, value):
    """Write a number into the first slot behind the tokens of sample 0, or into one before it."""
    end = int(stored(folder, 0, "attention_mask")[0].view("<i8").sum())
    put(folder, field, 0, end + more, 0, value)


def flip_row(folder, tensor):
    rows = native_rows(folder, 1, tensor)
    rows[len(rows) // 2, 0] ^= 1


def nan_at(tensor, *place):
    tensor[place] = NAN
    return tensor


@pytest.mark.parametrize(("name", "deep"), [*((name, False) for name in QUICK), *((name, True) for name in DEEP)])
def test_verify_tells_a_value_by_its_file_and_what_it_found(tmp_path, name, deep):
    kind, harm, *found = (DEEP if deep else QUICK)[name]
    cache = fresh(kind, tmp_path / "caches")
    harm(cache.resolve())
    with watched(tmp_path):
        assert not deep or KINDS[kind].is_eagle3 or judged(cache) == []
        problems = judged(cache, deep=deep)
    assert any(all(word in problem for word in found) for problem in problems), (found, problems)


# --- descriptions -----------------------------------------------------------------------------------------------------

WRONG_TYPES = {
    "vocab_size": [0, -1, 2**31 + 1, 2**63, 10**90, True, 300.0, "300", [300], {}],
    "special_token_ids": [3, "eot", [1, 2, 3, 4], True],
    "tokenizer_sha256": [3, "f", True, ["f" * 64], "F" * 64],
    "built": [None, 1, 0, "true", [], {}, 0.0],
    "token_dtype": [None, "uint64-le", "<u2", 2, []],
    "format_version": [None, 2, "1", True, 1.0, []],
    "shards": [None, 3, [], "train", {"train": None}, {"train": {}}, {"train": 3}, {"train": [{}]}],
    "index": [None, 3, []],
}


@pytest.mark.parametrize("kind", ["pretrain", "sft", "sft with bits", "rollouts"])
@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_key_of_another_type_is_refused_by_its_name(tmp_path, kind, name):
    cache = fresh(kind, tmp_path / "caches")
    for value in WRONG_TYPES[name]:
        keys(**{name: value})(cache.resolve())
        with refused("E202", "meta.json", name, "expected", "niels-gpt"):
            next(KINDS[kind].read(cache))
        assert any("meta.json" in problem for problem in judged(cache)), (name, value)


ANYTHING = (
    None,
    True,
    -1,
    10**12,
    0.5,
    "\x1b[31mred",
    [],
    {},
    [{}],
    {"train": [{"name": "../x"}]},
    {"name": "/etc/passwd"},
)
DESCRIPTIONS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b"[" * 100_000,
    b'{"a": ' * 5_000,
)
TELLS = ("verify", "verify --deep", "list", "stats", "diff")
"""What prints the damage of a cache, or a difference, without the code of an error."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(path, description):
    """Write a description: a meta.json with a CRC-32 that fits."""
    if path.name == "meta.json":
        write_meta(path.parent, description)
    else:
        path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.slow) for part in range(0, 11, 1 if LONG else 4))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_key_holds_ends_in_a_documented_error_or_none(tmp_path, kind, part):
    """A part: of all keys with all values, which everything meets; None: one call in turn meets some of them."""
    cache, looks = fresh(kind, tmp_path / "caches"), calls(kind)
    path = cache.resolve() / ("manifest.json" if KINDS[kind].is_eagle3 else "meta.json")
    good = path.read_bytes()
    cells = [(key, value) for key in json.loads(good) for value in ANYTHING]
    for turn, (key, value) in enumerate(cells[[*KINDS].index(kind) if part is None else part :: 11]):
        write(path, json.loads(good) | {key: value})
        with watched(tmp_path):
            for name in looks if part is not None else [[*looks][turn % len(looks)]]:
                done = looks[name](cache)
                text = done.out + done.err
                cell = f"{kind}: {key} is {value!r}: {name}: {done}"
                assert done.status in (0, 1, 3) and "Traceback" not in text and not CONTROL.search(text), cell
                assert done.status == 0 or re.search(r"error\[E\d+\]", text) or name in TELLS, cell
        path.write_bytes(good)


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_that_is_none_is_refused_by_its_name(tmp_path, kind):
    cache = fresh(kind, tmp_path / "caches")
    path = cache.resolve() / ("manifest.json" if KINDS[kind].is_eagle3 else "meta.json")
    for content in DESCRIPTIONS:
        path.write_bytes(content)
        with watched(tmp_path):
            assert any(path.name in problem for problem in judged(cache)), content[:9]
            if path.name not in KINDS[kind].not_read or KINDS[kind].is_eagle3:
                with refused("E701" if KINDS[kind].is_eagle3 else "E202", path.name):
                    next(KINDS[kind].read(cache))
