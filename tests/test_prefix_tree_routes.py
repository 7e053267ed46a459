"""Folded rows in real models of transformers: equal to the samples alone by the right route, refused by every other."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from causal_models import SAMPLES, WINDOW, alone, error, logprobs, tiny_config, tiny_model
from torch import Tensor, nn

from niels_gpt.prefix_tree import attention
from niels_gpt.prefix_tree.attention import (
    AttentionRouteError,
    check_model_inputs,
    dense_mask,
    guard,
    hf_attention_mask,
    hf_forward,
    model_inputs,
)
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.verify import verify_fold

FOREST = PrefixForest.from_sequences(SAMPLES).padded(8)
T = len(FOREST.input_ids)
BOTH = pytest.mark.parametrize("attn", ["sdpa", "eager"])
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
Inputs = dict[str, Any]


def by_hand(model: Any, *, window: int | None = None) -> Inputs:
    """Return the inputs that would be right for any attention that goes by the mask, refused models included."""
    attn = model.config.get_text_config()._attn_implementation
    return {
        **right_for_any_mask(FOREST),
        "attention_mask": hf_attention_mask(FOREST, attn, torch.float32, window=window),
    }


# --- right ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen2", MIXED),
        ("qwen3", {"use_sliding_window": False}),
        ("qwen3", MIXED),
        ("mistral", {}),  # one window for all layers
        ("mistral", {"sliding_window": None}),
        ("gemma", {}),
        ("gemma3_text", MIXED),
        ("mixtral", {}),
        ("gpt2", {}),  # learned positions
    ],
)
def test_a_folded_row_has_the_log_probabilities_of_its_samples(attn: str, model_type: str, changes: Inputs) -> None:
    model = tiny_model(model_type, attn, **changes)
    inputs = model_inputs(FOREST, model)
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5
    assert inputs["use_cache"] is False


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_softcaps_and_sinks_are_right_on_eager(model_type: str) -> None:
    model = tiny_model(model_type, "eager", **MIXED)
    assert error(model, FOREST, model_inputs(FOREST, model)) < 1e-5


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2])
def test_a_window_is_that_of_transformers_to_the_token(length: int) -> None:
    model = tiny_model("mistral")
    forest = PrefixForest.from_sequences([list(range(3, 3 + length)), [3, 4, 50]])
    assert error(model, forest, model_inputs(forest, model)) < 1e-5
    mask = model_inputs(forest, model)["attention_mask"][0, 0]
    assert torch.equal(mask, dense_mask(forest)) == (length <= WINDOW)
    if length > WINDOW:
        for off in (WINDOW - 1, WINDOW + 1):
            inputs = {**model_inputs(forest, model), "attention_mask": dense_mask(forest, window=off)[None, None]}
            assert error(model, forest, inputs) > 1e-3
            with pytest.raises(AttentionRouteError, match="pairs differ"):
                check_model_inputs(forest, model, inputs)


@BOTH
def test_layers_with_different_windows_get_a_mask_each_only_where_a_sample_is_longer(attn: str) -> None:
    model = tiny_model("qwen2", attn, **MIXED)
    masks = model_inputs(FOREST, model)["attention_mask"]
    assert set(masks) == {"sliding_attention", "full_attention"}
    short = PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6, 7, 8]])
    assert model_inputs(short, model)["attention_mask"].shape == (1, 1, 8, 8)
    assert error(model, short, model_inputs(short, model)) < 1e-5
    kinds = {kind: model_inputs(short, model)["attention_mask"] for kind in masks}
    check_model_inputs(short, model, {**model_inputs(short, model), "attention_mask": kinds})  # the same, spelled out


def test_the_model_takes_the_additive_mask_on_sdpa_too() -> None:
    model = tiny_model("llama")
    inputs = {**model_inputs(FOREST, model), "attention_mask": hf_attention_mask(FOREST, "eager", torch.float32)}
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5


@pytest.mark.parametrize("low", [-1e4, -1e9, -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_low_values_of_an_additive_mask_are_taken(low: float, dtype: torch.dtype) -> None:
    model = tiny_model("llama", "eager").to(dtype)
    right = model_inputs(FOREST, model)
    inputs = {**right, "attention_mask": right["attention_mask"].clamp(low)}
    inputs["attention_mask"][right["attention_mask"] < 0] = low
    check_model_inputs(FOREST, model, inputs)
    assert torch.equal(logprobs(model, **inputs), logprobs(model, **right))


@pytest.mark.parametrize("model_type", ["llama", "gemma", "olmo2", "phi"])
@pytest.mark.parametrize("more", [{}, MIXED])
def test_a_window_left_over_in_the_config_of_a_model_without_windows_is_none(model_type: str, more: Inputs) -> None:
    model = tiny_model(model_type, sliding_window=WINDOW, **more)
    assert model.config.sliding_window == WINDOW  # kept by transformers, and used by nothing
    inputs = model_inputs(FOREST, model)
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5
    assert verify_fold(hf_forward(model), FOREST, probes=1).ok


def test_a_window_under_another_name_or_of_a_config_with_an_init_of_its_own_is_one() -> None:
    class OwnConfig(transformers.LlamaConfig):
        def __init__(self, sliding_window: int | None = None, **more: Any) -> None:
            super().__init__(**more)
            self.sliding_window = sliding_window

    class MappedConfig(transformers.LlamaConfig):
        attribute_map: ClassVar[dict[str, str]] = {"sliding_window": "attention_window_size"}

    model = tiny_model("llama")

    class ComputedConfig(transformers.LlamaConfig):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            self.sliding_window = WINDOW

    for config in (OwnConfig(sliding_window=WINDOW), MappedConfig(attention_window_size=WINDOW), ComputedConfig()):
        config._attn_implementation = "sdpa"
        model.config = config
        mask = model_inputs(FOREST, model)["attention_mask"][0, 0]
        assert torch.equal(mask, dense_mask(FOREST, window=WINDOW))


def test_embeddings_may_be_given_for_ids() -> None:
    model = tiny_model("llama")
    inputs = model_inputs(FOREST, model)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    check_model_inputs(FOREST, model, inputs)
    assert error(model, FOREST, inputs) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["DataParallel", "compile"]
)
def test_wrapped_models_are_looked_into(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(tiny_model("mistral"))
    assert torch.equal(model_inputs(FOREST, model)["attention_mask"][0, 0], dense_mask(FOREST, window=WINDOW))
    with guard(FOREST, model), pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
        model(input_ids=FOREST.input_ids[None], position_ids=FOREST.position_ids[None])


class Adapted(nn.Module):
    """What PEFT's wrapper has: adapters live inside the base model, learned tokens are put before the row."""

    def __init__(self, model: nn.Module, *, is_prompt_learning: bool) -> None:
        super().__init__()
        self.base_model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def test_adapters_are_looked_into_and_learned_tokens_before_the_row_are_refused() -> None:
    model = Adapted(tiny_model("llama"), is_prompt_learning=False)
    inputs = model_inputs(FOREST, model)
    with guard(FOREST, model):
        model(**inputs)
        with pytest.raises(AttentionRouteError, match="use_cache was given"):
            model(**{**inputs, "use_cache": True})
    with pytest.raises(AttentionRouteError, match="learned tokens before the row"):
        model_inputs(FOREST, Adapted(tiny_model("llama"), is_prompt_learning=True))


