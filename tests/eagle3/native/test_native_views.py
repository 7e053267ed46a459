"""The target's head, found in a model and read from a cache; and the six keys of a native cache."""

import json

import pytest
import torch
from safetensors import safe_open
from support import eagle3_native, eagle3_runs
from support.eagle3_native import has_weights, read_weights, write_weights
from support.errors import refused
from support.target_outputs import in_parts_of
from torch import nn

from niels_gpt.eagle3.cache import (
    CACHE_KEYS,
    CachedEagle3Dataset,
    build_cached_eagle3_dataloader,
    read_target_embeddings,
    verify,
)
from niels_gpt.eagle3.head import TargetHead

transformers = pytest.importorskip("transformers", reason="running a target needs the extra eagle3")

VOCAB, HIDDEN = 50, 16
_ROTARY = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIGS = {
    "llama": ("Llama", {**_ROTARY}),
    "qwen3": ("Qwen3", {**_ROTARY, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**_ROTARY, "head_dim": 8, "final_logit_softcapping": 0.05}),
    "gpt2": ("GPT2", {"n_embd": HIDDEN, "n_head": 2, "n_layer": 2}),
    "gpt_neox": ("GPTNeoX", {**_ROTARY, "layer_norm_eps": 1e-4}),
    "cohere": ("Cohere", {**_ROTARY, "logit_scale": 0.3}),
    "granite": ("Granite", {**_ROTARY, "logits_scaling": 7.0, "embedding_multiplier": 12.0}),
    "olmo": ("Olmo", {**_ROTARY}),
    "olmo2": ("Olmo2", {**_ROTARY}),
    "phi": ("Phi", {**_ROTARY}),
}
NORMS = {"gemma2": "gemma_rms"} | dict.fromkeys(("gpt2", "gpt_neox", "cohere", "olmo", "phi"), "layer")


def made(name, dtype=torch.float32):
    """A model of random weights; biases and norms of random ones too, as new ones are zeros and ones."""
    kind, sizes = CONFIGS[name]
    model_class = "GPT2LMHeadModel" if name == "gpt2" else f"{kind}ForCausalLM"
    hidden = {} if name == "gpt2" else {"hidden_size": HIDDEN}
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, pad_token_id=0, **hidden, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.4, std=0.3)
    return model.eval().requires_grad_(False).to(dtype)


