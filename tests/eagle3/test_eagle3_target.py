"""The target's hidden states and logits, captured and shifted: real models of each family, tiny and random."""

import pytest
import torch
from support.errors import refused
from torch import nn

from niels_gpt.eagle3.target import (
    Eagle3TargetBatch,
    HFEagle3TargetModel,
    default_eagle3_aux_layer_ids,
)

transformers = pytest.importorskip("transformers", reason="running a target needs the extra eagle3")

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])


def config_of(family):
    if family == "gpt2":
        ends = {"bos_token_id": None, "eos_token_id": None}
        return transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=8, n_head=4, n_positions=64, **ends)
    if family == "llava":
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
            text_config=transformers.LlamaConfig(**SIZES),
            image_token_index=49,
        )
    name = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "mistral": "MistralConfig"}[family]
    return getattr(transformers, name)(**SIZES, **({"head_dim": 4} if family == "qwen3" else {}))


FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "llava"]


def model_of(family="llama"):
    config = config_of(family)
    of = transformers.AutoModelForImageTextToText if family == "llava" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return of.from_config(config, dtype=torch.float32)


def batch_of(lengths=(9, 4), width=9):
    chance = torch.Generator().manual_seed(0)
    present = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    loss = torch.randint(2, present.shape, generator=chance) * present
    ids = torch.randint(1, 49, present.shape, generator=chance)
    return {"input_ids": ids, "attention_mask": present, "loss_mask": loss}


def hooks_of(model):
    return sum(len(module._forward_hooks) for module in model.modules())


class Odd(nn.Module):
    """A model of another structure; `layers` makes it one whose blocks are found and whose forward skips one."""

    def __init__(self, layers=0, *, promised=8):
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": promised})()
        if layers:
            self.layers = nn.ModuleDict({str(index): nn.Identity() for index in reversed(range(layers))})

    def forward(self, input_ids, attention_mask):
        hidden = input_ids[..., None].float()
        for index in range(len(self.layers)):
            if index != 3:
                hidden = self.layers[str(index)](hidden) + 1
        return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_captured_is_the_output_of_the_blocks_bit_for_bit(family):
    model, given = model_of(family).train(), batch_of()
    target = HFEagle3TargetModel(model, [5, 0, 6])
    batch = target.generate_batch(**given)
    assert isinstance(batch, Eagle3TargetBatch) and target.aux_layer_ids == [5, 0, 6]
    assert not model.training and hooks_of(model) == 0
    with torch.no_grad():
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        whole = model(**inputs, output_hidden_states=True, use_cache=False)
    expected = torch.cat([whole.hidden_states[layer + 1] for layer in (5, 0, 6)], -1)
    assert torch.equal(batch.aux_hidden_states, expected) and batch.aux_hidden_states.shape == (2, 9, 3 * 16)
    assert torch.equal(batch.logits[:, :-1], whole.logits[:, 1:]) and not batch.logits[:, -1].any()
    assert batch.logits.shape == (2, 9, 50)
    assert torch.equal(batch.input_ids[:, :-1], given["input_ids"][:, 1:]) and not batch.input_ids[:, -1].any()
    assert torch.equal(batch.loss_mask[:, :-1], given["loss_mask"][:, 1:]) and not batch.loss_mask[:, -1].any()
    assert torch.equal(batch.attention_mask, given["attention_mask"])
    assert target.get_input_embeddings().weight.shape == (50, 16)
    assert HFEagle3TargetModel(model).aux_layer_ids == [1, 3, 4], "the default ones"


