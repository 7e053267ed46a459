"""A cache without plan and raw tokens, as other tools write it, is compared with its target all the same.

Run: pytest tests/test_eagle3_unplanned.py
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3_runs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from niels_gpt.eagle3 import unplanned
from niels_gpt.eagle3.__main__ import main
from niels_gpt.eagle3.layout import shard_path
from niels_gpt.eagle3.recompute import Target, recomputed
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.verify import verify

BOS, USER, ASSISTANT, END, NEWLINE = 33, 34, 35, 36, 37
Tensors = dict[str, torch.Tensor]


def chats(count: int = 12) -> list[eagle3_runs.Row]:
    """Return rows as a template makes them: loss on the reply and on what ends it, not on the line end behind."""
    chance = random.Random(0)
    found = []
    for number in range(count):
        asked, said = ([chance.randrange(30) for _ in range(chance.randint(2, 6))] for _ in range(2))
        ids = [BOS, USER, *asked, END, NEWLINE, ASSISTANT, *said, END, NEWLINE]
        mask = [0] * (len(asked) + 5) + [1] * (len(said) + 1) + [0]
        found.append(eagle3_runs.Row(f"{number}", ids, mask))
    return found


@pytest.fixture(scope="module", params=["dense", "topk"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of twelve chats, from which all that this project adds was removed."""
    folder = tmp_path_factory.mktemp("made") / "c"
    samples = Samples.of_rows(chats())
    changed: dict[str, Any] = eagle3_runs.TOPK if request.param == "topk" else {}
    eagle3_runs.run(folder, samples=samples, given=eagle3_runs.plan(samples, **changed))
    shutil.rmtree(folder / "sidecar")
    (folder / "meta.json").unlink()
    return folder


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "c"))


def target(load: Any = eagle3_runs.load) -> Target:
    """Return a target to compare with."""
    run = {"device": "cpu", "threads": 1, "compute_dtype": "fp32"}
    return Target({"name": "small"}, load, run)


def rewrite(cache: Path, change: Callable[[Tensors, int], None]) -> None:
    """Change each sample's tensors; `change` takes them and the number of its tokens."""
    for shard in range(3):
        path = shard_path(cache, shard)
        tensors = load_file(path)
        for row in range(len(tensors["input_ids"])):
            change({name: tensor[row] for name, tensor in tensors.items()}, int(tensors["attention_mask"][row].sum()))
        save_file(tensors, path)


def test_a_good_one_passes_without_its_first_tokens(made: Path) -> None:
    assert BOS not in {token for row in chats() for token in row.input_ids[1:]}
    found = recomputed(made, target(), k=12)
    assert (found.problems, found.note) == ([], None)


@pytest.mark.parametrize("shifted", [[0, 2, 3], [2, 4, 5], [3, 1, 4]])
def test_other_layers_are_found(cache: Path, shifted: list[int]) -> None:
    manifest = json.loads((cache / "manifest.json").read_text()) | {"aux_layer_ids": shifted}
    (cache / "manifest.json").write_text(json.dumps(manifest))
    problems = recomputed(cache, target(), k=3).problems
    assert problems and all("slot" in problem and "sample" in problem for problem in problems)


@pytest.mark.parametrize("with_positions", [True, False])
def test_a_mask_that_is_not_shifted_is_found(cache: Path, with_positions: bool) -> None:
    def unshift(tensors: Tensors, _: int) -> None:
        for name in ("loss_mask", "position_mask") if with_positions else ("loss_mask",):
            tensors[name][1:] = tensors[name][:-1].clone()
            tensors[name][0] = 0

    rewrite(cache, unshift)
    assert verify(cache, names=["complete", "finite"])["complete"].problems == []
    assert any("loss_mask is not shifted" in problem for problem in recomputed(cache, target(), k=12).problems)


def test_a_mask_with_loss_behind_the_last_token_is_found_without_the_target(cache: Path) -> None:
    def behind(tensors: Tensors, length: int) -> None:
        tensors["loss_mask"][length - 1] = 1

    rewrite(cache, behind)
    assert any("loss_mask is 1 at slot" in problem for problem in verify(cache)["distribution"].problems)


@pytest.mark.parametrize("kind", ["within", "between"])
def test_ids_that_are_not_those_of_the_states_are_found(cache: Path, kind: str) -> None:
    def within(tensors: Tensors, length: int) -> None:
        order = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))
        tensors["input_ids"][: length - 1] = tensors["input_ids"][order]

    if kind == "within":
        rewrite(cache, within)
    else:
        tensors = load_file(shard_path(cache, 0))
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, shard_path(cache, 0))
    problems = recomputed(cache, target(), k=12).problems
    assert any("is not what the target says" in problem for problem in problems)


def test_another_target_is_found(made: Path) -> None:
    def other(device: torch.device) -> Any:
        return eagle3_runs.load(device, seed=1)

    problems = recomputed(made, target(other), k=2).problems
    assert any("target_embeddings" in problem for problem in problems)
    assert any("no token of the target gives" in problem for problem in problems)


def test_a_cache_that_was_computed_in_another_precision_passes(made: Path) -> None:
    def rounded(device: torch.device) -> Any:
        config = eagle3_runs.load(device).config
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(eagle3_runs.load(device).state_dict())
        return model.to(torch.bfloat16).requires_grad_(False).eval()

    assert recomputed(made, target(rounded), k=12).problems == []


def test_what_was_asked_for_and_cannot_be_checked_is_no_success(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eagle3_runs.load(torch.device("cpu")).save_pretrained(tmp_path / "model")
    assert main(["verify", str(cache), "--target", str(tmp_path / "model"), "--device", "cpu"]) == 0
    capsys.readouterr()
    manifest = json.loads((cache / "manifest.json").read_text())
    del manifest["aux_layer_ids"]
    (cache / "manifest.json").write_text(json.dumps(manifest))
    assert main(["verify", str(cache), "--target", str(tmp_path / "model"), "--device", "cpu"]) == 1
    assert "cannot be checked: manifest.json has no aux_layer_ids" in capsys.readouterr().out
    assert main(["verify", str(cache)]) == 0, "it was not asked for"
    assert unplanned.MEDIAN < unplanned.WRONG
