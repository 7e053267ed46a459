"""TRL's SFTTrainer on the rows of a stream: losses of replies alone, borders of packed rows, and refusals."""

import json
import pickle
import shutil
from itertools import pairwise

import pytest
import torch
from support import TESTS

pytest.importorskip("trl", reason="the extra `rl` brings it, transformers and accelerate")

from support.documents import lines_to_copy
from support.trainer_runs import KILLED_AT, STEPS, run, steps
from support.transformers_script import T, build_caches, llama, open_stream, settings, tokenizer, trainer
from trl import SFTConfig

from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.trainers.trl import as_rows

SCRIPT = TESTS / "support" / "transformers_script.py"


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("caches"))


def documents(root, name, count):
    """Return ids and labels of each text of the first batches of a stream, as a model alone with it takes them."""
    found = []
    for _, batch in zip(range(count), iter(open_stream(root, name)), strict=False):
        starts = list(range(0, batch.x.numel() + 1, T)) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        pieces = [0] * (len(starts) - 1) if batch.piece_ids is None else batch.piece_ids.tolist()
        x, y = batch.x.flatten().tolist(), batch.y.flatten().tolist()
        for (begin, end), piece in zip(pairwise(starts), pieces, strict=True):
            if piece < 0 and begin % T:
                continue  # padding
            last = [y[end - 1]] if y[end - 1] >= 0 else []
            found.append((x[begin:end] + last, [-100, *y[begin : end - 1], *last]))
    return found


def lists(seen):
    return [(ids.tolist(), labels.tolist()) for step in seen for ids, labels in step]


def mean_loss(model, texts):
    """Return the mean loss of the targets of texts, each alone in the model."""
    summed = targets = 0
    for ids, labels in texts:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        summed += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        targets += sum(label >= 0 for label in labels)
    return summed / targets


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("chats", {}),
        ("chats", {"padding_free": True}),
        ("windows", {"max_length": T + 1}),
        ("packed chats", {"padding_free": True}),
        ("mixture", {"padding_free": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ],
)
def test_a_step_trains_on_each_text_as_if_it_were_alone(caches, tmp_path, name, how):
    run = trainer(open_stream(caches, name), settings(tmp_path, SFTConfig, max_steps=2, **how))
    run.train()
    assert lists(run.seen) == documents(caches, name, 2)
    assert run.losses[0] == pytest.approx(mean_loss(llama(), documents(caches, name, 1)), rel=1e-6)


def test_every_target_of_an_epoch_of_chats_is_trained_on_once(caches, tmp_path):
    stream = open_stream(caches, "chats", epochs=1)
    run = trainer(stream, settings(tmp_path, SFTConfig, max_steps=-1, num_train_epochs=1))
    run.train()
    targets = sum(label >= 0 for _, labels in lists(run.seen) for label in labels)
    assert targets == stream.counts.supervised_tokens > 1900


def test_a_run_goes_on_from_its_sample_with_workers_and_another_global_batch(caches, tmp_path):
    how = {"padding_free": True, "save_strategy": "steps", "save_steps": 2}
    trainer(open_stream(caches, "packed chats"), settings(tmp_path, SFTConfig, max_steps=2, **how)).train()
    other = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    args = settings(tmp_path, SFTConfig, padding_free=True, dataloader_num_workers=2, **other)
    run = trainer(open_stream(caches, "packed chats", 4), args)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    first = len(documents(caches, "packed chats", 2))
    assert lists(run.seen) == documents(caches, "packed chats", 4)[first:]
    with pytest.raises(CacheError):
        trainer(open_stream(caches, "packed"), settings(tmp_path, SFTConfig, **how)).train(True)


def test_rows_are_pickled_for_workers_that_are_spawned(caches, tmp_path):
    rows, _ = as_rows(open_stream(caches, "packed chats"), settings(tmp_path, SFTConfig, padding_free=True))
    assert str(pickle.loads(pickle.dumps(rows))[5:9]) == str(rows[5:9])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("packed chats", {}),
        ("mixture", {}),
        ("packed chats", {"packing": True, "padding_free": True, "max_length": 1024}),
        ("chats", {"dataset_kwargs": None}),
        ("chats", {"max_length": T}),
        ("chats", {"train_sampling_strategy": "random"}),
    ],
)
def test_settings_that_would_join_cut_or_reorder_rows_are_refused(caches, tmp_path, name, changes):
    with pytest.raises(UsageError):
        as_rows(open_stream(caches, name), settings(tmp_path, SFTConfig, **changes))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # of TRL's own default
def test_the_lines_of_the_page_train(caches, tmp_path):
    block = lines_to_copy("niels_gpt.trainers.trl")
    shutil.copytree(caches / "chats", tmp_path / "cache" / "sample" / "sft" / "oasst1")
    names = {"model": llama(torch.float32), "tokenizer": tokenizer()}
    exec(block.replace("max_steps=50", "max_steps=2, use_cpu=True"), names)
    assert names["trainer"].state.global_step == names["args"].max_steps


@pytest.mark.slow
def test_a_killed_run_of_packed_rows_goes_on_with_two_ranks_and_workers(caches, tmp_path):
    one = {"sft": True, "padding_free": True}
    two = {**one, "per_device_train_batch_size": 4, "dataloader_num_workers": 1}
    folders = [tmp_path / name for name in ("whole", "killed", "resumed")]
    settings_of = [json.dumps({**how, "out": str(tmp_path / out)}) for how, out in ((one, "a"), (one, "b"), (two, "b"))]
    run(SCRIPT, folders[0], caches, "packed chats", settings_of[0])
    run(SCRIPT, folders[1], caches, "packed chats", settings_of[1], kill_at=KILLED_AT)
    run(SCRIPT, folders[2], caches, "packed chats", settings_of[2], ranks=2)
    whole, killed, went_on = map(steps, folders)
    assert len(whole) == STEPS and len(killed) >= KILLED_AT - 1
    assert min(went_on) <= KILLED_AT and max(went_on) == STEPS
    for step, (sha256, loss) in {**killed, **went_on}.items():
        assert (sha256, loss) == (whole[step][0], pytest.approx(whole[step][1], rel=1e-6))
