"""The head of a target, read from its checkpoint alone."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.causal_models import tiny_config, tiny_model
from support.errors import refused

from niels_gpt.eagle3.forward import broken_weight
from niels_gpt.eagle3.head import TargetHead, embeddings_of

pytest.importorskip("transformers", reason="a target's class needs the extra eagle3")
KINDS = ["llama", "qwen2", "qwen3_moe", "gemma2", "gemma3n_text", "gemma4_text", "cohere", "granite", "gpt2", "olmo2"]
KINDS += ["gpt_neox", "phi", "bloom", "bamba"]
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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in KINDS), *((kind, torch.bfloat16) for kind in ("llama", "gemma2", "olmo2"))],
)
def test_the_head_of_a_checkpoint_is_the_models_bit_for_bit(kind, dtype, tmp_path):
    model = tiny_model(kind, "eager").to(dtype)
    folder = saved(model, tmp_path / "target")
    assert_equal(TargetHead.of_checkpoint(str(folder), dtype=dtype), TargetHead.of_model(model))


def test_a_model_with_a_vision_tower_needs_nothing_of_it(tmp_path):
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=tiny_config("gemma3_text").to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    folder = saved(model, tmp_path / "target")
    path = folder / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if "layers" not in name}
    save_file(weights, path, metadata={"format": "pt"})
    assert_equal(TargetHead.of_checkpoint(str(folder), dtype=torch.float32), TargetHead.of_model(model))


def test_a_narrow_checkpoint_computes_in_float32_and_its_embeddings_are_not_copied(tmp_path):
    model = tiny_model("llama", "eager").to(torch.bfloat16)
    folder = saved(model, tmp_path / "target")
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # of the blocks alone
    (folder / "config.json").write_text(json.dumps(config))
    head, expected = TargetHead.of_checkpoint(str(folder), dtype=torch.float32), TargetHead.of_model(model.float())
    weights, wanted = head.weights(), expected.weights()
    assert head.facts() == expected.facts() and weights.pop("embeddings").dtype == torch.bfloat16
    assert torch.equal(head.weights()["embeddings"].float(), wanted.pop("embeddings"))
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], weight)


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


def test_a_head_on_disk_is_read_from_the_checkpoint_and_proved_on_the_model(tmp_path):
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="it keeps weights on disk")
    model = tiny_model("llama", "eager")
    folder = saved(model, tmp_path / "target")
    how = {"dtype": torch.float32, "attn_implementation": "eager", "offload_folder": tmp_path / "offload"}
    offloaded = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, **how).eval()
    assert {weight.device.type for weight in offloaded.parameters()} == {"meta"}
    assert_equal(TargetHead.of_model(offloaded), TargetHead.of_model(model))
    assert torch.equal(embeddings_of(offloaded), embeddings_of(model)) and broken_weight(offloaded) == ""
    offloaded.name_or_path = str(saved(tiny_model("llama", tie_word_embeddings=True), tmp_path / "other"))
    with refused("E705", "give logits that differ from the model's"):
        TargetHead.of_model(offloaded)
    offloaded.name_or_path = str(tmp_path / "gone")
    with refused("E705", "its head is not whole in memory, and was loaded from", "gone"):
        TargetHead.of_model(offloaded)


def test_of_the_hub_the_files_with_the_head_are_enough(tmp_path, monkeypatch):
    from pathlib import Path

    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--somebody--large"
    model, commit = tiny_model("llama"), "c" * 40
    folder = saved(model, repository / "snapshots" / commit, max_shard_size="8KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    placed = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    for name in {*placed.values()} - {placed[name] for name in ENDS}:
        (folder / name).unlink()
    for revision in (None, commit):
        head = TargetHead.of_checkpoint("somebody/large", revision=revision, dtype=torch.float32)
        assert_equal(head, TargetHead.of_model(model))
    for name in (placed["lm_head.weight"], "model.safetensors.index.json"):
        (folder / name).unlink()
        with refused("E601", f"does not answer for its {name}", "hf download"):
            TargetHead.of_checkpoint("somebody/large", dtype=torch.float32)


def without(name):
    return lambda weights: {key: weight for key, weight in weights.items() if key != name}


def replaced(name, change):
    return lambda weights: {**weights, name: change(weights[name])}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(ENDS[1]), "lacks model.norm.weight"),
        (without(ENDS[2]), "lacks lm_head.weight"),
        (replaced(ENDS[2], lambda weight: weight.to(torch.float8_e4m3fn)), "lacks lm_head.weight"),
        (replaced(ENDS[2], lambda weight: weight[:50].clone()), "another shape of lm_head.weight"),
        (lambda weights: {ENDS[1]: weights[ENDS[1]]}, "config.json states 6,240 weights"),
    ],
    ids=["no norm", "no lm_head", "in 8 bits", "short", "large config"],
)
def test_a_checkpoint_without_the_whole_head_is_refused_by_name(change, said, tmp_path):
    folder = saved(tiny_model("llama"), tmp_path / "target")
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    with refused("E705", said):
        TargetHead.of_checkpoint(str(folder), dtype=torch.float32)


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path):
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "target")
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with refused("E705", "its weights are pickled") as found:
        TargetHead.of_checkpoint(str(folder), dtype=torch.float32)
    program, option, code = shlex.split(str(found.value).partition("Convert it: ")[2])
    assert (program, option) == ("python", "-c")
    exec(code)
    assert_equal(TargetHead.of_checkpoint(str(folder), dtype=torch.float32), TargetHead.of_model(model))


def test_an_adapter_and_a_class_that_needs_its_blocks_are_refused(tmp_path):
    folder = saved(tiny_model("llama"), tmp_path / "target")
    (folder / "adapter_config.json").write_text("{}")
    with refused("E705", "adapter_config.json, expected a whole model"):
        TargetHead.of_checkpoint(str(folder), dtype=torch.float32)