@BOTH
@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("mistral", {}), ("qwen2", MIXED)])
def test_hf_forward_takes_a_boolean_mask_without_windows(attn: str, model_type: str, changes: Inputs) -> None:
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
    with pytest.raises(AttentionRouteError, match="expected bool"):
        forward(ids, positions, mask.float())
    with pytest.raises(AttentionRouteError, match=r"expected \[1, T\]"):
        forward(ids, positions, mask[0])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(AttentionRouteError, match="sdpa"):
        forward(ids, positions, mask)


def test_hf_forward_runs_one_sample_as_anyone_would() -> None:
    model = tiny_model("mistral")
    given: list[Inputs] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    forward = hf_forward(model)
    assert forward.model is model
    rows = torch.arange(20)
    causal = (rows <= rows[:, None])[None, None]
    forward(torch.tensor([SAMPLES[0]]), rows[None], causal)
    assert set(given[-1]) == {"input_ids", "use_cache"}
    forward(torch.tensor([SAMPLES[0]]), rows[None] + 1, causal)  # positions of a wrong fold are not put right
    assert set(given[-1]) == {"input_ids", "use_cache", "position_ids", "attention_mask"}


def test_a_rule_of_ours_that_is_wrong_is_seen_by_verify_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert verify_fold(hf_forward(model), FOREST, probes=1).ok
    monkeypatch.setattr(attention, "_windows", lambda *_: {"": WINDOW})  # a window that the model has not
    report = verify_fold(hf_forward(model), FOREST, probes=1)
    assert not report.ok and report.logprob_error is not None and report.logprob_error > 1e-3
    assert report.gradient_error is not None  # the parameters are found by forward.model


