"""The example of fine-tuning on message trees: what it counts, and that a stop does not show in its losses."""

import importlib
import sys

import pytest
import torch
from support import ROOT

from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup

pytest.importorskip("transformers", reason="the extra `eagle3` brings it")
pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB_SIZE = 32


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("tree_sft")
        patch.delitem(sys.modules, "tree_sft")


def thread(*messages):
    """Messages as (first id, tokens): counting up from an id; those at odd places are the assistant's."""
    ids = [(first + i) % VOCAB_SIZE for first, length in messages for i in range(length)]
    mask = [place % 2 for place, (_, length) in enumerate(messages) for _ in range(length)]
    return Rollout(ids, loss_mask=mask)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    trees = []
    for tree in range(24):
        opening, answer = [(tree, 9), (tree + 3, 6)], (tree + 7, 5)
        threads = [
            thread(*opening, (tree + 1, 4), answer),
            thread(*opening, (tree + 2, 4), answer),
            thread((tree, 9), answer),
        ]
        trees.append(RolloutGroup(f"tree {tree}", threads))
    path = tmp_path_factory.mktemp("trees") / "oasst1"
    build_rollouts(trees, path, seed=0, val_frac=0.2, vocab_size=VOCAB_SIZE)
    return path


def run(example, cache, checkpoint, steps, max_tokens=120):
    found = example.main(
        [
            str(cache),
            "--checkpoint",
            str(checkpoint),
            *f"--max-tokens {max_tokens} --steps {steps} --hidden 32 --lr 1e-2".split(),
        ]
    )
    return found


def test_a_stop_does_not_show_in_the_losses(example, cache, tmp_path, capsys):
    straight = run(example, cache, tmp_path / "straight.pt", 30)
    begin, end = (float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if line.startswith("val"))
    assert end < begin / 2 and straight[-1] < straight[0] / 2
    first = run(example, cache, tmp_path / "stopped.pt", 10)
    assert run(example, cache, tmp_path / "stopped.pt", 30)[10:] == straight[10:]
    assert first == straight[:10]
    with pytest.raises(SystemExit, match=r"made with --hidden 32, --max-tokens \d+: expected the same"):
        run(example, cache, tmp_path / "stopped.pt", 30, max_tokens=999)
    with pytest.raises(SystemExit, match="its folder does not exist"):
        run(example, cache, tmp_path / "none" / "new.pt", 1)
    with pytest.raises(SystemExit, match="the largest tree has 38 tokens"):
        run(example, cache, tmp_path / "none.pt", 0, max_tokens=37)


def test_each_message_of_a_tree_counts_once(example, cache):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **config))
    dataset = RolloutDataset(cache)
    once = {}
    for sample in dataset.group(0).samples:
        ids = torch.as_tensor(sample.ids)
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for at in range(1, len(ids)):
            if sample.loss_mask[at]:
                once[tuple(ids[: at + 1].tolist())] = -logp[at - 1, ids[at]]
    loss, tokens = example.summed_loss(model, dataset.forest(0))
    assert tokens == len(once) == 6 + 5 + 5 + 5
    torch.testing.assert_close(loss, torch.stack(list(once.values())).sum())
