"""The pieces of the demo of folding, which users copy: its group, its loss, its log-probs, its picture."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from support.causal_models import VOCAB, logprobs, tiny_model
from support.commands import niels_gpt
from support.errors import refused

from niels_gpt.prefix_tree import demo
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head
from niels_gpt.prefix_tree.savings.plot import MOST_DRAWN, plot_mask

pytest.importorskip("transformers", reason="the extra `eagle3` brings it")

pytestmark = pytest.mark.usefixtures("one_thread")  # which gives back the threads that the demo sets
DEMO = "niels_gpt.prefix_tree.demo"
SMALL = ["--prompt", "24", "--completion", "10", "--samples", "5"]


def test_the_group_is_not_the_easy_case():
    for seed in range(5):
        prompt, completions = demo.random_group(prompt=24, completion=10, samples=5, seed=seed)
        assert len(prompt) == 24 and {len(each) for each in completions} <= set(range(5, 11))
        assert completions[0] == completions[1] and completions[2][0] == completions[3][0]
        assert len({len(each) for each in completions}) > 1
    assert demo.random_group(1, 1, 4, 0) == demo.random_group(1, 1, 4, 0)


def test_a_step_without_its_mask_fails(monkeypatch):
    right = demo.model_inputs

    def without_mask(forest, model, **how):
        return {**right(forest, model, **how), "prefix_tree": None}

    monkeypatch.setattr(demo, "model_inputs", without_mask)
    done = niels_gpt(*SMALL, "--json", module=DEMO)
    assert done.status == 1
    found = done.json
    assert found["ok"] is False and found["logprobs_differ"] > 1e-2


def test_the_loss_of_the_demo_clips_and_its_old_log_probs_are_per_sample():
    now, old = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -0.5])
    # Ratios 1, e and 0.61: a gain is cut at 1.2, and at 0.8 from below where the advantage is negative.
    gains = [1.0, 1.2, -0.8]
    loss = demo.policy_loss(now, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1.0, 2.0, 4.0]))
    assert loss == pytest.approx(-(gains[0] + 2 * gains[1] + 4 * gains[2]))


@pytest.mark.parametrize("model_type", ["llama", "granite"])
def test_the_folded_side_may_be_copied_for_a_model_that_scales_its_logits(model_type):
    model = tiny_model(model_type, **({"logits_scaling": 0.05} if model_type == "granite" else {}))
    drawn, group = demo.random_group(6, 4, 4, 1)
    prompt, *completions = [[token % VOCAB for token in ids] for ids in (drawn, *group)]
    forest = PrefixForest.from_rollout_group(prompt, completions)
    edges = LossEdges.from_forest(forest)
    with torch.no_grad():
        folded = demo.folded_logprobs(model, logits_head(model), forest, edges)
        plain = demo.folded_logprobs(model, model.lm_head, forest, edges)
    alone = [logprobs(model, input_ids=torch.tensor([prompt + ids]))[5:-1] for ids in completions]
    expected = [rows.gather(1, torch.tensor(ids)[:, None])[:, 0] for rows, ids in zip(alone, completions, strict=True)]
    torch.testing.assert_close(folded, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert ((plain - folded).abs().max() > 0.01) == (model_type == "granite")  # so the case can tell
    assert len(folded) == sum(map(len, completions)) > edges.num_edges, "the duplicate is a sample of its own"
    size = len(completions[0])
    assert torch.equal(folded[:size], folded[size : 2 * size])


def test_the_demo_itself_takes_the_head_once(monkeypatch):
    made = []

    def doubled(model):
        made.append(model)
        return lambda hidden: 2 * model.lm_head(hidden)

    monkeypatch.setattr(demo, "logits_head", doubled)
    assert niels_gpt(*SMALL, module=DEMO).status == 1  # the logits of the folded side only
    assert len(made) == 1


def test_a_finding_of_verify_fold_fails_the_demo_though_its_own_numbers_agree(monkeypatch):
    monkeypatch.setattr(demo, "hf_forward", lambda model: lambda ids, positions, mask: model(ids).logits)
    done = niels_gpt(*SMALL, module=DEMO)
    assert done.status == 1
    out = done.out
    found = re.search(r"log-probs +differ by (\S+)", out)
    assert found is not None and float(found.group(1)) < 1e-5 and "FAILED" in out


def test_the_picture_of_the_mask_is_dark_where_a_query_sees_a_key():
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    png = plot_mask(PrefixForest.from_sequences([[1, 2, 10, 11], [1, 2, 20, 21, 22]]))
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0]  # 8 of the palest blue of the colour map, more of darker ones
    drawn = (pixels == [247, 251, 255]).all(-1) | (blue > 100)
    (top, *_, bottom), (left, *_, right) = (np.flatnonzero(drawn.sum(axis) > 50) for axis in (1, 0))
    rows, columns = (
        [int(a + (b - a) * (cell + 0.5) / 7) for cell in range(7)] for a, b in ((top, bottom), (left, right))
    )
    seen = ["".join("#" if blue[row, column] > 100 else "." for column in columns) for row in rows]
    # The prompt 1 2, then 10 11, and 20 21 22, which do not see 10 11.
    assert seen == ["#......", "##.....", "###....", "####...", "##..#..", "##..##.", "##..###"]
    with refused("E801", "2,049 tokens"):
        plot_mask(PrefixForest.from_sequences([list(range(MOST_DRAWN + 1))]))
