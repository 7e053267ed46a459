"""Train a one-layer EAGLE-3 draft from a cache or a live target, and let it speculate: docs/eagle3_draft.md shows it.

    python examples/train_eagle3_draft.py run/target run/cache run/held_out.jsonl --out cache.png
    python examples/train_eagle3_draft.py run/target run/cache run/held_out.jsonl --online run/chats.jsonl
    python examples/train_eagle3_draft.py run/target run/cache run/held_out.jsonl --draft untrained
    python examples/train_eagle3_draft.py run/target run/cache run/held_out.jsonl --save run/draft

The draft, its training steps and the decoding are in eagle3_draft.py; save_eagle3_draft.py saves it. Each draft is
evaluated on chats that it was not trained on; for every chat the output is asserted to be the target's greedy output,
token for token.

Acceptance length: tokens for a pass of the target, the free one included, the pass over the prompt left out; from 1 to
--chain + 1. Acceptance at a position of the chain: of the proposals there whose predecessors were all accepted, the
share that is accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from eagle3_draft import Batch, Draft, draft_config, greedy, speculate, ttt_losses
from save_eagle3_draft import save_draft
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from niels_gpt.chat import open_tokenizer
from niels_gpt.chat.rows import Row
from niels_gpt.commands.console import with_progress
from niels_gpt.display.pictures import check_matplotlib, check_png, new_figure, plain_axes, png
from niels_gpt.eagle3.cache import build_cached_eagle3_dataloader, read_manifest, read_target_embeddings
from niels_gpt.eagle3.forward import draft_distribution
from niels_gpt.eagle3.target import HFEagle3TargetModel, load_target
from niels_gpt.recipes.eagle3.input import input_rows
from niels_gpt.settings import Settings

WEIGHT = 0.8  # of the loss of a step of test-time training, relative to the step before it


def live_batch(target: HFEagle3TargetModel, selected: Tensor, rows: Sequence[Row]) -> Batch:
    """Return the fields of a cache for some chats, computed by the target."""
    fields = [(row.input_ids, [1] * len(row.input_ids), row.loss_mask) for row in rows]
    padded = (pad_sequence([torch.as_tensor(x).long() for x in part], True) for part in zip(*fields, strict=True))
    out = target.generate_batch(*padded)
    known = torch.zeros(out.logits.shape[-1], dtype=torch.bool).index_fill_(0, selected, True)
    probs, mask = draft_distribution(out.logits, out.loss_mask, selected, known)
    return {**vars(out), "target_probs": probs, "position_mask": mask}


def train(draft: Draft, batches: DataLoader[Any], options: argparse.Namespace) -> list[list[float]]:
    """Train; return, for each update, the loss of each step of test-time training."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=options.lr, betas=(0.9, 0.95))
    total = options.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total, pct_start=0.1)
    weights = WEIGHT ** torch.arange(options.ttt_steps)
    curve: list[list[float]] = []
    for _ in range(options.epochs):
        for batch in with_progress(batches, "training", "updates", len(batches)):
            width = int(batch["attention_mask"].sum(1).max())  # samples of a cache are as wide as its longest
            losses = ttt_losses(draft, {name: part[:, :width] for name, part in batch.items()}, len(weights))
            optimizer.zero_grad()
            ((losses * weights).sum() / weights.sum()).backward()
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            curve.append(losses.tolist())
    return curve


