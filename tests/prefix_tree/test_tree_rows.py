"""Rows of TRL: equal to TRL's own code where that is installed, and right in its loss."""

import random
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from support.errors import refused
from support.prefix_trees import grown, register_segments

from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.tree_rows import tree_row

pytestmark = pytest.mark.usefixtures("one_thread")

Masks = list[list[int]]


def drawn(seed):
    """Return samples of several trees, with a duplicate and a prefix, and masks; every third draw trains all tokens."""
    draw = random.Random(seed)
    samples = grown(draw, samples=draw.randint(5, 22), vocab=draw.choice([2, 5, 97]))
    return samples, [[draw.randrange(2) if seed % 3 else 1 for _ in sample] for sample in samples]


def trl_modules():
    """Return TRL's trainer and packing, its utilities, and accelerate; skips the test without them."""
    names = ("trl.experimental.async_grpo.async_grpo_trainer", "trl.experimental.async_grpo.packing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its experimental modules say that they are
        return [
            pytest.importorskip(name, reason="TRL's rows need the extra rl")
            for name in (*names, "trl.trainer.utils", "accelerate")
        ]


def packed(samples, masks, old, advantages):
    """Return the row that TRL makes."""
    row = trl_modules()[1].TreeRow()
    for ids, mask, logps, advantage in zip(samples, masks, old, advantages.tolist(), strict=True):
        columns = {"input_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask), "old_log_probs": logps}
        row.add({**columns, "advantage": advantage, "group_id": 0})
    found = row.pack()
    return found


@pytest.mark.parametrize("seed", range(24))
def test_the_early_layout_is_the_row_of_trl(seed):
    samples, masks = drawn(seed)
    old, advantages = [torch.randn(len(sample)) for sample in samples], torch.randn(len(samples))
    half = len(samples) // 2 if seed % 2 else len(samples)  # joined trees share nothing, but TRL's rows do
    forest = PrefixForest.joined(
        [
            PrefixForest.from_sequences(samples[a:b], loss_mask=masks[a:b])
            for a, b in ((0, half), (half, len(samples)))
            if a < b
        ]
    )
    edges = LossEdges.from_forest(forest)
    per_token = [advantage.expand(len(sample)) for advantage, sample in zip(advantages, samples, strict=True)]
    wanted = packed(samples, masks, old, advantages)
    found = tree_row(forest, edges, fork_early=True, old_logprobs=old, advantages=per_token)
    assert list(found) == list(wanted)
    for name, column in wanted.items():
        assert found[name].dtype == column.dtype and torch.equal(found[name], column), name
    # The default has its keys and dtypes, every target as a label, and no more tokens.
    default = tree_row(forest, edges, old_logprobs=old, advantages=per_token)
    assert {name: column.dtype for name, column in default.items()} == {n: column.dtype for n, column in wanted.items()}
    assert torch.equal(default["shift_labels"][default["token_index"]], edges.target[edges.sample_edge])
    assert len(default["input_ids"]) <= len(wanted["input_ids"]) or seed % 2


def test_edges_and_layouts_that_do_not_fit_are_refused():
    forest = PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7], [8, 9]])
    edges = LossEdges.from_forest(forest)
    with refused("E801", "one_label=True"):
        tree_row(forest, edges, fork_early=True, one_label=False)
    with refused("E801", "LossEdges.from_forest"):
        tree_row(forest.padded(16), edges)


# --- one attention, TRL's loss, tree-recurrence -----------------------------------------------------------------------


def tiny_model():
    transformers = pytest.importorskip("transformers", reason="a model to test with needs the extra eagle3")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
    register_segments()
    model.set_attn_implementation("prefix_tree")
    return model


def alone(model, samples, masks):
    """Return the log-probs of the supervised tokens, each sample run by itself."""
    found = []
    for sample, mask in zip(samples, masks, strict=True):
        logp = model(input_ids=torch.tensor([sample]), use_cache=False).logits[0, :-1].log_softmax(-1)
        targets = torch.tensor(sample[1:])
        found.append(logp.gather(1, targets[:, None])[torch.tensor(mask[1:], dtype=torch.bool), 0])
    return torch.cat(found)


