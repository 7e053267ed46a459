"""A run over NeMo Automodel's own loader and step scheduler, built of its YAML. As a script: a rank of such a run.

automodel_run.py FOLDER AUTOMODEL CACHES WORKERS
"""

import os
import sys
from pathlib import Path

import torch
from torch import distributed

from support.mixed_caches import KINDS
from support.mixed_caches import open_mixture as opened_mixture
from support.trainer_runs import STEPS, Log

RECIPE = """
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: {steps}
  num_epochs: 1
dataset:
  _target_: niels_gpt.trainers.automodel.StreamDataset
  stream_fn: support.automodel_run.open_mixture
  caches: {caches}
  local_batch_size: 2
  form: {form}
dataloader:
  num_workers: {workers}
  collate_fn: nemo_automodel.components.datasets.utils.{collate}
"""
COLLATES = {"rows": "default_collater", "thd": "packed_sequence_thd_collater", "neat": "neat_packed_collater"}


def open_mixture(caches, kinds=KINDS, *, global_batch_size, **ranks):
    return opened_mixture(Path(caches), kinds, [1] * len(kinds), G=global_batch_size, **ranks)


def built(folder, caches, *, rank=0, ranks=1, form="thd", workers=0, **dataset):
    """Return Automodel's loader and step scheduler of one rank, from its YAML."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    path = Path(folder) / f"recipe-{rank}.yaml"
    text = RECIPE.format(steps=STEPS, caches=caches, form=form, workers=workers, collate=COLLATES[form])
    for name, value in dataset.items():
        text = text.replace("\ndataloader", f"\n  {name}: {value}\ndataloader")
    path.write_text(text)
    recipe = RecipeConfig(load_yaml_config(path))
    loader = recipe.dataloader.build(dp_rank=rank, dp_world_size=ranks)
    return loader, recipe.step_scheduler.build(loader, ranks, 2)


def trained(model, optimizer, batches, ranks):
    """Make a step on micro-batches; return the sum of this rank's losses and its targets."""
    loss, targets = torch.zeros((), dtype=torch.float64), torch.tensor(0)
    for batch in batches:
        labels = batch["labels"].flatten()
        loss = loss + torch.nn.functional.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), labels, reduction="sum"
        )
        targets += (labels != -100).sum()
    own = float(loss.detach()), int(targets)
    if ranks > 1:
        distributed.all_reduce(targets)
    optimizer.zero_grad()
    (loss / targets).backward()
    for parameter in model.parameters():
        if ranks > 1:
            distributed.all_reduce(parameter.grad)
    optimizer.step()
    return own


def main(folder, caches, workers):
    log, ranks = Log(folder), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 32), torch.nn.Linear(32, 300)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader, scheduler = built(folder, caches, rank=log.rank, ranks=ranks, workers=workers)
    # Automodel's names: a file for each data-parallel rank; one more rank than before gets a copy of the first's.
    kept = Path(folder) / f"dataloader_dp_rank_{log.rank}.pt"
    first = Path(folder) / "dataloader_dp_rank_0.pt"
    if first.exists():
        found = torch.load(first)
        loader.load_state_dict(found["loader"])
        scheduler.load_state_dict(found["scheduler"])
        model.load_state_dict(found["model"])
    if ranks > 1:
        distributed.barrier()
    for batches in scheduler:
        loss, targets = trained(model, optimizer, batches, ranks)
        rows = [[batch["input_ids"], batch["labels"], batch["position_ids"]] for batch in batches]
        log.step(scheduler.step + 1, rows, loss / max(1, targets), targets)
        if scheduler.step % 5 == 4:
            states = {"loader": loader, "scheduler": scheduler, "model": model}
            torch.save({name: each.state_dict() for name, each in states.items()}, kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
    log.file.close()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv.pop(2))
    main(*sys.argv[1:])
