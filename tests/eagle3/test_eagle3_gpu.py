"""A target on a GPU: equal bytes in every run, numbers near those of a CPU, and the commands that take --device."""

import copy
import json
import shutil

import pytest
import torch
from support import eagle3_runs
from support.commands import niels_gpt
from support.eagle3_damage import ALL_FORMS, FORMS, NATIVE_FORMS, copy_of, native_put, put
from support.eagle3_looks import problems_of, run_again
from support.eagle3_runs import load, load_bf16, run, samples_of, whole_tree
from support.errors import refused

from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader, read_manifest
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.storage.checks import Verdict

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CPU = torch.device("cpu")
LOADS = {"bf16": load_bf16, "fp32": load}
APART = {"bf16": 4e-2, "fp32": 2e-3}
"""Of the states of a GPU and of a CPU in fp32, as a share of their norm, by the dtype that the GPU computes in. What is
stored is rounded to the states' dtype, and a number near a border to its neighbour."""


def planned(form, compute_dtype="bf16", device="cuda", **changed):
    """Return the plan of a run of a form on a device."""
    where = {"device": device, "compute_dtype": compute_dtype}
    return eagle3_runs.plan(samples_of(), run=where, **{**ALL_FORMS[form], **changed})


@pytest.fixture(scope="module", params=ALL_FORMS)
def made_on_gpu(request, tmp_path_factory):
    """A form, and a finished cache of it that a GPU made in bf16."""
    folder = tmp_path_factory.mktemp("gpu") / request.param
    run(folder, given=planned(request.param), load=load_bf16)
    return request.param, folder


def remove_a_shard(cache):
    (cache / "meta.json").unlink()
    (cache / "shard-000001.safetensors").unlink()


def test_each_run_on_a_gpu_gives_the_same_bytes(made_on_gpu, tmp_path):
    form, cache = made_on_gpu
    whole, given = whole_tree(cache), planned(form)
    assert len(list(cache.glob("shard-*"))) > 1
    run(tmp_path / "again", given=given, load=load_bf16)
    assert whole_tree(tmp_path / "again") == whole
    run(tmp_path / "two", given=given, load=load_bf16, workers=2)
    assert whole_tree(tmp_path / "two") == whole
    unfinished = copy_of(cache, tmp_path)
    remove_a_shard(unfinished)
    run(unfinished, given=given, load=load_bf16, resume=True)
    assert whole_tree(unfinished) == whole


def test_the_checks_find_nothing_in_a_cache_of_a_gpu_and_its_target_gives_the_same_bits_again(made_on_gpu, tmp_path):
    form, cache = made_on_gpu
    plan = json.loads((cache / "sidecar" / "plan.json").read_bytes())
    assert problems_of(cache) == []
    assert run_again(cache, plan["target"], load_bf16, plan["run"], k=10) == Verdict([])
    changed = copy_of(cache, tmp_path)
    if form in FORMS:
        put(changed, "aux_hidden_states", 4, 0, 0, 2.5)
    else:
        native_put(changed, 4, "last_hidden_states", 0, 0, 2.5)
    (found, *_) = run_again(changed, plan["target"], load_bf16, plan["run"], k=10).problems
    assert "sample 4" in found and "run again" in found


def apart(one, other):
    """Return the distance of two tensors as a share of the second one's norm."""
    return float((one.float().cpu() - other.float().cpu()).norm() / other.float().cpu().norm())


@pytest.mark.parametrize("compute_dtype", LOADS)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_numbers_of_a_gpu_are_near_those_of_a_cpu(form, compute_dtype, tmp_path):
    run(tmp_path / "gpu", given=planned(form, compute_dtype, dtype="fp32"), load=LOADS[compute_dtype])
    run(tmp_path / "cpu", given=planned(form, "fp32", "cpu", dtype="fp32"))
    found, expected = (CachedEagle3Dataset(tmp_path / name) for name in ("gpu", "cpu"))
    limit = APART[compute_dtype] if form in NATIVE_FORMS or compute_dtype == "bf16" else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["loss_mask"], other["loss_mask"])
        assert apart(one["aux_hidden_states"], other["aux_hidden_states"]) < limit
        probs = [item["target_probs"].topk(4).values for item in (one, other)]  # of the top k: which ones may differ
        assert not other["target_probs"].any() or apart(*probs) < limit
    other_seed = load(CPU, seed=1).model.layers[1].mlp.up_proj.weight
    assert apart(load(CPU).model.layers[1].mlp.up_proj.weight, other_seed) > 0.5, "another target is not near"


def broken(device):
    model = copy.deepcopy(load(CPU))
    model.model.layers[3].mlp.down_proj.weight.fill_(torch.nan)
    return model.to(device)


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_not_finite_is_named_as_on_a_cpu(form, tmp_path):
    said = []
    for device in ("cuda", "cpu"):
        with refused("E708", "block 3", "nan", kind=RuntimeError) as error:
            run(tmp_path / device, given=planned(form, "fp32", device), load=broken)
        said.append(str(error))
    assert said[0] == said[1]


# --- the head and what reads a cache ----------------------------------------------------------------------------------


