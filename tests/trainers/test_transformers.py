"""transformers' Trainer on the rows of a stream: what a step trains on, how a run continues, and refusals."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from support import TESTS

pytest.importorskip("trl", reason="the extra `rl` brings it, transformers and accelerate")

from support.documents import lines_to_copy
from support.small_builds import rollout_groups, rollouts
from support.trainer_runs import KILLED_AT, STEPS, run, steps
from support.transformers_script import build_caches, llama, open_stream, settings, tokenizer, trainer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from niels_gpt.prefix_tree.rollouts.stream import RolloutStream
from niels_gpt.sampling import EpochStream
from niels_gpt.storage.errors import CacheError, StateError, StreamUseError, UsageError
from niels_gpt.trainers.transformers import as_rows

SCRIPT = TESTS / "support" / "transformers_script.py"
KINDS = ["windows", "packed", "chats", "mixture"]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("caches"))


def batches(stream, count):
    return [batch for _, batch in zip(range(count), iter(stream), strict=False)]


def rows_of(found):
    """Return ids and labels of the rows of batches, or of what a trainer has seen, as lists of numbers."""
    if hasattr(found[0], "for_transformers"):
        inputs = [batch.for_transformers() for batch in found]
        found = [list(zip(each["input_ids"], each["labels"], strict=True)) for each in inputs]
    return [(ids.tolist(), labels.tolist()) for step in found for ids, labels in step]


def summed_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()


@pytest.mark.parametrize("name", KINDS)
def test_a_step_trains_on_a_batch_of_the_stream_and_its_loss_is_that_of_y(caches, tmp_path, name):
    run = trainer(open_stream(caches, name), settings(tmp_path, max_steps=3))
    run.train()
    expected = batches(open_stream(caches, name), 3)
    assert rows_of(run.seen) == rows_of(expected)
    logits = llama()(**expected[0].for_transformers(dtype=torch.float64)).logits[:, :-1]
    y = expected[0].y
    assert run.losses[0] == pytest.approx(summed_loss(logits, y) / int((y != -100).sum()), rel=1e-6)


@pytest.mark.parametrize("name", ["packed", "packed chats"])
def test_documents_of_a_packed_row_are_trained_as_if_each_were_alone(caches, tmp_path, name):
    run = trainer(open_stream(caches, name), settings(tmp_path, max_steps=1))
    run.train()
    (batch,), model = batches(open_stream(caches, name), 1), llama()
    starts, x, y = batch.cu_seqlens.tolist(), batch.x.view(1, -1), batch.y.view(1, -1)
    assert len(starts) > len(batch.x) + 1
    parts = [slice(*pair) for pair in pairwise(starts)]
    expected = sum(summed_loss(model(x[:, part]).logits, y[:, part]) for part in parts) / int((y != -100).sum())
    assert run.losses[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_is_every_sample_once_and_the_last_batch_is_short(caches, tmp_path, accumulation):
    stream = open_stream(caches, "windows", 48, epochs=1)
    assert stream.num_samples % 48 > 24
    how = {"per_device_train_batch_size": 48 // accumulation, "gradient_accumulation_steps": accumulation}
    run = trainer(stream, settings(tmp_path, max_steps=-1, num_train_epochs=1, **how))
    run.train()
    assert rows_of(run.seen) == rows_of(list(open_stream(caches, "windows", 48, epochs=1)))
    assert run.state.global_step == len(stream)


def test_drop_last_of_the_stream_leaves_out_the_short_batch(caches, tmp_path):
    stream = open_stream(caches, "windows", epochs=1, drop_last=True)
    rows, _ = as_rows(stream, settings(tmp_path, max_steps=-1, num_train_epochs=1, dataloader_drop_last=True))
    assert len(rows) == len(stream) * 8


@pytest.fixture(scope="module")
def stopped(caches, tmp_path_factory):
    """The folder of a run of 6 steps of 8 rows of a mixture, which was saved after 4."""
    folder = tmp_path_factory.mktemp("stopped")
    run = trainer(open_stream(caches, "mixture"), settings(folder, max_steps=6, save_strategy="steps", save_steps=4))
    run.train()
    return folder


def resumed(stopped, stream, *, keep=True, how=None, **changes):
    run = trainer(stream, settings(stopped, **{"max_steps": 6, **changes}), keep=keep, how=how)
    run.train(resume_from_checkpoint=str(stopped / "checkpoint-4"))
    return run


def test_a_checkpoint_holds_the_state_of_the_stream(caches, stopped):
    kept = json.loads((stopped / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    whole = batches(open_stream(caches, "mixture"), 5)
    assert kept["niels_gpt stream"] == {"step": 4, "state": whole[3].state}
    stream = open_stream(caches, "mixture")
    stream.load_state_dict(kept["niels_gpt stream"]["state"])
    assert next(iter(stream)).x.equal(whole[4].x)


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_goes_on_in_mid_epoch_with_workers_and_other_batches_of_a_process(caches, stopped, keep):
    how = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dataloader_num_workers": 2}
    how["restore_callback_states_from_checkpoint"] = True
    run = resumed(stopped, open_stream(caches, "mixture"), keep=keep, **how)
    assert rows_of(run.seen) == rows_of(batches(open_stream(caches, "mixture"), 6)[4:])


@pytest.mark.parametrize("size", [4, 16])
def test_a_run_goes_on_from_its_sample_with_another_global_batch(caches, stopped, size):
    stream = open_stream(caches, "mixture", size)
    run = resumed(stopped, stream, per_device_train_batch_size=size)
    whole = batches(open_stream(caches, "mixture", size), 32 // size + 2)
    assert rows_of(run.seen) == rows_of(whole[32 // size :])


def test_a_stream_with_an_end_keeps_its_global_batch_or_is_refused(caches, tmp_path):
    how = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    args = settings(tmp_path, per_device_train_batch_size=48, **how)
    trainer(open_stream(caches, "windows", 48, epochs=1), args).train()
    again = trainer(open_stream(caches, "windows", 48, epochs=1), args)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rows_of(again.seen) == rows_of(list(open_stream(caches, "windows", 48, epochs=1))[2:])
    ended = trainer(open_stream(caches, "windows", 48, epochs=1), args)
    ended.train(True)
    assert not ended.seen and ended.state.global_step == 5
    other = trainer(
        open_stream(caches, "windows", 24, epochs=1), settings(tmp_path, per_device_train_batch_size=24, **how)
    )
    with pytest.raises(StateError):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_another_stream_is_refused_or_continues_with_changes(caches, stopped, tmp_path):
    with pytest.raises(StateError):
        resumed(stopped, open_stream(caches, "windows"))
    changed = EpochStream(caches / "text" / "train", T=48, global_batch_size=8, seed=4)
    trainer(
        open_stream(caches, "windows"), settings(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    ).train()
    with pytest.raises(StateError):
        resumed(tmp_path, changed)
    with pytest.raises(CacheError):
        chats = EpochStream(
            build_caches(tmp_path / "other", ["Other text. " * 500]) / "text" / "train",
            T=48,
            global_batch_size=8,
            seed=3,
        )
        resumed(tmp_path, chats)
    with pytest.warns(UserWarning, match="W103"):
        run = resumed(tmp_path, changed, how={"changed": True})
    assert rows_of(run.seen) == rows_of(
        batches(EpochStream(caches / "text" / "train", T=48, global_batch_size=8, seed=4), 2)
    )
    with pytest.raises(StreamUseError):
        run.train()  # from sample 0, which the changed run does not have


@pytest.mark.parametrize("damaged", [None, 5, [], {}, {"step": 4}, {"step": 4, "state": {}}], ids=str)
def test_what_is_no_state_is_refused(caches, stopped, tmp_path, damaged):
    shutil.copytree(stopped / "checkpoint-4", tmp_path / "checkpoint-4")
    written = tmp_path / "checkpoint-4" / "trainer_state.json"
    kept = json.loads(written.read_text())
    kept["stateful_callbacks"]["niels_gpt stream"] = damaged
    written.write_text(json.dumps(kept))
    with pytest.raises(StateError):
        resumed(tmp_path, open_stream(caches, "mixture"))


@pytest.mark.parametrize("kept_before", [False, True])
def test_a_checkpoint_of_a_run_without_the_callback_is_refused(caches, tmp_path, kept_before):
    """Trainer copies into it what the checkpoint before had."""
    how = {"save_strategy": "steps", "save_steps": 2}
    trainer(open_stream(caches, "windows"), settings(tmp_path, max_steps=2, **how), keep=kept_before).train()
    trainer(open_stream(caches, "windows"), settings(tmp_path, max_steps=4, **how), keep=False).train(True)
    with pytest.raises(StateError):
        resumed(tmp_path, open_stream(caches, "windows"))


class Two(TrainingArguments):
    """Settings of one of two processes; the other one need not run."""

    world_size = 2


@pytest.mark.parametrize(
    "changes",
    [
        {"train_sampling_strategy": "random"},
        {"ignore_data_skip": True},
        {"auto_find_batch_size": True},
        {"dataloader_in_order": False, "dataloader_num_workers": 2},
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"dispatch_batches": True}},
        {"per_device_train_batch_size": 4},
        {"max_steps": -1},
        {"max_steps": 1000},
        {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True},
        {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 4, "kind": Two},
    ],
    ids=str,
)
def test_settings_that_would_repeat_or_drop_rows_are_refused(caches, tmp_path, changes):
    with pytest.raises(UsageError):
        as_rows(open_stream(caches, "windows", epochs=1), settings(tmp_path, **changes))


def test_streams_that_trainer_cannot_serve_are_refused(caches, tmp_path):
    args, how = settings(tmp_path), {"T": 48, "global_batch_size": 8, "seed": 3}
    with pytest.raises(UsageError):
        as_rows(open_stream(caches, "windows"), settings(tmp_path, max_steps=-1, num_train_epochs=1))
    with pytest.raises(UsageError):
        as_rows(EpochStream(caches / "text" / "train", rank=1, world_size=2, **how), args)
    moved = open_stream(caches, "windows")
    next(iter(moved))
    rollouts(tmp_path / "rollouts", items=rollout_groups(0, 8), val_frac=0)
    bins = RolloutStream(tmp_path / "rollouts", max_tokens=64, seed=0, epochs=1)
    for other in (moved, bins):
        with pytest.raises(UsageError):
            as_rows(other, args)


def test_trainer_of_other_settings_and_a_sampler_that_shuffles_are_refused(caches, tmp_path):
    rows, position = as_rows(open_stream(caches, "windows"), settings(tmp_path))
    for changes in ({"train_sampling_strategy": "random"}, {"max_steps": STEPS + 1}):
        with pytest.raises(UsageError):
            Trainer(llama(), settings(tmp_path, **changes), train_dataset=rows, callbacks=[position]).train()
    with pytest.raises(StreamUseError):
        next(iter(DataLoader(rows, batch_size=4, shuffle=True)))
    assert rows[-1]["input_ids"].equal(rows[len(rows) - 1]["input_ids"])


@pytest.mark.parametrize("name", ["packed", "chats"])
def test_a_tokenizer_that_trainer_has_pads_nothing(caches, tmp_path, name):
    rows, position = as_rows(open_stream(caches, name), settings(tmp_path, max_steps=1), dtype=torch.float64)
    args = settings(tmp_path, max_steps=1)
    made = Trainer(llama(), args, train_dataset=rows, callbacks=[position], processing_class=tokenizer())
    batch = next(iter(made.get_train_dataloader()))
    for key, expected in batches(open_stream(caches, name), 1)[0].for_transformers(dtype=torch.float64).items():
        assert batch[key].equal(expected)


def test_a_stream_itself_names_the_adapter(caches, tmp_path):
    stream = open_stream(caches, "packed")
    with pytest.raises(StreamUseError, match=r"niels_gpt\.trainers\.transformers"):
        Trainer(model=llama(), args=settings(tmp_path), train_dataset=stream).train()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU
def test_the_lines_of_the_page_train(caches, tmp_path):
    block = lines_to_copy("niels_gpt.trainers.transformers")
    shutil.copytree(caches / "chats", tmp_path / "cache" / "sample" / "sft" / "oasst1")
    names = {"model": llama(torch.float32)}
    exec(block.replace("max_steps=50", "max_steps=5"), names)
    assert names["trainer"].state.global_step == names["args"].max_steps


@pytest.mark.slow
def test_60_steps_learn_the_next_token_and_not_the_one_after(caches, tmp_path):
    args = settings(tmp_path, max_steps=60)
    run = trainer(open_stream(caches, "packed"), args)
    run.train()
    (batch,) = batches(open_stream(caches, "packed", 32), 1)
    inputs = batch.for_transformers(dtype=torch.float64)
    del inputs["labels"]
    with torch.no_grad():
        logits = run.model.eval()(**inputs).logits[:, :-1]
    after_next = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.y[:, 1:].flatten()).item()
    assert summed_loss(logits, batch.y) / int((batch.y != -100).sum()) < 3 < after_next


@pytest.mark.slow
def test_a_killed_run_of_two_ranks_goes_on_with_one_rank_and_workers(caches, tmp_path):
    two = {"per_device_train_batch_size": 4, "dataloader_num_workers": 1}
    one = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dataloader_num_workers": 2}
    folders = [tmp_path / name for name in ("whole", "killed", "resumed")]
    settings_of = [json.dumps({**how, "out": str(tmp_path / out)}) for how, out in (({}, "a"), (two, "b"), (one, "b"))]
    run(SCRIPT, folders[0], caches, "mixture", settings_of[0])
    run(SCRIPT, folders[1], caches, "mixture", settings_of[1], ranks=2, kill_at=KILLED_AT)
    run(SCRIPT, folders[2], caches, "mixture", settings_of[2])
    whole, killed, went_on = map(steps, folders)
    assert len(whole) == STEPS and len(killed) >= KILLED_AT - 1
    assert min(went_on) <= KILLED_AT and max(went_on) == STEPS
    for step, (sha256, loss) in {**killed, **went_on}.items():
        assert (sha256, loss) == (whole[step][0], pytest.approx(whole[step][1], rel=1e-6))
