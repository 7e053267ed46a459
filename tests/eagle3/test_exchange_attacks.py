"""Folders of other tools, targets and draft vocabularies that were made to harm, and native caches that grow.

The commands that read them end with a documented error. Here each attack meets the commands that have to refuse it.
For its figures: python tests/support/attacks.py test_exchange_attacks
"""

import importlib
import json
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
import test_eagle3_attacks as published
from support.attacks import Attack, Probe, is_one_of
from test_eagle3_attacks import HUGE, all_of, at, changed, file, header, put, sparse, to_a_device
from test_native_attacks import tensor

IMPORTS = (*published.IMPORTS, "niels_gpt.eagle3.native", "niels_gpt.eagle3.derive", "niels_gpt.eagle3.exchange")
IMPORTS += ("datasets", "niels_gpt.recipes.eagle3.prepare")
CKPT, HS = "../sf/rows_0-2000/data_002.ckpt", "../sp/hidden_states/hs_2.safetensors"
ROWS, INFO, STATE = "../sp/data-00000-of-00001.arrow", "../sp/dataset_info.json", "../sp/state.json"
AM = "../am/{}".format
SECOND, ITS_WEIGHTS = AM("shard-000001.safetensors"), AM("target_weights.safetensors")
WEIGHTS, PICKLED, CONFIG = "../target/model.safetensors", "../target/pytorch_model.bin", "../target/config.json"
SF, SP, OF_AM = ("import specforge",), ("import speculators",), ("import automodel",)
EACH, WRITE = ("import *",), ("export *", "convert")


def build(root):
    """Ten samples as the files of each tool, `sf`, `sp` and `am`, and as a native cache, `c`; and their target."""
    from support.exchange_files import chats, in_bf16, small_model, write_automodel, write_specforge, write_speculators
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = small_model()
    model.save_pretrained(root / "target")
    given = [in_bf16(chat) for chat in chats(model)]
    write_specforge(root / "sf", given)
    write_speculators(root / "sp", given)
    write_automodel(root / "am", model, given, [1, 3, 4, 7])
    assert command(IMPORT.format("sp", "speculators"))(root) == 0
    (root / "of-sp").rename(root / "c")


def command(text):
    """Return a call of the command line; @ is the root."""

    def call(root):
        from niels_gpt.commands.eagle3.tools import main

        return main(text.replace("@", str(root)).split())

    return call


def of_chats(name):
    """Return a call of a command that reads a template before all else."""

    def call(root):
        main = importlib.import_module(f"niels_gpt.commands.eagle3.{name}").main
        words = f"--target-model @/none --input-data @/none --output{'-dir' * (name == 'precompute')} @/made"
        return main(f"{words} --chat-template @/template".replace("@", str(root)).split())

    return call


IMPORT = "import @/{0} @/of-{0} --from {1} --target @/target --draft-vocab-size 300"
PROBES = {
    "import specforge": Probe(command(IMPORT.format("sf", "specforge")), writes=True),
    "import speculators": Probe(command(IMPORT.format("sp", "speculators")), writes=True),
    "import automodel": Probe(command(IMPORT.format("am", "automodel")), writes=True),
    "export specforge": Probe(command("export @/c @/to-sf --to specforge"), writes=True),
    "export speculators": Probe(command("export @/c @/to-sp --to speculators"), writes=True),
    "convert": Probe(command("convert @/c --output-dir @/1 --format 1"), writes=True),
    "redraft": Probe(command("redraft @/c @/drafted --draft-vocab-from @/ids"), writes=True),
    "precompute": Probe(of_chats("precompute")),
    "respond": Probe(of_chats("respond")),
}


# --- the operations ---------------------------------------------------------------------------------------------------


def archived(name, content, *, compression=zipfile.ZIP_STORED, data=0):
    """Put a file of torch.save with this pickle, and as many bytes of data, in the place of another."""

    def make(path, _):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for member, value in {"data.pkl": content, "version": b"3\n", "data/0": bytes(data)}.items():
                archive.writestr(f"archive/{member}", value)

    return at(name, make)


# A dict whose key is a tuple: of the tuple before it, twice, at sixty levels; or of one tuple, 900,000 levels deep.
HASHED = b"\x80\x02}()q\x00" + b"".join(bytes([*b"h", i, 0x86, *b"q", i + 1]) for i in range(60)) + b"K\x01u."
DEEP = b"\x80\x02}()" + b"\x85" * 900_000 + b"K\x01u."
NESTED = b"\x80\x02}(X\x12\0\0\0target_vocab_size](]q\0"  # a list as those tuples, in the place of a number
NESTED += b"".join(bytes([*b"]q", i + 1, *b"(h", i, *b"h", i, *b"e"]) for i in range(40)) + b"eu."


