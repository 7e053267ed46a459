"""speculators 0.9.0 in a process of its own, with niels_gpt beside it: its rows and its EAGLE-3 training on a CPU.

`Tool(folder of speculators, this file)` starts it, see support/peer_exchange.py. Its Trainer wants an accelerator and
is not run: the steps here are the Trainer's, with its model, loss, collate function and batch sampler.
"""

import pickle
import sys
from types import SimpleNamespace

from support.peer_exchange import serve, speculators_shift

STEPS = 20


def both(cache, folder, **split):
    """Return the rows and lengths of our dataset, copied by pickle, and of speculators' own over an export."""
    from speculators.train.data import ArrowDataset

    from niels_gpt.trainers.speculators import DraftRows

    ours = pickle.loads(pickle.dumps(DraftRows(cache, 64, **split)))
    theirs = ArrowDataset(64, folder, on_missing="raise", **split)
    return [([each[number] for number in range(len(each))], each.approx_lengths) for each in (ours, theirs)]


def batches(cache, folder, kind, **how):
    """Return the batches of our loader, and of speculators' own with the shift of its training command for a kind."""
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader

    from niels_gpt.trainers.speculators import DraftRows, Eagle3Rows

    assert Eagle3Rows is DraftRows
    ours, theirs = DraftRows(cache, 64, **how), ArrowDataset(64, folder, on_missing="raise")
    layers = len(ours.target_layer_ids)
    loader = _setup_dataloader(theirs, 64, ours.hidden_size, 0, layers, preprocess=speculators_shift(kind))
    return list(ours.loader(num_workers=0)), list(loader)


def errors(cache, **opening):
    """Return the code and the text of what opening a cache raises."""
    from niels_gpt.storage.errors import CodedError
    from niels_gpt.trainers.speculators import DraftRows

    try:
        DraftRows(cache, 64, **opening)
    except CodedError as error:
        return error.code, str(error)
    return None


def opened(lines, cache, target):
    """Run the lines of the page up to its Trainer; return what they define. Attention is sdpa: flex needs a GPU."""
    import torch
    from transformers import LlamaConfig

    for said, here in {'"targets"': repr(str(cache)), '"target"': repr(str(target)), "8192": "64"}.items():
        lines = lines.replace(said, here)
    before, _, last = lines.partition("trainer = ")
    layer = LlamaConfig.from_pretrained(target, num_hidden_layers=1)
    found = {"layer": layer}
    torch.manual_seed(0)
    exec(before.replace('"norm_before_residual"', '"draft_attn_impl": "sdpa", "norm_before_residual"'), found)
    assert last.endswith("rows.loader())\ntrainer.run_training()\n")
    return SimpleNamespace(**found)


def losses(lines, cache, target, folder=None):
    """Return the loss of each of STEPS steps on our rows, or on speculators' own of an exported folder."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader

    run = opened(lines, cache, target)
    loader = run.rows.loader(num_workers=0)
    if folder is not None:
        rows = ArrowDataset(64, folder, on_missing="raise", train_ratio=0.9)
        loader = _setup_dataloader(rows, 64, run.rows.hidden_size, 0, 3, preprocess=shift_batch)
    loss_config = resolve_loss_config("kl_div", "eager")  # the fused one needs Triton
    optimizer, found = torch.optim.AdamW(run.model.parameters(), lr=1e-2), []
    while len(found) < STEPS:
        loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1)
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss, _ = run.model(**batch, loss_config=loss_config)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            optimizer.step()
            found.append(float(loss))
    return found[:STEPS]


def resumed(lines, cache, target, steps):
    """Return the batches of an epoch, and those that speculators' Trainer trains on after a stop at some step."""
    from speculators.train.trainer import Trainer

    loader = opened(lines, cache, target).rows.loader(num_workers=0)
    whole = list(loader)
    state = {"current_epoch": 0, "_resume_local_step": steps, "global_step": steps}
    Trainer._prepare_resume_skip(SimpleNamespace(train_loader=loader, **state), 0)
    return whole, list(loader)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    serve(globals())
