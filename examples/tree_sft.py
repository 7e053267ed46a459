"""Fine-tune a small model on a cache of message trees, folded: docs/folded_training.md shows it.

    python examples/tree_sft.py cache/trees/oasst1 --checkpoint tree_sft.pt

Each message of a tree is computed once and counts once, however many threads go through it (weighting "unique"). Where
the checkpoint exists, the run continues after its last step, with the same bins as a run that was never stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.prefix_tree.edges import LossEdges, folded_cross_entropy
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.stream import RolloutStream


def summed_loss(model: LlamaForCausalLM, forest: PrefixForest) -> tuple[Tensor, int]:
    """Return the cross-entropy summed over the supervised tokens of the trees, and how many these are."""
    edges = LossEdges.from_forest(forest, weighting="unique").to(model.device)
    hidden, head = body_forward(model, forest)
    return folded_cross_entropy(hidden, edges, head, normalizer=1), edges.num_edges


@torch.no_grad()
def nats_per_token(model: LlamaForCausalLM, forests: Iterable[PrefixForest]) -> float:
    """Return the mean cross-entropy over all supervised tokens of some trees."""
    sums = [(loss.item(), tokens) for loss, tokens in (summed_loss(model, forest) for forest in forests)]
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def check_trees_fit(stream: RolloutStream) -> None:
    """Refuse a budget that cuts a tree: what its pieces share would count once in each of them."""
    largest = max(stream.dataset.forest(group).num_tokens for group in range(len(stream.dataset)))
    if largest > stream.max_tokens:
        raise SystemExit(f"the largest tree has {largest} tokens: expected --max-tokens of at least that")


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; print the losses, the tokens and the evaluation; return the loss of each step."""
    options = parse(arguments)
    if not options.checkpoint.absolute().parent.is_dir():
        raise SystemExit(f"{options.checkpoint}: its folder does not exist. Make it first")
    sizes = {"hidden": options.hidden, "max_tokens": options.max_tokens}
    stream = RolloutStream(options.cache, options.max_tokens, seed=0)
    check_trees_fit(stream)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=stream.dataset.vocab_size,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        if saved["sizes"] != sizes:
            found = ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in saved["sizes"].items())
            raise SystemExit(f"{options.checkpoint} was made with {found}: expected the same, or another --checkpoint")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["stream"])
        losses = saved["losses"]
        print(f"resumed after step {len(losses)}")
    val = RolloutDataset(options.cache, "val")
    print(f"val before: {nats_per_token(model, map(val.forest, range(len(val)))):.3f} nats a token")
    unfolded = folded = 0
    for batch in islice(stream, max(options.steps - len(losses), 0)):
        loss, tokens = summed_loss(model, batch.forest)
        (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / tokens)
        unfolded, folded = unfolded + len(batch.forest.loss_mask), folded + batch.forest.num_tokens
        if len(losses) % 10 == 0:
            print(
                f"step {len(losses):>3}: {sum(losses[-10:]) / 10:.3f} nats a token, {len(batch.groups.unique())} trees"
            )
        if len(losses) % 10 == 0 or len(losses) == options.steps:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "sizes": sizes, "stream": batch.state, "losses": losses}, options.checkpoint)
    if folded:
        print(f"{folded:,} tokens computed for {unfolded:,} of the threads: {unfolded / folded:.2f}x fewer")
    print(f"val after: {nats_per_token(model, map(val.forest, range(len(val)))):.3f} nats a token")
    return losses


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("tree_sft.pt"), help="written every ten steps and at the end"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens of a row, after folding")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
