"""Samples that are run through the target again: with the plan bit for bit, without it within a tolerance."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle3_runs
from support.commands import niels_gpt
from support.eagle3_damage import ALL_FORMS, FORMS, copy_of, flip_bit, put
from support.eagle3_looks import run_again, verdicts
from support.errors import refused

from niels_gpt.eagle3.cache import convert, shard_path, write_target_embeddings
from niels_gpt.storage.checks import Verdict

GOOD = Verdict([])
BOS, USER, ASSISTANT, END, NEWLINE = 33, 34, 35, 36, 37
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def dense(eagle3_caches, tmp_path):
    return copy_of(eagle3_caches["dense"], tmp_path)


Target = tuple[dict[str, Any], Callable[[torch.device], Any], dict[str, Any]]


def plan_of(cache):
    return json.loads((cache / "sidecar" / "plan.json").read_bytes())


def target(plan, *, seed=0, load=None, **run):
    """Return the target of a cache of eagle3_runs, or another one that has the same name and checksums."""
    return plan["target"], load or (lambda device: eagle3_runs.load(device, seed=seed)), {**plan["run"], **run}


def recomputed(cache, there, **how):
    return run_again(cache, *there, **how)


def jittered(device):
    """Change each weight that a cache has not a little, as another order of sums changes what is computed from them."""
    model, chance = copy.deepcopy(eagle3_runs.load(device)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("model.layers."):  # nothing is computed to write the others
                weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=chance))
    return model


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("k", [1, 4, 100])
def test_samples_that_are_run_again_are_equal_bit_for_bit(eagle3_caches, form, k):
    threads, seen = torch.get_num_threads(), []
    there = target(plan_of(eagle3_caches[form]))
    assert recomputed(eagle3_caches[form], there, k=k, progress=lambda *given: seen.append(given)) == GOOD
    assert torch.get_num_threads() == threads
    assert [done for done, _, _ in seen] == list(range(len(seen))) and seen[0][2] == len(seen)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_another_target_gives_other_numbers_which_are_told_by_field(eagle3_caches, form):
    plan = plan_of(eagle3_caches[form])
    found = recomputed(eagle3_caches[form], target(plan, seed=1), k=3).problems
    assert any("aux_hidden_states of block " in problem for problem in found)
    values = "target_probs" if form in FORMS else "log_normalizers"
    assert any(values in problem and "run again" in problem for problem in found)
    assert all("expected equal bits" in problem or "argmax_ids differs" in problem for problem in found)
    embeddings, *elsewhere = recomputed(eagle3_caches[form], target(plan, seed=1, torch="3.0"), k=3).problems
    assert embeddings == found[0] and "the embedding of token 0 is not the target's" in embeddings
    if form not in FORMS:
        assert "lm_head of token 0 is not the target's" in elsewhere.pop(0)
    assert elsewhere and all("where the environment has another torch" in problem for problem in elsewhere)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_elsewhere_rounding_is_let_pass_and_nan_and_another_target_are_not(eagle3_caches, form):
    cache, plan = eagle3_caches[form], plan_of(eagle3_caches[form])
    assert recomputed(cache, target(plan, load=jittered), k=10).problems
    assert recomputed(cache, target(plan, load=jittered, processor="another"), k=10) == GOOD
    broken = copy.deepcopy(eagle3_runs.load(torch.device("cpu")))
    broken.model.layers[3].mlp.down_proj.weight.fill_(torch.nan)
    found = recomputed(cache, target(plan, load=lambda _: broken), k=1).problems
    assert "run again" in found[0] and ("block 3" in found[0] or form not in FORMS)
    facts = {**plan["target"], "config_sha256": "d" * 64, "name": "larger"}
    (said,) = recomputed(cache, (facts, lambda device: pytest.fail("loaded"), plan["run"])).problems
    assert "made from another target: config_sha256 of small in the plan differ from those of larger" in said


def test_other_embeddings_than_the_targets_are_told_with_the_token(dense):
    path, plan = dense / "target_embeddings.safetensors", plan_of(dense)
    flip_bit(path, -4 * eagle3_runs.HIDDEN * 3)  # the last bit of a number of the third token from the end
    for there in (target(plan), target(plan, torch="3.0")):
        (found,) = recomputed(dense, there, k=1).problems
        assert found.startswith(f"{path}: the embedding of token {eagle3_runs.VOCAB - 3} is not the target's")
        assert "wrong for 1 of 40 tokens" in found
    path.unlink()
    assert recomputed(dense, target(plan), k=1).problems[0].startswith(f"{path}: no such file")
    write_target_embeddings(dense, torch.zeros(3, 2))
    assert "is [3, 2], the target's [40, 16]" in recomputed(dense, target(plan), k=1).problems[0]
    for name in ("samples.safetensors", "batches.jsonl", "plan.json"):
        moved = (dense / "sidecar" / name).rename(dense / name)
        (found,) = recomputed(dense, target(plan), k=1).problems
        assert found.startswith(f"{dense}/sidecar/{name}: no such file") and "with --resume" in found
        moved.rename(dense / "sidecar" / name)


def test_a_wrong_sample_is_found_if_it_is_drawn_and_the_seed_decides_the_draw(dense):
    put(dense, "aux_hidden_states", 4, 0, 0, 2.5)
    there = target(plan_of(dense))
    (found,) = recomputed(dense, there, k=10).problems
    assert "sample 4 ('chat\\n4'): aux_hidden_states of block 1 is 2.5 at slot 0, column 0, run again " in found
    by_seed = [[bool(recomputed(dense, there, k=1, seed=seed).problems) for seed in range(15)] for _ in range(2)]
    assert by_seed[0] == by_seed[1]
    assert 0 < sum(by_seed[0]) < 15
    with refused("E102", "k=0"):
        recomputed(dense, there, k=0)


def test_a_converted_cache_passes_every_check(dense):
    before = plan_of(dense)
    for version in (2, 1):
        assert convert(dense, version)
        assert json.loads((dense / "manifest.json").read_text())["format_version"] == version
        assert all(verdict == GOOD for verdict in verdicts(dense).values())
        assert recomputed(dense, target(before), k=2) == GOOD
    (dense / "target_embeddings.safetensors").unlink()
    with refused("E702", dense, "--resume"):
        convert(dense, 2)


def chats(count=12):
    """Return rows as a template makes them: loss on the reply and on what ends it, not on the line end behind."""
    chance = random.Random(0)
    rows = []
    for number in range(count):
        asked, said = ([chance.randrange(30) for _ in range(chance.randint(2, 6))] for _ in range(2))
        ids = [BOS, USER, *asked, END, NEWLINE, ASSISTANT, *said, END, NEWLINE]
        mask = [0] * (len(asked) + 5) + [1] * (len(said) + 1) + [0]
        rows.append(eagle3_runs.Row(f"{number}", ids, mask))
    return rows


@pytest.fixture(scope="module", params=FORMS)
def foreign(request, tmp_path_factory):
    """A cache of twelve chats, from which all that this project adds was removed."""
    folder, samples = tmp_path_factory.mktemp("made") / "c", chats()
    eagle3_runs.run(folder, samples=samples, given=eagle3_runs.plan(samples, **FORMS[request.param]))
    shutil.rmtree(folder / "sidecar")
    (folder / "meta.json").unlink()
    return folder


@pytest.fixture
def cache(foreign, tmp_path):
    return copy_of(foreign, tmp_path)


def small(load=eagle3_runs.load):
    """Return a target of which nothing is known but its name."""
    return {"name": "small"}, load, {"device": "cpu", "threads": 1, "compute_dtype": "fp32"}


def rewrite(cache, change):
    """Change each sample's tensors; `change` takes them and the number of its tokens."""
    for shard in range(3):
        tensors = load_file(shard_path(cache, shard))
        for row in range(len(tensors["input_ids"])):
            change({name: tensor[row] for name, tensor in tensors.items()}, int(tensors["attention_mask"][row].sum()))
        save_file(tensors, shard_path(cache, shard))