def test_the_dtype_of_a_mask_is_that_of_floating_parameters() -> None:
    model = tiny_model("llama", "eager")
    head = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)  # as of quantized weights
    model._parameters = {"quantized": head, **model._parameters}
    assert next(model.parameters()).dtype == torch.uint8
    assert model_inputs(FOREST, model)["attention_mask"].dtype == torch.float32


# --- wrong inputs -----------------------------------------------------------------------------------------------------

RAMP = torch.arange(T)  # scores that grow along the row, as those of a bias
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()[None, None]


def without(name: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {key: value for key, value in inputs.items() if key != name}


def changed(**values: Any) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {**inputs, **values}


@pytest.mark.parametrize(
    ("attn", "change", "message"),
    [
        ("sdpa", without("attention_mask"), "taken for packed sequences"),
        ("eager", without("attention_mask"), "taken for packed sequences"),
        ("sdpa", changed(attention_mask=torch.ones(1, T, dtype=torch.long)), "fewer dimensions"),
        ("eager", changed(attention_mask=torch.ones(1, T, dtype=torch.long)), "fewer dimensions"),
        ("sdpa", without("position_ids"), "position_ids is NoneType; expected forest.position_ids"),
        ("sdpa", changed(position_ids=torch.arange(T)[None]), "every branch goes on from its parent"),
        ("eager", changed(attention_mask=dense_mask(FOREST)[None, None]), '"eager" adds it to the scores'),
        ("eager", changed(attention_mask=dense_mask(FOREST)[None, None].long()), "torch.int64"),
        ("sdpa", changed(attention_mask=CAUSAL), r"pairs differ, first: row 20 must not see row 14\b"),
        ("sdpa", changed(attention_mask=dense_mask(FOREST).T[None, None]), "pairs differ, first: row 0 must not see"),
        ("sdpa", changed(attention_mask=torch.eye(T, dtype=torch.bool)[None, None]), "first: row 1 must see row 0"),
        (
            "eager",
            changed(attention_mask=torch.zeros(1, 1, T, T)),
            r"row 0 has 0, expected -1e4 or less, as it must not see row 1\b",
        ),
        ("eager", changed(attention_mask=hf_attention_mask(FOREST, "eager", torch.float32).clamp(-1)), "row 0 has -1,"),
        (
            "eager",
            changed(attention_mask=hf_attention_mask(FOREST, "eager", torch.float32) + RAMP),
            "has 1, expected 0, as it",
        ),
    ],
)
def test_inputs_that_would_be_silently_wrong_are_refused(
    attn: str, change: Callable[[Inputs], Inputs], message: str
) -> None:
    model = tiny_model("llama", attn)
    inputs = change(model_inputs(FOREST, model))
    assert error(model, FOREST, inputs) > 1e-3  # no error, no warning, other values
    with pytest.raises(AttentionRouteError, match=message):
        check_model_inputs(FOREST, model, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(attention_mask=dense_mask(FOREST)[None]), "fewer dimensions"),
        (changed(attention_mask=hf_attention_mask(FOREST, "eager", torch.float64)), "torch.float64"),
        (changed(attention_mask={"full_attention": dense_mask(FOREST)[None, None]}), "the model has no layer types"),
        (changed(attention_mask=dense_mask(FOREST)[None, None, :, 1:]), r"\[1, 1, 32, 31\]"),
        (changed(input_ids=FOREST.input_ids.repeat(2, 1)), "one row, with all its groups"),
        (changed(input_ids=FOREST.input_ids[None] + 1), "which these are not"),
        (changed(input_ids=None), "input_ids is NoneType"),
        (changed(position_ids=FOREST.position_ids[None, 1:]), r"expected forest.position_ids\[None\]"),
        (changed(use_cache=True), "pass use_cache=False"),
        (changed(past_key_values=transformers.DynamicCache()), "a cache belongs to one sequence"),
        (changed(encoder_hidden_states=torch.zeros(1)), "encoder states"),
        (changed(output_router_logits=True), "counts a shared prompt once"),
    ],
)
def test_further_inputs_are_refused(change: Callable[[Inputs], Inputs], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(AttentionRouteError, match=message):
        check_model_inputs(FOREST, model, change(model_inputs(FOREST, model)))


@pytest.mark.parametrize("change", ["full", "sliding", "a type is missing"])
def test_wrong_masks_of_layers_with_different_windows_are_refused(change: str) -> None:
    model = tiny_model("gemma3_text", **MIXED)
    inputs = model_inputs(FOREST, model)
    masks = inputs["attention_mask"]
    if change == "a type is missing":
        inputs["attention_mask"] = {"full_attention": masks["full_attention"]}
        with pytest.raises(AttentionRouteError, match=r"a dict with \['full_attention', 'sliding_attention'\]"):
            check_model_inputs(FOREST, model, inputs)
        return
    inputs["attention_mask"] = masks[f"{change}_attention"]
    assert error(model, FOREST, inputs) > 1e-3
    with pytest.raises(AttentionRouteError, match="layers see different windows"):
        check_model_inputs(FOREST, model, inputs)
    inputs["attention_mask"] = dict.fromkeys(masks, masks[f"{change}_attention"])
    with pytest.raises(AttentionRouteError, match="pairs differ"):
        check_model_inputs(FOREST, model, inputs)


def test_a_mask_without_the_models_window_is_refused() -> None:
    model = tiny_model("mistral")
    inputs = {**model_inputs(FOREST, model), "attention_mask": dense_mask(FOREST)[None, None]}
    assert error(model, FOREST, inputs) > 1e-3  # transformers adds no window to a mask of four dimensions
    with pytest.raises(AttentionRouteError, match=r"row 6 must not see row 0\b"):
        check_model_inputs(FOREST, model, inputs)


def test_the_models_own_loss_is_refused_unless_the_labels_are_shifted() -> None:
    model = tiny_model("llama")
    forest = PrefixForest.from_sequences([[1, 2, 10, 11], [1, 2, 20, 21, 22]])
    labels = torch.tensor([[-100, -100, 11, -100, 21, 22, -100]])  # as fold_shared_prefix_rollouts makes them
    inputs = {**model_inputs(forest, model), "labels": labels}
    with torch.no_grad():
        truth = -alone(model, forest)[[2, 6, 7], [11, 21, 22]].mean()
        found = {
            name: model(**inputs, **more).loss for name, more in {"own": {}, "mine": {"shift_labels": labels}}.items()
        }
    assert abs(found["own"] - truth) > 1e-2
    assert abs(found["mine"] - truth) < 1e-5
    check_model_inputs(forest, model, {**inputs, "shift_labels": labels})
    with pytest.raises(AttentionRouteError, match="folded_cross_entropy"):
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
def test_other_attention_routes_are_refused(attn: str, message: str) -> None:
    model = tiny_model("llama")
    inputs = model_inputs(FOREST, model)
    model.config._attn_implementation = attn
    for call in (
        lambda: hf_attention_mask(FOREST, attn, torch.float32),
        lambda: model_inputs(FOREST, model),
        lambda: check_model_inputs(FOREST, model, inputs),
    ):
        with pytest.raises(AttentionRouteError, match=f'{message}.*: use attn_implementation="sdpa" or "eager"'):
            call()


# --- wrong models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "attn", "changes", "message"),
    [
        ("mpt", "eager", {}, "takes no position_ids"),
        ("bart", "sdpa", {"is_encoder_decoder": False}, "takes no position_ids"),
        ("rwkv", "eager", {}, "takes no position_ids"),
        ("bert", "sdpa", {}, "config.is_decoder is False"),
        ("bert", "sdpa", {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
        ("roberta", "sdpa", {"is_decoder": True}, "position_embeddings counts positions from padding_idx"),
        ("mamba2", "eager", {}, "layers of type linear_attention"),
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
        ("llama4_text", "sdpa", {"floor_scale": 4, "no_rope_layers": [1, 0]}, "its factor goes by the flat row"),
        (
            "llama",
            "sdpa",
            {"rope_parameters": {**DYNAMIC, "original_max_position_embeddings": 64}, "max_position_embeddings": 12},
            "dynamic rotary angles depend on the longest sample of the row: 20 tokens, more than the 12",
        ),
        (
            "gemma3_text",
            "sdpa",
            {
                "rope_parameters": {"sliding_attention": DYNAMIC, "full_attention": DYNAMIC},
                "max_position_embeddings": 12,
            }
            | MIXED,
            "dynamic rotary angles depend on the longest sample",
        ),
        (
            "llama",
            "sdpa",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
                "max_position_embeddings": 12,
            },
            "dynamic rotary angles depend on the longest sample of the row: 20 tokens, more than the 12",
        ),
    ],
)
def test_models_that_cannot_be_folded_are_refused(model_type: str, attn: str, changes: Inputs, message: str) -> None:
    model = made(model_type, attn, changes)
    inputs = by_hand(model, window=WINDOW if model_type == "moshi" else None)
    for call in (lambda: model_inputs(FOREST, model), lambda: check_model_inputs(FOREST, model, inputs)):
        with pytest.raises(AttentionRouteError, match=f"cannot be folded: .*{message}.*Run its samples unfolded"):
            call()
    with pytest.raises(AttentionRouteError, match="cannot be folded"):
        hf_forward(model)(inputs["input_ids"], inputs["position_ids"], dense_mask(FOREST)[None, None])
    if model_type != "bert" or not model.config.is_decoder:
        assert error(model, FOREST, inputs) > 1e-3  # though the mask and the positions are right


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("distilbert", "DistilBertModel"),
        ("modernbert", "ModernBertModel"),
        ("albert", "AlbertModel"),
        ("mobilebert", "MobileBertModel"),
    ],
)
def test_encoders_whose_config_says_nothing_of_it_are_refused(model_type: str, name: str) -> None:
    model = getattr(transformers, name)._from_config(tiny_config(model_type), attn_implementation="sdpa").eval()
    with pytest.raises(AttentionRouteError, match="no module of it has is_causal = True"):
        model_inputs(FOREST, model)


