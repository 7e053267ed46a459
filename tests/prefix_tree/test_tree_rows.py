"""Rows of TRL: equal to TRL's own code where that is installed, and right in its loss."""

import random
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from support.errors import refused
from support.prefix_trees import grown, register_segments

from niels_gpt.prefix_tree.attention import hf_forward
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.tree_rows import from_tree_row, tree_row
from niels_gpt.prefix_tree.verify import verify_fold

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


def trained_to_the_end(seed):
    """Return `drawn` samples of two tokens and more whose last token is a target: a row tells all of them."""
    samples, masks = drawn(seed)
    longer = [[*sample, 1] if len(sample) == 1 else sample for sample in samples]
    return longer, [[0, *mask[1 : len(sample) - 1], 1] for sample, mask in zip(longer, masks, strict=True)]


@pytest.mark.parametrize("fork_early", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_read_back_is_the_row_and_its_samples(seed, fork_early):
    samples, masks = trained_to_the_end(seed)
    edges = LossEdges.from_forest(forest := PrefixForest.from_sequences(samples, loss_mask=masks))
    row = tree_row(forest, edges, fork_early=fork_early, segment_parents=True)
    read, terms = from_tree_row(row)
    assert read.samples() == samples
    assert torch.equal(read.input_ids, row["input_ids"]) and torch.equal(read.position_ids, row["position_ids"])
    assert torch.equal(terms.row[terms.sample_edge], row["token_index"])
    assert torch.equal(terms.target[terms.sample_edge], edges.target[edges.sample_edge])
    again = tree_row(read, terms, fork_early=fork_early, segment_parents=True)
    assert all(torch.equal(again[name], row[name]) for name in row)


def test_tails_without_a_term_are_read_in_order_and_never_lost():
    samples = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3], [7, 8], [9, 9]]
    masks = [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1], [0, 0], [0, 1]]
    forest = PrefixForest.from_sequences(samples, loss_mask=masks)
    for fork_early in (False, True):
        read, _ = from_tree_row(tree_row(forest, LossEdges.from_forest(forest), fork_early=fork_early))
        assert sorted(read.samples()) == sorted(samples)
        assert read.samples()[3:] == samples[3:]  # a sample without a term keeps its number


@pytest.mark.parametrize("fork_early", [False, True])
@pytest.mark.parametrize("seed", [1, 4, 5])
def test_a_right_row_is_right_whoever_gets_the_tokens_behind_the_last_target(seed, fork_early):
    samples, masks = drawn(seed)
    forest = PrefixForest.from_sequences(samples, loss_mask=masks)
    read, edges = from_tree_row(tree_row(forest, LossEdges.from_forest(forest), fork_early=fork_early))
    assert read.samples() != samples  # drawn so
    model = hf_forward(tiny_model())
    report = verify_fold(model, read, samples=samples, loss_mask=masks, edges=edges, probes=0)
    assert report.ok and report.other_tails, str(report)
    assert f"{report.other_tails} end otherwise behind their last target" in str(report)
    for changed in ([*samples[0], 96], [*samples[0][:-1], 95]):  # a token that the row lacks is no other tail
        fitting = [[*masks[0], 0][: len(changed)], *masks[1:]]
        report = verify_fold(model, read, samples=[changed, *samples[1:]], loss_mask=fitting, edges=edges)
        assert report.findings == ["samples"]


def damaged(row, name, index, value):
    column = row[name].clone()
    column[index] = value
    return {**row, name: column}


ROW_SAMPLES = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7], [8, 9]]


@pytest.mark.parametrize(
    ("name", "index", "value", "found"),
    [
        ("input_ids", 0, -1, "input_ids has -1 at 0"),
        ("position_ids", 1, 0, "position_ids: 0 at 1; expected 1"),
        ("tree_kv_index", 2, 5, "tree_kv_index: 5 at 2"),  # a segment that attends to its sibling's row
        ("tree_kv_index", 0, 99, "tree_kv_index has 99 at 0"),
        ("tree_cu_seqlens_q", 1, 0, "tree_cu_seqlens_q is "),
        ("tree_cu_seqlens_q", -1, 99, "tree_cu_seqlens_q has or ends at 99"),
        ("tree_cu_seqlens_k", -1, 99, "tree_cu_seqlens_k has or ends at 99"),
        ("tree_max_seqlens", 0, 9, "tree_max_seqlens: 9 at 0"),
        ("tree_segment_parents", 1, -1, "tree_segment_parents: -1 at 1; expected 0"),
        ("token_index", 0, 99, "token_index has 99 at 0"),
        ("token_index", 1, 0, "term 1 is row 0 of sample 0, after row 0"),
        ("segment_id", 0, 3, "term 1 is row "),
        ("segment_id", -1, 2**40, "segment_id has 1099511627776"),
        ("shift_labels", 0, 6, "term 0 is the token 6 after row 0 of sample 0"),
        ("shift_labels", 0, -100, "the rows with a label"),
    ],
)
def test_a_damaged_row_is_refused_with_what_was_found(name, index, value, found):
    forest = PrefixForest.from_sequences(ROW_SAMPLES)
    row = tree_row(forest, LossEdges.from_forest(forest), segment_parents=True)
    from_tree_row(row)
    with refused("E801", found):
        from_tree_row(damaged(row, name, index, value))


def test_rows_of_another_form_are_refused():
    forest = PrefixForest.from_sequences(ROW_SAMPLES)
    edges = LossEdges.from_forest(forest)
    row = tree_row(forest, edges)
    with refused("E801", "shift_labels"):
        from_tree_row(tree_row(forest, edges, one_label=False))
    with refused("E801", "input_ids", "each rank"):
        from_tree_row({name: column[None] for name, column in row.items()})
    with refused("E801", "input_ids", "[11]", "one axis"):
        from_tree_row({**row, "input_ids": row["input_ids"].float()})
    with refused("E801", "one_label=True"):
        tree_row(forest, edges, fork_early=True, one_label=False)
    with refused("E801", "LossEdges.from_forest"):
        tree_row(forest.padded(16), edges)
    for last, found in ((2**20, "segment_id has 1048576 at 0"), (2**20 - 1, "have 209715200 tokens")):
        forest = PrefixForest.from_sequences([range(200)])  # a short row that names many samples
        row = tree_row(forest, LossEdges.from_forest(forest))
        with refused("E801", found):
            from_tree_row({**row, "segment_id": torch.full_like(row["segment_id"], last)})


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


def test_trls_row_passes_verify_fold_and_a_damaged_one_fails():
    samples, masks = trained_to_the_end(8)
    model = tiny_model()
    row = packed(samples, masks, [torch.zeros(len(sample)) for sample in samples], torch.zeros(len(samples)))
    forest, edges = from_tree_row(row)
    given = {"samples": samples, "loss_mask": masks, "probes": 4}
    assert verify_fold(hf_forward(model), forest, edges=edges, **given).ok
    changed, edges = from_tree_row(damaged(row, "input_ids", 0, int(row["input_ids"][0]) ^ 1))
    assert verify_fold(hf_forward(model), changed, edges=edges, **given).findings == ["samples"]
    lost = {**row, "token_index": row["token_index"][:-1], "segment_id": row["segment_id"][:-1]}
    lost["shift_labels"] = torch.full_like(row["shift_labels"], -100)
    lost["shift_labels"][lost["token_index"]] = row["shift_labels"][lost["token_index"]]
    fewer, edges = from_tree_row(lost)
    report = verify_fold(hf_forward(model), fewer, edges=edges, **given)
    assert set(report.findings) & {"lost targets", "weights"}


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
