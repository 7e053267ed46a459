"""The plan of attention by segments, its kernel, and how long segments read from keys are kept."""

import gc
import weakref

import pytest
import torch
from support.errors import refused
from support.prefix_trees import tree, tree_keys

from niels_gpt.prefix_tree.attention import dense_mask
from niels_gpt.prefix_tree.segments import Segments, segments_of
from niels_gpt.prefix_tree.segments_kernel import FlashSegments, attend, has_kernel
from niels_gpt.prefix_tree.segments_plan import depths, plan_of


def pairs(plan, rows):
    """Return how often each query meets each key, int8 [T, T]."""
    met = torch.zeros(rows, rows, dtype=torch.int8)
    for step in (*plan.own, *plan.above):
        size = (step.end - step.start) // step.batch
        for at in range(step.start, step.end, size):
            keys = step.keys if step.batch == 1 else slice(at, at + size)
            seen = torch.ones_like(met[at : at + size, keys])
            seen = seen.tril() if step.causal else seen
            met[at : at + size, keys] += seen if step.mask is None else step.mask.to(torch.int8)
    return met


@pytest.mark.parametrize("window", [None, 5, 40])
def test_the_steps_of_a_plan_are_the_pairs_of_the_mask_each_once(window):
    for seed in range(20):
        forest = tree(seed)
        segments = Segments.from_forest(forest)
        assert depths(segments.subtree_end).tolist() == forest.position_ids.tolist()
        wanted = dense_mask(forest, window=window).to(torch.int8)
        for plan in (
            segments.plan(window),
            segments.blocks(window),
            plan_of(segments.subtree_end, window, block=8),
        ):
            assert torch.equal(pairs(plan, len(segments)), wanted), seed


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_dense_attention(dtype, window):
    if not has_kernel():
        pytest.skip("this torch has no flash kernel for CPUs with the arguments that are used")
    forest = tree(2)
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(len(forest.input_ids), heads, 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    query, key, value = (each.transpose(0, 1)[None] for each in exact)
    mask = dense_mask(forest, window=window)[None, None]
    attended = torch.nn.functional.scaled_dot_product_attention
    wanted = attended(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    weight = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, exact, weight)
    segments = Segments.from_forest(forest)
    for found in (
        FlashSegments.apply(*inputs, segments.kernel_plan(window, dtype), 8**-0.5),
        attend(*inputs, segments.blocks(window), 8**-0.5),
    ):
        others = torch.autograd.grad(found, inputs, weight.to(dtype))
        limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        for one, other in zip((wanted, *gradients), (found, *others), strict=True):
            assert float((one - other).detach().abs().max() / one.detach().abs().max()) < limit


def test_tree_keys_are_not_kept_and_changes_are_seen_in_inference_mode():
    keys = tree_keys(tree(2))
    found = segments_of(keys)
    assert segments_of(keys) is found
    gone = weakref.ref(found)
    del keys, found
    gc.collect()
    assert gone() is None
    with torch.inference_mode():
        keys = tree_keys(tree(2))
        assert segments_of(keys) is segments_of(keys)
        keys["tree_kv_index"][0] = 1
        with refused("E801", "pre-order"):
            segments_of(keys)
