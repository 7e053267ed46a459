"""The example of GRPO: TRL's trainer on folded rows trains as it does unfolded."""

import importlib
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from support import ROOT
from support.documents import blocks_of

pytest.importorskip("trl", reason="the extra `rl` brings it")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # TRL's and transformers' own
]
SMALL = "--prompt 32 --completion 4 16 --group 4 --hidden 64"


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("folded_grpo")
        patch.delitem(sys.modules, "folded_grpo")


@pytest.fixture(scope="module")
def options(example):
    return example.parse(SMALL.split())


@pytest.fixture(scope="module")
def folder(example, options, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("grpo"))
    example.save_model(folder, options)
    return folder


def apart(first, second):
    assert len(first) == len(second) == 6
    return max(abs(a[name] - b[name]) for a, b in zip(first, second, strict=True) for name in a)


def test_six_steps_are_those_of_the_unfolded_trainer(example, options, folder):
    from trl import GRPOTrainer

    trainers = [example.trained(kind, options, folder)[0] for kind in (GRPOTrainer, example.Unfolded, example.Folded)]
    prompts = [[len(batch["prompt_ids"].unique(dim=0)) for batch in each._buffered_inputs] for each in trainers]
    assert prompts[1:] == [[2, 2], [2, 2]] and max(prompts[0]) > 2
    shuffled, unfolded, folded = map(example.metrics_of, trainers)
    assert apart(unfolded, folded) < 1e-5
    for name in ("kl", "clip share"):
        assert sum(row[name] > 1e-3 for row in folded) >= 3, "a run without it proves nothing about it"
    gradient = [[{name: row[name] for name in ("loss", "grad_norm")} for row in rows] for rows in (shuffled, folded)]
    assert apart(*gradient) < 1e-5, "which samples share a micro-batch shows in the step"


@pytest.mark.slow
def test_six_steps_of_an_adapter_are_those_of_the_unfolded_trainer(example, folder, monkeypatch):
    peft = pytest.importorskip("peft", reason="the extra `rl` brings it")
    # Rows this short run under a mask, as in the test above.
    monkeypatch.setattr(example, "body_forward", partial(example.body_forward, backend="prefix_tree"))
    found, options = [], example.parse([*SMALL.split(), "--lr", "2e-2"])
    for kind in (example.Unfolded, example.Folded):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        found.append(example.metrics_of(example.trained(kind, options, folder, peft_config=lora)[0]))
    assert apart(*found) < 1e-5
    for name in ("kl", "clip share"):  # without a difference from the reference, no adapter was switched off
        assert sum(row[name] > 1e-3 for row in found[0]) >= 3


