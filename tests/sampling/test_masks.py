"""What the mask of a batch lets each token see; models of transformers then give each piece what it has alone."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.causal_models import VOCAB, WINDOW, tiny_model
from support.number_caches import number_cache, with_vocabulary

from niels_gpt.sampling import Batch, EpochStream, PackedStream, block_causal_mask

pytestmark = pytest.mark.filterwarnings("ignore:the last batch has")


def sees(starts, B, T, window=10**9):
    """Return what token i of each row sees, token by token."""
    segment = [sum(start <= at for start in starts) for at in range(B * T)]
    return [
        [
            [j <= i and i - j < window and segment[row * T + i] == segment[row * T + j] for j in range(T)]
            for i in range(T)
        ]
        for row in range(B)
    ]


def test_the_mask_of_two_rows_written_out():
    mask = block_causal_mask(torch.tensor([0, 1, 3, 6], dtype=torch.int32), (2, 3))
    assert mask.dtype == torch.float32 and mask.shape == (2, 1, 3, 3)
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}
    assert (mask[:, 0] == 0).int().tolist() == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_each_token_sees_its_segment_up_to_itself(dtype):
    draw = random.Random(0)
    for _ in range(20):
        B, T, window = draw.randint(0, 3), draw.randint(1, 9), draw.randint(1, 5)
        starts = sorted({*range(0, B * T, T), *draw.choices(range(B * T), k=4)} if B else {0})
        cu_seqlens = torch.tensor([*starts, B * T] if B else [0])
        for how, expected in (({}, sees(starts, B, T)), ({"sliding_window": window}, sees(starts, B, T, window))):
            mask = block_causal_mask(cu_seqlens, (B, T), dtype=dtype, **how)
            assert mask.shape == (B, 1, T, T) and mask.dtype == dtype
            assert (mask if dtype == torch.bool else mask == 0)[:, 0].tolist() == expected
        if B == 1:
            assert torch.equal(block_causal_mask(cu_seqlens, dtype=dtype, **how), mask)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (None, "None, expected batch.cu_seqlens of"),
        (torch.tensor([0.0, 4.0]), r"float32 \[2\], expected int32 or int64"),
        (torch.tensor([[0, 4]]), r"int64 \[1, 2\], expected int32"),
        (torch.tensor([1, 4]), r"\[1, 4\], expected numbers that begin at 0 and ascend"),
        (torch.tensor([0, 2, 2, 4]), r"\[0, 2, 2, 4\], expected numbers that begin at 0 and ascend"),
        (torch.tensor([0, 2]), "ends at 2, expected 4, the tokens of 2 rows of 2"),
        (torch.tensor([0, 1, 4]), "no segment begins with row 1, at 2"),
    ],
)
def test_numbers_that_are_no_segments_of_the_rows_are_refused(cu_seqlens, message):
    with pytest.raises(ValueError, match=f"cu_seqlens: {message}"):
        block_causal_mask(cu_seqlens, (2, 2))


def packed_batch():
    """Two rows of 16: pieces of 9, 1 and 6 tokens; of 4 and 9, and 3 of padding. Longer and shorter than a window."""
    x = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    y = torch.cat((x[:, 1:], x[:, :1]), dim=1)
    starts = np.array([0, 9, 10, 16, 20, 29, 32], dtype=np.int32)
    y.view(-1)[torch.from_numpy(starts[1:] - 1).long()] = -100
    y[1, 13:] = -100
    numbers = torch.tensor([0, 1, 2, 3, 4, -1])
    return Batch(x, y, {}, None, torch.from_numpy(starts), numbers, numbers, 9)


def alone(model, batch):
    assert batch.cu_seqlens is not None
    pieces = batch.x.view(-1).split(batch.cu_seqlens.diff().tolist())
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in pieces])


@torch.no_grad()
def apart(model, batch, **arguments):
    """Return the largest difference of a logit in the batch and of its piece alone."""
    together = model(input_ids=batch.x, **arguments).logits.flatten(0, 1)
    assert not together.isnan().any()
    return float((together - alone(model, batch)).abs().max())


def masks_for(model, batch, dtype):
    """Return the mask that the docstring of `block_causal_mask` asks for."""
    shape, window = (len(batch.x), batch.x.shape[1]), getattr(model.config, "sliding_window", None)
    whole = block_causal_mask(batch.cu_seqlens, shape, dtype=dtype)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if window is None or kinds == {"full_attention"}:
        return whole
    slid = block_causal_mask(batch.cu_seqlens, shape, dtype=dtype, sliding_window=window)
    return {"full_attention": whole, "sliding_attention": slid} if kinds else slid


@pytest.mark.parametrize(
    ("attention", "dtype", "limit"),
    [("sdpa", torch.float32, 1e-5), ("sdpa", torch.float64, 1e-12), ("eager", torch.float32, 1e-5)],
    # "eager" of transformers computes its softmax in 32 bits, whatever the model's dtype
)
def test_a_stock_llama_gives_each_piece_the_logits_and_the_loss_that_it_has_alone(attention, dtype, limit):
    model, batch = tiny_model("llama", attention).to(dtype), packed_batch()
    inputs = {"position_ids": batch.position_ids, "attention_mask": masks_for(model, batch, dtype)}
    assert apart(model, batch, use_cache=False, **inputs) < limit
    assert apart(model, batch, use_cache=False) > 0.1  # without the mask
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(logits, batch.y.view(-1), reduction="sum")
            for logits in (model(input_ids=batch.x, **inputs).logits.flatten(0, 1), alone(model, batch))
        ]
    assert abs(float(losses[0] - losses[1])) < 32 * limit


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mistral", "gemma3_text", "qwen2", "olmo2", "phi", "falcon"])
def test_other_stock_models_do_too(name):
    model, batch = tiny_model(name), packed_batch()
    mask = masks_for(model, batch, torch.float32)
    assert apart(model, batch, position_ids=batch.position_ids, attention_mask=mask, use_cache=False) < 1e-5
    assert apart(model, batch, position_ids=batch.position_ids, use_cache=True) > 0.1  # without the mask
    if name == "gpt2":  # rotary positions count differences alone
        assert apart(model, batch, attention_mask=mask, use_cache=False) > 0.1  # without the positions
    if name == "mistral":
        whole = block_causal_mask(batch.cu_seqlens, (2, 16))
        assert WINDOW < 9 and apart(model, batch, attention_mask=whole, use_cache=False) > 0.1  # without its window


def test_what_transformers_does_with_other_arguments():
    """What the docstring of masks.py says goes wrong, or right, without an error."""
    batch, llama = packed_batch(), tiny_model("llama")
    positions = {"position_ids": batch.position_ids}
    assert apart(llama, batch, use_cache=False, **positions) < 1e-5
    assert apart(llama, batch, **positions) > 0.1  # the default is use_cache=True
    assert apart(tiny_model("falcon"), batch, use_cache=False, **positions) > 0.1
    boolean = block_causal_mask(batch.cu_seqlens, (2, 16), dtype=torch.bool)
    assert apart(llama, batch, attention_mask=boolean, use_cache=False, **positions) < 1e-5
    assert apart(tiny_model("llama", "eager"), batch, attention_mask=boolean, use_cache=False, **positions) > 0.1


def test_the_arguments_of_flash_attention_reach_the_layers_of_a_stock_model():
    """An attention of variable lengths in plain torch, called with what a model passes on to FlashAttention."""
    from transformers import AttentionInterface

    def by_lengths(module, query, key, value, mask, scaling, **given):
        assert mask is None and given["cu_seq_lens_q"].dtype == given["cu_seq_lens_k"].dtype == torch.int32
        assert given["max_length_q"] == given["max_length_k"] == 9
        groups = query.shape[1] // key.shape[1]
        heads = query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        flat = [each.transpose(1, 2).flatten(0, 1).transpose(0, 1) for each in heads]  # [heads, B * T, size]
        lengths = given["cu_seq_lens_q"].diff().tolist()
        parts = zip(*(each.split(lengths, dim=1) for each in flat), strict=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        found = torch.cat([attend(*part, is_causal=True, scale=scaling) for part in parts], dim=1)
        return found.transpose(0, 1).unflatten(0, (len(query), -1)), None

    AttentionInterface.register("by_lengths", by_lengths)
    batch, model = packed_batch(), tiny_model("llama")
    model.set_attn_implementation("by_lengths")
    cu, longest = batch.cu_seqlens, batch.max_seqlen
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    with torch.no_grad():
        packed = model(input_ids=batch.x, position_ids=batch.position_ids, use_cache=False, **lengths).logits
        assert (packed.flatten(0, 1) - alone(tiny_model("llama"), batch)).abs().max() < 1e-5


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Eight documents of ten ids each: 10-19, 20-29, ..."""
    return with_vocabulary(number_cache(tmp_path_factory.mktemp("masks") / "numbers", count=80), VOCAB).parent


