"""The guard checks every forward of a model in its block, wrapped and compiled models too."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.causal_models import FOREST, MIXED, SAMPLES, WINDOW, error, tiny_model, without
from support.errors import refused
from support.prefix_trees import calls_of
from torch import nn

from niels_gpt.prefix_tree.attention import AttentionRouteError, check_model_inputs, dense_mask, guard, model_inputs
from niels_gpt.prefix_tree.forest import PrefixForest

Inputs = dict[str, Any]
dense_inputs = partial(model_inputs, backend="dense")


class Adapted(nn.Module):
    """What PEFT's wrapper has: adapters live inside the base model, learned tokens are put before the row."""

    def __init__(self, model, *, is_prompt_learning):
        super().__init__()
        self.base_model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_adapters_are_looked_into_and_learned_tokens_before_the_row_are_refused():
    model = Adapted(tiny_model("llama"), is_prompt_learning=False)
    inputs = dense_inputs(FOREST, model)
    with guard(FOREST, model):
        model(**inputs)
        with refused("E802", "use_cache", kind=AttentionRouteError):
            model(**{**inputs, "use_cache": True})
    with refused("E802", "Adapted", "tokens before the row", kind=AttentionRouteError):
        dense_inputs(FOREST, Adapted(tiny_model("llama"), is_prompt_learning=True))


def test_the_guard_checks_every_forward_in_its_block_and_none_after_it():
    model = tiny_model("llama")
    inputs = dense_inputs(FOREST, model)
    wrong = without("attention_mask")(inputs)
    ran = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(True))
    with guard(FOREST, model):
        model(**inputs)
        model(inputs["input_ids"], inputs["attention_mask"], inputs["position_ids"])  # by position
        for _ in range(2):
            with refused("E802", "attention_mask is NoneType", kind=AttentionRouteError):
                model(**wrong)
        with refused("E802", "attention_mask is NoneType", kind=AttentionRouteError):
            model(inputs["input_ids"], None, inputs["position_ids"])
    assert len(ran) == 2  # a refused forward does not run
    model(**wrong)
    assert len(ran) == 3


def test_the_guard_checks_calls_of_the_body_too_and_each_call_once():
    model = tiny_model("llama")
    inputs = dense_inputs(FOREST, model)
    with calls_of("attention.check_model_inputs") as checks, guard(FOREST, model):
        model(**inputs)
        model.model(**inputs)
        with refused("E802", "attention_mask is NoneType", kind=AttentionRouteError):
            model.model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
        failing = model.model.layers[0].register_forward_pre_hook(lambda *_: {}["no key"])
        with pytest.raises(KeyError):
            model(**inputs)
        failing.remove()
        with refused("E802", "attention_mask is NoneType", kind=AttentionRouteError):
            model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
    assert [module for (_, module, _), _ in checks] == [model, model.model, model.model, model, model]
    model.model(input_ids=inputs["input_ids"])


class Dropping(nn.Module):
    """A wrapper that takes positions and does not pass them on."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, input_ids, attention_mask=None, **_):
        return self.module(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


class ValueHead(nn.Module):
    """What TRL's wrapper has: positions are among the further arguments."""

    def __init__(self, model):
        super().__init__()
        self.pretrained_model = model

    def forward(self, input_ids, attention_mask=None, **more):
        return self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        pytest.param(lambda model: torch.compile(model, backend="eager"), marks=pytest.mark.slow),
        lambda model: Adapted(model, is_prompt_learning=False),
        lambda model: nn.DataParallel(Adapted(model, is_prompt_learning=False)),
        ValueHead,
    ],
    ids=["DataParallel", "compile", "adapters", "both", "value head"],
)
def test_the_guard_sees_calls_of_what_a_wrapper_holds(wrap):
    model = tiny_model("mistral")
    wrapped = wrap(model)
    inputs = dense_inputs(FOREST, wrapped)
    # DataParallel has moved the model to a GPU where there is one.
    assert torch.equal(inputs["attention_mask"][0, 0].cpu(), dense_mask(FOREST, window=WINDOW))
    wrong = without("attention_mask")(inputs)
    wrapped(**wrong)  # a graph of it is there before the guard
    with guard(FOREST, wrapped):
        for called in (wrapped, model, model.model):
            called(**inputs)
            for _ in range(2):
                with refused("E802", "attention_mask is NoneType", kind=AttentionRouteError):
                    called(**wrong)
    wrapped(**wrong)


