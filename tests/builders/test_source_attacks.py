"""Texts, chats, rollouts and files of other tools that were made to harm: a build or an import ends as documented.

For its figures: python tests/support/attacks.py test_source_attacks
"""

import gzip
import json
import os
import struct

import numpy as np
import pytest
from support.attacks import Attack, Probe

IMPORTS = (
    "sentencepiece",
    "niels_gpt.commands.build",
    "niels_gpt.commands.report",
    "niels_gpt.recipes.exchange.imports",
)
TEXT = b'{"text": "The heron walks to the river and finds three apples.", "messages": []}\n'


def main(*arguments):
    from niels_gpt.commands import cache

    return cache.main([*map(str, arguments)])


def build(root):
    """Make a tokenizer, and the folder `in` with a good text."""
    (root / "in").mkdir(parents=True)
    (root / "in" / "good.jsonl").write_bytes(TEXT * 20)
    own = ("--pretrain", f"a={root}/in", "--vocab-size", 300, "--cache-dir", root, "--threads", 1)
    assert main("build", "a", *own) == 0


# --- what meets it ----------------------------------------------------------------------------------------------------


def built(family):
    def call(root):
        where = ("--cache-dir", root / "cache", "--tokenizer", root / "tokenizer" / "spm.model", "--threads", 1)
        return main("build", "a", f"--{family}", f"a={root}/in", *where, "--strict")

    return call


def imported(name):
    def call(root):
        where = ("--cache-dir", root / "cache", "--tokenizer", root / "tokenizer" / "spm.model", "--copy")
        return main("import", root / "in", "a", "--from", name, *where)

    return call


PROBES = {family: Probe(built(family), writes=True) for family in ("pretrain", "sft", "rollouts")}
PROBES |= {name: Probe(imported(name), writes=True) for name in ("hf", "datatrove", "litdata", "olmo")}

# --- attacks ----------------------------------------------------------------------------------------------------------


def file(name, *content):
    """Write a file into the folder; packed where its name says so. content: bytes, one after the other."""

    def make(root, outside):
        with (gzip.open if name.endswith(".gz") else open)(root / "in" / name, "wb") as file:
            file.writelines(content)

    return make


def sparse(name, begin=b""):
    def make(root, outside):
        (root / "in" / name).write_bytes(begin)
        os.truncate(root / "in" / name, 1 << 40)

    return make


def deep(name):
    """Make a file in a folder below 2,000 others."""

    def make(root, outside):
        handle = os.open(root / "in", os.O_RDONLY)
        for _ in range(2_000):
            os.mkdir("d", dir_fd=handle)
            below = os.open("d", os.O_RDONLY, dir_fd=handle)
            os.close(handle)
            handle = below
        os.close(os.open(name, os.O_CREAT, dir_fd=handle))

    return make