def change_manifest(cache, **changed):
    manifest = json.loads((cache / "manifest.json").read_text()) | changed
    (cache / "manifest.json").write_text(json.dumps({key: value for key, value in manifest.items() if value}))


def test_a_good_one_passes_without_its_first_tokens(foreign):
    assert BOS not in {token for row in chats() for token in row.input_ids[1:]}
    assert recomputed(foreign, small(), k=12) == GOOD


@pytest.mark.parametrize("layers", [[0, 2, 3], [2, 4, 5], [3, 1, 4]])
def test_other_layers_are_found(cache, layers):
    change_manifest(cache, aux_layer_ids=layers)
    problems = recomputed(cache, small(), k=3).problems
    assert problems and all("slot" in problem and "sample" in problem for problem in problems)


def unshift(tensors, _, names=("loss_mask", "position_mask")):
    for name in names:
        tensors[name][1:] = tensors[name][:-1].clone()
        tensors[name][0] = 0


def shuffle(tensors, length):
    order = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))
    tensors["input_ids"][: length - 1] = tensors["input_ids"][order]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unshift, "loss_mask is not shifted"),
        (partial(unshift, names=["loss_mask"]), "loss_mask is not shifted"),
        (shuffle, "is not what the target gives"),  # ids that are not those of the states
        (None, "is not what the target gives"),  # those of another sample
    ],
)
def test_ids_and_masks_that_are_not_those_of_the_states_are_found(cache, change, said):
    if change is not None:
        rewrite(cache, change)
    else:
        tensors = load_file(shard_path(cache, 0))
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, shard_path(cache, 0))
    assert verdicts(cache, names=["complete", "finite"])["complete"].problems == []
    assert any(said in problem for problem in recomputed(cache, small(), k=12).problems)


