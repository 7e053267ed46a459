"""Target models by folder and by hub id: what is known before they are loaded, the loading, and the sample's own."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.disk import sha256
from support.disk_faults import writing_fails
from support.errors import refused
from support.power_loss import recorded_below

from niels_gpt.eagle3.target import HFEagle3TargetModel, load_target, target_facts, write_small_target
from niels_gpt.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="running a target needs the extra eagle3")

FILES = {"config.json", "model.safetensors", "spm.model"}


@pytest.fixture
def own(model, tmp_path):
    shutil.copytree(model, tmp_path / "own")
    return tmp_path / "own"


def opened(folder, revision=None, dtype=torch.float32):
    return load_target(str(folder), revision=revision, dtype=dtype, attention="sdpa", device="cpu")


@pytest.mark.slow
def test_the_small_target_has_the_same_bytes_in_every_process(model, tmp_path):
    program = (
        "import sys, torch\n"
        "from niels_gpt.eagle3.target import write_small_target\n"
        "from niels_gpt.tokenizer import load_tokenizer\n"
        "torch.manual_seed(int(sys.argv[3])); torch.set_num_threads(int(sys.argv[3]))\n"
        "torch.set_default_dtype(torch.float64)\n"
        "write_small_target(sys.argv[1], load_tokenizer(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", program]
    for number in ("1", "2"):
        subprocess.run([*command, str(tmp_path / number), str(model), number], check=True)
        made, expected = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (tmp_path / number, model))
        assert made == expected


def test_the_small_target_is_a_frozen_llama_of_eight_layers_with_the_tokenizer_beside_it(
    model, tmp_path, tiny_tokenizer
):
    assert {path.name for path in model.iterdir()} == FILES
    llama = opened(model)
    assert isinstance(llama, transformers.LlamaForCausalLM) and llama.config.vocab_size == tiny_tokenizer.vocab_size
    assert HFEagle3TargetModel(llama).aux_layer_ids == [1, 3, 4]
    assert load_tokenizer(model).sha256 == tiny_tokenizer.sha256
    assert llama.state_dict().keys() == load_file(model / "model.safetensors").keys()
    with torch.no_grad():
        logits = llama(torch.arange(20)[None]).logits[0]
    assert len(set(logits.argmax(-1).tolist())) > 5 and 0.5 < logits.std() < 2
    before = torch.get_rng_state()
    other = write_small_target(tmp_path / "other", tiny_tokenizer, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert sha256(other / "model.safetensors") != sha256(model / "model.safetensors")
    assert sha256(other / "config.json") == sha256(model / "config.json")
    for dtype in (torch.float32, torch.bfloat16):
        loaded = opened(model, dtype=dtype)
        assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())
        assert {weight.dtype for weight in loaded.parameters()} == {dtype}
        assert loaded.config._attn_implementation == "sdpa"


def test_a_target_is_whole_or_absent(tmp_path, tiny_tokenizer):
    trace = recorded_below(tmp_path, lambda: write_small_target(tmp_path / "a" / "small", tiny_tokenizer))
    appears = next(place for place, (verb, *names) in enumerate(trace) if verb == "rename" and names[1] == "a/small")
    assert {verb for verb, *_ in trace[appears + 1 :]} == {"fsync_dir"}
    written = [Path(name) for verb, name, *_ in trace[:appears] if verb == "write"]
    assert len(written) >= 3 and {path.parent for path in written} == {Path(trace[appears][1])}
    with writing_fails("model.safetensors"), refused("E501", "model.safetensors", kind=OSError):
        write_small_target(tmp_path / "b" / "small", tiny_tokenizer)
    assert list((tmp_path / "b").iterdir()) == []


def test_builders_that_want_a_small_target_at_once_have_one(tmp_path, tiny_tokenizer):
    for turn in range(4):
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(write_small_target, tmp_path / f"{turn}", tiny_tokenizer) for _ in range(4)]
        assert {each.result() for each in made} == {tmp_path / f"{turn}"}
    assert len(list(tmp_path.iterdir())) == 4, "no half-written one is left"


def test_a_small_target_that_stands_is_kept_and_anything_else_is_not_overwritten(own, tiny_tokenizer):
    before = {path: path.stat().st_mtime_ns for path in own.iterdir()}
    assert write_small_target(own, tiny_tokenizer) == own
    assert {path: path.stat().st_mtime_ns for path in own.iterdir()} == before
    with refused("E509", own, kind=FileExistsError):
        write_small_target(own, tiny_tokenizer, seed=1)
    assert {path: path.stat().st_mtime_ns for path in own.iterdir()} == before


TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 9, "max_position_embeddings": 32}


def test_the_facts_of_a_folder_by_any_name(model, tmp_path, monkeypatch):
    facts = target_facts(str(model))
    assert (facts.name, facts.revision, facts.model_type) == (str(model), None, "llama")
    assert facts.config_sha256 == sha256(model / "config.json")
    gpt2 = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=8, n_head=4, n_positions=64)  # has its own names
    gemma = transformers.Gemma3Config(text_config={**TEXT, "num_attention_heads": 2})  # the sizes are those of its text
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for config, sizes in ((None, (8, 64, 389, 2048)), (gpt2, (8, 16, 50, 64)), (gemma, (9, 16, 50, 32))):
        if config is not None:
            config.save_pretrained(tmp_path)
            facts = target_facts(str(tmp_path))
        assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.max_positions) == sizes
    monkeypatch.setenv("HOME", str(model.parent))
    monkeypatch.chdir(model.parent)
    for name in ("target", "./target", "~/target"):
        assert target_facts(name).name == name and opened(name) is not None


def test_other_weights_are_another_target(own, model):
    sums = [target_facts(str(folder)).weights_sha256 for folder in (model, own)]
    assert sums[0] == sums[1]
    raw = bytearray((own / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (own / "model.safetensors").write_bytes(raw)
    sums.append(target_facts(str(own)).weights_sha256)
    (own / "model.safetensors").rename(own / "model-2.safetensors")
    sums.append(target_facts(str(own)).weights_sha256)
    save_file({"x": torch.zeros(1)}, own / "model-1.safetensors")
    sums.append(target_facts(str(own)).weights_sha256)
    (own / "notes.txt").write_text("no weights")
    assert len(set(sums)) == 4 and target_facts(str(own)).weights_sha256 == sums[-1]


def test_folders_that_are_no_models_are_named(own, tmp_path):
    with refused("E705", "nothing/config.json", kind=FileNotFoundError):
        target_facts(str(tmp_path / "nothing"))
    (own / "model.safetensors").unlink()
    with refused("E705", own, "*.safetensors", kind=FileNotFoundError):
        target_facts(str(own))
    (own / "config.json").unlink()
    with refused("E705", "own/config.json", kind=FileNotFoundError):
        target_facts(str(own))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "clip"}', "'clip'"),
        ('{"model_type": "resnet"}', "'resnet'"),
        ('{"model_type": "of tomorrow"}', ""),
        ("{}", ""),
        ('{"model_type": "llama", ', ""),
        ("[1]", ""),
        ("\xff\xfe", ""),
        ('{"model_type": "llama", "hidden_size": "wide"}', ""),
    ],
)
def test_a_config_of_something_else_is_named(config, said, own):
    (own / "config.json").write_bytes(config.encode("latin-1"))
    with refused("E705", "own/config.json", said):
        target_facts(str(own))


def test_without_transformers_it_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for ask in (lambda: target_facts(str(model)), lambda: opened(model)):
        with refused("E901", "niels-gpt[eagle3]", kind=ImportError):
            ask()


@pytest.fixture
def offline(monkeypatch):
    """No network, as HF_HUB_OFFLINE=1 has it; returns the folder of what was downloaded before."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def test_a_hub_model_is_known_by_its_commit_and_the_asked_revision_is_the_one_that_is_loaded(
    offline, model, tmp_path, tiny_tokenizer
):
    repository = offline / "models--somebody--small"
    commits = {"main": "a" * 40, "v1": "b" * 40}
    shutil.copytree(model, repository / "snapshots" / commits["main"])
    write_small_target(tmp_path / "older", tiny_tokenizer, seed=1)
    shutil.copytree(tmp_path / "older", repository / "snapshots" / commits["v1"])
    (repository / "refs").mkdir()
    for ref, commit in commits.items():
        (repository / "refs" / ref).write_text(commit)
    older = tmp_path / "older"
    for asked, ref, folder in ((None, "main", model), ("v1", "v1", older), (commits["v1"], "v1", older)):
        revision, commit = asked, commits[ref]
        facts = target_facts("somebody/small", revision=revision)
        assert (facts.name, facts.revision, facts.weights_sha256) == ("somebody/small", commit, None)
        weights = opened("somebody/small", revision).state_dict()
        assert all(torch.equal(weights[name], there) for name, there in load_file(folder / "model.safetensors").items())


