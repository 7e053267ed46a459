"""Models of transformers that cannot be folded are refused with the reason; what only looks like them is not."""

from typing import Any

import pytest
import torch
import transformers
from support.causal_models import FOREST, MIXED, SAMPLES, WINDOW, error, logprobs, tiny_config, tiny_model
from support.errors import refused
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
from niels_gpt.prefix_tree.verify import verify_fold

T = len(FOREST.input_ids)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
SHORT, KINDS = {"max_position_embeddings": 12}, ["sliding_attention", "full_attention"]
LONGEST = "dynamic rotary angles depend on the longest sample of the row: 20 tokens, more than the 12"
Inputs = dict[str, Any]


def by_hand(model, *, window=None):
    """Return the inputs that would be right for any attention that goes by the mask, refused models included."""
    attn = model.config.get_text_config()._attn_implementation
    return {
        "input_ids": FOREST.input_ids[None],
        "position_ids": FOREST.position_ids[None],
        "attention_mask": hf_attention_mask(FOREST, attn, torch.float32, window=window),
    }


@pytest.mark.parametrize(
    ("model_type", "attn", "changes", "message"),
    [
        ("mpt", "eager", {}, "takes no position_ids"),
        ("bart", "sdpa", {"is_encoder_decoder": False}, "takes no position_ids"),
        ("bert", "sdpa", {}, "config.is_decoder is False"),
        ("bert", "sdpa", {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
        ("roberta", "sdpa", {"is_decoder": True}, "position_embeddings counts positions from padding_idx"),
        ("recurrent_gemma", "sdpa", {"num_hidden_layers": 3}, "layers of type linear_attention"),
        ("qwen3_next", "sdpa", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear"),
        ("lfm2", "sdpa", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("llama4_text", "sdpa", {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 2}, "chunked"),
        ("gpt_neo", "eager", {"window_size": 8}, "local layers see 8 tokens of the flat row, which has 32"),
        ("moshi", "sdpa", {}, "flash attention only"),
        ("gemma3_text", "sdpa", {"use_bidirectional_attention": True}, "looks ahead"),
        ("llama", "sdpa", {"is_causal": False}, "config.is_causal is False"),
        ("doge", "sdpa", {"keep_window_size": 20}, "keeps the best 20 keys of the flat row, which has 32 tokens"),
        ("doge", "sdpa", {"is_moe": True}, "config.is_moe is set"),
        ("llama4_text", "sdpa", {"floor_scale": 4, "no_rope_layers": [1, 0]}, "its factor follows the flat row"),
        ("llama", "sdpa", {"rope_parameters": {**DYNAMIC, "original_max_position_embeddings": 64}, **SHORT}, LONGEST),
        ("gemma3_text", "sdpa", {"rope_parameters": dict.fromkeys(KINDS, DYNAMIC), **SHORT, **MIXED}, "dynamic rotary"),
    ],
)
def test_models_that_cannot_be_folded_are_refused(model_type, attn, changes, message):
    if model_type == "gpt_neo":
        changes = {**changes, "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
    model = tiny_model(model_type, attn, **changes)
    inputs = by_hand(model, window=WINDOW if model_type == "moshi" else None)
    for call in (lambda: model_inputs(FOREST, model), lambda: check_model_inputs(FOREST, model, inputs)):
        with refused("E802", message, kind=AttentionRouteError):
            call()
    with refused("E802", "cannot be folded", kind=AttentionRouteError):
        hf_forward(model)(inputs["input_ids"], inputs["position_ids"], dense_mask(FOREST)[None, None])
    if model_type != "bert" or not model.config.is_decoder:
        assert error(model, FOREST, inputs) > 1e-3  # though the mask and the positions are right


SMALL_T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda kind=kind: getattr(transformers, f"{kind}Model")(tiny_config(kind.lower())), "has is_causal")
            for kind in ("DistilBert", "Albert")  # encoders whose config says nothing of it
        ),
        (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL_T5)), "cross-attention"),
        (lambda: tiny_model("falcon", "eager", alibi=True), "config.alibi"),
        (lambda: tiny_model("mixtral", output_router_logits=True), "config.output_router_logits"),
        (lambda: nn.Linear(2, 2), "Linear has no config._attn_implementation"),
    ],
)
def test_encoders_biases_losses_over_experts_and_models_of_other_libraries_are_refused(make, message):
    with refused("E802", message, kind=AttentionRouteError):
        model_inputs(FOREST, make().eval())