def rows_of(columns, **how):
    """Put a dataset of these columns in the place of speculators' rows."""

    def make(root, _):
        import datasets
        import pyarrow

        table = pyarrow.table(dict(zip(("input_ids", "loss_mask", "seq_len"), columns(pyarrow), strict=True)))
        features = datasets.Features.from_arrow_schema(table.schema)
        options = pyarrow.ipc.IpcWriteOptions(**how)
        with pyarrow.ipc.new_stream(str(root / "c" / ROWS), table.schema, options=options) as writer:
            writer.write_table(table)
        info = json.loads((root / "c" / INFO).read_bytes())
        (root / "c" / INFO).write_text(json.dumps({**info, "features": features.to_dict()}))

    return make


def zeros(pyarrow, length=1 << 28):
    """One row of many zeros."""
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, length], "int32"), np.zeros(length, np.int8))
    return column, column, [length]


def twenty(pyarrow):
    """Ten rows of two values each."""
    column = pyarrow.ListArray.from_arrays(pyarrow.array(range(0, 21, 2), "int32"), pyarrow.array(range(20)))
    return column, column, [2] * 10


def moved_lists(path, _):
    """Let the second list begin a million values behind the end of its column."""
    content, old = path.read_bytes(), struct.pack("<4i", 0, 2, 4, 6)
    assert content.count(old) == 2
    path.write_bytes(content.replace(old, struct.pack("<4i", 0, 1_000_000, 4, 6)))