def states_and_logits(model):
    """The last block's output [T, H] and the logits [T, V] of two rows of tokens."""
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    blocks = [module for name, module in model.named_modules() if name.endswith((".layers.1", ".h.1"))]
    seen = []
    handle = blocks[0].register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    handle.remove()
    return seen[0].flatten(0, 1), logits.flatten(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_of_a_model_gives_the_models_own_logits(name):
    model = made(name)
    head = TargetHead.of_model(model)
    states, logits = states_and_logits(model)
    torch.testing.assert_close(head(states), logits, rtol=1e-5, atol=1e-6 * float(logits.abs().max()))
    facts = head.facts()
    assert (facts["norm"], head.last_hidden) == (NORMS.get(name, "rms"), "pre_norm")
    assert facts["tied"] == (name in ("qwen3", "gemma2", "gpt2", "cohere"))
    assert facts["softcap"] == (0.05 if name == "gemma2" else None)
    assert facts["logit_scale"] == {"cohere": 0.3, "granite": 1 / 7.0}.get(name, 1.0)
    assert ("lm_head_bias" in head.weights()) == (name == "phi")
    # And it fails where a part of it is another one.
    for wrong in ({"norm": "rms" if facts["norm"] != "rms" else "layer"}, {"logit_scale": 1.1}):
        other = TargetHead(head.weights(), **{**facts_of(head), **wrong})
        assert float((other(states) - logits).abs().max()) > 1e-2 * float(logits.abs().max())


def facts_of(head):
    return {name: value for name, value in head.facts().items() if name != "compute_dtype"}


def test_a_softcap_that_small_logits_hardly_show_is_found_and_one_that_is_not_applied_is_not():
    model = made("gemma2", torch.bfloat16)
    model.config.final_logit_softcapping = 1000.0
    assert TargetHead.of_model(model).softcap == 1000.0
    model = made("llama", torch.bfloat16)
    model.config.final_logit_softcapping = 1000.0
    assert TargetHead.of_model(model).softcap is None


@pytest.mark.parametrize(("name", "norm"), [("llama", "rms"), ("olmo2", "wide_rms"), ("gemma2", "gemma_rms")])
def test_the_head_computes_in_bf16_as_a_model_of_bf16(name, norm):
    model = made(name, torch.bfloat16)
    head = TargetHead.of_model(model)
    states, logits = states_and_logits(model)
    assert (head.facts()["compute_dtype"], head.norm) == ("bf16", norm) and torch.equal(head(states), logits)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as training scripts do
    try:
        assert head.log_normalizer_and_argmax(states)[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


class Twisted(nn.Module):
    """A norm that none of the known ones is."""

    def forward(self, states):
        return torch.tanh(states * 3)


def test_a_norm_that_is_not_known_makes_the_states_post_norm(monkeypatch):
    model = made("llama")
    model.model.norm = Twisted()
    head = TargetHead.of_model(model)
    states, logits = states_and_logits(model)
    assert (head.last_hidden, head.facts()["norm"]) == ("post_norm", "none")
    torch.testing.assert_close(head(torch.tanh(states * 3)), logits, rtol=1e-5, atol=1e-6)


def test_a_model_whose_logits_do_not_follow_from_its_last_hidden_state_is_refused():
    model = made("llama")
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + torch.arange(VOCAB) / VOCAB)
    with refused("E705", "logits"):
        TargetHead.of_model(model)


def test_normalizers_argmax_and_probabilities_in_parts_are_those_of_all_logits():
    head = TargetHead.of_model(made("cohere"))
    states = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits, ids = head(states), [4, 49, 0, 7]
    with in_parts_of(3 * VOCAB):
        normalizers, argmax = head.log_normalizer_and_argmax(states)
        torch.testing.assert_close(normalizers, logits.exp().sum(-1).log())
        assert argmax.tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(head.logits(states, torch.tensor(ids)), logits[:, ids])
        slots = torch.tensor([0, 2, 3, 5, 8, 9, 11])
        batch = {"input_ids": torch.zeros(3, 4), "last_hidden_states": states, "target_slots": slots}
        for given, among in ((ids, logits[:, ids]), (None, logits)):
            probs = head.target_probs(batch, given).flatten(0, 1)
            torch.testing.assert_close(probs[slots], among.softmax(-1))
            assert not probs[[1, 4, 6, 7, 10]].any()


@pytest.mark.parametrize("name", ["qwen3", "phi"])
def test_the_weights_are_stored_once_in_the_smallest_dtype_that_is_exact(tmp_path, name):
    model = made(name).to(torch.bfloat16).to(torch.float32)  # loaded as fp32, as on a CPU
    head = TargetHead.of_model(model)
    (tmp_path / "sidecar").mkdir()
    write_weights(tmp_path, head.weights())
    assert has_weights(tmp_path)
    found = read_weights(tmp_path)
    assert ("lm_head" in found) == (name == "phi") and {each.dtype for each in found.values()} == {torch.bfloat16}
    expected = model.get_input_embeddings().weight
    assert torch.equal(read_target_embeddings(tmp_path), expected)
    manifest = {"format_version": "native-1", "hidden_size": HIDDEN, "target_vocab_size": VOCAB, "head": head.facts()}
    assert json.loads(json.dumps(manifest)) == manifest
    raw = bytearray((tmp_path / "target_weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "target_weights.safetensors").write_bytes(raw)
    assert not has_weights(tmp_path)


def test_weights_that_bf16_cannot_hold_stay_as_they_are_and_foreign_ones_are_refused(tmp_path):
    values = torch.tensor([[1.0, 2.0**-12 + 1, 0.1]])
    write_weights(tmp_path, {"embeddings": values, "norm": torch.tensor([1.0009765625, 0, 1])})
    with safe_open(tmp_path / "target_weights.safetensors", "pt") as file:
        assert [file.get_slice(name).get_dtype() for name in ("embeddings", "norm")] == ["F32", "F16"]
    assert torch.equal(read_weights(tmp_path, ["embeddings"])["embeddings"], values)
    from safetensors.torch import save_file

    save_file({"embeddings": torch.zeros(3)}, tmp_path / "target_weights.safetensors")
    with refused("E701", "target_weights.safetensors", "[3]"):
        read_weights(tmp_path)
    with refused("E102", "{'embeddings': (3,)}"):
        write_weights(tmp_path, {"embeddings": torch.zeros(3)})


# --- the six keys -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A cache of version 1, and a native one of the same samples; ten of them, of 1 to 24 tokens, in float32."""
    folder, samples = tmp_path_factory.mktemp("both"), eagle3_runs.samples_of()
    plan = eagle3_runs.plan(samples, dtype="fp32", tokenizer={"pad_id": 0})
    eagle3_runs.run(folder / "1", samples=samples, given=plan)
    same = {key: plan.settings["manifest"][key] for key in ("aux_layer_ids", "selected_token_ids", "draft_vocab_size")}
    form = {"seq_length": eagle3_runs.LENGTH, "dtype": "fp32", "aux_dtype": "fp32", **same}
    eagle3_native.capture_native(folder / "native", eagle3_runs.load(torch.device("cpu")), samples, **form)
    return folder / "1", folder / "native"


def test_items_of_a_native_cache_are_those_of_version_1_where_a_draft_looks(both):
    published, native = (CachedEagle3Dataset(path) for path in both)
    assert len(native) == len(published) == 10 and native.shard_size is None and not native.compressed
    supervised = 0
    for index in range(len(native)):
        found, expected = native[index], published[index]
        assert found.keys() == set(CACHE_KEYS)
        for name, tensor in expected.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            assert torch.equal(found[name], expected[name]), name
        loss = expected["loss_mask"].bool()
        torch.testing.assert_close(found["target_probs"][loss], expected["target_probs"][loss], rtol=1e-5, atol=1e-6)
        assert not found["target_probs"][~loss].any()
        # Up to its last slot with loss a draft sees the hidden states of version 1, and zeros where nothing follows.
        read = torch.cummax(loss.flip(0).long(), 0).values.flip(0).bool()
        torch.testing.assert_close(found["aux_hidden_states"][read], expected["aux_hidden_states"][read])
        supervised += int(loss.sum())
    assert supervised > 30 and verify(both[1]) == []
    with refused("E102", kind=IndexError):
        native[10]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_native_cache_are_its_items(both, workers):
    dataset = CachedEagle3Dataset(both[1])
    batches = list(build_cached_eagle3_dataloader(both[1], 4, False, workers))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    for index in range(len(dataset)):
        row = {name: tensor[index % 4] for name, tensor in batches[index // 4].items()}
        assert row.keys() == set(CACHE_KEYS)
        for name, tensor in dataset[index].items():
            torch.testing.assert_close(row[name], tensor)


def test_target_probs_can_be_left_out_and_are_no_option_of_version_1(both):
    (native := CachedEagle3Dataset(both[1], target_probs=False))[1]
    assert native[1].keys() == set(CACHE_KEYS) - {"target_probs"}
    with refused("E102", "target_probs"):
        CachedEagle3Dataset(both[0], target_probs=False)


def test_the_head_of_a_cache_is_that_of_the_model(both):
    expected, found = TargetHead.of_model(eagle3_runs.load(torch.device("cpu"))), TargetHead.of_cache(both[1])
    states = torch.randn(3, eagle3_runs.HIDDEN, generator=torch.Generator().manual_seed(2))
    assert torch.equal(found(states), expected(states)) and found.facts() == expected.facts()
    assert TargetHead.of_cache(both[1], dtype=torch.bfloat16)(states).dtype == torch.bfloat16
    with refused("E102", "embeddings"):
        found.weights()
    with refused("E208", "format_version"):
        TargetHead.of_cache(both[0])


def test_fp8_states_become_those_of_the_manifests_dtype(tmp_path):
    (stored,) = eagle3_native.write_native(tmp_path, [[0, 1, 1, 0]], aux_dtype="fp8", dtype="fp32")
    item = CachedEagle3Dataset(tmp_path, target_probs=False)[0]
    expected = stored.aux_hidden_states.float() * stored.aux_scales[..., None]
    assert item["aux_hidden_states"].dtype == torch.float32
    assert torch.equal(item["aux_hidden_states"][:3], expected.bfloat16().float().flatten(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_target_probs_are_made_on_a_gpu(both):
    (found, expected) = (
        next(iter(build_cached_eagle3_dataloader(both[1], 4, False, device=device))) for device in ("cuda", "cpu")
    )
    assert found["target_probs"].is_cuda and not found["aux_hidden_states"].is_cuda
    torch.testing.assert_close(found["target_probs"].cpu(), expected["target_probs"], rtol=1e-3, atol=1e-5)