def test_the_guard_checks_what_a_wrapper_hands_on():
    wrapper = Dropping(tiny_model("llama"))
    inputs = dense_inputs(FOREST, wrapper)
    assert error(wrapper, FOREST, inputs) > 1e-5
    with guard(FOREST, wrapper), refused("E802", "position_ids is NoneType", kind=AttentionRouteError):
        wrapper(**inputs)


def test_a_graph_made_under_the_guard_is_checked_by_the_wrappers_arguments():
    model = torch.compile(tiny_model("llama"), backend="eager")
    inputs = dense_inputs(FOREST, model)
    with guard(FOREST, model):
        model(**inputs)
        with refused("E802", "position_ids", "parent", kind=AttentionRouteError):
            model(**{**inputs, "position_ids": torch.arange(len(FOREST.input_ids))[None]})


def test_a_model_that_is_compiled_in_place_is_not_guarded():
    model = tiny_model("llama")
    model.compile(backend="eager")
    with refused("E802", "model.compile()", kind=AttentionRouteError), guard(FOREST, model):
        pass


def test_the_guard_goes_after_an_exception_too():
    model = tiny_model("llama")
    with refused("E802", kind=AttentionRouteError), guard(FOREST, model):
        model(input_ids=FOREST.input_ids[None])
    model(input_ids=FOREST.input_ids[None])
    with pytest.raises(KeyError), guard(FOREST, model):
        raise KeyError
    model(input_ids=FOREST.input_ids[None])


@pytest.mark.parametrize("changes", [{}, MIXED], ids=["one window", "two"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_mask_of_model_inputs_is_not_computed_again_unless_anything_changed(attn, changes):
    model = tiny_model("qwen2" if changes else "mistral", attn, **changes)
    forest = PrefixForest.from_sequences(SAMPLES)

    def inputs():
        made = model_inputs(forest, model, backend="dense")
        masks = made["attention_mask"]
        return made, masks["full_attention"] if isinstance(masks, dict) else masks

    of_forest = inputs()[0]
    with calls_of("attention.dense_mask") as computed:
        check_model_inputs(forest, model, of_forest)
    assert not computed

    made, mask = inputs()
    mask[0, 0][4, 3] = False if attn == "sdpa" else -1e4  # by a view
    with refused("E802", "1 pairs", "row 4", kind=AttentionRouteError):
        check_model_inputs(forest, model, made)

    made, mask = inputs()
    if changes:  # each mask is right, but for the other type of layer
        swapped = dict(zip(made["attention_mask"], reversed(made["attention_mask"].values()), strict=True))
        with refused("E802", "sliding_attention", "pairs differ", kind=AttentionRouteError):
            check_model_inputs(forest, model, {**made, "attention_mask": swapped})
    other = PrefixForest.from_sequences([*SAMPLES[1:], SAMPLES[0]])  # as long, and of the same tokens
    of_other = {**model_inputs(other, model, backend="dense"), "attention_mask": made["attention_mask"]}
    with refused("E802", "attention_mask", "pairs differ", kind=AttentionRouteError):
        check_model_inputs(other, model, of_other)
    forest.subtree_end[3] = 4  # the forest itself, after its mask was made
    with refused("E802", "attention_mask", "pairs differ", kind=AttentionRouteError):
        check_model_inputs(forest, model, made)


def test_a_mask_made_in_inference_mode_has_no_version_and_is_compared():
    model = tiny_model("llama")
    with torch.inference_mode():
        made = model_inputs(FOREST, model, backend="dense")
        check_model_inputs(FOREST, model, made)
        made["attention_mask"][0, 0, 4, 3] = False
        with refused("E802", "1 pairs", kind=AttentionRouteError):
            check_model_inputs(FOREST, model, made)