def test_chunks_and_best_keys_are_taken_where_the_row_is_no_longer() -> None:
    chunks = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    for model in (tiny_model("llama4_text", attention_chunk_size=T, **chunks), tiny_model("doge", keep_window_size=T)):
        inputs = model_inputs(FOREST, model)
        check_model_inputs(FOREST, model, inputs)
        assert error(model, FOREST, inputs) < 1e-5
    with pytest.raises(AttentionRouteError, match="layers of type chunked_attention"):
        model_inputs(FOREST, tiny_model("llama4_text", attention_chunk_size=T - 1, **chunks))


def made(model_type: str, attn: str, changes: Inputs) -> Any:
    if model_type == "gpt_neo":
        changes = {**changes, "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
    return tiny_model(model_type, attn, **changes)


def test_a_bias_that_is_counted_along_the_row_is_refused() -> None:
    model = tiny_model("falcon", "eager", alibi=True)
    with pytest.raises(AttentionRouteError, match=r"config\.alibi is set"):
        model_inputs(FOREST, model)
    model = tiny_model("falcon", "eager")
    assert error(model, FOREST, model_inputs(FOREST, model)) < 1e-5


def test_a_loss_over_experts_is_refused() -> None:
    model = tiny_model("mixtral", output_router_logits=True)
    with pytest.raises(AttentionRouteError, match=r"set config.output_router_logits = False"):
        model_inputs(FOREST, model)


def test_encoder_decoders_and_models_of_other_libraries_are_refused() -> None:
    small = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    with pytest.raises(AttentionRouteError, match="cross-attention"):
        model_inputs(FOREST, transformers.T5ForConditionalGeneration(transformers.T5Config(**small)))
    with pytest.raises(AttentionRouteError, match=r"Linear has no config._attn_implementation.*verify_fold"):
        model_inputs(FOREST, nn.Linear(2, 2))


def test_a_convolution_along_the_row_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[0].short_convolution = nn.Conv1d(32, 32, 4)
    with pytest.raises(AttentionRouteError, match=r"model.layers.0.short_convolution is a convolution along the row"):
        model_inputs(FOREST, model)
    for tower in ("vision_tower", "audio_tower"):  # an encoder of its own, which no row of ids passes
        model = tiny_model("llama")
        model.add_module(tower, nn.Sequential(nn.Conv1d(32, 32, 4)))
        model_inputs(FOREST, model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_angles_that_depend_on_the_longest_sample_are_taken_where_all_samples_agree(kind: str) -> None:
    rope: Inputs = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 12}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}

    def model() -> Any:  # "dynamic" keeps the angles of the longest sample so far
        return tiny_model("llama", rope_parameters=rope, max_position_embeddings=12)

    same = PrefixForest.from_sequences([[*SAMPLES[0][:12], token, 5] for token in (1, 2)])
    short = PrefixForest.from_sequences([sample[:12] for sample in SAMPLES])
    longer = PrefixForest.from_sequences(SAMPLES[:3])  # of 16 to 20 tokens
    for forest in (short, same, longer) if kind == "longrope" else (short, same):
        assert error(model(), forest, model_inputs(forest, model())) < 1e-5
    for forest in (FOREST,) if kind == "longrope" else (FOREST, longer):
        with pytest.raises(AttentionRouteError, match=rf"its {kind} rotary angles depend on the longest sample"):
            model_inputs(forest, model())
    assert error(model(), FOREST, right_for_any_mask(FOREST)) > 1e-3
    taken = hf_forward(model())
    if kind == "longrope":
        assert verify_fold(taken, longer.padded(8), probes=1).ok
        assert not verify_fold(taken, FOREST, probes=1).ok  # its shortest sample is the opening of another one
    else:
        with pytest.raises(AttentionRouteError, match="while the shortest has 16 "):
            taken(FOREST.input_ids[None], FOREST.position_ids[None], dense_mask(FOREST)[None, None])
    rows = torch.arange(20)
    alone_by_mask = hf_forward(model())(torch.tensor([SAMPLES[0]]), rows[None], (rows <= rows[:, None])[None, None])
    plain = logprobs(model(), input_ids=torch.tensor([SAMPLES[0]]))
    assert (alone_by_mask[0].log_softmax(-1) - plain).abs().max() < 1e-5  # one sample is right at any length