@pytest.mark.parametrize("backend", ["prefix_tree", "dense"])
def test_padding_and_masked_completions_have_no_part_in_a_row(example, options, folder, monkeypatch, backend):
    monkeypatch.setattr(example, "body_forward", partial(example.body_forward, backend=backend))
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, example.VOCAB_SIZE, (6, 12), generator=draw)
    ids[:3, :7], ids[3:, :7] = ids[0, :7].clone(), ids[3, :7].clone()
    mask = torch.ones_like(ids)
    mask[3:, :3] = 0  # a shorter prompt
    mask[1, 9:] = mask[4, 11:] = 0  # shorter completions
    mask[2, 7:] = 0  # a completion that was cut, which TRL may leave out (mask_truncated_completions)
    values = []
    for kind in (example.Unfolded, example.Folded):
        trainer = example.trainer_of(kind, options, folder)
        model = trainer.model.eval()
        ids, mask = ids.to(model.device), mask.to(model.device)
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, 5, batch_size=4, compute_entropy=True
        )
        (logps.square() + entropies).sum().backward()
        values.append([logps, entropies, *(each.grad for each in model.parameters())])
    for unfolded, folded in zip(*values, strict=True):
        torch.testing.assert_close(folded, unfolded, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    cut = (torch.arange(12) < 7).long().expand(6, -1).to(ids.device)
    nothing = trainer._get_per_token_logps_and_entropies(model, ids, cut, 5)[0]
    nothing.sum().backward()  # every completion was cut
    assert not nothing.any() and all(each.grad is not None and not each.grad.any() for each in model.parameters())
    with pytest.raises(ValueError, match="pixel_values"):
        trainer._get_per_token_logps_and_entropies(model, ids, mask, 5, pixel_values=torch.ones(1))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.0"):
        trainer._get_per_token_logps_and_entropies(model, ids, mask, 5, compute_aux_loss=True)
    mask[0, :7] = 0
    with pytest.raises(ValueError, match="prompt is empty"):
        trainer._get_per_token_logps_and_entropies(model, ids, mask, 5)


def test_the_completions_of_a_prompt_stay_together(example):
    prompts = torch.tensor([3, 1, 2, 3, 1, 2, 1, 3])[:, None]
    whole = {"prompt_ids": prompts, "advantages": torch.arange(8.0), "num_items_in_batch": torch.tensor(5)}
    batches = [{key: value[i : i + 4] if value.ndim else value for key, value in whole.items()} for i in (0, 4)]
    first, second = example.grouped([{**batch, "old": None} for batch in batches])
    assert first["prompt_ids"][:, 0].tolist() == [3, 3, 3, 1]
    assert second["prompt_ids"][:, 0].tolist() == [1, 1, 2, 2]
    assert [batch["advantages"].tolist() for batch in (first, second)] == [[0, 3, 7, 1], [4, 6, 2, 5]]
    assert first["num_items_in_batch"] == 5 and first["old"] is None
    with pytest.raises(TypeError, match="num_images"):
        example.grouped([{**batch, "num_images": [1]} for batch in batches])


@pytest.mark.slow
def test_two_processes_train_as_unfolded():
    command = f"-W ignore -m torch.distributed.run --nproc-per-node 2 examples/folded_grpo.py {SMALL} --rounds 1"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # two ranks need two GPUs
    run = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    apart = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("apart")]
    assert len(apart) == 1 and len(apart[0]) == 5 and max(map(float, apart[0])) < 1e-5, run.stdout


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_the_rows_of_the_page_are_those_of_the_asynchronous_trainer():
    from trl.experimental.async_grpo import async_grpo_trainer
    from trl.experimental.async_grpo.packing import TreeRow

    page = (ROOT / "docs" / "folded_training.md").read_text(encoding="utf-8")
    (code,) = (block.body for block in blocks_of(page) if "FoldedRow" in block.body)
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_grpo_trainer, "TreeRow", TreeRow)  # put back what the page replaces
        exec(code, names)
        assert async_grpo_trainer.TreeRow is names["FoldedRow"]
    batches = []
    for kind in (TreeRow, names["FoldedRow"]):
        row, draw = kind(), torch.Generator().manual_seed(0)
        for group in range(2):
            prompt = torch.randint(9, (20,), generator=draw)
            for length in (3, 8, 5):
                mask = torch.arange(20 + length) >= 20
                row.add(
                    {
                        "input_ids": torch.cat([prompt, torch.randint(9, (length,), generator=draw)]),
                        "completion_mask": mask.long(),
                        "old_log_probs": -torch.rand(20 + length, generator=draw),
                        "advantage": float(length),
                        "group_id": group,
                        "metrics": {},
                    }
                )
        batches.append(async_grpo_trainer.DataCollatorForRollout(0).torch_call([[row]]))
    theirs, ours = batches
    assert ours.keys() == theirs.keys() and ours["input_ids"].shape <= theirs["input_ids"].shape
    for name in ("old_log_probs", "advantages", "segment_id"):
        assert torch.equal(ours[name], theirs[name])
    for name in ("shift_labels", "position_ids"):  # of the row that each term is read from
        assert torch.equal(*(batch[name][0, batch["token_index"][0]] for batch in batches))
