"""What folding gains and what it costs: training steps, and the folding itself, as ratios to what one would do without.

Run: python benchmarks/prefix_tree.py [--rounds 7] [--threads 1] [--only SECTION ...] [--quick]

    step     forward and backward of a small Llama (4 layers, width 128, float32, CPU), folded by segments and under a
             dense mask, against the plain causal batch of the same samples, of equal lengths, so without padding. The
             lm_head sees the rows of completions only, on both sides. Beside the ratio of times stand those of tokens
             and of attention pairs; and whether the aims are met
    deep     the same for a tree of many small nodes; unfolded, in batches of its samples, padded
    bins     100,000 groups -> bins for 1 and 8 ranks, from sizes alone: time, fill, imbalance
    group    ids of one prompt and its completions -> PrefixForest and LossEdges, fold_shared_prefix_rollouts; against
             plain Python loops over the tokens with the same results, which is checked on a small case first
    many     from_rollout_group of 100,000 completions against 10,000, in CPU time; packed into bins too
    trees    10,000 and 100,000 sequences that share turns at many levels -> PrefixForest and LossEdges; is it linear?
    rows     rollouts with masks, old log-probs and advantages, as tensors, 8 of each prompt: 64 of 512 + 512 tokens,
             and 8 of 256 + 60 and of 64 + 28; to what a step takes, in CPU time: forest, edges and fields; and to a row
             of TRL, tree_row; against TreeRow's add and pack (extra rl)
    blocks   block_mask of a prompt and 8 completions, against FlexAttention's create_block_mask of the same rule

The limit of group and trees is one np.concatenate of np.asarray of the same lists: nobody folds before having read the
ids. The ways of a section take turns, in another order in each round; a ratio is the median of the rounds' ratios, and
what is printed of time is a median too. One round before them is not counted.
"""

import argparse
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np
import torch
from folded_steps import folded_logprobs, gradients, tiny_llama, unfolded_logprobs
from measuring import Seconds, Ways, measured, ratio
from torch import Tensor

from niels_gpt.prefix_tree.bins import SampleSizes, pack, plan_bins
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import FoldedRollouts, fold_shared_prefix_rollouts
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head
from niels_gpt.prefix_tree.masks import block_mask
from niels_gpt.prefix_tree.tree_rows import tree_row

# Tokens of prompt, of each of N completions. First those with an aim: 0.8 of the smaller ratio of tokens and pairs.
AIMS = ((256, 256, 4), (512, 128, 8), (1024, 64, 16), (1024, 1024, 8), (1024, 256, 8))
STEPS = (*AIMS, (64, 64, 8), (256, 64, 8), (1024, 32, 8))
NEVER_SLOWER = 1.2  # the token ratio from which folding must not be slower
GROUPS = ((256, 64, 8), (1024, 256, 16), (4096, 512, 8), (512, 8192, 8))
MANY = (64, 32)  # tokens of the prompt and of each of many completions
TREES = (10_000, 100_000)
VOCAB = 32_000
LIMIT = "np.concatenate of the ids"
FOREST, OURS, PACKED, LOOP = (
    "from_rollout_group",
    "PrefixForest and LossEdges",
    "forest -> bins of 16,384",
    "loop: a trie of dicts",
)

Ids = list[int]


# --- the same by plain loops ------------------------------------------------------------------------------------------