def right_for_any_mask(forest: PrefixForest) -> Inputs:
    ids, positions = forest.input_ids[None], forest.position_ids[None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": dense_mask(forest)[None, None]}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_chunk_size", 8, "chunks are cut by the flat row, which has 32 tokens"),
        ("use_bidirectional_attention", "all", "its attention looks ahead"),
        ("layers_block_type", ["mamba", "attention"], "layers of type mamba"),
        ("model_type", "retnet_2", "a retnet_2 carries a state along the row"),
        ("model_type", "blt_patcher", "groups of neighbouring ids"),
        ("ngram_size", 3, "groups of neighbouring ids"),
    ],
)
def test_configs_that_tell_of_another_mixing_of_tokens_are_refused(name: str, value: Any, message: str) -> None:
    model = tiny_model("llama")
    model_inputs(FOREST, model)
    setattr(model.config, name, value)
    with pytest.raises(AttentionRouteError, match=message):
        model_inputs(FOREST, model)


@pytest.mark.parametrize(
    ("model_type", "changes", "what"),
    [
        ("llama", {"attention_dropout": 0.5}, "attention_dropout"),
        ("opt", {"dropout": 0.5, "layerdrop": 0.0, "word_embed_proj_dim": 32}, "dropout"),
        ("mixtral", {"router_jitter_noise": 0.5}, "router_jitter_noise"),
        ("starcoder2", {"residual_dropout": 0.5}, "residual_dropout"),
        ("phimoe", {"router_jitter_noise": 0.3}, "router_jitter_noise"),  # it draws the experts
    ],
)
def test_randomness_in_training_is_warned_of(model_type: str, changes: Inputs, what: str) -> None:
    model = tiny_model(model_type, **changes)
    model_inputs(FOREST, model)
    with pytest.warns(UserWarning, match=f"dropout is active, or noise of another kind.*{what}"):
        inputs = model_inputs(FOREST, model.train())
    torch.manual_seed(0)
    assert not torch.equal(logprobs(model, **inputs), logprobs(model, **inputs))