def table(change=lambda raw: raw, name="rows.parquet", **columns):
    """Write a parquet or arrow file. columns: functions that make them; change: of its bytes."""

    def make(root, outside):
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, rows = root / "in" / name, pa.table({key: column(pa) for key, column in columns.items()})
        if path.suffix == ".parquet":
            pq.write_table(rows, path, compression="zstd")
        else:
            with pa.ipc.new_stream(path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
                stream.write_table(rows)
        path.write_bytes(change(path.read_bytes()))

    return make


def one_row(values):
    """A column with one row, a list of all values."""
    return lambda pa: pa.ListArray.from_arrays(pa.array([0, len(made := values(pa))], pa.int32()), made)


def of_rows(old, new):
    """Change a number of zigzag in the footer of a parquet file, which counts its rows."""

    def change(raw):
        size = int.from_bytes(raw[-8:-4], "little")
        footer = raw[-8 - size : -8].replace(old, new)
        return raw[: -8 - size] + footer + len(footer).to_bytes(4, "little") + raw[-4:]

    return change


def replaced(old, new):
    def change(raw):
        assert old in raw
        return raw.replace(old, new)

    return change


def chunks(*names):
    """Write what litdata writes, with other names of chunks."""

    def make(root, outside):
        content = struct.pack("<III", 1, 12, 32) + np.full(10, 7, "<u2").tobytes()
        (root / "in" / "chunk-0-0.bin").write_bytes(content)
        about = {"chunk_bytes": len(content), "chunk_size": 1, "dim": 10}
        config = {"data_format": ["no_header_tensor:20"]}
        index = {"chunks": [{**about, "filename": name} for name in names], "config": config}
        (root / "in" / "index.json").write_text(json.dumps(index))

    return make


IDS = np.full(100, 7, "<u2").tobytes()
INT32 = struct.Struct("<8i")
TOO_MANY = "more than 1,048,576 lists and objects"
ATTACKS = {
    "pretrain: a row of lists": Attack(file("a.jsonl.gz", b'{"text": "x", "a": [', *[b"{}," * 2**16] * 20, b"0]}\n")),
    "pretrain: an item of objects": Attack(file("a.json.gz", b'[{"a": [', *[b'{"":{}},' * 2**16] * 10, b"0]}]")),
    "sft: a chat of 600,000 messages": Attack(
        file("a.jsonl.gz", b'{"messages": [', *[b'{"content": []},' * 2**10] * 600, b"0]}\n")
    ),
}
ATTACKS = {name: Attack(attack.make, ("*",), TOO_MANY) for name, attack in ATTACKS.items()} | {
    "rollouts: 300,000 completions of an id": Attack(
        file("a.jsonl.gz", b'{"prompt_ids": [], "completions": [', *[b"[1]," * 1000] * 300, b"[1]]}\n"),
        ("rollouts",),
        "a group of more than 67,108,864 tokens or 262,144 samples",
    ),
    "pretrain: a row of 2**26 nulls and one": Attack(
        table(text=one_row(lambda pa: pa.nulls(2**26 + 1))), ("pretrain",), "67,108,865 values"
    ),
    "pretrain: a row of two million empty lists": Attack(
        table(text=one_row(lambda pa: pa.ListArray.from_arrays(pa.array(np.zeros(2**21 + 1, "i4")), pa.nulls(0)))),
        ("pretrain",),
        "row 1: more than 67,108,864 bytes",
    ),
    **{
        f"pretrain: a parquet file that says {said} rows": Attack(
            table(of_rows(b"\xd0\x0f", number), text=lambda pa: pa.array([f"text {row}" for row in range(1000)])),
            ("pretrain",),
            "not a whole parquet file .row group 0 has",
        )
        for said, number in (("fewer", b"\x14"), ("more", b"\xd0\xff\x7f"), ("-10", b"\x13"))
    },
    **{
        f"pretrain: a {name} of 1 TiB that is mostly holes": Attack(
            sparse(name, begin), ("pretrain",), f"{name}: 1,099,511,627,776 bytes, .*a sparse file"
        )
        for name, begin in (("a.txt", b"text"), ("a.jsonl.gz", gzip.compress(TEXT)))
    },
    "pretrain: a folder below 2,000 others": Attack(deep("a.txt"), ("pretrain",), "below more than 100 folders"),
    "datatrove: a folder below 2,000 others": Attack(deep("a.ds"), ("datatrove",), "E221.*more than 100 folders"),
    **{
        f"datatrove: a file called {name!r}": Attack(file(name, IDS), ("datatrove",), "E221.*a file called .*Rename it")
        for name in ("\x1b[2J.ds", "a\n.ds", "\udcff.ds", "\u202ea.ds", "x" * 250 + ".ds")
    },
    **{
        f"litdata: chunks called {', '.join(map(repr, names))}": Attack(
            chunks(*names), ("litdata",), "E221.*index.json: (chunks.[01]..filename is|a file called)"
        )
        for names in (("..",), ("../a",), ("\x1b[2J",), ("chunk-0-0.bin", "chunk-0-0.bin"))
    },
    "olmo: a pickled array": Attack(file("a.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}"), ("olmo",), "E221.*header"),
    "olmo: a border of 5,000 digits": Attack(
        lambda root, outside: (file("a.npy", IDS)(root, outside), file("a.csv.gz", b"0," + b"9" * 5000)(root, outside)),
        ("olmo",),
        "E221.*no lines START,END",
    ),
    "hf: a row of 2**25 ids and one": Attack(
        table(input_ids=one_row(lambda pa: pa.array(np.full(2**25 + 1, 7, "u1")))), ("hf",), "E221.*33,554,433 values"
    ),
    "hf: an id of 100,000 bytes": Attack(
        table(input_ids=lambda pa: pa.array([[7]] * 9), id=lambda pa: pa.array(["x" * 100_000] * 9)),
        ("hf",),
        "E221.*an id of 100,000 bytes",
    ),
    "hf: a packed batch that says 2**40 bytes": Attack(
        table(
            replaced(struct.pack("<q", 8000), struct.pack("<q", 2**40)),
            "rows.arrow",
            input_ids=one_row(lambda pa: pa.array(np.full(1000, 7, "i8"))),
        ),
        ("hf",),
        "E221.*a batch of 1,099,511,[0-9,]* bytes when unpacked",
    ),
}
"""By the probe that meets it, and what it is."""


LARGE = ("pretrain: a row of 2**26 nulls and one", "pretrain: a row of lists")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in ATTACKS])
def test_a_hostile_source_gives_a_documented_error_and_harms_nobody(attack_server, name):
    attack_server.check("test_source_attacks", name, [name.partition(":")[0]])