def looped(sequences: Sequence[Ids], untrained: int) -> tuple[list[Ids], list[Ids]]:
    """Fold token by token into a trie of dicts. untrained: tokens at the beginning of each sequence without loss.

    Returns ids, positions and subtree_end of the row; row and target of the edges, and the edge of each token.
    """
    children: list[dict[int, int]] = [{}]
    token, parent, paths = [-1], [-1], []
    for sequence in sequences:
        node, path = 0, []
        for each in sequence:
            child = children[node].get(each)
            if child is None:
                child = len(token)
                children[node][each] = child
                children.append({})
                token.append(each)
                parent.append(node)
            path.append(child)
            node = child
        paths.append(path)
    row, depth, order = [-1] * len(token), [-1] * len(token), []
    waiting = list(reversed(children[0].values()))
    while waiting:
        node = waiting.pop()
        row[node], depth[node] = len(order), depth[parent[node]] + 1
        order.append(node)
        waiting += reversed(children[node].values())
    end = [place + 1 for place in row]
    for node in reversed(order):
        end[parent[node]] = max(end[parent[node]], end[node])
    targets = sorted(
        {node for path in paths for node in path[max(1, untrained) :]}, key=lambda x: (row[parent[x]], row[x])
    )
    edge = {node: number for number, node in enumerate(targets)}
    flat = [[token[node] for node in order], [depth[node] for node in order], [end[node] for node in order]]
    used = [edge[node] for path in paths for node in path[max(1, untrained) :]]
    return flat, [[row[parent[node]] for node in targets], [token[node] for node in targets], used]


def looped_contract(prompt: Ids, completions: Sequence[Ids]) -> FoldedRollouts:
    """Make what fold_shared_prefix_rollouts makes, token by token."""
    ids, labels, positions, lengths, paths = [], [], [], [len(prompt)], []
    for position, token in enumerate(prompt):
        ids.append(token)
        labels.append(-100)
        positions.append(position)
    for number, completion in enumerate(completions, 1):
        for index, token in enumerate(completion):
            ids.append(token)
            labels.append(completion[index + 1] if index + 1 < len(completion) else -100)
            positions.append(len(prompt) + index)
        lengths.append(len(completion))
        paths.append([0, number] if prompt else [number])
    return FoldedRollouts(ids, labels, positions, lengths, paths)


def ours(sequences: Sequence[Ids]) -> LossEdges:
    """Fold whole sequences, every token a target."""
    return LossEdges.from_forest(PrefixForest.from_sequences(sequences))


def ours_of_group(prompt: Ids, completions: Sequence[Ids]) -> LossEdges:
    """Fold a group."""
    return LossEdges.from_forest(PrefixForest.from_rollout_group(prompt, completions))


def check_loops() -> None:
    """Assert that the loops give what the library gives, on a case with duplicates, prefixes and many levels."""
    for forest, plain in (
        (PrefixForest.from_sequences(small := grown(300, 300, vocab=3)), looped(small, 0)),
        (PrefixForest.from_rollout_group(*(group := random_group(5, 9, 20, vocab=2))), looped(wholes(*group), 5)),
    ):
        edges = LossEdges.from_forest(forest)
        found = (
            [forest.input_ids, forest.position_ids, forest.subtree_end],
            [edges.row, edges.target, edges.sample_edge],
        )
        assert tuple([each.tolist() for each in part] for part in found) == plain
    for prompt in ([], [1, 2]):
        assert fold_shared_prefix_rollouts(prompt, [[3, 4], [5]]) == looped_contract(prompt, [[3, 4], [5]])


# --- rollouts ---------------------------------------------------------------------------------------------------------


def random_group(prompt: int, completion: int, samples: int, vocab: int = VOCAB) -> tuple[Ids, list[Ids]]:
    """Return a prompt and completions of equal lengths."""
    draw = random.Random(0)
    first, *others = [draw.choices(range(vocab), k=length) for length in (prompt, *[completion] * samples)]
    return first, others


def wholes(prompt: Ids, completions: Sequence[Ids]) -> list[Ids]:
    """Return the whole samples of a group."""
    return [prompt + completion for completion in completions]


def grown(count: int, near: int, vocab: int = VOCAB) -> list[Ids]:
    """Return sequences of 3 to 7 turns of 5 to 25 tokens; each continues a turn of one of the `near` before it."""
    draw = random.Random(0)
    turns: list[list[Ids]] = []
    for number in range(count):
        shared = turns[draw.randrange(max(0, number - near), number)] if number else []
        kept = shared[: draw.randint(0, len(shared))]
        more = max(0, draw.randint(3, 7) - len(kept))
        turns.append([*kept, *(draw.choices(range(vocab), k=draw.randint(5, 25)) for _ in range(more))])
    return [[token for turn in sample for token in turn] for sample in turns]


# --- measuring --------------------------------------------------------------------------------------------------------