def test_dropout_that_is_off_or_belongs_to_another_head_is_not_warned_of() -> None:
    model_inputs(FOREST, tiny_model("llama").train())
    model = tiny_model("gpt2").train()
    assert model.config.summary_first_dropout > 0
    model_inputs(FOREST, model)
    model.transformer.drop.p = 0.5
    with pytest.warns(UserWarning, match=r"transformer\.drop"):
        model_inputs(FOREST, model)


# --- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_checks_every_forward_in_its_block_and_none_after_it() -> None:
    model = tiny_model("llama")
    inputs = model_inputs(FOREST, model)
    wrong = without("attention_mask")(inputs)
    ran: list[bool] = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(True))
    with guard(FOREST, model):
        model(**inputs)
        model(inputs["input_ids"], inputs["attention_mask"], inputs["position_ids"])  # by position
        for _ in range(2):
            with pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
                model(**wrong)
        with pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
            model(inputs["input_ids"], None, inputs["position_ids"])
    assert len(ran) == 2  # a refused forward does not run
    model(**wrong)
    assert len(ran) == 3


def test_the_guard_checks_calls_of_the_body_too_and_each_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inputs = model_inputs(FOREST, model)
    checks: list[nn.Module] = []

    def counted(forest: PrefixForest, module: nn.Module, given: Inputs) -> None:
        checks.append(module)
        check_model_inputs(forest, module, given)

    monkeypatch.setattr(attention, "check_model_inputs", counted)
    with guard(FOREST, model):
        model(**inputs)
        model.model(**inputs)
        with pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
            model.model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
        failing = model.model.layers[0].register_forward_pre_hook(lambda *_: {}["no key"])
        with pytest.raises(KeyError):
            model(**inputs)
        failing.remove()
        with pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
            model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
    assert checks == [model, model.model, model.model, model, model]
    model.model(input_ids=inputs["input_ids"])


