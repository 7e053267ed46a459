"""Folded rows on a GPU: each attention gives the log-probs and gradients of the samples run alone on a CPU."""

import pytest
import torch
from support.causal_models import FOREST, MIXED, SAMPLES, alone, tiny_model

from niels_gpt.prefix_tree.attention import guard, hf_forward, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, folded_cross_entropy, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward, logits_head
from niels_gpt.prefix_tree.verify import verify_fold

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUTES = {
    "a dense mask": ("sdpa", "auto"),
    "eager": ("eager", "auto"),
    "segments": ("sdpa", "prefix_tree"),
    "flex_attention": ("flex_attention", "auto"),
}
MODELS = {
    "llama": {},
    "mistral": {},  # a sliding window
    "qwen2": MIXED,  # layers with and without one: a dict of masks
    "gemma2": MIXED,  # and a softcap of the scores
}
WIDE = {"head_dim": 16, "hidden_size": 64}
"""FlexAttention's kernels take heads of 16 values or more."""


def model_of(kind, attention="sdpa"):
    """Return a model. attention: of it; Gemma 2 has no "sdpa", and gets "eager" in its place."""
    attention = "eager" if (kind, attention) == ("gemma2", "sdpa") else attention
    return tiny_model(kind, attention, **WIDE, **MODELS[kind])


def loss_and_gradients(model, forest, backend):
    """Return the log-probs of all targets, the loss, and the gradients, by the names of parameters, on the CPU."""
    model.zero_grad()
    edges = LossEdges.from_forest(forest).to(model.device)
    hidden, head = body_forward(model, forest, backend=backend)
    logp = sample_logprobs(edge_logprobs(hidden, edges, head, chunk=7), edges).detach()
    hidden, head = body_forward(model, forest, backend=backend)
    loss = folded_cross_entropy(hidden, edges, head, chunk=7)
    loss.backward()
    grads = {name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None}
    return logp.cpu(), loss.detach().cpu(), grads


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", MODELS)
def test_each_attention_on_a_gpu_gives_what_the_cpu_gives(kind, route):
    attention, backend = ROUTES[route]
    forest = PrefixForest.from_sequences(SAMPLES)
    wanted = loss_and_gradients(model_of(kind, "eager"), forest, "dense")
    model = model_of(kind, attention).cuda()
    found = loss_and_gradients(model, forest, backend)
    assert (model.config._attn_implementation == "prefix_tree") == (backend == "prefix_tree")
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-3)
    assert found[2].keys() == wanted[2].keys()
    for name, grad in wanted[2].items():
        assert float((found[2][name] - grad).norm()) <= 1e-3 * float(grad.norm()), name


@pytest.mark.parametrize("route", ROUTES)
def test_a_padded_row_on_a_gpu_is_that_of_its_samples(route):
    attention, backend = ROUTES[route]
    model = model_of("llama", attention).cuda()
    with torch.no_grad():
        logits = model(**model_inputs(FOREST, model, backend=backend)).logits[0]
    found = logits.log_softmax(-1)[FOREST.sample_rows.cuda()]
    assert float((found.cpu() - alone(model_of("llama"), FOREST)).abs().max()) < 1e-3


def test_rows_of_many_lengths_run_by_flex_attention_one_after_the_other():
    model, plain = (model_of("llama", attention).cuda() for attention in ("flex_attention", "sdpa"))
    for number in range(12):  # torch.compile keeps eight versions of a function by default
        samples = [[*range(3, 40 + 9 * number), *range(5, 9)], [*range(3, 40 + 9 * number), *range(9, 20 + number)]]
        forest = PrefixForest.from_sequences([[each % 97 for each in sample] for sample in samples])
        with torch.no_grad():
            found = model(**model_inputs(forest, model)).logits[0]
            wanted = plain(**model_inputs(forest, plain, backend="dense")).logits[0]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("route", ["a dense mask", "segments", "flex_attention"])
def test_bf16_on_a_gpu_is_near_float32(route):
    attention, backend = ROUTES[route]
    model = model_of("llama", attention).cuda().bfloat16()
    logp, loss, grads = loss_and_gradients(model, FOREST, backend)
    wanted = loss_and_gradients(model_of("llama"), FOREST, "dense")
    assert abs(float(loss - wanted[1])) < 0.1 and float((logp - wanted[0]).abs().mean()) < 0.2
    assert all(each.isfinite().all() for each in grads.values())
    model = model_of("llama", attention).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        hidden, head = body_forward(model, FOREST, backend=backend)
        loss = folded_cross_entropy(hidden, LossEdges.from_forest(FOREST).to("cuda"), head)
    loss.backward()
    assert abs(float(loss.detach()) - float(wanted[1])) < 0.1


def test_a_fold_on_a_gpu_is_verified_and_guarded():
    forest = PrefixForest.from_sequences(SAMPLES)
    model = model_of("llama").cuda()
    assert verify_fold(hf_forward(model), forest, samples=SAMPLES, seed=0).ok
    with guard(forest, model):
        hidden, _ = body_forward(model, forest)
    hidden_of_cpu, _ = body_forward(model_of("llama"), forest)
    torch.testing.assert_close(hidden.cpu(), hidden_of_cpu, rtol=1e-3, atol=1e-3)
    states = torch.randn(3, 64, device="cuda")
    torch.testing.assert_close(logits_head(model)(states), model.lm_head(states))


def test_a_forest_that_is_on_the_gpu_gives_the_same():
    model, there = model_of("llama").cuda(), FOREST.to("cuda")
    with torch.no_grad():
        found, wanted = (model(**model_inputs(each, model)).logits for each in (there, FOREST))
    assert torch.equal(found, wanted) and there.stats() == FOREST.stats()
    edges, wanted = LossEdges.from_forest(there), LossEdges.from_forest(FOREST)
    assert torch.equal(edges.row.cpu(), wanted.row) and torch.equal(edges.target.cpu(), wanted.target)
