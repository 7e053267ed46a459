"""The head of a target, read from its checkpoint alone."""

import json

import pytest
import torch
from support.causal_models import tiny_model

from niels_gpt.eagle3.head import TargetHead

pytest.importorskip("transformers", reason="a target's class needs the extra eagle3")
KINDS = [
    "llama",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "cohere",
    "granite",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "phi",
]
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def saved(model, folder, **how):
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, **how)
    finally:
        logging.enable_progress_bar()
    return folder


def assert_equal(head, expected):
    assert (head.facts(), head.last_hidden) == (expected.facts(), expected.last_hidden)
    weights, wanted = head.weights(), expected.weights()
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_a_checkpoint_is_the_models_bit_for_bit(kind, dtype, tmp_path):
    model = tiny_model(kind, "eager").to(dtype)
    folder = saved(model, tmp_path / "target")
    assert_equal(TargetHead.of_checkpoint(str(folder), dtype=dtype), TargetHead.of_model(model))


def test_files_that_hold_blocks_alone_may_be_gone_and_one_of_the_head_is_named(tmp_path):
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "target", max_shard_size="8KB")
    placed = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    needed = {placed[name] for name in ENDS}
    for path in folder.glob("model-*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert len(needed) < len(set(placed.values()))
    assert_equal(TargetHead.of_checkpoint(str(folder), dtype=torch.float32), TargetHead.of_model(model))
    (folder / placed["model.norm.weight"]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{placed['model.norm.weight']}: no such file") as found:
        TargetHead.of_checkpoint(str(folder), dtype=torch.float32)
    assert found.value.code == "E705"