class Dropping(nn.Module):
    """A wrapper that takes positions and does not pass them on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        return self.module(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


class ValueHead(nn.Module):
    """What TRL's wrapper has: positions are among the further arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
        return self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: Adapted(model, is_prompt_learning=False),
        lambda model: nn.DataParallel(Adapted(model, is_prompt_learning=False)),
        ValueHead,
    ],
    ids=["DataParallel", "compile", "adapters", "both", "value head"],
)
def test_the_guard_sees_calls_of_what_a_wrapper_holds(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny_model("mistral")
    wrapped = wrap(model)
    inputs = model_inputs(FOREST, wrapped)
    wrong = without("attention_mask")(inputs)
    wrapped(**wrong)  # a graph of it is there before the guard
    with guard(FOREST, wrapped):
        for called in (wrapped, model, model.model):
            called(**inputs)
            for _ in range(2):
                with pytest.raises(AttentionRouteError, match="attention_mask is NoneType"):
                    called(**wrong)
    wrapped(**wrong)


def test_the_guard_checks_what_a_wrapper_hands_on() -> None:
    wrapper = Dropping(tiny_model("llama"))
    inputs = model_inputs(FOREST, wrapper)
    assert error(wrapper, FOREST, inputs) > 1e-5
    with guard(FOREST, wrapper), pytest.raises(AttentionRouteError, match="position_ids is NoneType"):
        wrapper(**inputs)


def test_a_graph_made_under_the_guard_is_checked_by_the_wrappers_arguments() -> None:
    model = torch.compile(tiny_model("llama"), backend="eager")
    inputs = model_inputs(FOREST, model)
    with guard(FOREST, model):
        model(**inputs)
        with pytest.raises(AttentionRouteError, match="every branch goes on from its parent"):
            model(**{**inputs, "position_ids": torch.arange(T)[None]})


def test_a_model_that_is_compiled_in_place_is_not_guarded() -> None:
    model = tiny_model("llama")
    model.compile(backend="eager")
    with pytest.raises(AttentionRouteError, match=r"compiled in place by model.compile\(\)"), guard(FOREST, model):
        pass


def test_the_guard_goes_after_an_exception_too() -> None:
    model = tiny_model("llama")
    with pytest.raises(AttentionRouteError), guard(FOREST, model):
        model(input_ids=FOREST.input_ids[None])
    model(input_ids=FOREST.input_ids[None])
    with pytest.raises(KeyError), guard(FOREST, model):
        raise KeyError
    model(input_ids=FOREST.input_ids[None])


def test_gradients_pass_through_a_guarded_forward() -> None:
    model = tiny_model("llama")
    with guard(FOREST, model):
        model(**model_inputs(FOREST, model)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
