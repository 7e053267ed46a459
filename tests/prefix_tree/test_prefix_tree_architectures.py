"""Every causal language model of the installed transformers is folded right or refused, none is folded wrong."""

import warnings
from collections import defaultdict

import pytest
import torch
from support.causal_models import CLASSES, SAMPLES, error, from_config, tiny_config, tiny_model
from support.errors import refused

from niels_gpt.prefix_tree.attention import AttentionRouteError, check_model_inputs, model_inputs, use_segments
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head

RIGHT = """
cohere cohere2 deepseek_v2 deepseek_v3 doge ernie4_5 exaone4 falcon gemma gemma2 gemma3_text gemma4_text glm4 glm4_moe
gpt2 gpt_neox gpt_oss granite granitemoe llama ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe phi phi3 phimoe
qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2 xglm
"""
NOT_MADE = """
blt cohere_compass_text dbrx emu3 falcon_h1 gemma4_assistant git gpt_neo kimi_linear lfm2_moe mllama musicgen
musicgen_melody phi4_multimodal prophetnet reformer roc_bert xlnet zamba zamba2 zaya
"""
MAX_PARAMETERS = 3_000_000  # some sizes are not reached by the names in causal_models.py


def outcome(model_type, forest):
    """Return what becomes of a model: "refused", "equal", "wrong ...", or "not made" where the sizes do not fit."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in from_config(config, "eager").parameters())
        if size > MAX_PARAMETERS:
            return "not made"
        try:
            model = from_config(config, "sdpa")
        except ValueError:  # the architecture has no sdpa
            model = from_config(config, "eager")
    except Exception:
        return "not made"
    try:
        inputs = model_inputs(forest, model, backend="dense")
    except AttentionRouteError:
        return "refused"
    check_model_inputs(forest, model, inputs)
    try:
        difference = error(model, forest, inputs)
        if not use_segments(model):
            inputs = model_inputs(forest, model, backend="prefix_tree")
            check_model_inputs(forest, model, inputs)
            difference = max(difference, error(model, forest, inputs))
    except Exception as raised:  # not silent
        return f"raised {type(raised).__name__}"
    if difference >= 5e-5:
        return f"wrong by {difference:.2g}"
    try:
        head = logits_head(model)
    except AttentionRouteError:
        return "equal, head refused"
    with torch.no_grad():
        difference = float((head(model.base_model(**inputs)[0]) - model(**inputs).logits).abs().max())
    return "equal" if difference < 5e-5 else f"wrong head by {difference:.2g}"


def outcomes(names):
    """Return the model types by outcome, after checking that each outcome is an expected one."""
    forest = PrefixForest.from_sequences(SAMPLES).padded(8)
    found = defaultdict(list)
    with warnings.catch_warnings(action="ignore"):
        for model_type in names:
            found[outcome(model_type, forest)].append(model_type)
    assert set(found) <= {"equal", "refused", "not made", "equal, head refused"}, found
    assert set(RIGHT.split()) & set(names) <= set(found["equal"]), found
    assert set(found["not made"]) <= set(NOT_MADE.split()), found
    return found


@pytest.mark.slow
def test_a_part_of_the_architectures_is_folded_right_or_refused():
    known = [name for name in RIGHT.split() if name in CLASSES]  # of the transformers that is installed
    assert len(known) > 30
    special = {"gpt_neox", "xglm", "codegen"} & set(CLASSES)  # for which there are rules of their own
    found = outcomes({*known[::3], *list(CLASSES)[::8], *special})
    assert len(found["equal"]) > 15 and len(found["refused"]) > 4, found


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("falcon", "does not go through AttentionInterface"),
        ("doge", "raised AttentionRouteError"),  # it adds a bias to its mask
        ("nemotron", "does not pass prefix_tree to NemotronAttention"),
        ("llama", ""),
        ("gpt2", ""),
        ("cohere2", ""),
    ],
)
def test_models_that_cannot_run_segments_are_left_as_they_are(model_type, reason):
    if model_type not in CLASSES:
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type)
    modes = [module.training for module in model.modules()]
    for _ in range(2):  # asked once, remembered
        found = use_segments(model)
        assert found == reason or (reason and reason in found)
        assert model.config._attn_implementation == ("sdpa" if reason else "prefix_tree")
    assert [module.training for module in model.modules()] == modes


@pytest.mark.faults  # most of its time is the import of 230 modules
def test_every_architecture_is_folded_right_or_refused():
    found = outcomes(CLASSES)
    assert len(found["equal"]) > 80 and len(found["refused"]) > 40, found


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("phi", {}),  # a bias in the head
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),  # divides
        ("hyperclovax", {"logits_scaling": 0.125}),  # multiplies
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("gemma3_text", {"final_logit_softcapping": None}),
    ],
)
def test_log_probs_of_loss_rows_are_those_of_the_models_own_logits(model_type, changes):
    if model_type not in CLASSES:
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type, "eager", **changes)
    forest = PrefixForest.from_sequences(SAMPLES)
    edges = LossEdges.from_forest(forest)
    with torch.no_grad():
        inputs = model_inputs(forest, model)
        wanted = edge_logprobs(model(**inputs).logits, edges)
        hidden = model.base_model(**inputs).last_hidden_state
        found = edge_logprobs(hidden, edges, logits_head(model), chunk=5)
        plain = edge_logprobs(hidden, edges, model.get_output_embeddings())
    assert float((found - wanted).abs().max()) < 1e-5
    if changes.get("logit_scale") or changes.get("logits_scaling") or changes.get("final_logit_softcapping"):
        assert float((plain - wanted).abs().max()) > 1e-2  # what lm_head alone would give


def test_a_head_that_is_not_understood_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    assert logits_head(model)(torch.zeros(3, 32)).shape == (3, 97)

    class Shifted(type(model)):
        def forward(self, **inputs):
            out = super().forward(**inputs)
            out.logits = out.logits + torch.arange(97)
            return out

    model.__class__ = Shifted
    with refused("E802", "Shifted", "logit_scale", kind=AttentionRouteError):
        logits_head(model)
    with refused("E802", "LlamaModel", "output embeddings", kind=AttentionRouteError):
        logits_head(model.model)
    with refused("E802", "Linear", "output embeddings", kind=AttentionRouteError):
        logits_head(torch.nn.Linear(2, 2))
