"""A run of torchtitan's loader and checkpoints in a loop of this file's own, since its Trainer needs a GPU.

Started by trainer_runs.run with the folder of the run, the folder of the caches, the local batch size and the workers
of the DataLoader. It saves every fifth step, and continues from the last save.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from support.trainer_runs import STEPS, Log

T, VOCABULARY = 16, 300


class Ids:
    """A tokenizer of 300 ids: the loader asks it only for their number."""

    def get_vocab_size(self):
        return VOCABULARY


class Model(nn.Module):
    """Token and position decide the next token. In 64 bits, so that losses do not depend on the number of ranks."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32, dtype=torch.float64)
        self.positions = nn.Embedding(T, 32, dtype=torch.float64)
        self.head = nn.Linear(32, VOCABULARY, dtype=torch.float64)

    def forward(self, input, positions):
        return self.head((self.tokens(input) + self.positions(positions)).tanh())


@dataclass
class Steps:
    """How many steps were made, as the Trainer keeps it."""

    step: int = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def train(folder, caches, local_batch_size, num_workers):
    """Train until step 40, each rank on its part of the global batch."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from niels_gpt.trainers.torchtitan import CacheRows, StreamDataLoader

    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizers = default_adamw(lr=0.01).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=STEPS)
    sources = [
        CacheRows(cache=f"{caches}/pretrain", rows="documents", split="train", weight=2),
        CacheRows(cache=f"{caches}/pretrain", rows="packed", weight=1),
        CacheRows(cache=f"{caches}/sft", rows="chats", over_length="split"),
    ]
    loader = StreamDataLoader.Config(sources=sources, seed=3, block_size=20, num_workers=num_workers).build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=Ids(),
        seq_len=T,
        local_batch_size=local_batch_size,
        snapshot_every_n_steps=5,
    )
    steps = Steps()
    manager = CheckpointManager.Config(enable=True, interval=5, keep_latest_k=0).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": steps},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load()
    log, batches = Log(folder), iter(loader)
    while steps.step < STEPS:
        steps.step += 1
        inputs, labels = next(batches)
        targets = (labels != IGNORE_INDEX).sum()
        total = targets.clone()
        distributed.all_reduce(total)
        logits = model(**inputs)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        optimizers.zero_grad()
        (loss / total).backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizers.step()
        schedulers.step()
        log.step(steps.step, [[inputs["input"], inputs["positions"], labels]], float(loss / targets), int(targets))
        manager.save(steps.step)
    manager.close()


if __name__ == "__main__":
    import support.torchtitan_peer  # noqa: F401 - makes torchtitan importable

    folder, caches, size, workers = sys.argv[1:]
    if "WORLD_SIZE" not in os.environ:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(folder, caches, int(size), int(workers))
    distributed.destroy_process_group()