def ratios(seconds: Seconds, one: str, other: str) -> str:
    """Return how many times faster `one` is than `other`: the median of the rounds, and how it spreads."""
    found = [b / a for a, b in zip(seconds[one], seconds[other], strict=True)]
    return f"{statistics.median(found):6.2f}x ({min(found):.2f} to {max(found):.2f})"


def bench_step(arguments: argparse.Namespace) -> None:
    """Compare forward and backward, and print whether the aims are met."""
    print("step: forward and backward; `folded` is by segments, `dense` under a mask of all T x T pairs")
    print(
        f"  {'P, R, N':<14} {'tokens':<8} {'pairs':<8} {'unfolded':>9} {'folded':>9} {'dense':>9}  folded is faster by"
    )
    missed: list[str] = []
    for case in STEPS[1::5] if arguments.quick else STEPS:
        prompt, completions = random_group(*case, vocab=512)
        forest = PrefixForest.from_rollout_group(prompt, completions)
        stats, step = forest.stats(), partial(unfolded_logprobs, group=(prompt, completions))
        tokens, pairs = stats.tokens_before / stats.tokens_after, stats.pairs_before / stats.pairs_after
        found = steps(", ".join(map(str, case)), forest, step, arguments.rounds)
        least = 1.0 if tokens >= NEVER_SLOWER else 0.0
        least = max(least, 0.8 * min(tokens, pairs)) if case in AIMS else least
        if found < least:
            missed.append(f"{case} {found:.2f} of {least:.2f}")
    print(
        f"  aims (1.0 from a token ratio of {NEVER_SLOWER}, 0.8 of the smaller ratio at the first {len(AIMS)}): ",
        end="",
    )
    print(f"MISSED: {'; '.join(missed)}" if missed else "met", flush=True)


def steps(name: str, forest: PrefixForest, unfolded: Callable[[Any], Tensor], rounds: int) -> float:
    """Time one step in three ways and print a line; returns how many times faster segments are than not folding.

    unfolded: returns the log-probs of all targets of a model's samples.
    """
    model, masked = tiny_llama(0), tiny_llama(0)  # segments change the model's attention: the mask gets its own
    edges, stats = LossEdges.from_forest(forest), forest.stats()
    heads = logits_head(model), logits_head(masked)
    ways: Ways = {
        "folded": lambda: gradients(model, -folded_logprobs(model, heads[0], forest, edges, "prefix_tree").mean()),
        "unfolded": lambda: gradients(masked, -unfolded(masked).mean()),
        "dense": lambda: gradients(masked, -folded_logprobs(masked, heads[1], forest, edges, "dense").mean()),
    }
    plain = ways["unfolded"]()
    for way in ("folded", "dense"):
        torch.testing.assert_close(ways[way](), plain, atol=1e-5, rtol=1e-3)
    seconds = measured(ways, rounds)
    tokens, pairs = stats.tokens_before / stats.tokens_after, stats.pairs_before / stats.pairs_after
    middle = [f"{statistics.median(seconds[way]) * 1e3:6.0f} ms" for way in ("unfolded", "folded", "dense")]
    print(
        f"  {name:<14} {tokens:5.2f}x   {pairs:5.2f}x   {' '.join(middle)}  {ratios(seconds, 'folded', 'unfolded')}",
        end="",
    )
    print(f"; dense {ratios(seconds, 'dense', 'unfolded').strip()}", flush=True)
    return ratio(seconds, "folded", "unfolded")


def bench_deep(arguments: argparse.Namespace) -> None:
    """Compare a step on a tree of many small nodes: short turns at many levels."""
    print("deep: forward and backward of trees of short turns")
    print(
        f"  {'samples':<14} {'tokens':<8} {'pairs':<8} {'unfolded':>9} {'folded':>9} {'dense':>9}  folded is faster by"
    )
    for count, near in ((32, 8), (128, 1000)) if not arguments.quick else ((16, 8),):
        samples = grown(count, near, vocab=512)
        forest = PrefixForest.from_sequences(samples)

        def unfolded(model: Any, samples: list[Ids] = samples) -> Tensor:
            rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in samples], batch_first=True)
            logits = model(input_ids=rows, use_cache=False).logits
            targets = [(number, end) for number, one in enumerate(samples) for end in range(1, len(one))]
            row, end = torch.tensor(targets).T
            return logits[row, end - 1].log_softmax(-1)[torch.arange(len(row)), rows[row, end]]

        nodes = f"{count}, {len(forest.node_starts)} nodes"
        steps(nodes, forest, unfolded, arguments.rounds)


