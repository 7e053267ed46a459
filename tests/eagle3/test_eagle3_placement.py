"""A target that does not fit: where its weights lie decides no byte of a cache, and their form is in its plan."""

import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import tempfile
from contextlib import nullcontext
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import ROOT
from support import eagle3_runs as small
from support.causal_models import tiny_model
from support.commands import niels_gpt
from support.eagle3_runs import whole_tree
from support.errors import refused

from niels_gpt.commands.eagle3 import precompute
from niels_gpt.eagle3.format.native import NativeLayout
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.placement import SCHEMES, Placement, parse_max_memory, read_device_map
from niels_gpt.eagle3.target import capture, load_target
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.recipes.eagle3.request import settings_fingerprint
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import WorkerDied
from niels_gpt.storage.fileio import canonical_json

pytest.importorskip("transformers", reason="a target needs the extra eagle3")
ENDS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
FORMS = {"native": ["--format", "native", "--shard-bytes", "100000"], "dense": ["--shard-size", "4"]}
FORMS["no block"] = [*FORMS["native"], "--for", "mtp"]
FP32 = {"revision": None, "dtype": torch.float32, "attention": "sdpa", "device": "cpu"}


def is_here(library):
    return importlib.util.find_spec(library) is not None


def on_disk(*blocks, ends="cpu"):
    """Return a device map of the small target: these blocks on the disk, and the other ones on the CPU."""
    places = {f"model.layers.{block}": "disk" if block in blocks else "cpu" for block in range(8)}
    return {**dict.fromkeys(ENDS, ends), **places}


@pytest.fixture
def map_file(tmp_path):
    """Write a device map; return the path as text."""

    def written(content):
        path = tmp_path / "map.json"
        path.write_bytes(content if isinstance(content, bytes) else canonical_json(content))
        return str(path)

    return written