def test_an_id_without_a_network_is_an_error_of_the_network(offline):
    for ask in (target_facts, opened):
        with refused("E601", "somebody/unknown", kind=ConnectionError):
            ask("somebody/unknown")
    with refused("E602", "a name!"):  # it can be no id
        target_facts("a name!")


def test_loading_prints_nothing_and_leaves_the_library_as_it_was(model, own, capfd, caplog):
    from transformers.utils import logging

    logging.add_handler(caplog.handler)  # its loggers do not tell the root
    weights = load_file(own / "model.safetensors")
    save_file({**weights, "left.over": torch.zeros(1)}, own / "model.safetensors", {"format": "pt"})
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    opened(model)
    opened(own)
    logging.remove_handler(caplog.handler)
    assert capfd.readouterr() == ("", "") and caplog.messages == []
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before == (logging.WARNING, True)


@pytest.mark.parametrize(
    ("config", "gone", "said"),
    [
        (
            {},
            ["lm_head.weight", "model.layers.3.mlp.up_proj.weight"],
            ["2 of its weights", "lm_head.weight, model.layers.3.mlp.up_proj.weight"],
        ),
        ({"num_hidden_layers": 9}, [], ["9 of its weights", "model.layers.8"]),
        ({"vocab_size": 390}, [], ["2 of its weights", "shape", "lm_head.weight, model.embed_tokens.weight"]),
    ],
)
def test_weights_that_are_missing_or_of_another_shape_are_an_error_and_not_made_up(own, config, gone, said):
    weights = load_file(own / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name not in gone}
    save_file(kept, own / "model.safetensors", {"format": "pt"})
    written = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**written, **config}))
    with refused("E705", own, *said):
        opened(own)
    with refused("E705", own, "of tomorrow"):
        load_target(str(own), revision=None, dtype=torch.float32, attention="of tomorrow", device="cpu")


@pytest.mark.parametrize("left", [0, 5, 2000, -1])
def test_a_file_of_weights_that_is_cut_off_is_an_error(left, own):
    path = own / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with refused("E705", own, "SafetensorError" if left < 0 else "expected whole files"):
        opened(own)