def bench_bins(arguments: argparse.Namespace) -> None:
    """Plan bins of groups with drawn sizes."""
    count = 10_000 if arguments.quick else 100_000
    draw = np.random.default_rng(0)
    prompts = draw.lognormal(6.2, 0.7, count).clip(16, 8000).astype(np.int64)
    shared = np.repeat(prompts, 8)
    lengths = shared + draw.lognormal(5.5, 0.8, 8 * count).clip(8, 6000).astype(np.int64)
    shared[::8] = 0
    sizes = SampleSizes(lengths, shared, np.arange(count + 1) * 8)
    print(
        f"bins: {count:,} groups of 8, {int((lengths - shared).sum()):,} tokens after folding, rows of 16,384 at most"
    )
    for ranks in (1, 8):
        begin = time.perf_counter()
        plan = plan_bins(sizes, 16_384, ranks=ranks)
        seconds = time.perf_counter() - begin
        fill = sum(plan.tokens) / (len(plan.bins) * 16_384)
        print(
            f"  {ranks} ranks: {len(plan.bins):,} bins, {fill:.3f} full, {seconds / count * 1e6:.0f} us a group; ",
            end="",
        )
        print(
            f"the busiest rank has {plan.imbalance:.4f} of the mean, all rounds {plan.round_imbalance:.4f}", flush=True
        )


def table(title: str, seconds: Seconds, tokens: int) -> None:
    """Print a line for each way: time, tokens a second, and the share of the limit's speed."""
    print(f"{title}, {tokens:,} tokens\n  {'way':<34} {'ms':>9} {'M tokens/s':>11}  of the limit's speed")
    for name, rounds in seconds.items():
        middle = statistics.median(rounds)
        print(
            f"  {name:<34} {middle * 1e3:9.2f} {tokens / middle / 1e6:11.2f}  {ratios(seconds, name, LIMIT)}",
            flush=True,
        )


def concatenated(sequences: Sequence[Ids]) -> Any:
    """Read all ids into one array."""
    return np.concatenate([np.asarray(sequence) for sequence in sequences])


def bench_group(arguments: argparse.Namespace) -> None:
    """Compare the folding of one prompt and its completions."""
    for prompt, completion, samples in GROUPS[:2] if arguments.quick else GROUPS:
        group = random_group(prompt, completion, samples)
        ways: Ways = {
            OURS: partial(ours_of_group, *group),
            LOOP: lambda group=group, prompt=prompt: looped(wholes(*group), prompt),
            "fold_shared_prefix_rollouts": partial(fold_shared_prefix_rollouts, *group),
            "loop: the published layout": partial(looped_contract, *group),
            LIMIT: partial(concatenated, [group[0], *group[1]]),
        }
        seconds = measured(ways, arguments.rounds)
        table(f"group {prompt}, {completion}, {samples}", seconds, prompt * samples + completion * samples)
        for one, other in (list(ways)[:2], list(ways)[2:4]):
            print(f"  {one} is faster than its loop by {ratios(seconds, one, other)}")


