"""The example of a DFlash draft: its slots in training are those at inference; one training from a cache and live."""

import json
import shutil

import pytest
import torch
from support.draft_example import ANSWERS, imported
from support.eagle3_native import write_native

from niels_gpt.commands.eagle3 import precompute
from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.models import write_small_target
from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset
from niels_gpt.eagle3.target import load_target

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def example():
    yield from imported("train_dflash_draft")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer):
    """A folder with a target of random weights, and its caches in fp32 and bf16."""
    folder = tmp_path_factory.mktemp("run")
    write_small_target(folder / "target", tiny_tokenizer)
    chats = [[("user", f"Page {page}?"), ("assistant", ANSWERS[page % 3] * (1 + page % 2))] for page in range(10)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    what = f"--target-model {folder}/target --input-data {folder}/chats.jsonl --format native --for dflash"
    for dtype in ("fp32", "bf16"):
        how = f"--output-dir {folder}/{dtype} --dtype {dtype} --seq-length 48 --threads 1 --device cpu"
        assert precompute.main([*what.split(), *how.split()]) == 0
    return folder


def test_each_slot_of_training_is_a_proposal_at_inference(example, run):
    """One block at a time, with the states of the tokens before its anchor, against the target's own logits."""
    data = NativeEagle3Dataset(run / "fp32", fields=FIELDS)
    target = load_target(str(run / "target"), revision=None, dtype=torch.float32, attention="sdpa", device="cpu")
    draft, drawn, divergences = example.Draft(read_weights(run / "fp32"), 5 * 64), [], []
    batch = data.collate_fn()([data.as_stored()[number] for number in (0, 1, 4)])
    with torch.no_grad():
        hook = draft.register_forward_hook(lambda _, inputs, __: drawn.append(inputs[2]))
        found = example.loss_of(draft, TargetHead.of_cache(run / "fp32"), batch, torch.Generator().manual_seed(0))
        hook.remove()
        (anchors,) = drawn
        for row in range(3):
            ids, mask, aux = (tensor[None] for tensor in [*data[(0, 1, 4)[row]].values()][:3])
            says = target(ids).logits[0].log_softmax(-1)
            for anchor in anchors[row].tolist():
                assert mask[0, anchor] and mask[0, anchor + 1]
                known = torch.cat(
                    [aux[:, :anchor], torch.full_like(aux[:, :1], 9)], dim=1
                )  # no state of the anchor yet
                block = draft(ids[:, : anchor + 1], known, torch.tensor([[anchor]]))[0, 0]
                for slot in range(1, min(8, ids.shape[1] - anchor)):
                    if mask[0, anchor + slot]:
                        proposes = (draft.lm_head.weight @ block[slot]).log_softmax(-1)
                        wanted = says[anchor + slot - 1]
                        divergences.append((wanted.exp() * (wanted - proposes)).sum())
    assert len(divergences) > 100
    assert torch.allclose(found, torch.stack(divergences).mean(), rtol=1e-4)


def test_a_cache_without_blocks_is_refused(example, tmp_path, capsys):
    write_native(tmp_path, [[0, 1, 1]], targets="all", aux_layer_ids=[])
    with pytest.raises(SystemExit):
        example.main([str(tmp_path)])
    assert "enough for mtp only: a DFlash draft reads blocks" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "error"), [("fp32", 3e-6), ("bf16", 2e-3)])
def test_the_losses_from_the_cache_are_those_of_the_running_target_and_fall(example, run, dtype, error):
    live = torch.tensor(example.main([str(run / dtype), "--live", str(run / "target")]))
    away = shutil.move(run / "target", run / "away")  # a training from the cache needs no target
    cached = torch.tensor(example.main([str(run / dtype)]))
    shutil.move(away, run / "target")
    assert cached.shape == (50,) and torch.allclose(cached, live, rtol=error, atol=0)
    assert cached[-10:].mean() < cached[:10].mean() / 2
