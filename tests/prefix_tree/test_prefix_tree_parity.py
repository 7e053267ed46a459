"""A folded batch trains a model as its samples do one by one.

The other side of every comparison is the plain one: each sample alone, without a mask and without positions, and losses
that know nothing of trees. In float64 throughout both sides agree to rounding; stock models agree to that of float32.
"""

import random
from functools import partial

import pytest
import torch
from support.float64_models import SIZES, VOCAB, float64_llama
from support.prefix_trees import grown
from torch.nn import functional

from niels_gpt.prefix_tree.attention import guard, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, folded_cross_entropy, sample_logprobs
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX, fold_shared_prefix_rollouts
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward

transformers = pytest.importorskip("transformers", reason="models to test with need the extra eagle3")
pytestmark = pytest.mark.usefixtures("one_thread")

segment_inputs = partial(model_inputs, backend="prefix_tree")  # these rows are so short that "auto" takes a mask
TWO_WINDOWS = "Qwen2 with two windows"
STOCK = {
    "Llama": {},
    "Qwen2": {},
    TWO_WINDOWS: {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4},
}


@pytest.fixture(scope="module")
def llama():
    return float64_llama()


def stock(name, implementation):
    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**SIZES, **STOCK[name], attn_implementation=implementation)
    torch.manual_seed(1)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def alone(model, samples):
    """Return the log-prob of every token but the first of each sample, run by itself."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample])
        logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        found.append(logp[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return found


def clipped_policy_loss(logp, old, advantages):
    """Return the GRPO loss: the mean over samples of the mean over tokens of the clipped objective."""
    losses = []
    for mine, before, advantage in zip(logp, old, advantages, strict=True):
        if len(mine):
            ratio = (mine - before).exp()
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    return torch.stack(losses).mean()


def gradients(loss, model):
    named = dict(model.named_parameters())
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(loss, list(named.values()), **options)
    return dict(zip(named, found, strict=True))


def largest_error(found, wanted):
    """Return the largest relative error of a parameter's gradient.

    Of a hundredth of the whole gradient at least: that of a key bias is zero but for rounding.
    """
    whole = torch.stack([part.norm() for part in wanted.values()]).norm()
    return max(float((found[name] - part).norm() / max(part.norm(), whole / 100)) for name, part in wanted.items())


def largest_difference(found, wanted):
    """Return the largest difference of two log-probs, relative to the largest log-prob."""
    wanted = torch.cat(list(wanted))
    return float((torch.cat(list(found)) - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("seed", range(5))
def test_a_clipped_policy_step_on_a_random_forest_is_that_of_its_samples(llama, seed):
    samples = grown(random.Random(seed))
    forest = PrefixForest.from_sequences(samples)
    edges = LossEdges.from_forest(forest)
    assert forest.num_tokens < len(forest.loss_mask) and (forest.node_parents < 0).sum() > 1
    chance = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(samples), generator=chance, dtype=torch.float64)
    plain = alone(llama, samples)
    # Samples differ in their old log-probs also where they share tokens; about half of the ratios are clipped.
    old = [part.detach() + torch.randn(len(part), generator=chance, dtype=torch.float64) * 0.3 for part in plain]
    wanted = gradients(clipped_policy_loss(plain, old, advantages), llama)

    inputs = segment_inputs(forest, llama)
    dense = model_inputs(forest, llama, backend="dense")
    hidden = llama.model(**inputs).last_hidden_state
    ways = {
        "logits": edge_logprobs(llama(**inputs).logits, edges),
        "hidden states, head in chunks": edge_logprobs(hidden, edges, llama.lm_head, chunk=5),
        "logits under a mask": edge_logprobs(llama(**dense).logits, edges),
    }
    for way, edge_logp in ways.items():
        folded = sample_logprobs(edge_logp, edges).split(edges.sample_offsets.diff().tolist())
        assert largest_difference(folded, plain) < 1e-12, way
        assert largest_error(gradients(clipped_policy_loss(folded, old, advantages), llama), wanted) < 1e-12, way
        # Fields per sample and token reach the same loss without a loop.
        ratio, advantage = (sample_logprobs(edge_logp, edges) - edges.field(old)).exp(), edges.field(advantages)
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        counts = edges.sample_offsets.diff()
        loss = -(objective / counts[edges.sample]).sum() / (counts > 0).sum()
        assert largest_error(gradients(loss, llama), wanted) < 1e-12, way


def test_an_entropy_bonus_is_that_of_the_samples_and_so_are_its_gradients(llama):
    samples = grown(random.Random(6))
    forest = PrefixForest.from_sequences(samples)
    edges = LossEdges.from_forest(forest)
    plain, temperature = [], 0.8
    for sample in samples:
        logp = (llama(input_ids=torch.tensor([sample]), use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        plain.append(-(logp.exp() * logp).sum(-1))
    hidden, head = body_forward(llama, forest, backend="prefix_tree")
    logp, entropy = edge_logprobs(hidden, edges, head, temperature=temperature, chunk=5, entropies=True)
    folded = sample_logprobs(entropy, edges)
    assert largest_difference([folded], plain) < 1e-12
    bonus = [gradients(each.mean(), llama) for each in (folded, torch.cat(plain))]
    assert largest_error(*bonus) < 1e-12
    assert torch.equal(logp, edge_logprobs(hidden, edges, head, temperature=temperature, chunk=5))


def test_weighted_edges_are_the_sum_over_the_samples_in_all_weightings(llama):
    samples = grown(random.Random(4))
    masks = [[random.Random(4 + len(sample)).randint(0, 1) for _ in sample] for sample in samples]
    forest = PrefixForest.from_sequences(samples, loss_mask=masks)
    plain = alone(llama, samples)
    targets = [torch.tensor(mask[1:], dtype=torch.float64) for mask in masks]
    sums = [-(logp * mask).sum() for logp, mask in zip(plain, targets, strict=True)]
    count = sum(mask.sum() for mask in targets)
    means = [total / mask.sum() for total, mask in zip(sums, targets, strict=True) if mask.any()]
    logits = llama(**segment_inputs(forest, llama)).logits
    for weighting, wanted in {"per_sample": sum(sums) / count, "sample_mean": torch.stack(means).mean()}.items():
        loss = folded_cross_entropy(logits, LossEdges.from_forest(forest, weighting=weighting))
        assert float((loss - wanted).detach()) == pytest.approx(0, abs=1e-13)
        assert largest_error(gradients(loss, llama), gradients(wanted, llama)) < 1e-12


def test_padded_groups_in_one_row_are_the_sum_of_the_groups(llama):
    generator = random.Random(6)
    groups = []
    for prompt in (5, 1, 9):
        ids = [generator.randrange(VOCAB) for _ in range(prompt + 12)]
        groups.append((ids[:prompt], [ids[-12:-7], ids[-7:-6], [*ids[-12:-9], *ids[-6:]]]))
    forests = [PrefixForest.from_rollout_group(*group) for group in groups]
    plain = [alone(llama, [prompt + part for part in parts]) for prompt, parts in groups]
    wanted = -sum(
        logp[len(prompt) - 1 :].sum() for (prompt, _), part in zip(groups, plain, strict=True) for logp in part
    )
    wanted_gradients = gradients(wanted, llama)
    for pad_id in (0, 11):
        row = PrefixForest.joined(forests).padded(16, pad_id)
        assert len(row.input_ids) % 16 == 0 and row.num_tokens % 16 != 0
        logits = llama(**segment_inputs(row, llama)).logits
        assert bool(logits.isfinite().all())
        loss = folded_cross_entropy(logits, LossEdges.from_forest(row), normalizer=1)
        assert float(((loss - wanted) / wanted).detach()) == pytest.approx(0, abs=1e-13)
        assert largest_error(gradients(loss, llama), wanted_gradients) < 1e-12


@pytest.mark.parametrize(
    ("name", "implementation", "backend"),
    [
        *((name, "sdpa", backend) for name in STOCK for backend in ("prefix_tree", "dense")),
        ("Llama", "eager", "auto"),
        (TWO_WINDOWS, "eager", "auto"),
    ],
)
def test_stock_models_agree_to_the_rounding_of_float32(name, implementation, backend):
    model = stock(name, implementation)
    samples = grown(random.Random(8))
    assert max(map(len, samples)) > 8  # more than the windows
    forest = PrefixForest.from_sequences(samples).padded(8)
    edges = LossEdges.from_forest(forest)
    plain = alone(model, samples)
    with guard(forest, model):
        logp = edge_logprobs(model(**model_inputs(forest, model, backend=backend)).logits, edges)
    folded = sample_logprobs(logp, edges).split(edges.sample_offsets.diff().tolist())
    assert largest_difference(folded, plain) < 1e-5
    wanted = gradients(-torch.cat(plain).mean(), model)
    loss = -(logp * edges.weight.to(logp)).sum() / edges.num_loss_tokens
    assert largest_error(gradients(loss, model), wanted) < 1e-5


@pytest.mark.parametrize(("name", "implementation"), [("Llama", "sdpa"), ("Mistral", "eager"), (TWO_WINDOWS, "sdpa")])
def test_a_change_in_a_branch_moves_nothing_else_unless_the_mask_is_dropped(name, implementation):
    model = stock(name, implementation)
    forest = PrefixForest.from_rollout_group([1, 2, 3], [[10, 11, 12], [20, 21], [30]])
    prompt, first, siblings = slice(0, 3), slice(4, 6), slice(6, 9)  # 10 in row 3 is changed; 11 12 see it
    changed = forest.input_ids.clone()
    changed[3] = 50

    def movement(inputs):
        with torch.no_grad():
            both = [model(**{**inputs, "input_ids": ids[None]}).logits[0] for ids in (forest.input_ids, changed)]
        return (both[0] - both[1]).abs().amax(-1)

    dense = model_inputs(forest, model, backend="dense")
    for inputs in (dense, segment_inputs(forest, model)) if implementation == "sdpa" else (dense,):
        tree = movement(inputs)
        assert not tree[prompt].any() and not tree[siblings].any()  # not one bit
        assert tree[first].min() > 0
    rows = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    plain = rows if implementation == "sdpa" else torch.zeros(1, 1, 9, 9).masked_fill(~rows, torch.finfo().min)
    dropped = movement({**dense, "attention_mask": plain})
    assert not dropped[prompt].any() and dropped[siblings].min() > 0


def test_one_label_per_row_loses_most_of_a_short_answers_gradient(llama):
    """8 completions of R tokens behind a prompt of 24, mean cross-entropy: labels are far off, edges are not."""
    errors = {}
    for answer in (1, 2, 4, 16):
        generator = random.Random(answer)
        drawn = [generator.randrange(VOCAB) for _ in range(24 + 8 * answer)]
        prompt, completions = drawn[:24], [drawn[start : start + answer] for start in range(24, len(drawn), answer)]
        plain = alone(llama, [prompt + completion for completion in completions])
        wanted = gradients(-torch.cat([logp[23:] for logp in plain]).mean(), llama)

        forest = PrefixForest.from_rollout_group(prompt, completions)
        loss = folded_cross_entropy(llama(**segment_inputs(forest, llama)).logits, LossEdges.from_forest(forest))
        assert largest_error(gradients(loss, llama), wanted) < 1e-12

        folded = fold_shared_prefix_rollouts(prompt, completions)
        labels = torch.tensor(folded.labels)
        assert int((labels != CROSS_ENTROPY_IGNORE_IDX).sum()) == 8 * (answer - 1)
        if answer == 1:  # nothing is supervised: no gradient, and a mean of 0 / 0
            assert bool(functional.cross_entropy(torch.zeros(len(labels), VOCAB), labels).isnan())
            continue
        layout = PrefixForest.from_node_paths(folded.node_lengths, folded.sample_paths, folded.input_ids)
        logits = llama(**segment_inputs(layout, llama)).logits[0]
        found = gradients(functional.cross_entropy(logits, labels), llama)
        apart = torch.cat([(found[name] - part).flatten() for name, part in wanted.items()]).norm()
        errors[answer] = float(apart / torch.cat([part.flatten() for part in wanted.values()]).norm())
    assert errors[2] > 0.8 and errors[4] > 0.4 and 0.15 < errors[16] < 0.6, errors
    assert errors[2] > errors[4] > errors[16]
