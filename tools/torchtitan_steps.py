"""Steps of torchtitan's own Trainer on the batches of a StreamDataLoader: for gpu_checks.py, in a process of its own.

Run: python tools/torchtitan_steps.py CACHE TOKENIZER FOLDER LAST

It trains torchtitan's smallest Llama on packed rows of a cache, from the last checkpoint in the folder on, until step
LAST of 6; every second step is saved. Prints, as JSON, of each step the sha256 of its batch and its loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from niels_gpt.trainers.torchtitan import CacheRows, StreamDataLoader

STEPS = 6


class Recorded(Trainer):  # type: ignore[misc]
    """A Trainer that keeps what each step trained on, and stops at a step."""

    last = STEPS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows: list[str] = []
        self.losses: dict[int, float] = {}
        log = self.metrics_processor.log

        def logged(step: int, loss: float, *others: Any, **more: Any) -> None:
            self.losses[step] = float(loss)
            log(step, loss, *others, **more)

        self.metrics_processor.log = logged

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        for inputs, labels in super().batch_generator(data_iterable):
            columns = (inputs["input"], inputs["positions"], labels)
            self.rows.append(hashlib.sha256(b"".join(each.numpy().tobytes() for each in columns)).hexdigest())
            yield inputs, labels

    def should_continue_training(self) -> bool:
        return bool(self.step < self.last)


def config_of(cache: str, tokenizer: str, folder: str) -> Any:
    """Return torchtitan's configuration of the run."""
    config = llama3_debugmodel()
    config.dataloader = StreamDataLoader.Config(sources=[CacheRows(cache=cache, rows="packed")], seed=0)
    config.hf_assets_path, config.dump_folder = tokenizer, folder
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 256, STEPS
    config.training.disable_cuda_graphs, config.debug.seed = True, 0
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    return config


def main() -> None:
    """Train, and print what was trained on."""
    cache, tokenizer, folder, last = sys.argv[1:]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    trainer = Recorded(config_of(cache, tokenizer, folder))
    trainer.last = int(last)
    trainer.train()
    print(json.dumps({"rows": trainer.rows, "losses": trainer.losses}))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
