"""A Lightning run of a mixture, logged batch by batch. As a script: a rank of a run of test_lightning.py.

lightning_run.py FOLDER CACHES WORKERS
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed

from niels_gpt.trainers.lightning import StreamDataModule
from support.mixed_caches import KINDS, open_mixture
from support.trainer_runs import STEPS, Log

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Tiny(LightningModule):
    """A model of single tokens, in float64. on_batch: called with the number of each batch, the batch, and its loss."""

    def __init__(self, on_batch):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(300, 32), torch.nn.Linear(32, 300)).double()
        self.on_batch = on_batch

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = torch.nn.functional.cross_entropy(self.layers(x).flatten(0, 1), y.flatten(), reduction="sum")
        targets = torch.tensor(int((y != -100).sum()))
        self.on_batch(
            self.trainer.fit_loop.epoch_loop.total_batch_idx + 1, batch, float(losses.detach()) / max(1, int(targets))
        )
        if self.trainer.world_size > 1:
            distributed.all_reduce(targets)
        return losses * self.trainer.world_size / targets

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main(folder, caches, workers):
    log, accumulated, ranks = Log(folder), 2, int(os.environ.get("WORLD_SIZE", 1))

    def on_batch(number, batch, loss):
        log.step(number, [[batch.x, batch.y]], loss, int((batch.y != -100).sum()))

    def opened(rank, world_size):
        return open_mixture(Path(caches), KINDS, [2, 1, 1], G=4, rank=rank, world_size=world_size)

    trainer = Trainer(
        **QUIET,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=STEPS // accumulated,
        accumulate_grad_batches=accumulated,
        callbacks=[ModelCheckpoint(Path(folder) / "kept", every_n_train_steps=3, save_top_k=-1)],
    )
    found = sorted((Path(folder) / "kept").glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1]))
    data = StreamDataModule(opened, num_workers=int(workers))
    trainer.fit(Tiny(on_batch), datamodule=data, ckpt_path=found[-1] if found else None)
    log.file.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