def test_a_mask_with_loss_behind_the_last_token_is_found_without_the_target(cache):
    rewrite(cache, lambda tensors, length: tensors["loss_mask"][length - 1].fill_(1) and None)
    assert any("loss_mask is 1 at slot" in problem for problem in verdicts(cache)["distribution"].problems)


@pytest.mark.parametrize("column", [0, 3])
def test_an_id_that_the_target_does_not_have_and_another_vocabulary_are_told(cache, column):
    rewrite(cache, lambda tensors, _: tensors["input_ids"][column].fill_(40) and None)
    assert any("expected 0 to 39" in problem for problem in recomputed(cache, small(), k=12).problems)
    change_manifest(cache, target_vocab_size=41)
    assert any("target_vocab_size is 41" in problem for problem in recomputed(cache, small(), k=1).problems)


def test_another_target_is_found(foreign):
    problems = recomputed(foreign, small(lambda device: eagle3_runs.load(device, seed=1)), k=2).problems
    assert any("target_embeddings" in problem for problem in problems)
    assert any("no token of the target gives" in problem for problem in problems)


def test_a_cache_that_was_computed_in_another_precision_passes(foreign):
    rounded = copy.deepcopy(eagle3_runs.load(torch.device("cpu"))).to(torch.bfloat16)
    assert recomputed(foreign, small(lambda _: rounded), k=12) == GOOD


@pytest.mark.parametrize("foreign", ["dense"], indirect=True)
def test_what_was_asked_for_and_not_checked_fails(cache, tmp_path):
    eagle3_runs.load(torch.device("cpu")).save_pretrained(tmp_path / "model")
    command = ["eagle3", "verify", cache, "--target", tmp_path / "model", "--device", "cpu"]
    assert niels_gpt(*command).status == 0
    change_manifest(cache, aux_layer_ids=None)
    done = niels_gpt(*command)
    assert done.status == 1 and "cannot be checked: manifest.json has no aux_layer_ids" in done.out
    assert niels_gpt(*command[:3]).status == 0, "it was not asked for"