def bench_many(arguments: argparse.Namespace) -> None:
    """Fold 10,000 and 100,000 completions of one prompt."""
    found: list[dict[str, float]] = []
    for count in [number // 10 for number in TREES] if arguments.quick else TREES:
        group = random_group(*MANY, count)
        forest, tokens = PrefixForest.from_rollout_group(*group), MANY[0] + MANY[1] * count
        ways: Ways = {
            FOREST: partial(PrefixForest.from_rollout_group, *group),
            OURS: partial(ours_of_group, *group),
            PACKED: lambda forest=forest: [one.forest for one in pack([forest], 16_384)],
            LIMIT: partial(concatenated, [group[0], *group[1]]),
        }
        seconds = measured(ways, arguments.rounds, clock=time.process_time)
        nodes = len(forest.node_starts) / count
        table(f"group {MANY[0]}, {MANY[1]}, {count:,} ({nodes:.2f} nodes a sample)", seconds, tokens)
        found.append({name: statistics.median(seconds[name]) for name in ways})
    growth = {name: found[1][name] / found[0][name] for name in found[0]}
    verdict = "met" if growth[FOREST] <= 10.5 else "MISSED"
    shown = ", ".join(f"{name} {times:.1f} times" for name, times in growth.items())
    print(f"  aim 10.5 {verdict}: CPU time, 10 times the completions: {shown}")


def bench_trees(arguments: argparse.Namespace) -> None:
    """Fold trees of two sizes, one ten times the other, in the order of rollouts and in an order that caches cannot."""
    sizes = [number // 10 for number in TREES] if arguments.quick else TREES
    for near, order in ((1000, "each continues one of the 1,000 before it"), (sizes[-1], "from any earlier one")):
        found = [bench_tree(count, near, order, arguments.rounds) for count in sizes]
        growth = {name: found[1][name] / found[0][name] for name in found[0]}
        others = ", ".join(f"{name} {growth[name]:.2f}x" for name in list(growth)[1:])
        verdict = "" if near == sizes[-1] else " met:" if growth[OURS] <= 1.2 else " MISSED:"
        print(f" {verdict} time a token, 10 times the sequences: {growth[OURS]:.2f}x, aim 1.2; {others}")


def bench_tree(count: int, near: int, order: str, rounds: int) -> dict[str, float]:
    """Fold one tree; returns the seconds a token of each way."""
    sequences = grown(count, near)
    tokens = sum(map(len, sequences))
    seconds = measured({OURS: partial(ours, sequences), LIMIT: partial(concatenated, sequences)}, rounds)
    stats = PrefixForest.from_sequences(sequences).stats()
    shared = f"{tokens / stats.tokens_after:.2f}x folded, {stats.nodes:,} nodes, {stats.max_levels} on a path at most"
    table(f"trees of {count:,} sequences, {order} ({shared})", seconds, tokens)
    begin = time.perf_counter()
    looped(sequences, 0)  # once: it takes long, and gigabytes
    slow = time.perf_counter() - begin
    print(f"  {LOOP:<34} {slow * 1e3:9.2f} {tokens / slow / 1e6:11.2f}  (once)")
    print(f"  {OURS} is faster than its loop by {slow / statistics.median(seconds[OURS]):.2f}x")
    medians = {name: statistics.median(found) / tokens for name, found in seconds.items()}
    return {OURS: medians[OURS], LIMIT: medians[LIMIT], LOOP: slow / tokens}


# --- other tools ------------------------------------------------------------------------------------------------------


def bench_rows(arguments: argparse.Namespace) -> None:
    """Compare the folding of rollouts into a row of TRL's asynchronous trainer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its experimental modules say that they are
            from trl.experimental.async_grpo.packing import TreeRow
    except ImportError as error:
        print(f"rows: left out, TRL 1.16 is not here (extra rl): {error}")
        return
    sizes = ((8, 64, 448),) if arguments.quick else ((8, 512, 512), (1, 256, 60), (1, 64, 28))
    for groups, prompt, completion in sizes:
        samples = rollouts(groups, prompt, completion)

        def theirs(samples: list[dict[str, Any]] = samples) -> dict[str, torch.Tensor]:
            row = TreeRow()
            for sample in samples:
                row.add(sample)
            return row.pack()

        found, wanted = row_of(samples, fork_early=True), theirs()
        assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        ways: Ways = {
            "forest, edges, fields": partial(fields_of, samples),
            "tree_row": partial(row_of, samples, fork_early=False),
            "tree_row, fork_early": partial(row_of, samples, fork_early=True),
            "TreeRow": theirs,
        }
        times = 20 if groups == 1 else 1  # in a round, so that a small group is not lost in the clock's
        repeated: Ways = {name: partial(timeit, run, number=times) for name, run in ways.items()}
        seconds = measured(repeated, arguments.rounds, clock=time.process_time)
        tokens = len(samples) * (prompt + completion)
        print(f"rows: {len(samples)} rollouts, {tokens:,} tokens, {len(wanted['input_ids']):,} in the row")
        for name, spent in seconds.items():
            each = statistics.median(spent) / times * 1e3
            print(f"  {name:<22} {each:8.2f} ms  {ratios(seconds, name, 'TreeRow')}", flush=True)


def rollouts(groups: int, prompt: int, completion: int) -> list[dict[str, Any]]:
    """Return 8 rollouts of each prompt, as TRL's TreeRow takes them."""
    draw, chance, samples = random.Random(0), torch.Generator().manual_seed(0), []
    for group in range(groups):
        first = draw.choices(range(VOCAB), k=prompt)
        for _ in range(8):
            ids = torch.tensor(first + draw.choices(range(VOCAB), k=completion))
            sample = {"input_ids": ids, "completion_mask": torch.arange(len(ids)) >= prompt, "group_id": group}
            samples.append(
                sample | {"old_log_probs": torch.randn(len(ids), generator=chance), "advantage": draw.random()}
            )
    return samples


def folded_rollouts(samples: list[dict[str, Any]]) -> tuple[PrefixForest, LossEdges, list[Tensor], Tensor]:
    """Fold them; returns forest, edges, and the fields as they were given."""
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage")
    ids, masks, old, advantages = ([sample[name] for sample in samples] for name in names)
    forest = PrefixForest.from_sequences(ids, loss_mask=masks)
    return forest, LossEdges.from_forest(forest), old, torch.tensor(advantages)


def fields_of(samples: list[dict[str, Any]]) -> tuple[PrefixForest, Tensor, Tensor]:
    """Return what a step of this package takes."""
    forest, edges, old, advantages = folded_rollouts(samples)
    return forest, edges.field(old, per="token"), edges.field(advantages, per="sample")


def row_of(samples: list[dict[str, Any]], *, fork_early: bool) -> dict[str, Tensor]:
    """Return what a step of TRL takes."""
    forest, edges, old, advantages = folded_rollouts(samples)
    return tree_row(forest, edges, fork_early=fork_early, old_logprobs=old, advantages=advantages)


def bench_blocks(arguments: argparse.Namespace) -> None:
    """Compare the making of a BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    print("blocks: BlockMask, blocks of 128")
    for rows in (2048,) if arguments.quick else (2048, 4096, 8192):
        forest = PrefixForest.from_rollout_group(*random_group(rows // 2, rows // 16, 8)).padded(128)
        size = len(forest.input_ids)
        for window in (None, 256):
            rule = block_mask(forest, window=window, forward_only=True).mask_mod
            ways: Ways = {
                "block_mask": partial(block_mask, forest, window=window, forward_only=True),
                "create_block_mask": partial(create_block_mask, rule, 1, 1, size, size, device="cpu"),
            }
            seconds = measured(ways, min(3, arguments.rounds))
            times = " ".join(f"{name} {statistics.median(found) * 1e3:.2f} ms," for name, found in seconds.items())
            print(f"  T {size:,}, window {window}: {times} {ratios(seconds, *ways)}", flush=True)


SECTIONS = {
    "step": bench_step,
    "deep": bench_deep,
    "bins": bench_bins,
    "group": bench_group,
    "many": bench_many,
    "trees": bench_trees,
    "rows": bench_rows,
    "blocks": bench_blocks,
}


def main() -> None:
    """Read the arguments, check the loops, run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each section (7)")
    parser.add_argument("--threads", type=int, default=1, help="torch's (1)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections only")
    parser.add_argument("--quick", action="store_true", help="one round of small cases: does it run at all?")
    arguments = parser.parse_args()
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    torch.set_num_threads(arguments.threads)
    print("python", " ".join(sys.argv), f"| torch {torch.__version__}, {torch.get_num_threads()} threads,", end=" ")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    check_loops()
    for name in arguments.only:
        SECTIONS[name](arguments)


if __name__ == "__main__":
    main()
