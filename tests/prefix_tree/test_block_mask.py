"""block_mask: equal to what FlexAttention makes by evaluating every pair, and right in its attention."""

import random

import pytest
import torch
from support.errors import refused
from support.prefix_trees import grown
from torch.nn.functional import scaled_dot_product_attention

from niels_gpt.prefix_tree.attention import AttentionRouteError, dense_mask, model_inputs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.masks import block_mask

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("num_blocks", "indices")
BLOCKS = [f"{full}{side}_{kind}" for full in ("", "full_") for side in ("kv", "q") for kind in KINDS]


def drawn(draw):
    """Return a forest of several roots, every third one padded."""
    forest = PrefixForest.from_sequences(grown(draw, samples=draw.randint(4, 14), vocab=draw.choice([2, 5, 97])))
    return forest if draw.randrange(3) else forest.padded(draw.choice([4, 16, 50]))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(6)])
def test_the_closed_form_is_that_of_every_pair(seed):
    from torch.nn.attention.flex_attention import create_block_mask

    draw = random.Random(seed)
    for _ in range(30):
        forest, size = drawn(draw), draw.choice([1, 2, 3, 4, 8, 16, 32, 128])
        window = draw.choice([None, None, 1, 2, 3, 5, 9, 20])
        mask, rows = block_mask(forest, block_size=size, window=window, forward_only=True), len(forest.input_ids)
        row = torch.arange(rows)
        assert torch.equal(mask.mask_mod(row, row, row[:, None], row), dense_mask(forest, window=window))
        wanted = create_block_mask(mask.mask_mod, 1, 1, rows, rows, device="cpu", BLOCK_SIZE=size)
        assert mask.shape == wanted.shape and mask.BLOCK_SIZE == wanted.BLOCK_SIZE
        for name in BLOCKS:
            found, expected = getattr(mask, name), getattr(wanted, name)
            assert found.dtype == expected.dtype and torch.equal(found, expected), (name, size, window)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flex_attention_is_that_of_the_dense_mask(window, device):
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("the backward pass of FlexAttention needs a GPU")
    forest = drawn(random.Random(3)).to(device)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, len(forest.input_ids), 16, dtype=torch.float64).to(device)
    if device == "cuda":
        query, key, value = (part.float().requires_grad_() for part in (query, key, value))
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(forest, window=window))
    attention = torch.compile(flex_attention) if device == "cuda" else flex_attention
    found = attention(query, key, value, block_mask=block_mask(forest, window=window, forward_only=device == "cpu"))
    assert (found - wanted).abs().max() < (1e-12 if device == "cpu" else 1e-5)
    if device == "cuda":
        weight = torch.randn_like(wanted)
        grads = [torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in (found, wanted)]
        assert max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)) < 1e-4


def test_what_cannot_be_trained_or_makes_no_block_is_refused():
    forest = PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]])
    with refused("E801", "the forest", "CPU", "FlexAttention", "forward_only=True"):
        block_mask(forest)
    for bad in ({"block_size": 0}, {"window": 0}):
        with refused("E801", "at least 1"):
            block_mask(forest, forward_only=True, **bad)


def test_a_model_of_flex_attention_gets_block_masks_on_a_gpu_and_a_reason_on_a_cpu():
    transformers = pytest.importorskip("transformers", reason="a model to test with needs the extra eagle3")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
    model.set_attn_implementation("flex_attention")
    forest = drawn(random.Random(3))
    with refused("E802", "CPU", "FlexAttention", kind=AttentionRouteError):
        model_inputs(forest, model)
    if torch.cuda.is_available():
        found = model.cuda()(**model_inputs(forest, model)).logits
        model.set_attn_implementation("sdpa")
        assert (found - model(**model_inputs(forest, model, backend="dense")).logits).abs().max() < 1e-3


def test_a_long_row_needs_no_square_of_values():
    rows = 32_768  # 1 GiB as bool [T, T]
    samples = [torch.arange(rows // 2), torch.cat([torch.arange(16), torch.arange(rows // 2)])]
    mask = block_mask(PrefixForest.from_sequences(samples), window=4096, forward_only=True)
    assert mask.kv_indices.shape == (1, 1, rows // 128, rows // 128)
    assert int(mask.kv_num_blocks.max() + mask.full_kv_num_blocks.max()) <= 4096 // 128 + 2