def test_chunks_and_best_keys_are_taken_where_the_row_is_no_longer():
    chunks = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    llama4, doge = tiny_model("llama4_text", attention_chunk_size=T, **chunks), tiny_model("doge", keep_window_size=T)
    for model, backend in ((llama4, "dense"), (llama4, "prefix_tree"), (doge, "dense")):
        inputs = model_inputs(FOREST, model, backend=backend)
        check_model_inputs(FOREST, model, inputs)
        assert error(model, FOREST, inputs) < 1e-5
    with refused("E802", "chunked_attention", kind=AttentionRouteError):
        model_inputs(FOREST, tiny_model("llama4_text", attention_chunk_size=T - 1, **chunks))


def test_a_convolution_along_the_row_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].short_convolution = nn.Conv1d(32, 32, 4)
    with refused("E802", "model.layers.0.short_convolution", kind=AttentionRouteError):
        model_inputs(FOREST, model)
    for tower in ("vision_tower", "audio_tower"):  # an encoder that no row of ids passes
        model = tiny_model("llama")
        model.add_module(tower, nn.Sequential(nn.Conv1d(32, 32, 4)))
        model_inputs(FOREST, model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_angles_that_depend_on_the_longest_sample_are_taken_where_all_samples_agree(kind):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 12}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}

    def model():  # "dynamic" keeps the angles of the longest sample so far
        return tiny_model("llama", rope_parameters=rope, max_position_embeddings=12)

    same = PrefixForest.from_sequences([[*SAMPLES[0][:12], token, 5] for token in (1, 2)])
    short = PrefixForest.from_sequences([sample[:12] for sample in SAMPLES])
    longer = PrefixForest.from_sequences(SAMPLES[:3])  # of 16 to 20 tokens
    for forest in (short, same, longer) if kind == "longrope" else (short, same):
        for backend in ("prefix_tree", "dense"):
            folded = model()
            assert error(folded, forest, model_inputs(forest, folded, backend=backend)) < 1e-5
    for forest in (FOREST,) if kind == "longrope" else (FOREST, longer):
        with refused("E802", kind, kind=AttentionRouteError):
            model_inputs(forest, model())
    assert error(model(), FOREST, by_hand(model())) > 1e-3
    taken = hf_forward(model())
    if kind == "longrope":
        assert verify_fold(taken, longer.padded(8), probes=1).ok
        assert not verify_fold(taken, FOREST, probes=1).ok  # its shortest sample is the opening of another one
    else:
        with refused("E802", "of 16", kind=AttentionRouteError):
            taken(FOREST.input_ids[None], FOREST.position_ids[None], dense_mask(FOREST)[None, None])
    rows = torch.arange(20)
    alone_by_mask = hf_forward(model())(torch.tensor([SAMPLES[0]]), rows[None], (rows <= rows[:, None])[None, None])
    plain = logprobs(model(), input_ids=torch.tensor([SAMPLES[0]]))
    assert (alone_by_mask[0].log_softmax(-1) - plain).abs().max() < 1e-5  # one sample is right at any length


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_chunk_size", 8, "chunks are cut along the flat row, which has 32 tokens"),
        ("use_bidirectional_attention", "all", "its attention looks ahead"),
        ("layers_block_type", ["mamba", "attention"], "layers of type mamba"),
        ("model_type", "retnet_2", "a retnet_2 carries a state along the row"),
        ("model_type", "blt_patcher", "groups of neighbouring ids"),
        ("ngram_size", 3, "groups of neighbouring ids"),
    ],
)
def test_configs_that_tell_of_another_mixing_of_tokens_are_refused(name, value, message):
    model = tiny_model("llama")
    model_inputs(FOREST, model)
    setattr(model.config, name, value)
    with refused("E802", message, kind=AttentionRouteError):
        model_inputs(FOREST, model)


@pytest.mark.parametrize(
    ("model_type", "changes", "what"),
    [
        ("llama", {"attention_dropout": 0.5}, "attention_dropout"),
        ("starcoder2", {"residual_dropout": 0.5}, "residual_dropout"),
        ("phimoe", {"router_jitter_noise": 0.3}, "router_jitter_noise"),  # it draws the experts
    ],
)
@pytest.mark.parametrize("backend", ["prefix_tree", "dense"])
def test_randomness_in_training_is_warned_of(model_type, changes, what, backend):
    model = tiny_model(model_type, **changes)
    model_inputs(FOREST, model)
    with pytest.warns(UserWarning, match=f"noise is active.*{what}"):
        inputs = model_inputs(FOREST, model.train(), backend=backend)
    torch.manual_seed(0)
    assert not torch.equal(logprobs(model, **inputs), logprobs(model, **inputs))


def test_dropout_that_is_off_or_belongs_to_another_head_is_not_warned_of():
    model_inputs(FOREST, tiny_model("llama").train())
    model = tiny_model("gpt2").train()
    assert model.config.summary_first_dropout > 0
    model_inputs(FOREST, model)
    model.transformer.drop.p = 0.5
    with pytest.warns(UserWarning, match=r"transformer\.drop"):
        model_inputs(FOREST, model)
