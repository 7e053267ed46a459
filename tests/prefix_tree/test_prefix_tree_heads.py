"""logits_head gives the model's own logits of some rows."""

from typing import Any

import pytest
import torch
from support.causal_models import CLASSES, SAMPLES, tiny_model

from niels_gpt.prefix_tree.attention import AttentionRouteError, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head


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
def test_log_probs_of_loss_rows_are_those_of_the_models_own_logits(model_type: str, changes: dict[str, Any]) -> None:
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


def test_a_head_that_is_not_understood_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    assert logits_head(model)(torch.zeros(3, 32)).shape == (3, 97)

    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits = out.logits + torch.arange(97)
            return out

    model.__class__ = Shifted
    with pytest.raises(AttentionRouteError, match="the logits of Shifted are not its output embeddings times"):
        logits_head(model)
    with pytest.raises(AttentionRouteError, match="LlamaModel has no output embeddings"):
        logits_head(model.model)
    with pytest.raises(AttentionRouteError, match="Linear has no output embeddings"):
        logits_head(torch.nn.Linear(2, 2))
