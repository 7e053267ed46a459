"""Folded rows in real models of transformers: equal to the samples alone by the right route, refused by every other."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import transformers
from support.causal_models import FOREST, LONG, MIXED, SAMPLES, WINDOW, alone, error, logprobs, tiny_model, without
from support.errors import refused
from support.prefix_trees import window_of_all
from torch import nn

from niels_gpt.prefix_tree.attention import (
    AttentionRouteError,
    check_model_inputs,
    dense_mask,
    hf_attention_mask,
    hf_forward,
    model_inputs,
)
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.segments_plan import dense_is_faster
from niels_gpt.prefix_tree.verify import verify_fold

T = len(FOREST.input_ids)
Inputs = dict[str, Any]
dense_inputs = partial(model_inputs, backend="dense")


@pytest.mark.parametrize(
    ("attn", "model_type", "changes"),
    [  # the other architectures, on one route each, in test_prefix_tree_architectures.py
        ("eager", "llama", {}),
        ("sdpa", "qwen2", {"use_sliding_window": False}),
        ("eager", "qwen2", MIXED),
        ("sdpa", "gemma3_text", MIXED),
        ("eager", "mistral", {}),  # one window for all layers
        ("sdpa", "mistral", {"sliding_window": None}),
        ("eager", "gpt2", {}),  # learned positions
        ("eager", "gemma2", MIXED),  # softcaps
        ("eager", "gpt_oss", MIXED),  # sinks
    ],
)
def test_a_folded_row_has_the_log_probabilities_of_its_samples(attn, model_type, changes):
    model = tiny_model(model_type, attn, **changes)
    inputs = model_inputs(FOREST, model, backend="prefix_tree" if attn == "sdpa" else "auto")
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5
    assert inputs["use_cache"] is False and (inputs["attention_mask"] is None) == (attn == "sdpa")


def test_short_rows_get_a_mask_and_long_ones_segments():
    model = tiny_model("llama")
    assert not dense_is_faster(len(LONG.input_ids), model.config.hidden_size)
    for forest, by_segments in ((FOREST, False), (LONG, True), (FOREST, False)):  # whichever way was taken before
        inputs = model_inputs(forest, model)
        check_model_inputs(forest, model, inputs)
        assert ("prefix_tree" in inputs, inputs["attention_mask"] is None) == (by_segments, by_segments)
        assert error(model, forest, inputs) < 1e-5
    for attn in ("sdpa", "eager", "flex_attention"):  # asked for, there are segments at any length
        assert "prefix_tree" in model_inputs(FOREST, tiny_model("llama", attn), backend="prefix_tree")


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2])
def test_a_window_is_that_of_transformers_to_the_token(length):
    model = tiny_model("mistral")
    forest = PrefixForest.from_sequences([list(range(3, 3 + length)), [3, 4, 50]])
    assert error(model, forest, dense_inputs(forest, model)) < 1e-5
    mask = dense_inputs(forest, model)["attention_mask"][0, 0]
    assert torch.equal(mask, dense_mask(forest)) == (length <= WINDOW)
    if length > WINDOW:
        for off in (WINDOW - 1, WINDOW + 1):
            inputs = {**dense_inputs(forest, model), "attention_mask": dense_mask(forest, window=off)[None, None]}
            assert error(model, forest, inputs) > 1e-3
            with refused("E802", "attention_mask", "pairs differ", kind=AttentionRouteError):
                check_model_inputs(forest, model, inputs)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_layers_with_different_windows_get_a_mask_each_only_where_a_sample_is_longer(attn):
    model = tiny_model("qwen2", attn, **MIXED)
    masks = dense_inputs(FOREST, model)["attention_mask"]
    assert set(masks) == {"sliding_attention", "full_attention"}
    short = PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6, 7, 8]])
    assert dense_inputs(short, model)["attention_mask"].shape == (1, 1, 8, 8)
    assert error(model, short, dense_inputs(short, model)) < 1e-5
    kinds = {kind: dense_inputs(short, model)["attention_mask"] for kind in masks}
    check_model_inputs(short, model, {**dense_inputs(short, model), "attention_mask": kinds})  # the same, spelled out


@pytest.mark.parametrize(
    ("low", "dtype"), [(-1e4, torch.bfloat16), (-1e9, torch.float32), (-float("inf"), torch.bfloat16)]
)
def test_other_low_values_of_an_additive_mask_are_taken(low, dtype):
    model = tiny_model("llama", "eager").to(dtype)
    quantized = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    model._parameters = {"quantized": quantized, **model._parameters}  # the mask has the dtype of floating ones
    right = dense_inputs(FOREST, model)
    inputs = {**right, "attention_mask": right["attention_mask"].clamp(low)}
    inputs["attention_mask"][right["attention_mask"] < 0] = low
    check_model_inputs(FOREST, model, inputs)
    assert torch.equal(logprobs(model, **inputs), logprobs(model, **right))


@pytest.mark.parametrize("given", ["an additive mask on sdpa", "embeddings for ids"])
def test_other_inputs_that_mean_the_same_are_taken(given):
    model = tiny_model("llama")
    inputs = dense_inputs(FOREST, model)
    if given == "embeddings for ids":
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    else:
        inputs["attention_mask"] = hf_attention_mask(FOREST, "eager", torch.float32)
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5


@pytest.mark.parametrize(("model_type", "more"), [("llama", {}), ("gemma", MIXED), ("phi", {})])
def test_a_window_left_over_in_the_config_of_a_model_without_windows_is_none(model_type, more):
    model = tiny_model(model_type, sliding_window=WINDOW, **more)
    assert model.config.sliding_window == WINDOW  # kept by transformers, and used by nothing
    inputs = dense_inputs(FOREST, model)
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5
    assert verify_fold(hf_forward(model), FOREST, probes=1).ok


def test_a_window_under_another_name_or_of_a_config_with_an_init_of_its_own_is_one():
    class OwnConfig(transformers.LlamaConfig):
        def __init__(self, sliding_window=None, **more):
            super().__init__(**more)
            self.sliding_window = sliding_window

    class MappedConfig(transformers.LlamaConfig):
        attribute_map: ClassVar[dict[str, str]] = {"sliding_window": "attention_window_size"}

    model = tiny_model("llama")

    class ComputedConfig(transformers.LlamaConfig):
        def __init__(self, **more):
            super().__init__(**more)
            self.sliding_window = WINDOW

    for config in (OwnConfig(sliding_window=WINDOW), MappedConfig(attention_window_size=WINDOW), ComputedConfig()):
        config._attn_implementation = "sdpa"
        model.config = config
        mask = dense_inputs(FOREST, model)["attention_mask"][0, 0]
        assert torch.equal(mask, dense_mask(FOREST, window=WINDOW))


@pytest.mark.parametrize(
    ("attn", "model_type", "changes"), [("sdpa", "llama", {}), ("eager", "mistral", {}), ("eager", "qwen2", MIXED)]
)
def test_hf_forward_takes_a_boolean_mask_without_windows(attn, model_type, changes):
    model = tiny_model(model_type, attn, **changes)
    forward = hf_forward(model)
    ids, positions, mask = FOREST.input_ids[None], FOREST.position_ids[None], dense_mask(FOREST)[None, None]
    with torch.no_grad():
        found = forward(ids, positions, mask)[0].log_softmax(-1)[FOREST.sample_rows]
        sample = torch.tensor([SAMPLES[0]])
        rows = torch.arange(sample.shape[1])
        one = forward(sample, rows[None], (rows <= rows[:, None])[None, None])[0].log_softmax(-1)
    assert (found - alone(model, FOREST)).abs().max() < 1e-5
    assert (one - logprobs(model, input_ids=sample)).abs().max() < 1e-5
    with refused("E802", "torch.float32", "bool", kind=AttentionRouteError):
        forward(ids, positions, mask.float())
    with refused("E802", "[1, T]", kind=AttentionRouteError):
        forward(ids, positions, mask[0])
    model.config._attn_implementation = "flash_attention_2"
    with refused("E802", "sdpa", "attn_implementation=", kind=AttentionRouteError):
        forward(ids, positions, mask)


def test_hf_forward_runs_one_sample_as_anyone_would():
    model = tiny_model("mistral")
    given = []
    model.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    forward = hf_forward(model)
    assert forward.model is model
    rows = torch.arange(20)
    causal = (rows <= rows[:, None])[None, None]
    forward(torch.tensor([SAMPLES[0]]), rows[None], causal)
    assert set(given[-1]) == {"input_ids", "use_cache"}
    forward(torch.tensor([SAMPLES[0]]), rows[None] + 1, causal)  # positions of a wrong fold are not put right
    assert set(given[-1]) == {"input_ids", "use_cache", "position_ids", "attention_mask"}


def test_a_rule_of_ours_that_is_wrong_is_seen_by_verify_fold():
    model = tiny_model("llama")
    assert verify_fold(hf_forward(model), FOREST, probes=1).ok
    with window_of_all(WINDOW):  # which the model has not
        report = verify_fold(hf_forward(model), FOREST, probes=1)
    assert not report.ok and report.logprob_error is not None and report.logprob_error > 1e-3
    assert report.gradient_error is not None  # the parameters are found by forward.model


ADDED = hf_attention_mask(FOREST, "eager", torch.float32)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()[None, None]


def changed(**values):
    return lambda inputs: {**inputs, **values}


@pytest.mark.parametrize(
    ("attn", "change", "message"),
    [
        ("sdpa", without("attention_mask"), "read as packed sequences"),
        ("eager", without("attention_mask"), "read as packed sequences"),
        ("sdpa", changed(attention_mask=torch.ones(1, T, dtype=torch.long)), "fewer dimensions"),
        ("eager", changed(attention_mask=torch.ones(1, T, dtype=torch.long)), "fewer dimensions"),
        ("sdpa", without("position_ids"), "position_ids is NoneType"),
        ("sdpa", changed(position_ids=torch.arange(T)[None]), "each branch continues from its parent"),
        ("eager", changed(attention_mask=dense_mask(FOREST)[None, None]), '"eager" adds it to the scores'),
        ("eager", changed(attention_mask=dense_mask(FOREST)[None, None].long()), "torch.int64"),
        ("sdpa", changed(attention_mask=CAUSAL), "row 20 must not see row 14"),
        ("sdpa", changed(attention_mask=dense_mask(FOREST).T[None, None]), "row 0 must not see"),
        ("sdpa", changed(attention_mask=torch.eye(T, dtype=torch.bool)[None, None]), "row 1 must see row 0"),
        (
            "eager",
            changed(attention_mask=torch.zeros(1, 1, T, T)),
            "row 0 has 0, expected -1e4",
        ),
        ("eager", changed(attention_mask=ADDED.clamp(-1)), "row 0 has -1,"),
        ("eager", changed(attention_mask=ADDED + torch.arange(T)), "has 1, expected 0"),  # as those of a bias
    ],
)
def test_inputs_that_are_silently_wrong_are_errors(attn, change, message):
    model = tiny_model("llama", attn)
    inputs = change(dense_inputs(FOREST, model))
    assert error(model, FOREST, inputs) > 1e-3  # no error, no warning, other values
    with refused("E802", message, kind=AttentionRouteError):
        check_model_inputs(FOREST, model, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(attention_mask=dense_mask(FOREST)[None]), "fewer dimensions"),
        (changed(attention_mask=hf_attention_mask(FOREST, "eager", torch.float64)), "torch.float64"),
        (changed(attention_mask={"full_attention": dense_mask(FOREST)[None, None]}), "the model has no layer types"),
        (changed(attention_mask=dense_mask(FOREST)[None, None, :, 1:]), "[1, 1, 32, 31]"),
        (changed(input_ids=FOREST.input_ids.repeat(2, 1)), "one row with all groups"),
        (changed(input_ids=FOREST.input_ids[None] + 1), "the values differ"),
        (changed(input_ids=None), "input_ids is NoneType"),
        (changed(position_ids=FOREST.position_ids[None, 1:]), "forest.position_ids[None]"),
        (changed(use_cache=True), "use_cache=False"),
        (changed(past_key_values=transformers.DynamicCache()), "a cache belongs to one sequence"),
        (changed(encoder_hidden_states=torch.zeros(1)), "encoder states"),
        (changed(output_router_logits=True), "counts a shared prompt once"),
    ],
)
def test_further_inputs_are_refused(change, message):
    model = tiny_model("llama")
    with refused("E802", message, kind=AttentionRouteError):
        check_model_inputs(FOREST, model, change(dense_inputs(FOREST, model)))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_wrong_masks_of_layers_with_different_windows_are_refused(kind):
    model = tiny_model("gemma3_text", **MIXED)
    inputs = dense_inputs(FOREST, model)
    masks = inputs["attention_mask"]
    assert error(model, FOREST, {**inputs, "attention_mask": masks[kind]}) > 1e-3
    for wrong, said in (
        (masks[kind], "layers see different windows"),
        (dict.fromkeys(masks, masks[kind]), "pairs differ"),
        ({kind: masks[kind]}, "['full_attention', 'sliding_attention']"),
    ):
        with refused("E802", said, kind=AttentionRouteError):
            check_model_inputs(FOREST, model, {**inputs, "attention_mask": wrong})


def test_the_models_own_loss_is_refused_unless_the_labels_are_shifted():
    model = tiny_model("llama")
    forest = PrefixForest.from_sequences([[1, 2, 10, 11], [1, 2, 20, 21, 22]])
    labels = torch.tensor([[-100, -100, 11, -100, 21, 22, -100]])  # as fold_shared_prefix_rollouts makes them
    inputs = {**dense_inputs(forest, model), "labels": labels}
    with torch.no_grad():
        truth = -alone(model, forest)[[2, 6, 7], [11, 21, 22]].mean()
        assert abs(model(**inputs).loss - truth) > 1e-2
        assert abs(model(**inputs, shift_labels=labels).loss - truth) < 1e-5
    check_model_inputs(forest, model, {**inputs, "shift_labels": labels})
    with refused("E802", "folded_cross_entropy", kind=AttentionRouteError):
        check_model_inputs(forest, model, inputs)


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("flash_attention_2", "packed sequences"),
        ("flash_attention_3", "packed sequences"),
        ("kernels-community/flash-attn3", "packed sequences"),
        ("flex_attention", "BlockMask"),
        ("paged|sdpa", "cache of pages"),
        ("magi", "not known here"),
        ("Sdpa", "not known here"),
    ],
)
def test_other_attention_routes_are_refused(attn, message):
    model = tiny_model("llama")
    inputs = dense_inputs(FOREST, model)
    model.config._attn_implementation = attn
    for call in (
        lambda: hf_attention_mask(FOREST, attn, torch.float32),
        lambda: dense_inputs(FOREST, model),
        lambda: check_model_inputs(FOREST, model, inputs),
    ):
        with refused("E802", message, 'attn_implementation="sdpa', "eager", kind=AttentionRouteError):
            call()
