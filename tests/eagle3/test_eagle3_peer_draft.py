"""A saved draft of the example: what its files hold, and the logits of speculators' and SpecForge's own classes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.draft_example import imported, small_run
from support.peer_caches import PEERS
from support.peer_exchange import Tool

from niels_gpt.eagle3.cache import build_cached_eagle3_dataloader, read_manifest, read_target_embeddings
from niels_gpt.storage.errors import CacheError

transformers = pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, STEPS = [1, 3, 4], 3
FOLDERS = {"speculators": "speculators-0.9.0", "specforge": "specforge-0.2.0"}
needs_peers = pytest.mark.skipif(
    PEERS is None, reason="set NIELS_GPT_PEERS to a folder with both packages, see .ci/run"
)


@pytest.fixture(scope="module")
def saving():
    yield from imported("save_eagle3_draft")


@pytest.fixture(scope="module")
def parts(saving):
    yield from imported("eagle3_draft")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer):
    return small_run(tmp_path_factory.mktemp("run"), tiny_tokenizer)


@pytest.fixture(scope="module")
def draft(parts, run):
    """A draft none of whose weights is as it begins: norms too, so that each shows in the logits."""
    torch.manual_seed(0)
    config = parts.draft_config(transformers.AutoConfig.from_pretrained(run / "target"))
    selected = torch.tensor(read_manifest(run / "cache")["selected_token_ids"])
    assert not bool((selected.diff() > 0).all()), "a sorted list would not show the order of the rows"
    made = parts.Draft(config, read_target_embeddings(run / "cache"), selected)
    for weight in made.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return made


@pytest.fixture(scope="module")
def saved(saving, draft, run):
    saving.save_draft(draft, run / "draft", str(run / "target"), LAYERS, 4)
    return run / "draft"


def test_tokens_of_the_files_on_paper(saving, parts, run, tmp_path):
    """Of 9 tokens the draft has 7, 2 and 5, in this order: in the files they are 2, 5, 7, and its rows are so too."""
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    draft = parts.Draft(parts.draft_config(config), torch.zeros(9, 8), torch.tensor([7, 2, 5]))
    saving.save_draft(draft, tmp_path / "d", str(run / "target"), LAYERS, 4)
    for name in ("speculators", "specforge"):
        found = load_file(tmp_path / "d" / name / "model.safetensors")
        assert found["d2t"].tolist() == [2 - 0, 5 - 1, 7 - 2]
        assert found["t2d"].tolist() == [False, False, True, False, False, True, False, True, False]
        assert torch.equal(found["lm_head.weight"], draft.lm_head.weight[[1, 2, 0]])


def test_each_folder_numbers_the_layers_as_its_readers_do(saved, run):
    """speculators and vLLM: boundaries, block + 1. SpecForge and SGLang: blocks, of which SGLang adds the 1 itself."""
    configs = {name: json.loads((saved / name / "config.json").read_text()) for name in FOLDERS}
    assert configs["speculators"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert configs["specforge"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == LAYERS
    assert configs["speculators"]["speculators_config"]["verifier"]["name_or_path"] == str(run / "target")


def test_a_folder_with_anything_and_other_numbers_of_layers_are_refused(saving, draft, run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(CacheError, match="exists already") as refused:
        saving.save_draft(draft, tmp_path / "mine", str(run / "target"), LAYERS, 4)
    assert refused.value.code == "E704"
    with pytest.raises(ValueError, match="2 auxiliary layers"):
        saving.save_draft(draft, tmp_path / "two", str(run / "target"), LAYERS[:2], 4)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@needs_peers
@pytest.mark.parametrize("name", FOLDERS)
def test_their_class_computes_the_draft_s_logits_at_each_step(name, parts, draft, saved, run, tmp_path):
    batch, ours = next(iter(build_cached_eagle3_dataloader(run / "cache", 4, shuffle=False))), []
    hook = draft.lm_head.register_forward_hook(lambda _module, _inputs, out: ours.append(out.detach()))
    with torch.no_grad():
        parts.ttt_losses(draft, batch, STEPS)
    hook.remove()
    tool = Tool(Path(str(PEERS)) / FOLDERS[name])
    try:
        taken = {part: batch[part] for part in ("input_ids", "aux_hidden_states")}
        theirs, config = tool.call(f"{name}_draft", str(saved / name), taken, STEPS)
        if name == "speculators":
            tool.call("speculators_saves", str(saved / name), str(tmp_path / "again"))
    finally:
        tool.close()
    assert config["class"] == {"speculators": "Eagle3DraftModel", "specforge": "LlamaForCausalLMEagle3"}[name]
    order = (draft.d2t + torch.arange(len(draft.d2t))).argsort()
    compared = 0
    for step in range(STEPS):
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            end = length - step  # beyond it a slot's token is padding
            expected, found = ours[step][row, :end][:, order], theirs[step][row, :end]
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), (step, row)
            compared += found.numel()
    assert compared > 50_000 and float(theirs.std()) > 0.5
    if name == "speculators":  # what it saves of this draft is what we saved
        again, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", saved / name))
        assert again.keys() == given.keys() and all(torch.equal(again[key], given[key]) for key in given)