def gradients(model, loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("layout", [{}, {"fork_early": True}, {"one_label": False}])
def test_every_layout_is_the_samples_through_one_attention(layout):
    samples, masks = drawn(7)
    model, edges = tiny_model(), LossEdges.from_forest(PrefixForest.from_sequences(samples, loss_mask=masks))
    row = tree_row(PrefixForest.from_sequences(samples, loss_mask=masks), edges, **layout)
    keys = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    ids, positions = row["input_ids"][None], row["position_ids"][None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **keys).logits
    if "shift_labels" in row:
        index = row["token_index"]
        found = logits[0].log_softmax(-1)[index, row["shift_labels"][index]]
    else:
        found = sample_logprobs(edge_logprobs(logits, edges), edges)
    wanted = alone(model, samples, masks)
    assert (found - wanted).abs().max() < 1e-5
    weight = torch.randn(len(wanted))
    a, b = (gradients(model, (logp * weight).sum()) for logp in (found, wanted))
    assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("fork_early", [False, True])
def test_the_loss_of_trls_trainer_is_that_of_the_samples(fork_early):
    trainer, packing, utils, accelerate = trl_modules()
    samples, masks = drawn(9)
    model = tiny_model()
    wanted = alone(model, samples, masks)
    old = [torch.randn(len(sample)) * 0.3 - 4 for sample in samples]
    advantages = torch.randn(len(samples))

    class Row(packing.TreeRow):
        def pack(self):
            forest = PrefixForest.from_sequences(samples, loss_mask=masks)
            per_token = [advantage.expand(len(sample)) for advantage, sample in zip(advantages, samples, strict=True)]
            fields = {"old_logprobs": old, "advantages": per_token}
            return tree_row(forest, LossEdges.from_forest(forest), fork_early=fork_early, **fields)

    row = Row()
    for ids, mask, logps, advantage in zip(samples, masks, old, advantages.tolist(), strict=True):
        sample = {"input_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask), "old_log_probs": logps}
        row.add({**sample, "advantage": advantage, "group_id": 0, "metrics": {}})
    batch = trainer.DataCollatorForRollout(pad_token_id=0).torch_call([[row]])
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    numbers = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    stand_in = SimpleNamespace(  # what compute_loss reads of the trainer, whose own start needs a GPU and a server
        epsilon_low=0.2,
        epsilon_high=0.2,
        accelerator=accelerate.Accelerator(cpu=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in numbers},
    )
    loss = trainer.AsyncGRPOTrainer.compute_loss(stand_in, model, batch)
    before = torch.cat([part[1:][torch.tensor(mask[1:], dtype=bool)] for part, mask in zip(old, masks, strict=True)])
    gain = torch.cat([a.expand(sum(mask[1:])) for a, mask in zip(advantages, masks, strict=True)])
    ratio = (wanted - before).exp()
    expected = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    assert (loss - expected).abs() < 1e-5 * expected.abs()
    a, b = gradients(model, loss), gradients(model, expected)
    assert (a - b).norm() < 1e-5 * b.norm()
    assert stand_in._metrics["train"]["ratio"] == [pytest.approx(float(ratio.mean().detach()), rel=1e-5)]


def test_tree_recurrence_reads_the_same_tree_from_either_key():
    plans = pytest.importorskip("tree_recurrence", reason="the package of recurrent layers is not installed")
    samples, masks = drawn(10)
    forest = PrefixForest.from_sequences(samples, loss_mask=masks)
    for fork_early in (False, True):
        row = tree_row(forest, LossEdges.from_forest(forest), fork_early=fork_early, segment_parents=True)
        keys = {name: column for name, column in row.items() if name.startswith("tree_")}
        derived = plans.TreePlan.from_kwargs({name: keys[name] for name in keys if "segment" not in name})
        given = plans.TreePlan.from_kwargs({name: keys[name] for name in keys if "kv" not in name})
        for name in ("cu_seqlens", "parents", "depths", "kv_index", "cu_seqlens_k"):
            assert (getattr(derived, name) == getattr(given, name)).all(), name
