"""A run of a mixture over Grain, logged step by step. As a script: a rank of a run of test_grain.py.

grain_run.py FOLDER CACHES WORKERS
"""

import json
import os
import sys
import warnings
from pathlib import Path

import grain
import torch
from torch import distributed

from niels_gpt.trainers.grain import StreamDataset
from support.mixed_caches import KINDS, open_mixture
from support.trainer_runs import STEPS, Log


def step(model, optimizer, x, y):
    """Take a step with all ranks; return the mean loss of this rank's targets, and their number."""
    losses = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    targets = every = torch.tensor(int((y != -100).sum()))
    optimizer.zero_grad()
    losses.backward()
    if distributed.is_initialized():
        distributed.all_reduce(every := targets.clone())
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= every
    optimizer.step()
    return float(losses.detach()) / max(1, int(targets)), int(targets)


def main(folder, caches, workers):
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 32), torch.nn.Linear(32, 300)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stream = open_mixture(Path(caches), KINDS, [2, 1, 1], G=4, rank=rank, world_size=ranks)
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=int(workers))
    batches = iter(StreamDataset(stream, multiprocessing_options=options))
    log, saved, first = Log(folder), Path(folder) / "saved.pt", 1
    if saved.exists():
        found = torch.load(saved)
        first, state = found["step"] + 1, json.loads(found["data"])
        batches.set_state(state)
        model.load_state_dict(found["model"])
    for number in range(first, STEPS + 1):
        batch = next(batches)
        x, y = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        loss, targets = step(model, optimizer, x, y)
        if rank == 0 and number % 3 == 0:
            found = {"step": number, "model": model.state_dict(), "data": json.dumps(batches.get_state())}
            torch.save(found, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
        log.step(number, [[x, y]], loss, targets)
    batches.close()
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
