"""Which layers are captured, and the hidden states of any number of them, while one slot of logits is computed."""

import pytest
import torch
from support.causal_models import VOCAB, tiny_model
from support.errors import refused

from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS, enough_for, manifest_keys
from niels_gpt.eagle3.target import capture, parse_aux_layers
from niels_gpt.recipes.eagle3 import options


@pytest.mark.parametrize(
    ("text", "layers", "ids"),
    [
        ("eagle3", 32, [1, 15, 28]),
        ("1,15,28", 32, [1, 15, 28]),
        ("3,0", 4, [3, 0]),
        ("dflash:1", 8, [4]),
        ("dflash:5", 36, [1, 9, 17, 25, 33]),  # of the published draft for Qwen3-8B
        ("dflash:5", 28, [1, 7, 13, 19, 25]),
        ("dflash:3", 8, [1, 3, 5]),
        ("dflash:4", 9, [1, 3, 4, 6]),  # 1, 2.67, 4.33, 6
        ("dspark:5", 36, [1, 10, 18, 26]),  # 1, 9.5, 18, 26.5, 35: halves to the even one; the last is left out
        ("dspark:5", 6, [1, 2, 3, 4]),
        ("dspark:2", 8, [1]),
        ("dspark:1", 8, []),
        ("none", 8, []),
    ],
)
def test_the_layers_of_a_rule(text, layers, ids):
    assert parse_aux_layers(text, layers) == ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dflash:6", "8 layers has no 6 "),
        ("dflash:99999999999", "no 99999999999 "),
        ("dflash:0", "dflash:N"),
        ("dspark:0", "dspark:N"),
        ("dspark:8", "8 layers has no 8 "),
        ("dspark:99999999999", "no 99999999999 "),
        ("none,1", "none, or ids"),
        ("dflash", "dflash:N"),
        ("1;2", "dflash:N"),
        ("1,1", "distinct"),
        ("1,8", "layer 8 "),
    ],
)
def test_other_texts_are_refused(text, said):
    with refused("E705", said):
        parse_aux_layers(text, 8)


def test_the_options_name_the_kinds_of_drafts_and_the_target_rows():
    assert (tuple(DRAFTERS), TARGETS) == (options.DRAFTERS, options.TARGETS)


FITS = {"eagle3": [1, 3, 4], "peagle": [1, 3, 4], "dflash": [1, 2, 3, 4, 5], "dspark": [1, 2, 4, 6], "mtp": []}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_cache_that_is_made_for_a_kind_of_draft_is_enough_for_it(kind):
    of = DRAFTERS[kind]
    layers = parse_aux_layers(of.layers, 8)
    assert (
        layers == FITS[kind] and kind in enough_for(of.targets, layers) and kind in enough_for(of.reads, layers or [0])
    )
    less = TARGETS[: TARGETS.index(of.reads)]
    assert not any(kind in enough_for(targets, [0]) for targets in less)
    assert manifest_keys("loss", layers or [0], "eagle3") == {}
    assert [enough_for(targets, []) for targets in TARGETS] == [[], [], ["mtp"]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "cohere"])
def test_the_states_are_those_of_the_model_and_lm_head_gets_one_slot(kind):
    model, seen = tiny_model(kind, "eager"), []
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    whole = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    watching = model.get_output_embeddings().register_forward_hook(lambda *of: seen.append(of[2].shape))
    aux, pre_norm, post_norm = capture(model, ids, mask, [1, 0])
    watching.remove()
    assert seen == [(2, 1, VOCAB)] and aux.shape == (2, 7, 2, 32)
    hidden = whole.hidden_states
    assert torch.equal(aux[:, :, 1], hidden[1]) and torch.equal(aux[:, :, 0], pre_norm)
    torch.testing.assert_close(post_norm, hidden[-1])  # transformers has the final norm in the last one
    assert not torch.allclose(pre_norm, post_norm)
    assert not model.get_output_embeddings()._forward_pre_hooks and not aux.requires_grad


def test_a_model_without_what_is_captured_is_refused():
    model = tiny_model("llama")
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with refused("E705", "layer 2", "2 layers"):
        capture(model, ids, torch.ones_like(ids), [2])
    model.get_output_embeddings = lambda: None
    with refused("E705", "lm_head"):
        capture(model, ids, torch.ones_like(ids), [0])
    model.get_output_embeddings = lambda: torch.nn.Linear(2, 2)
    with refused("E705", "lm_head", kind=RuntimeError):
        capture(model, ids, torch.ones_like(ids), [0])
