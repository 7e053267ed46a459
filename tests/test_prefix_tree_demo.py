"""python -m niels_gpt.prefix_tree.demo: folded and not folded agree, what is printed is so, and what is wrong is found.

Run: pytest tests/test_prefix_tree_demo.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from niels_gpt.prefix_tree import demo
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.plot import MOST_DRAWN, plot_mask

pytest.importorskip("transformers", reason="the extra `eagle3` brings it")

SMALL = ["--prompt", "24", "--completion", "10", "--samples", "5"]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Give the other tests the threads back that the demo sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_group_is_not_the_easy_case() -> None:
    for seed in range(5):
        prompt, completions = demo.random_group(prompt=24, completion=10, samples=5, seed=seed)
        assert len(prompt) == 24 and {len(each) for each in completions} <= set(range(5, 11))
        assert completions[0] == completions[1] and completions[2][0] == completions[3][0]
        assert len({len(each) for each in completions}) > 1
    assert demo.random_group(1, 1, 4, 0) == demo.random_group(1, 1, 4, 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_ways_agree_and_the_sizes_are_those_of_the_group(
    attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, "--attention", attention]) == 0
    step, verdict = capsys.readouterr().out.split("\n\nverify_fold: ")
    said = dict(re.split(r"\s{2,}|(?<=backward) ", line, maxsplit=1) for line in step.splitlines())
    prompt, completions = demo.random_group(24, 10, 5, 0)
    lengths = [len(each) for each in completions]
    before = 5 * len(prompt) + sum(lengths)
    after = len(prompt) + sum(lengths) - lengths[1] - 1  # a duplicate, and two that share their first token
    assert said["tokens"] == f"{before} unfolded, {after} folded: {before / after:.2f}x"
    assert said["supervised"].startswith(f"{sum(lengths)} tokens by LossEdges, {sum(lengths) - 5} by one label a row")
    assert re.fullmatch(r"\d\.\d{3} s unfolded, \d\.\d{3} s folded: .*x", said["forward+backward"])
    for name in ("log-probs", "gradients"):
        found = re.match(r"differ by (\S+) ", said[name])
        assert found is not None and float(found.group(1)) < 1e-5
    assert f"{before} tokens folded into {after} rows" in verdict and "FAILED" not in verdict


def test_a_folded_step_without_its_mask_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.model_inputs

    def without_mask(forest: PrefixForest, model: Any) -> dict[str, Any]:
        return {**right(forest, model), "attention_mask": None}

    monkeypatch.setattr(demo, "model_inputs", without_mask)
    assert demo.main(SMALL) == 1
    found = re.search(r"log-probs +differ by (\S+)", capsys.readouterr().out)
    assert found is not None and float(found.group(1)) > 1e-2


def test_the_loss_of_the_demo_clips_and_its_old_log_probs_are_per_sample() -> None:
    now, old = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -0.5])
    # Ratios 1, e and 0.61: a gain is cut at 1.2, and at 0.8 from below where the advantage is negative.
    gains = [1.0, 1.2, -0.8]
    loss = demo.policy_loss(now, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1.0, 2.0, 4.0]))
    assert loss == pytest.approx(-(gains[0] + 2 * gains[1] + 4 * gains[2]))


def test_the_duplicate_counts_as_a_sample_of_its_own() -> None:
    prompt, completions = demo.random_group(6, 4, 4, 1)
    edges = LossEdges.from_forest(PrefixForest.from_rollout_group(prompt, completions))
    model = demo.tiny_llama("sdpa", 0)
    with torch.no_grad():
        folded = demo.folded_logprobs(model, PrefixForest.from_rollout_group(prompt, completions), edges)
        torch.testing.assert_close(folded, demo.unfolded_logprobs(model, (prompt, completions)), atol=1e-5, rtol=0)
    assert len(folded) == sum(map(len, completions)) > edges.num_edges
    size = len(completions[0])
    assert torch.equal(folded[:size], folded[size : 2 * size])


def test_the_mask_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `pipelines` brings it")
    target = tmp_path / "mask.png"
    assert demo.main([*SMALL, "--plot", str(target)]) == 0
    with Image.open(target) as picture:
        assert picture.size == (600, 600)
    with pytest.raises(ValueError, match=r"2,049 tokens is not drawn"):
        plot_mask(PrefixForest.from_sequences([list(range(MOST_DRAWN + 1))]))


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert demo.main(SMALL) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and "pip install 'niels_gpt[eagle3]'" in said.err


@pytest.mark.parametrize("flags", [["--samples", "3"], ["--prompt", "0"], ["--attention", "flash_attention_2"]])
def test_what_cannot_be_folded_here_is_wrong_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(flags)
    assert stopped.value.code == 2 and "usage: python -m niels_gpt.prefix_tree.demo" in capsys.readouterr().err