def test_the_example_prints_that_pieces_are_apart(cache, capsys):
    path = Path(__file__).parents[2] / "examples" / "packed_attention.py"
    spec = importlib.util.spec_from_file_location("packed_attention", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main([str(cache), "--T", "25"])
    for how, difference in found.items():
        assert difference > 0.1 if "without" in how else difference < (1e-12 if "float64" in how else 1e-5), how
    printed = capsys.readouterr().out
    assert len(found) >= 6 and "from 20: 5 tokens padding" in printed and "max_seqlen=10" in printed


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_batches_of_both_streams_keep_their_pieces_apart(cache, kind):
    """A token sees those of its own ten ids up to itself; padding sees padding."""
    arguments = {"T": 25, "global_batch_size": 3, "seed": 0}
    windows = EpochStream(str(cache / "train"), documents=True, **arguments)
    batch = next(iter(windows if kind == "windows" else PackedStream(str(cache), **arguments)))
    mask = block_causal_mask(batch.cu_seqlens, (3, 25), dtype=torch.bool)
    assert mask[:, 0].tolist() == [
        [[j <= i and row[i] // 10 == row[j] // 10 for j in range(25)] for i in range(25)] for row in batch.x.tolist()
    ]
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = tiny_model("llama").to(dtype)
        inputs = {"position_ids": batch.position_ids, "attention_mask": masks_for(model, batch, dtype)}
        assert apart(model, batch, use_cache=False, **inputs) < limit
        assert apart(model, batch, use_cache=False) > 0.1