def evaluate(
    model: Any, draft: Draft, prompts: Sequence[Tensor], replies: Sequence[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Let the draft speculate on every chat; replies: those of `greedy`, which must come out."""
    passes: list[tuple[int, int]] = []
    shown = with_progress(replies, "speculating", "replies", len(replies))
    for prompt, reply in zip(prompts, shown, strict=True):
        found, more = speculate(model, draft, prompt, options.new_tokens, options.layers, options.chain)
        assert found == reply, f"speculation gives {found}, the target alone {reply}"
        passes += more
    compared = [sum(tokens > place for _, tokens in passes) for place in range(options.chain)]
    rates = [
        sum(accepted > place for accepted, _ in passes) / max(1, compared[place]) for place in range(options.chain)
    ]
    tokens = sum(tokens for _, tokens in passes)
    return {"acceptance_length": tokens / max(1, len(passes)), "acceptance": rates, "passes": len(passes)}


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the loss of the first step and the acceptance by position, means of the seeds of each run."""
    figure = new_figure(8, 3.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, runs in results.items():
        rates = torch.tensor([run["acceptance"] for run in runs]).mean(0)
        (line,) = right.plot(range(1, len(rates) + 1), rates, "o-", linewidth=0.9, markersize=3, label=name)
        if curves := [run["losses"] for run in runs if run["losses"]]:
            curve = torch.tensor(curves)[..., 0].mean(0)
            left.plot(curve.unfold(0, min(20, len(curve)), 1).mean(-1), linewidth=0.9, color=line.get_color())
    left.set(xlabel="update", ylabel="loss of the first proposal, nats")
    right.set(xlabel="position in the chain", ylabel="accepted, if all before it are", ylim=(0, 1))
    right.set_xticks(range(1, len(rates) + 1))
    plain_axes(left)
    plain_axes(right)
    right.legend(frameon=False, fontsize=7)
    path.write_bytes(png(figure, colours=64))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add("target", help="folder or hub id of the target")
    add("cache", type=Path, help="EAGLE-3 cache; it also states the layers and the draft's vocabulary")
    add("held_out", help="chats to evaluate on, as --input-data of precompute: what comes before the first reply")
    add("--online", metavar="CHATS", help="train on these chats instead: the target runs at every update")
    add("--draft", choices=("trained", "untrained"), default="trained", help="untrained: evaluate it as it begins")
    add("--out", type=Path, default="draft.png", help="picture; the numbers are beside it, in .json")
    add("--beside", type=Path, nargs="*", default=[], metavar="JSON", help="numbers of other runs, drawn as well")
    add("--save", type=Path, metavar="DIR", help="save the first seed's draft as the checkpoints that servers load")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="one draft each: weights and order")
    add("--epochs", type=int, default=2, metavar="N", help="over the samples")
    add("--batch-size", type=int, default=4, metavar="N", help="samples of an update")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--ttt-steps", type=int, default=3, metavar="N", help="steps of test-time training")
    add("--chain", type=int, default=4, metavar="N", help="proposals for a pass of the target")
    add("--new-tokens", type=int, default=64, metavar="N", help="of a reply, at most")
    return made.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a draft for each seed and evaluate it; draw the curves and write the numbers."""
    options = parse(argv)
    check_png(options.out)
    check_matplotlib()
    manifest, tokenizer = read_manifest(options.cache), open_tokenizer(options.target)
    options.layers, selected = manifest["aux_layer_ids"], torch.tensor(manifest["selected_token_ids"])
    # float64: in float32, rounding depends on the tokens of a pass, and can decide between two tokens.
    model = load_target(options.target, revision=None, dtype=torch.float64, attention="sdpa", device="cpu")
    if options.save and (options.save.exists() or len(options.layers) != 3):
        sys.exit("train_eagle3_draft: --save takes a folder that does not exist, and a draft of three auxiliary layers")
    if max(options.layers) + 1 == model.config.num_hidden_layers:
        sys.exit("train_eagle3_draft: the last block's output is an auxiliary layer, and transformers shows it normed")
    rows = partial(input_rows, Settings(), tokenizer=tokenizer, seq_length=manifest["seq_length"], counters=Counter())
    prompts = [torch.from_numpy(row.input_ids[: row.loss_mask.argmax()]).long() for row in rows(options.held_out)]
    shown = with_progress(prompts, "target alone", "replies", len(prompts))
    replies = [greedy(model, prompt, options.new_tokens) for prompt in shown]
    batches: Any = build_cached_eagle3_dataloader(options.cache, options.batch_size, shuffle=True)
    if options.online:
        live = partial(live_batch, HFEagle3TargetModel(model, options.layers), selected)
        batches = DataLoader(list(rows(options.online)), options.batch_size, shuffle=True, collate_fn=live)
    runs, numbers = cast("list[dict[str, Any]]", []), options.out.with_suffix(".json")
    for seed in options.seeds:
        torch.manual_seed(seed)
        draft = Draft(draft_config(model.config), read_target_embeddings(options.cache), selected, len(options.layers))
        losses = [] if options.draft == "untrained" else train(draft, batches, options)
        runs.append({"seed": seed, **evaluate(model, draft, prompts, replies, options), "losses": losses})
        numbers.write_text(json.dumps(runs) + "\n")
        rates = " ".join(f"{rate:.3f}" for rate in runs[-1]["acceptance"])
        if options.save and seed == options.seeds[0]:
            save_draft(draft, options.save, options.target, options.layers, options.chain)
        print(f"seed {seed}: acceptance length {runs[-1]['acceptance_length']:.3f}, by position {rates}", flush=True)
    plot({path.stem: json.loads(path.read_text()) for path in [*options.beside, numbers]}, options.out)


if __name__ == "__main__":
    main()
