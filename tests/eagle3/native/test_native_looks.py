"""A native cache is run again and checked without a plan; its figures and tables are what is stored."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import eagle3_runs
from support.eagle3_damage import NATIVE_FORMS, copy_of, native_put
from support.eagle3_looks import check_names, run_again, sample_heading, slot_rows, stats_of, summary
from support.eagle3_looks import verdicts as verify
from support.eagle3_native import capture_native
from support.errors import refused

from niels_gpt.commands.eagle3.tools import main
from niels_gpt.eagle3.cache import write_manifest
from niels_gpt.eagle3.format.drafters import rows_text
from niels_gpt.eagle3.inspect.verify import LOGIT_SHARE
from niels_gpt.kinds.diff import diff
from niels_gpt.storage.checks import Verdict

Copy = Callable[..., Path]
SAMPLE_4 = r"/shard-000001.safetensors: sample 4 \('chat\\n4'\): "
LOADED = {"device": "cpu", "threads": 1, "compute_dtype": "fp32"}


@pytest.fixture
def copied(eagle3_caches, tmp_path):
    return lambda form="native": copy_of(eagle3_caches[form], tmp_path)


def problems(cache, name):
    return verify(cache, names=[name])[name].problems


def test_the_share_of_a_logit_that_is_let_pass_holds_for_the_rounding_of_a_state():
    chance = torch.Generator().manual_seed(0)
    weight, states = (torch.randn(rows, 256, generator=chance) for rows in (4000, 200))
    for sharpness in (0.01, 0.1, 1.0):
        logits = sharpness * states @ weight.T
        for dtype, share in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            rounded = sharpness * states.to(share).float() @ weight.T
            apart = (rounded.logsumexp(-1) - logits.logsumexp(-1)).abs()
            assert bool((apart <= LOGIT_SHARE[dtype] * logits.abs().amax(-1).clamp_min(1)).all())


def test_a_sample_without_a_target_row_is_good(tmp_path):
    rows = [eagle3_runs.Row("a", range(3, 11), [0] * 4 + [1] * 4), eagle3_runs.Row("b", range(3, 9), [0] * 6)]
    capture_native(tmp_path / "c", eagle3_runs.load(torch.device("cpu")), rows)
    assert [problems(tmp_path / "c", name) for name in ("finite", "distribution", "positions")] == [[], [], []]


def unplanned(cache):
    """Leave of a cache what an import writes: receipts of shards and weights, and no plan."""
    for name in ("plan.json", "batches.jsonl", "samples.safetensors", "ids.txt"):
        (cache / "sidecar" / name).unlink()
    for path in (cache / "sidecar").glob("shard-*"):
        receipt = json.loads(path.read_text())
        del receipt["facts"]["plan"]
        path.write_text(json.dumps(receipt))
    (cache / "meta.json").unlink()
    return cache


@pytest.mark.parametrize("form", NATIVE_FORMS)
def test_a_cache_without_a_plan_is_checked_by_its_receipts_and_run_again_by_its_ids(copied, form):
    cache, there = unplanned(copied(form)), ({"name": "small"}, eagle3_runs.load, LOADED)
    unchecked = Verdict([], "cannot be checked: no plan, as precompute did not make this cache")
    assert verify(cache) == {**dict.fromkeys(check_names()[:-1], Verdict([])), "ids_match": unchecked}
    assert "precompute did not make" in dict(row[:2] for row in summary(cache))["sidecar"]
    assert run_again(cache, *there, k=10) == Verdict([])
    layers = json.loads((cache / "manifest.json").read_text())["aux_layer_ids"]
    other = ({"name": "small"}, lambda device: eagle3_runs.load(device, seed=1), LOADED)
    found = run_again(cache, *other, k=3).problems
    assert "the embedding of token 0 is not the target's" in found[0] and "last_hidden_states is not" in str(found)
    manifest = json.loads((cache / "manifest.json").read_text())
    write_manifest(cache, {**manifest, "aux_layer_ids": [layers[0] + 1, *layers[1:]]})
    found = run_again(cache, *there, k=10).problems
    assert found and all(f"of block {layers[0] + 1} is not what the target gives" in problem for problem in found)
    shutil.rmtree(cache / "sidecar")
    assert "no sidecar" in str(verify(cache)["checksums"].note)


def test_a_wrong_sample_is_found_if_it_is_drawn(copied):
    cache = copied()
    plan = json.loads((cache / "sidecar" / "plan.json").read_text())
    there = (plan["target"], eagle3_runs.load, plan["run"])
    native_put(cache, 4, "aux_hidden_states", 0, 3, 2.5)
    (found,) = run_again(cache, *there, k=10).problems
    assert re.search(SAMPLE_4 + r"aux_hidden_states of block 1 is 2.5 at token 0, run again .* at 1 token, ", found)
    (found,) = run_again(cache, *(plan["target"], eagle3_runs.load, {**plan["run"], "torch": "3"}), k=10).problems
    assert "is 2.5 at token 0" in found and "where the environment has another torch" in found
    assert 0 < sum(bool(run_again(cache, *there, k=1, seed=seed).problems) for seed in range(12)) < 12


def test_a_wrong_state_far_from_any_loss_is_found(copied):
    cache, mask = copied("all"), eagle3_runs.rows()[0].loss_mask
    plan = json.loads((cache / "sidecar" / "plan.json").read_text())
    token = len(mask) - 1
    assert token not in eagle3_runs.target_rows(mask, "reply")
    native_put(cache, 0, "last_hidden_states", token, 0, 9.0)
    (found,) = run_again(cache, plan["target"], eagle3_runs.load, plan["run"], k=10).problems
    assert f"last_hidden_states is 9 at token {token}, " in found


# --- stats and inspect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NATIVE_FORMS)
def test_stats_are_those_of_the_samples(eagle3_caches, form):
    cache, rows = eagle3_caches[form], eagle3_runs.rows()
    selected = eagle3_runs.manifest()["selected_token_ids"]
    found = stats_of(cache).as_json()
    model, masses, entropies, positions = eagle3_runs.load(torch.device("cpu")), [], [], 0
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.input_ids])).logits[0].double()
        for token in [token for token in range(1, len(row.loss_mask)) if row.loss_mask[token]]:
            probs = logits[token].softmax(-1)
            masses.append(float(probs[selected].sum()))
            if int(probs.argmax()) in selected:
                positions += 1
                entropies.append(float(torch.special.entr(logits[token][selected].softmax(-1)).sum()))
    assert (found["supervised_tokens"], found["positions"]) == (len(masses), positions)
    assert found["draft_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-2)
    assert found["entropy_nats"]["mean"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-3)
    manifest = eagle3_runs.manifest(**NATIVE_FORMS[form])
    rule = manifest.get("targets", "loss")
    tokens, aux, targets = map(sum, zip(*(eagle3_runs.rows_of(row.loss_mask, rule) for row in rows), strict=True))
    assert (found["targets"], found["enough_for"]) == (rule, manifest.get("enough_for", ["eagle3", "peagle"]))
    assert (found["aux_rows"], found["target_rows"], found["tokens"]) == (aux, targets, tokens)
    parts, layers = found["bytes_per_token_by_part"], len(found["aux_norms"])
    values, scales, numbers = (1, 4, 4) if manifest["aux_dtype"] == "fp8" else (2, 0, 2)
    assert parts["aux"] * tokens == pytest.approx(aux * layers * eagle3_runs.HIDDEN * values)
    assert parts["scales"] * tokens == pytest.approx(aux * layers * scales)
    assert parts["last hidden"] * tokens == pytest.approx(targets * eagle3_runs.HIDDEN * numbers)
    assert parts["targets"] * tokens == pytest.approx(targets * 8)
    files = sum(path.stat().st_size for path in cache.glob("shard-*"))
    assert found["shard_bytes"] == files == pytest.approx(sum(parts.values()) * tokens) and parts["headers"] > 0


@pytest.mark.parametrize(("form", "targets"), [("native", "loss"), ("reply", "reply")])
def test_inspect_shows_what_is_stored_of_each_token(eagle3_caches, form, targets):
    cache, row = eagle3_caches[form], eagle3_runs.rows()[1]
    heading, (columns, *found) = sample_heading(cache, 1), slot_rows(cache, 1, slots=100)
    mask, model = row.loss_mask, eagle3_runs.load(torch.device("cpu"))
    with torch.no_grad():
        output = model(torch.tensor([row.input_ids]), output_hidden_states=True)
    needed = eagle3_runs.target_rows(mask, targets)
    assert ("target rows", rows_text(eagle3_runs.manifest(**NATIVE_FORMS[form]))) in summary(cache)
    assert f"{len(mask)} tokens, {sum(mask[1:])} supervised slots" in heading
    assert f"{needed[-1]} auxiliary rows, {len(needed)} target rows" in heading
    assert columns[:7] == ("token", "id", "text", "loss", "norm 1", "norm 3", "norm 4")
    for token, shown in enumerate(found):
        assert shown[:4] == (str(token), str(row.input_ids[token]), "-", "yes" if mask[token] else "-")
        if token < needed[-1]:
            assert float(shown[4]) == pytest.approx(float(output.hidden_states[2][0, token].norm()), rel=2e-2)
        else:
            assert set(shown[4:7]) == {"-"}
        argmax = str(int(output.logits[0, token].argmax())) if token in needed else "-"
        assert shown[7] == argmax and (shown[9] == "-") == (token not in needed)
    with refused("E106", "slot 24", "sample 1", "24 tokens", kind=ValueError):
        slot_rows(cache, 1, begin=24)


def test_the_commands_know_the_native_form(eagle3_caches, tmp_path, capsys):
    cache = eagle3_caches["fp8"]
    assert main(["verify", str(cache), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {*check_names()}
    assert main(["inspect", str(cache)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "native-1, auxiliary states in fp8, last hidden states in fp32, before the final norm" in text
    assert "norm rms with eps 1e-06, lm_head" in text and "shard samples size tokens supervised aux rows" in text
    assert main(["inspect", str(cache), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert layout["aux_hidden_states"] == ["float8_e4m3fn", [4, 16]]
    assert main(["stats", str(cache), "--plot", str(tmp_path / "p.png")]) == 0
    assert "bytes a token" in capsys.readouterr().out and (tmp_path / "p.png").stat().st_size > 1000


def test_a_cache_whose_weights_are_gone_has_no_stats(copied):
    cache = copied()
    (cache / "target_weights.safetensors").unlink()
    for look in (stats_of, lambda folder: slot_rows(folder, 1)):
        with refused("E702", "target_weights.safetensors"):
            look(cache)


def test_diff_compares_the_ids_of_native_caches(eagle3_caches):
    found = diff(eagle3_caches["native"], eagle3_caches["fp8"], tokenizers=(None, None), limit=5)
    assert found["compared"] == "tokens" and "manifest.aux_dtype" in found["settings"]
    assert [found[part]["count"] for part in ("only_a", "only_b", "moved")] == [0, 0, 0]


@pytest.mark.parametrize("weight", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize(("form", "is_planned"), [("dense", True), ("native", True), ("native", False)])
def test_a_broken_weight_of_the_target_is_named_when_it_is_run_again(copied, form, weight, is_planned):
    cache = copied(form)
    plan = json.loads((cache / "sidecar" / "plan.json").read_text())
    if not is_planned:
        unplanned(cache)

    def load(device):
        model = copy.deepcopy(eagle3_runs.load(device))
        with torch.no_grad():
            model.get_parameter(weight)[0, 0] = torch.nan
        return model

    assert weight in run_again(cache, plan["target"], load, plan["run"], k=3).problems[0]