def test_a_batch_on_paper():
    model = model_of()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        raw = model(input_ids=ids, output_hidden_states=True)
    batch = HFEagle3TargetModel(model).generate_batch(ids, torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 0]]))
    assert batch.input_ids.tolist() == [[6, 7, 8, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0]]
    # Slot 0: the hidden state of 5 and the id 6, from which a draft predicts what the target makes of 5 6.
    assert torch.allclose(batch.logits[0, 0], raw.logits[0, 1], atol=1e-6)
    assert torch.allclose(batch.aux_hidden_states[0, 0, :16], raw.hidden_states[2][0, 0], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_logits_of_a_model_are_shifted_where_they_are(family, bias):
    model, kept = model_of(family), []
    if bias:  # torch makes the output of such a layer as a view
        model.lm_head.bias = nn.Parameter(torch.ones(50))
    handle = model.register_forward_hook(lambda _module, _inputs, output: kept.append(output.logits))
    batch = HFEagle3TargetModel(model).generate_batch(**batch_of())
    handle.remove()
    assert batch.logits.data_ptr() == kept[0].data_ptr()


class Fixed(Odd):
    """Returns the logits that it was given, one number per id, in a form that is not this call's own to change."""

    def __init__(self, logits):
        super().__init__(8)
        self.logits = logits

    def forward(self, input_ids, attention_mask):
        hidden = input_ids[..., None].float()
        for index in range(8):
            self.layers[str(index)](hidden)
        return self.logits


def _made_in_inference_mode():
    with torch.inference_mode():
        return torch.arange(18.0).view(2, 9, 1)


@pytest.mark.parametrize(
    "logits",
    [
        torch.arange(36.0).view(2, 9, 2)[..., :1],
        torch.arange(9.0).view(1, 9, 1).expand(2, 9, 1),
        nn.Parameter(torch.arange(18.0).view(2, 9, 1)),
        _made_in_inference_mode(),
    ],
    ids=["strided", "expanded", "parameter", "inference"],
)
def test_logits_that_are_not_to_be_changed_are_shifted_in_a_copy(logits):
    before = logits.detach().clone()
    batch = HFEagle3TargetModel(Fixed(logits)).generate_batch(**batch_of())
    assert torch.equal(
        batch.logits, torch.cat((before[:, 1:], torch.zeros_like(before[:, :1])), dim=1)
    ) and torch.equal(logits, before)
    assert not batch.logits.is_inference() and not batch.logits.requires_grad


def test_padding_does_not_change_what_a_row_gets():
    target = HFEagle3TargetModel(model_of())
    together = target.generate_batch(**batch_of((9, 4)))
    alone = target.generate_batch(**{name: tensor[1:, :4] for name, tensor in batch_of((9, 4)).items()})
    assert torch.allclose(together.aux_hidden_states[1, :4], alone.aux_hidden_states[0], atol=1e-6)
    assert torch.allclose(together.logits[1, :3], alone.logits[0, :3], atol=1e-6)


@pytest.mark.parametrize("surroundings", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_draft_can_train_on_a_batch_wherever_it_was_made(surroundings):
    target = HFEagle3TargetModel(model_of())
    with surroundings():
        batch = target.generate_batch(**batch_of())
    tensors = list(vars(batch).values())
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
    weight = torch.ones(48, requires_grad=True)
    (batch.aux_hidden_states * weight * batch.attention_mask[..., None]).sum().backward()
    assert weight.grad is not None and bool(weight.grad.any())


@pytest.mark.parametrize(("layers", "ids"), [(7, [1, 2, 3]), (8, [1, 3, 4]), (32, [1, 15, 28]), (36, [1, 17, 32])])
def test_the_default_layers_are_low_middle_and_high(layers, ids):
    assert default_eagle3_aux_layer_ids(layers) == ids
    for shallow in range(7):
        with refused("E705", f"num_hidden_layers={shallow} ", "aux_layer_ids"):
            default_eagle3_aux_layer_ids(shallow)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2], "2 ids, expected exactly 3"),
        ([1, 2, 3, 4], "4 ids, expected exactly 3"),
        ([], "0 ids, expected exactly 3"),
        ([1, 2, 1], "distinct"),
        ([1, 2, 8], "layer 8 is out of bounds for a model with 8 layers"),
        ([-1, 2, 3], "layer -1 is out of bounds"),
    ],
)
def test_layer_ids_are_three_different_blocks(ids, said):
    with refused("E705", said):
        HFEagle3TargetModel(model_of(), ids)


def test_models_that_do_not_fit_are_errors_and_keep_no_hooks():
    given, llama, skips = batch_of(), model_of(), Odd(8)
    beyond = {**given, "input_ids": given["input_ids"] + 50}
    for model, batch, error, said in (
        (Odd(), given, ValueError, ["E705", "Odd", "model.layers"]),
        (Odd(4), given, ValueError, ["E705", "layer 4 ", "4 layers"]),  # its config promises more
        (skips, given, RuntimeError, ["E705", "[1, 3, 4]", "[1, 4]"]),
        (llama, beyond, IndexError, ["E102", "out of range"]),  # of torch
    ):
        with refused(*said, kind=error):
            HFEagle3TargetModel(model).generate_batch(**batch)
        assert hooks_of(model) == 0


def test_blocks_in_a_dict_go_by_their_names_and_logits_may_come_alone():
    batch = HFEagle3TargetModel(Odd(8), [0, 1, 2]).generate_batch(**batch_of())
    ids = batch_of()["input_ids"][..., None]
    assert torch.equal(batch.aux_hidden_states, torch.cat((ids, ids + 1, ids + 2), -1).float())
    assert torch.equal(batch.logits[:, :-1], ids[:, 1:].float() + 7)


@pytest.mark.parametrize(("mask", "slot"), [([0, 0, 1, 1], 1), ([1, 0, 1, 1], 1), ([1, 1, 0, 1], 2)])
def test_only_padding_on_the_right_is_taken(mask, slot):
    given = {name: tensor[:, :4] for name, tensor in batch_of((4, 4)).items()}
    given["attention_mask"] = torch.tensor([[1, 1, 1, 0], mask])
    with refused("E705", "row 1", f"slot {slot} is 0", f"slot {slot + 1} is 1"):
        HFEagle3TargetModel(model_of()).generate_batch(**given)
    for name in ("attention_mask", "loss_mask"):  # of the shape of the ids
        wrong = {**batch_of(), name: batch_of()[name][:, :-1]}
        with refused("E705", f"{name} of shape (2, 8)", "input_ids of shape (2, 9)"):
            HFEagle3TargetModel(model_of()).generate_batch(**wrong)