def indexed(name):
    """Return what lets an index name a file of weights in the place of the target's own."""

    def make(path, outside):
        from safetensors import safe_open

        with safe_open(path, framework="pt") as opened:
            weights = dict.fromkeys(opened.keys(), name or str(outside))
        path.with_name(f"{path.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        path.rename(path.with_name("other.safetensors"))

    return at(WEIGHTS, make)


def code_of_its_own(path, outside):
    config = {**json.loads(path.read_bytes()), "auto_map": {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.C"}}
    path.write_text(json.dumps(config))
    path.with_name("own.py").write_text(f"open({str(outside.parent / 'harm')!r}, 'w')")


def long_samples(hidden, vocab):
    """Return what makes a native cache of one long sample with two tokens that have states."""

    def make(root, _):
        from support.eagle3_native import write_native

        shutil.rmtree(root / "c")
        mask, sizes = [0, 1, *[0] * 99_998], {"hidden_size": hidden, "target_vocab_size": vocab, "seq_length": 100_000}
        ids = {"selected_token_ids": [*range(vocab)], "draft_vocab_size": vocab, "aux_layer_ids": [1, 2, 3]}
        write_native(root / "c", [mask], **sizes, **ids)

    return make


def number(name, value):
    """Return what puts a number into a sample of the native cache."""

    def make(root, _):
        from support.eagle3_damage import native_put

        native_put(root / "c", 2, name, 0, 0, value)

    return make


def one_long_sample(root, _):
    """Let Automodel's cache be a single sample of 16,777,216 tokens, almost all holes, with 10 GB of states."""
    import torch
    from safetensors.torch import load_file, save_file

    from niels_gpt.eagle3.exchange.automodel import shard_tensors
    from niels_gpt.eagle3.format.layout import row_bytes_of, tensors_header

    folder = root / "am"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest |= {"seq_length": 1 << 24, "num_samples": 1, "shard_size": 1, "dtype": "fp32"}
    manifest |= {"target_layer_ids": [*range(-1, 8)], "target_hidden_dim": 9 * 16}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    weights = load_file(folder / "target_weights.safetensors")
    model = load_file(root / "target" / "model.safetensors")
    whole = {"embed_tokens.weight": model["model.embed_tokens.weight"], "lm_head.weight": model["lm_head.weight"]}
    assert all(torch.equal(whole[name].bfloat16(), each) for name, each in weights.items())
    save_file(whole, folder / "target_weights.safetensors")
    for path in folder.glob("shard-*"):
        path.unlink()
    tensors = shard_tensors(manifest, 1)
    size = len(tensors_header(tensors)) + sum(map(row_bytes_of, tensors.values()))
    assert size > 10 << 30
    with open(folder / "shard-000000.safetensors", "wb") as made:
        made.write(tensors_header(tensors))
        made.seek((8 << 24) - (1 << 20) - 8, 1)
        made.write(bytes(1 << 20) + b"\1".ljust(8, b"\0"))  # the last id is another one than all before it
        made.truncate(size)


pipe = lambda path, _: (path.unlink(missing_ok=True), os.mkfifo(path))  # noqa: E731
a_device = lambda path, outside: (path.touch(), to_a_device(path, outside))  # noqa: E731
no_weights = at(WEIGHTS, lambda path, _: path.unlink())
MANY_IDS = HUGE // 8
BIG_IDS = {"token_ids": tensor("I32", [MANY_IDS], 0, 4 * MANY_IDS)}
BIG_IDS["hidden_states"] = tensor("BF16", [19, 4, 16], 4 * MANY_IDS, 19 * 4 * 16 * 2)

ATTACKS = {
    "a pickle that hashes for ever": Attack(archived(CKPT, HASHED), SF, "uses a part twice"),
    "a pickle that is too deep": Attack(archived(CKPT, DEEP), SF, "tuples"),
    "sparse sample": Attack(sparse(CKPT), SF, "holes"),
    "sparse ids": Attack(sparse(HS, head=header(BIG_IDS)), SP, "holes"),
    "a header of many tensors": Attack(
        file(HS, lambda: header({f"{i}": tensor("U8", [0], 0, 0) for i in range(30_000)})), SP, "a header of"
    ),
    "a thousand million rows": Attack(rows_of(lambda arrow: [arrow.nulls(10**9)] * 3), SP, "null"),
    "compressed rows": Attack(rows_of(zeros, compression="zstd"), SP, "compressed"),
    "rows outside of their file": Attack(all_of(rows_of(twenty), at(ROWS, moved_lists)), SP, "out of bounds"),
    "sparse rows": Attack(sparse(ROWS), SP, "holes"),
    "sparse features": Attack(sparse(INFO), SP, "bytes, expected at most"),
    "rows elsewhere": Attack(
        changed(STATE, put("_data_files", [{"filename": "../c/manifest.json"}])), SP, "same folder"
    ),
    "pipe of weights": Attack(at(WEIGHTS, pipe), EACH, "regular file"),
    "device beside weights": Attack(at("../target/a.bin", a_device), EACH, "regular file"),
    "sparse target": Attack(sparse(WEIGHTS), EACH, "holes"),
    "weights above": Attack(indexed("../../outside/target/model.safetensors"), EACH, "files beside it"),
    "weights anywhere": Attack(indexed(""), EACH, "files beside it"),
    "an adapter": Attack(file("../target/adapter_config.json", lambda: b"{}"), EACH, "Merge the adapter"),
    "a pickle of weights that hashes for ever": Attack(all_of(no_weights, archived(PICKLED, HASHED)), EACH, "twice"),
    "compressed weights": Attack(
        all_of(no_weights, archived(PICKLED, HASHED, compression=zipfile.ZIP_DEFLATED, data=1 << 24)),
        EACH,
        "compressed",
    ),
    **{
        f"{layers} layers": Attack(changed(CONFIG, put("num_hidden_layers", layers)), EACH, "layers")
        for layers in (10**9, -1)
    },
    "a vocabulary for the memory": Attack(changed(CONFIG, put("vocab_size", 2 * 10**8)), EACH, "states 6,400,0"),
    "a model as tokenizer": Attack(
        file("../target/tokenizer_config.json", lambda: b'{"tokenizer_class": "AutoModelForCausalLM"}')
    ),
    "code of its own": Attack(at(CONFIG, code_of_its_own)),
    **{
        f"a vocabulary that {how}": Attack(made, ("redraft",), words)
        for how, made, words in (
            ("hashes for ever", archived("../ids", HASHED), "twice"),
            ("is written for ever", archived("../ids", NESTED), "twice"),
            ("is compressed", archived("../ids", HASHED, compression=zipfile.ZIP_DEFLATED, data=1 << 24), "compressed"),
            ("calls", file("../ids", lambda: pickle.dumps(print)), "torch.save"),
        )
    },
    "states for the memory": Attack(long_samples(2**16, 4), WRITE, "tokens would have|padded to"),
    "distributions for the memory": Attack(long_samples(2, 50_000), ("convert",), "redraft"),
    "pipe of a template": Attack(at("../template", pipe), ("precompute", "respond"), "regular file"),
    "sparse template": Attack(sparse("../template"), ("precompute", "respond"), "bytes"),
    "a sample for the memory": Attack(one_long_sample, OF_AM, "bytes of states|memory to map"),
    "many shards": Attack(
        changed(AM("manifest.json"), lambda value: value.update(num_samples=9_999_999, shard_size=1)), OF_AM, "3 shards"
    ),
    "a sparse shard": Attack(sparse(SECOND), OF_AM, "holes"),
    "a sparse manifest": Attack(sparse(AM("manifest.json")), OF_AM, "bytes, expected at most"),
    "sparse weights of a head": Attack(sparse(ITS_WEIGHTS), OF_AM, "holes"),
    "a pipe as a shard": Attack(at(SECOND, pipe), OF_AM, "regular file"),
    "a device as weights": Attack(at(ITS_WEIGHTS, to_a_device), OF_AM, "link"),
    "a device as manifest": Attack(at(AM("manifest.json"), to_a_device), OF_AM, "link"),
    "NaN": Attack(number("last_hidden_states", float("nan")), WRITE, "finite"),
    "ids of no token": Attack(number("input_ids", 400), WRITE, "ids"),
}


OTHERS = {"weights anywhere", "sparse target", "a pickle of weights that hashes for ever", "compressed weights"}
OTHERS |= {"a vocabulary that is written for ever", "a vocabulary that calls", "-1 layers", "sparse rows"}
"""Attacks that do to another file, or with another value, what one of the rest does."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OTHERS)) for n in ATTACKS])
def test_every_attack_meets_a_documented_error(attack_server, name):
    concerned = [probe for probe in PROBES if is_one_of(probe, ATTACKS[name].refused_by)]
    attack_server.check("test_exchange_attacks", name, concerned)
