"""Attention by segments: exactly the pairs of the mask, equal to dense attention, forward and backward."""

from functools import partial

import pytest
import torch
from support.causal_models import FOREST, LONG, MIXED, SAMPLES, error, logprobs, tiny_model
from support.errors import refused
from support.prefix_trees import calls_of, tree, tree_keys
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from niels_gpt.prefix_tree.attention import (
    AttentionRouteError,
    Segments,
    check_model_inputs,
    dense_mask,
    hf_forward,
    model_inputs,
)
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.verify import verify_fold

segment_inputs = partial(model_inputs, backend="prefix_tree")  # these rows are so short that "auto" takes a mask


def test_tree_keys_give_the_segments_of_their_forest():
    forest = tree(2)
    keys = list(tree_keys(forest).values())
    found = Segments.from_tree_keys(*keys)
    assert found.subtree_end.tolist() == forest.subtree_end[: forest.num_tokens].tolist()
    other = keys[0].clone()
    other[int(keys[2][3]) - 1] += 1
    apart = [keys[0], keys[1][0], keys[2]]
    for wrong, found in (
        ([other, *keys[1:]], "segment 2 (rows 90 to 96)"),
        ([keys[0] - 1, *keys[1:]], "tree_kv_index has rows from -1 to 1376"),
        ([keys[0], keys[1][:-1], keys[2]], "tree_cu_seqlens_k"),
        (keys[:1] + keys[:2], "tree_cu_seqlens_q is [0, 1, 2"),
        (apart, "tree_cu_seqlens_q has the shape []"),
    ):
        with refused("E801", found):
            Segments.from_tree_keys(*wrong)


def test_a_mask_gives_the_segments_of_its_forest_or_none():
    forest = tree(3)
    found = Segments.from_mask(dense_mask(forest))
    assert found is not None and found.subtree_end.tolist() == forest.subtree_end.tolist()
    assert Segments.from_mask(dense_mask(forest, window=3)) is None
    assert Segments.from_mask(torch.ones(3, 3, dtype=torch.bool)) is None
    with refused("E801", "pre-order"):
        Segments([3, 4, 4, 4])


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_model_set_to_segments_runs_everything_else_as_before(model_type):
    model = tiny_model(model_type)
    ids = torch.tensor([SAMPLES[0][:18], SAMPLES[1][:18][::-1]])
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    packed = torch.tensor([[*range(8), *range(10)]] * 2)
    calls = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": padded},
        {"input_ids": ids, "position_ids": packed, "use_cache": False},
    ]
    with torch.no_grad():
        before = [model(**call).logits for call in calls]
        written = model.generate(ids, attention_mask=padded, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert "prefix_tree" in segment_inputs(FOREST, model)
        assert model.config._attn_implementation == "prefix_tree"
        for call, wanted in zip(calls, before, strict=True):
            assert torch.equal(model(**call).logits, wanted)
        assert torch.equal(
            model.generate(ids, attention_mask=padded, max_new_tokens=4, do_sample=False, pad_token_id=0), written
        )


def test_segments_of_another_row_and_a_mask_beside_them_are_refused():
    model = tiny_model("llama")
    inputs = segment_inputs(FOREST, model)
    check_model_inputs(FOREST, model, inputs)
    other = Segments.from_forest(PrefixForest.from_sequences(SAMPLES[:2]).padded(8))
    mask = dense_mask(FOREST)[None, None]
    for changes, message in (
        ({"prefix_tree": other}, "these belong to another tree"),
        ({"prefix_tree": FOREST}, "expected Segments"),
        ({"prefix_tree": None}, "read as packed sequences"),
        ({"attention_mask": mask}, "beside prefix_tree"),
        ({"prefix_tree": None, "tree_kv_index": torch.arange(3)}, "three tensors, or none"),
    ):
        with refused("E802", message, kind=AttentionRouteError):
            check_model_inputs(FOREST, model, {**inputs, **changes})
        if changes != {"prefix_tree": None}:
            with refused("E802", kind=AttentionRouteError):
                model(**{**inputs, **changes})
    with refused("E802", "indexer", kind=AttentionRouteError):
        model(**inputs, block_indices=torch.zeros(1))
    with refused("E802", "prefix_tree", "no cache", kind=AttentionRouteError):
        model(**{**inputs, "use_cache": True, "past_key_values": model(torch.tensor([[1, 2]])).past_key_values})
    model.set_attn_implementation("sdpa")
    with refused("E802", "prefix_tree", "ignores", kind=AttentionRouteError):
        check_model_inputs(FOREST, model, inputs)


def test_a_model_that_drops_the_segments_gets_a_mask():
    model = tiny_model("llama")
    for layer in model.model.layers:
        given = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, given=given, prefix_tree=None, **more: given(*args, **more)
    inputs = model_inputs(LONG, model)
    assert inputs["attention_mask"] is not None and model.config._attn_implementation == "sdpa"
    assert error(model, LONG, inputs) < 1e-5
    with refused("E802", "prefix_tree", "LlamaAttention", kind=AttentionRouteError):
        segment_inputs(FOREST, model)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_model_takes_tree_keys_and_reads_them_once(model_type):
    forest = PrefixForest.from_sequences(SAMPLES)
    model = tiny_model(model_type)
    inputs = segment_inputs(forest, model)
    del inputs["prefix_tree"]
    inputs |= tree_keys(forest)
    with calls_of("segments.Segments.from_tree_keys") as read:
        assert error(model, forest, {**inputs, "tree_max_seqlen_q": 9, "tree_max_seqlen_k": 20}) < 1e-5
        check_model_inputs(forest, model, inputs)
        assert len(read) == 1
    inputs["tree_kv_index"][0] = 1
    with refused("E801", "pre-order"):  # changed in place: read again
        model(**inputs)


def test_layers_that_share_keys_get_whole_rows_or_the_rows_of_a_mask():
    layers = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma4_text", num_hidden_layers=4, layer_types=layers, num_kv_shared_layers=2)
    ids = torch.tensor([SAMPLES[0][:18], SAMPLES[1][:18][::-1]])

    def run():
        model.generation_config.cache_implementation = "static"
        with torch.no_grad():
            logits = [model(input_ids=ids, logits_to_keep=last, use_cache=False).logits for last in (1, 3, 0)]
            return [*logits, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)]

    wanted = run()
    whole = model(**segment_inputs(FOREST, model)).logits[0]
    assert model.config._attn_implementation == "prefix_tree"
    for one, other in zip(wanted, run(), strict=True):
        assert float((one - other).abs().max()) < 1e-5
    for backend in ("prefix_tree", "dense"):
        hidden, head = body_forward(model, FOREST, backend=backend)
        assert float((head(hidden) - whole).detach().abs().max()) < 1e-4