def test_the_head_of_a_cache_of_a_gpu_gives_the_targets_logits_on_both_devices(tmp_path):
    run(tmp_path / "c", given=planned("native", "fp32", dtype="fp32"))
    model = load(torch.device("cuda"))
    states = torch.randn(7, eagle3_runs.HIDDEN, generator=torch.Generator().manual_seed(2))
    of_model, on_gpu, on_cpu = (
        TargetHead.of_model(model),
        *(TargetHead.of_cache(tmp_path / "c", device=device) for device in ("cuda", None)),
    )
    assert of_model(states).is_cuda and on_gpu(states).is_cuda and not on_cpu(states).is_cuda
    assert torch.equal(on_gpu(states), of_model(states.cuda()))
    torch.testing.assert_close(on_gpu(states).cpu(), on_cpu(states))
    for found, expected in zip(*(head.log_normalizer_and_argmax(states) for head in (on_gpu, on_cpu)), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_cache_of_a_gpu_are_pinned_and_those_of_the_cpu(made_on_gpu, workers):
    form, cache = made_on_gpu
    batches = list(build_cached_eagle3_dataloader(cache, 4, False, workers))
    how = {} if form in FORMS else {"device": "cuda"}
    for found, expected in zip(build_cached_eagle3_dataloader(cache, 4, False, workers, **how), batches, strict=True):
        assert found["aux_hidden_states"].is_pinned()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].cpu(), tensor.cpu(), rtol=2e-2, atol=1e-4)


# --- commands ---------------------------------------------------------------------------------------------------------


def eagle3(*words):
    done = niels_gpt("eagle3", *words)
    return done.status, done.out + done.err


FORMATS = {
    "dense": (),
    "topk": ("--format-version", "2", "--target-probs-topk", "4"),
    "native": ("--format", "native"),
    "fp8": ("--format", "native", "--aux-dtype", "fp8"),
}


def without_shard_size(arguments):
    """Return arguments of precompute without --shard-size, which the native form has not."""
    at = arguments.index("--shard-size")
    return arguments[:at] + arguments[at + 2 :]


@pytest.mark.parametrize("form", FORMATS)
def test_precompute_on_a_gpu_gives_equal_bytes_and_verify_runs_the_target_again(form, model, arguments, tmp_path):
    def made(name, *more):
        words = arguments("--device", "cuda", *FORMATS[form], *more)
        words = without_shard_size(words) if "native" in words else words
        out = words.index("--output-dir")
        words[out + 1] = str(tmp_path / name)
        return eagle3("precompute", *words), tmp_path / name

    (status, said), cache = made("c")
    assert status == 0, said
    plan = json.loads((cache / "sidecar" / "plan.json").read_bytes())
    assert (plan["run"]["device"], plan["run"]["compute_dtype"]) == ("cuda", "bf16")
    assert plan["run"]["processor"] == torch.cuda.get_device_name()
    (status, said), two = made("two", "--workers", "2")
    assert status == 0 and whole_tree(two) == whole_tree(cache), said
    (two / "meta.json").unlink()
    (two / "shard-000000.safetensors").unlink()
    (status, said), _ = made("two", "--resume")
    assert status == 0 and whole_tree(two) == whole_tree(cache), said
    for device in ((), ("--device", "cuda")):
        status, said = eagle3("verify", cache, "--target", model, "-k", 10, *device)
        assert status == 0 and "recomputed    ok" in said, said


def test_a_cache_of_a_cpu_is_verified_on_a_gpu_and_the_other_way_round(made, model, run, tmp_path):
    status, said = eagle3("verify", made, "--target", model, "-k", 10, "--device", "cuda")
    assert status == 0 and "recomputed    ok" in said, said
    for dtype in ("fp32", "bf16"):
        cache = tmp_path / "c"
        assert run("--device", "cuda", "--compute-dtype", dtype)[0] == 0
        status, said = eagle3("verify", cache, "--target", model, "-k", 10, "--device", "cpu")
        assert status == 0 and "recomputed    ok" in said, (dtype, said)
        assert run("--device", "cpu", "--compute-dtype", dtype, "--resume")[0] == 1, "another processor is another plan"
        shutil.rmtree(cache)
    put(damaged := copy_of(made, tmp_path), "aux_hidden_states", 4, 0, 0, 2.5)
    status, said = eagle3("verify", damaged, "--target", model, "-k", 10, "--device", "cuda")
    assert status != 0 and "aux_hidden_states of block" in said


@pytest.mark.parametrize("form", NATIVE_FORMS)
def test_a_native_cache_of_a_gpu_is_converted_and_redrafted_as_on_a_cpu(form, tmp_path):
    cache = tmp_path / "c"
    run(cache, given=planned(form, "fp32", aux_layer_ids=[1, 3, 4], dtype="fp32"))
    for device in ("cuda", "cpu"):
        words = ("--format", "1", "--output-dir", tmp_path / device, "--device", device)
        status, said = eagle3("convert", cache, *words)
        assert status == 0, said
    found, expected = (CachedEagle3Dataset(tmp_path / device) for device in ("cuda", "cpu"))
    for one, other in zip(found, expected, strict=True):
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-6)
    assert eagle3("verify", tmp_path / "cuda")[0] == 0
    for name in ("manifest.json", "target_embeddings.safetensors"):
        assert (tmp_path / "cuda" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()
    status, said = eagle3("redraft", cache, tmp_path / "small", "--draft-vocab-from", tmp_path / "cuda")
    assert status == 0 and eagle3("verify", tmp_path / "small")[0] == 0, said
    assert read_manifest(tmp_path / "small")["selected_token_ids"] == read_manifest(cache)["selected_token_ids"]