@pytest.fixture(scope="module")
def bf16_model(model, tmp_path_factory):
    """The small target as a checkpoint of bf16."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("bf16") / "target")
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_bytes(canonical_json(config))
    return folder


@pytest.fixture
def run(model, chats, tmp_path, capsys):
    """Runs precompute into tmp_path / "c"; returns status, output and errors."""

    def done(*more):
        capsys.readouterr()
        given = {"--target-model": model, "--input-data": chats, "--output-dir": tmp_path / "c", "--seq-length": 40}
        words = [str(word) for pair in given.items() for word in pair]
        status = precompute.main([*words, "--threads", "1", "--device", "cpu", *more])
        return (status, *capsys.readouterr())

    return done


def weight_bytes(model):
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if not weight.is_meta)


def run_of(folder):
    return json.loads((folder / "sidecar" / "plan.json").read_bytes())["run"]


# --- where the weights lie --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_blocks_on_the_disk_give_the_bytes_of_a_target_in_memory(form, tmp_path, run, map_file):
    assert run(*FORMS[form])[0] == 0
    whole = whole_tree(tmp_path / "c")
    maps = {"blocks": on_disk(0, 3, 7), "all": on_disk(*range(8), ends="disk"), "cpu": on_disk()}
    for name, where in maps.items():
        out = ["--output-dir", str(tmp_path / name), *FORMS[form]]
        assert run(*out, "--device-map", map_file(where))[0] == 0, name
        assert whole_tree(tmp_path / name) == whole, name


def test_a_computed_map_keeps_to_its_limits_and_gives_the_same_bytes(tmp_path, run, made, model):
    limits = ["--shard-size", "4", "--device-map", "auto", "--max-memory", "cpu=600KB"]
    assert run(*limits)[0] == 0 and whole_tree(tmp_path / "c") == whole_tree(made)
    loaded = load_target(str(model), **FP32, placement=Placement("auto", parse_max_memory("cpu=600KB")))
    whole = weight_bytes(load_target(str(model), **FP32))
    assert 0 < weight_bytes(loaded) <= 600_000 < whole and "disk" in loaded.hf_device_map.values()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "cohere", "qwen3_moe"])
def test_states_of_an_offloaded_target_are_equal_and_its_folder_is_removed(kind, tmp_path, monkeypatch):
    folder, offload = tmp_path / "target", tmp_path / "offload"
    offload.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(offload))
    tiny_model(kind).save_pretrained(folder)
    ids = torch.arange(12)[None] + 3
    here = load_target(str(folder), **FP32)
    assert here.name_or_path == str(folder)
    expected = capture(here, ids, torch.ones_like(ids), [0, 1])
    tensors = [*here.named_parameters(remove_duplicate=False), *here.named_buffers()]
    where = {name.rpartition(".")[0]: "disk" for name, _ in tensors}
    away = load_target(str(folder), **FP32, placement=Placement(where))
    assert away.name_or_path == str(folder) and weight_bytes(away) == 0
    for found, wanted in zip(capture(away, ids, torch.ones_like(ids), [0, 1]), expected, strict=True):
        assert torch.equal(found, wanted)
    assert TargetHead.of_model(away).facts() == TargetHead.of_model(here).facts()
    assert bool([*offload.iterdir()]) == (kind == "qwen3_moe"), "its experts are stored apart and run as one tensor"
    del away
    gc.collect()
    assert [*offload.iterdir()] == []


@pytest.mark.parametrize("how", ["fails", "is killed", "ends"])
def test_two_processes_with_blocks_on_the_disk_give_the_same_bytes_and_no_folder_is_left_if_one(
    how, tmp_path, monkeypatch
):
    offload, where = tmp_path / "offload", dict.fromkeys(ENDS, "cpu") | {"model.layers": "disk"}
    offload.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(offload))
    tiny_model("qwen3_moe", num_hidden_layers=8, vocab_size=small.VOCAB).save_pretrained(tmp_path / "target")

    def load(device, placement=Placement(where)):  # noqa: B008  it is frozen
        model = load_target(str(tmp_path / "target"), **FP32 | {"device": device}, placement=placement)
        if placement.device_map is not None:
            assert [*offload.glob("niels-gpt-*/niels-gpt-offload-*")] != []
            model.model.layers[3].register_forward_pre_hook(end_at_the_third)
        return model

    def end_at_the_third(*_, calls=[]):  # noqa: B006  of this process
        calls.append(1)
        if len(calls) == 3 and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        assert len(calls) < 3 or how == "ends"

    sizes = {"hidden_size": 32, "target": {"hidden_size": 32}}
    plan = small.plan(small.samples_of(), **{**small.NATIVE, **sizes, "dtype": "fp32"})
    with nullcontext() if how == "ends" else pytest.raises((AssertionError, WorkerDied)):
        small.run(tmp_path / "c", given=plan, load=load, workers=2, start="fork")
        small.run(tmp_path / "whole", given=plan, load=partial(load, placement=Placement()))
        assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "whole")
    assert [*offload.glob("niels-gpt-*")] == []


# --- the form of the weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_bf16_weights_in_fp32_arithmetic_take_half_and_give_the_same_bytes(where, tmp_path, run, bf16_model, map_file):
    named = ["--target-model", str(bf16_model), "--format", "native"]
    assert run(*named)[0] == 0
    more = ["--device-map", map_file(on_disk(1, 2))] if where == "disk" else []
    assert run(*named, "--output-dir", str(tmp_path / "d"), "--load-dtype", "bf16", *more)[0] == 0
    assert run_of(tmp_path / "d") == run_of(tmp_path / "c") | {"load_dtype": "bf16"}
    shards = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(shards) > 1
    for name in shards:
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "d" / name).read_bytes(), name
    assert run(*named, "--output-dir", str(tmp_path / "d"), "--resume")[0] == 0, "the form is the plan's"
    done = niels_gpt("eagle3", "verify", tmp_path / "d", "--target", bf16_model)
    assert done.status == 0 and "recomputed ok" in " ".join(done.out.split()) and "note" not in done.out, done.out


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3n_text"])
def test_what_a_model_computes_itself_is_not_rounded_to_the_dtype_of_its_weights(kind, tmp_path):
    tiny_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.arange(12)[None] + 3
    whole, half = (
        load_target(str(tmp_path), **FP32, placement=Placement(load_dtype=dtype)) for dtype in (None, "bf16")
    )
    for found, wanted in zip(
        *(capture(each, ids, torch.ones_like(ids), [0, 1]) for each in (half, whole)), strict=True
    ):
        assert torch.equal(found, wanted)


def test_the_weights_of_the_blocks_take_half_and_are_put_back_after_an_error(bf16_model):
    whole = load_target(str(bf16_model), **FP32)
    half = load_target(str(bf16_model), **FP32, placement=Placement(load_dtype="bf16"))
    blocks = weight_bytes(whole.model.layers)
    assert weight_bytes(half) == weight_bytes(whole) - blocks // 2
    peaks = []
    half.model.layers[3].self_attn.register_forward_hook(lambda *_: peaks.append(weight_bytes(half)))
    half(torch.arange(5)[None])
    assert peaks == [weight_bytes(half) + blocks // 16], "one block at a time is wide"
    half.model.layers[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        half(torch.arange(5)[None])
    assert {weight.dtype for weight in half.model.layers.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(not is_here("torchao"), reason="needs the extra quantized")
def test_a_quantized_target_is_in_the_plan_is_run_again_bit_for_bit_and_no_other_form_continues_it(
    tmp_path, run, made, model
):
    folder = tmp_path / "c"
    assert run("--format", "native", "--quantization", "torchao:int8wo")[0] == 0
    assert run("--format", "native", "--output-dir", str(tmp_path / "whole"))[0] == 0
    assert (run_of(folder)["quantization"], run_of(folder)["quantizer"][:8]) == ("torchao:int8wo", "torchao ")
    shard = "shard-000000.safetensors"
    assert (folder / shard).read_bytes() != (tmp_path / "whole" / shard).read_bytes()
    shown = niels_gpt("eagle3", "inspect", folder).out
    assert "quantization torchao:int8wo" in " ".join(shown.split())
    done = niels_gpt("eagle3", "verify", folder, "--target", model)
    assert done.status == 0 and "recomputed ok" in " ".join(done.out.split()) and "note" not in done.out, done.out
    status, _, errors = run("--format", "native", "--resume", "--load-dtype", "bf16")
    assert status == 1 and "'run.quantization'" in errors and "'run.load_dtype'" in errors
    status, _, errors = run("--format", "native", "--resume", "--output-dir", str(tmp_path / "whole"), *INT8)
    assert status == 1 and "'run.quantization'" in errors
    status, out, _ = run("--format", "native", "--resume")
    assert status == 0 and "up to date" in out, "an unset form is the plan's"


INT8 = ("--quantization", "torchao:int8wo")


@pytest.mark.skipif(not is_here("torchao"), reason="needs the extra quantized")
@pytest.mark.parametrize(
    ("kind", "form"), [("llama", "Int8"), ("llama", "Float8"), ("granite", "Int8"), ("cohere", "Int8")]
)
def test_the_head_is_proved_on_quantized_weights(kind, form, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), **FP32, placement=Placement(quantization=f"torchao:{form.lower()}wo"))
    whole = load_target(str(tmp_path), **FP32)
    assert TargetHead.of_model(loaded).facts() == TargetHead.of_model(whole).facts()
    block = next(iter(loaded.model.layers))
    assert form in type(block.self_attn.q_proj.weight).__name__


@pytest.mark.skipif(not is_here("torchao"), reason="needs the extra quantized")
def test_a_scheme_that_leaves_out_the_experts_of_a_mixture_is_refused(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    with refused("E705", "--quantization torchao:int8wo", "%", "--device-map auto"):
        load_target(str(tmp_path), **FP32, placement=Placement(quantization="torchao:int8wo"))


@pytest.mark.skipif(not is_here("bitsandbytes"), reason="bitsandbytes is not installed")
@pytest.mark.parametrize("scheme", ["8bit", "4bit"])
def test_a_target_of_bitsandbytes_gives_the_same_bytes_twice(scheme, tmp_path, run, model):
    named = ["--format", "native", "--quantization", f"bitsandbytes:{scheme}"]
    assert run(*named)[0] == 0
    done = niels_gpt("eagle3", "verify", tmp_path / "c", "--target", model)
    assert done.status == 0 and "recomputed ok" in " ".join(done.out.split()) and "note" not in done.out, done.out


# --- what is refused --------------------------------------------------------------------------------------------------


def test_limits_are_bytes_by_device():
    found = parse_max_memory("0=70GiB, cuda:1=1KB,cpu=200GB")
    assert found == {0: 70 * 2**30, 1: 1000, "cpu": 200 * 10**9}


@pytest.mark.parametrize(
    "text", ["", "0", "0=", "0=1XB", "0=-1", "gpu=1GB", "disk=1GB", "0=1GB,cuda:0=2GB", "0=1.5GB", "1000=1GB"]
)
def test_other_limits_are_refused(text):
    with refused("E102", "--max-memory", "0=70GiB,1=70GiB,cpu=200GiB"):
        parse_max_memory(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "expected a JSON object"),
        (b"{}", "no module"),
        (b'{"model": "tpu"}', "'tpu'"),
        (b'{"model": true}', "True"),
        (b'{"model": -1}', "-1"),
        (b'{"model": "cpu", "model": "disk"}', "twice"),
        (b'{"model": "' + b"x" * (1 << 20) + b'"}', "more than 1,048,576 bytes"),
    ],
)
def test_a_map_that_is_none_is_refused(content, said, map_file):
    with refused("E102", "--device-map", said):
        read_device_map(map_file(content))


REFUSED = {
    "--max-memory cpu=1GB": "--device-map auto",
    "--device-map auto --max-memory 0=1GB": "--device cuda",
    "--device-map auto --max-memory cpu": "0=70GiB",
    "--device-map gone.json": "balanced_low_0",
    "--quantization torchao:int8wo --load-dtype bf16": "Leave one out",
    "--compute-dtype bf16 --load-dtype fp16": "save no memory",
}


@pytest.mark.usefixtures("not_tokenized", "no_weights")
@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_contradict_each_other_are_refused_at_once(flags, run):
    status, _, errors = run(*flags.split())
    assert status != 0 and REFUSED[flags] in errors


@pytest.mark.usefixtures("no_weights")
def test_a_map_of_a_gpu_that_the_run_does_not_use_is_refused(run, map_file):
    status, _, errors = run("--device-map", map_file({"model": 0, "lm_head": "cpu"}))
    assert status == 1 and "GPU 0" in errors and "--device cuda" in errors


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"": "cpu", "model.layers.8": "cpu"}, "'model.layers.8'"), ({"model.layers.3": None}, "model.layers.3.")],
)
def test_a_map_that_does_not_fit_the_model_names_the_module(changed, said, model):
    where = {name: place for name, place in {**on_disk(1), **changed}.items() if place is not None}
    with refused("E705", "--device-map", said):
        load_target(str(model), **FP32, placement=Placement(where))


@pytest.mark.usefixtures("not_tokenized", "no_weights")
def test_such_a_map_is_refused_before_the_input_is_tokenized(run, map_file):
    status, _, errors = run("--device-map", map_file({"modle": "cpu"}), "--dry-run")
    assert status == 1 and "E705" in errors and "'modle'" in errors and "model.embed_tokens" in errors


def test_a_library_that_is_not_there_is_named_with_its_command(run, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("torchao", "bitsandbytes") else real(name, *more),
    )
    for scheme, command in (("torchao:int8wo", "'niels-gpt[quantized]'"), ("bitsandbytes:8bit", "bitsandbytes")):
        status, _, errors = run("--quantization", scheme)
        assert status == 1 and f"pip install {command}" in errors and "E901" in errors


@pytest.mark.usefixtures("no_weights")
def test_a_checkpoint_that_is_quantized_already_is_loaded_as_it_is(tmp_path, run, model):
    folder = shutil.copytree(model, tmp_path / "target")
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_bytes(canonical_json(config))
    named = ["--target-model", str(folder)]
    for flags in (INT8, ("--load-dtype", "bf16")):
        status, _, errors = run(*named, *flags)
        assert status == 1 and flags[0] in errors and "quantized already (gptq)" in errors
    assert run(*named, "--dry-run")[0] == 0


@pytest.mark.skipif(not is_here("torchao"), reason="needs the extra quantized")
def test_quantized_weights_on_the_disk_are_refused(run, map_file):
    status, _, errors = run(*INT8, "--device-map", map_file(on_disk(1)))
    assert status == 1 and "cannot lie on the disk" in errors
    status, _, errors = run(*INT8, "--device-map", "auto", "--max-memory", "cpu=200KB")
    assert status == 1 and "--max-memory" in errors


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_only_what_decides_bytes_is_in_a_fingerprint_and_only_where_it_is_set():
    plain = settings_fingerprint(Settings(), "eagle3/targets")
    placed = Settings(eagle3_device_map="auto", eagle3_max_memory="cpu=1GB")
    assert settings_fingerprint(placed, "eagle3/targets") == plain
    for changed in ({"eagle3_quantization": "torchao:int8wo"}, {"eagle3_load_dtype": "bf16"}):
        settings = Settings(**changed)
        assert settings_fingerprint(settings, "eagle3/targets") != plain
        options = Options.from_settings(settings, target_model="target")
        (name, value), *_ = changed.items()
        unset = Options(target_model="target", input_data="dolly15k").in_fingerprint
        assert options.in_fingerprint == unset | {name.removeprefix("eagle3_"): value}


# --- the table of the page --------------------------------------------------------------------------------------------


def llama(hidden, inner, layers, heads, **more):
    from transformers import LlamaConfig

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 128_256}
    return LlamaConfig(num_attention_heads=heads, num_key_value_heads=8, **sizes, **more)


def qwen3_moe():
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "vocab_size": 151_936}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, **heads, **sizes)


TARGETS = {
    "Llama 3.2 1B": lambda: llama(2048, 8192, 16, 32, tie_word_embeddings=True),
    "Llama 3.1 8B": lambda: llama(4096, 14336, 32, 32),
    "Llama 3.1 70B": lambda: llama(8192, 28672, 80, 64),
    "Llama 3.1 405B": lambda: llama(16384, 53248, 126, 128),
    "Qwen3 235B-A22B": qwen3_moe,
}
TOKENS = 68_000 * 538


def row_of(name):
    """The figures of a target in the page's table, computed: bytes in bf16 and int8, GPUs, bytes a token, disk."""
    from transformers import AutoModelForCausalLM

    config = TARGETS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    whole = sum(weight.numel() for weight in model.parameters())
    blocks = sum(weight.numel() for weight in model.model.layers.parameters())
    linear = [each for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)]
    in_int8 = sum(each.weight.numel() for each in linear)
    # A byte for each weight of the linear layers, a scale for each of their rows, and the rest in bf16.
    int8 = 2 * (whole - in_int8) + in_int8 + 2 * sum(each.out_features for each in linear)
    forms = [2 * whole, int8 if 2 * in_int8 >= blocks else None]
    million = np.array([[10**6, 10**6, 600_000]])  # tokens, rows of auxiliary states, target rows
    layouts = [NativeLayout(config.hidden_size, 3, "bf16", aux) for aux in ("bf16", "fp8")]
    by_token = [sum(layout.token_bytes(million).values()) for layout in layouts]

    def each(values, text):
        return ", ".join("none" if value is None else text(value) for value in values)

    return [
        *(each([size], lambda size: f"{size / 1e9:.1f} GB") for size in forms),
        *(each(forms, lambda size, most=most: f"{math.ceil(size / (0.9 * most * 1e9))}") for most in (80, 141)),
        each(by_token, lambda size: f"{size:,.0f}"),
        each(by_token, lambda size: f"{TOKENS * size / 1e12:.2f} TB"),
    ]


@pytest.mark.parametrize("name", TARGETS)
def test_the_table_of_targets_is_computed_from_their_configs_and_the_layout(name):
    page = (ROOT / "docs" / "eagle3.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:7] == row_of(name) and cells[8] == "arithmetic"


def test_every_scheme_can_be_asked_for():
    named = next(each for each in fields(Options) if each.name == "quantization").metadata["flag"]["choices"]
    assert set(named) == set(SCHEMES)