def stepped(model, inputs):
    """Return the logits of a forward, and the gradients of the sum of their squares."""
    model.zero_grad()
    logits = model(**inputs).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(("model_type", "changes"), [("gemma2", MIXED), ("gpt_oss", MIXED), ("deepseek_v3", {})])
def test_softcaps_sinks_and_small_values_are_those_of_dense_attention(model_type, changes):
    model = tiny_model(model_type, "eager", **changes)
    assert model_inputs(LONG, model)["attention_mask"] is not None  # "eager" is left as it is
    dense = stepped(model, model_inputs(FOREST, model))
    batch = {"input_ids": torch.tensor([SAMPLES[0][:18]] * 2), "attention_mask": torch.ones(2, 18, dtype=torch.int64)}
    batch["attention_mask"][0, :7] = 0  # the first queries see nothing
    plain = logprobs(model, **batch)
    inputs = segment_inputs(FOREST, model)
    check_model_inputs(FOREST, model, inputs)
    assert float((logprobs(model, **batch) - plain)[7:].abs().max()) < 2e-5
    for each in (inputs, model_inputs(FOREST, model)):  # the second one has a mask, as the row is short
        for wanted, found in zip(dense, stepped(model, each), strict=True):
            assert float((wanted - found).abs().max()) <= 2e-5 * max(1.0, float(wanted.abs().max()))
    report = verify_fold(hf_forward(model), FOREST, probes=1)  # by segments, and each sample without
    assert report.ok and report.route == "by segments"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # the name of all versions
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])  # gpt2 gives the mask to the checkpoint by position
def test_checkpoints_training_and_low_precision_change_nothing(model_type):
    forest = tree(2)
    model = tiny_model(model_type, max_position_embeddings=1024).train()
    inputs = segment_inputs(forest, model)
    wanted = stepped(model, inputs)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for one, other in zip(wanted, stepped(model, inputs), strict=True):
            assert torch.equal(one, other)
    model.gradient_checkpointing_disable()
    with torch.autocast("cpu", torch.bfloat16):
        low = model(**inputs).logits
        dense = model(**model_inputs(forest, model, backend="dense")).logits
    limit = float((dense - wanted[0]).detach().abs().max())
    assert limit > 0 and float((low - dense).detach().abs().max()) < limit


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return out


@pytest.mark.parametrize("window", [None, pytest.param(256, marks=pytest.mark.slow)])
def test_a_row_of_16384_tokens_needs_no_tensor_of_all_pairs(window):
    turn = torch.arange(1024) % 90
    samples = [torch.cat([turn, turn[:at], torch.tensor([91 + at % 5]), turn[at:]])[:2048] for at in range(0, 1024, 64)]
    forest = PrefixForest.from_sequences(samples).padded(2**14)
    assert len(forest.input_ids) == 2**14
    model = tiny_model("mistral", num_hidden_layers=1, sliding_window=window, max_position_embeddings=4096)
    segment_inputs(FOREST, model)  # asks the model
    with Largest() as largest:
        hidden = model.model(**segment_inputs(forest, model)).last_hidden_state
        hidden.square().mean().backward()
    assert 2**14 * 32 * 4 <= largest.bytes <= 2**14 * 48 * 8  # values, or ids, by token; a mask has 2**28
