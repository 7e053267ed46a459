"""The published contract beside its reference implementation: nemo-automodel's own code runs and is asked.

Where its wheel lies unpacked in a folder named 0.7.0 (0.5.0 has no prefix trees), and NIELS_GPT_PEERS names the folder
above it. .ci/run makes it so; elsewhere these tests are left out.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peer_automodel import Peer, answer

from niels_gpt.prefix_tree import fold
from niels_gpt.prefix_tree.attention import AttnMaskSpec

PEERS = os.environ.get("NIELS_GPT_PEERS")
pytestmark = pytest.mark.skipif(
    PEERS is None, reason="nemo-automodel is not here: set NIELS_GPT_PEERS to a folder with its wheels, see .ci/run"
)

OURS = [fold, AttnMaskSpec]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls():
    draw = random.Random(0)

    def ids(longest, shortest=1):
        return [draw.randrange(4) for _ in range(draw.randint(shortest, longest))]  # equal openings are frequent

    found = [("CROSS_ENTROPY_IGNORE_IDX", (), {})]
    groups = [(ids(6, 0), [ids(5) for _ in range(draw.randint(1, 5))]) for _ in range(200)]
    for prompt, completions in groups:
        found.append(("fold_shared_prefix_rollouts", (prompt, completions), {}))
        found.append(("fold_shared_prefix_rollouts", (prompt, completions), {"ignore_idx": draw.choice([-1, 0, 7])}))
        found.append(
            ("prefix_tree_collate_fn", ([{"prompt_ids": prompt, "completions": completions, "reward": 1}],), {})
        )
    for bad in [], [[]], [[1], []], [[], [1]]:
        found += [("fold_shared_prefix_rollouts", (prompt, bad), {}) for prompt in ([], [1])]
    group = {"prompt_ids": [1], "completions": [[2]]}
    found += [("prefix_tree_collate_fn", (batch,), {}) for batch in ([], [group, group], [group] * 3)]
    found += [("build_mock_rollout_dataset", (), changes) for changes in ({}, {"seed": 7, "num_groups": 3})]
    found.append(("build_mock_rollout_dataset", (), {"prompt_len": 0, "completion_len": 1, "vocab_size": 3}))
    for _ in range(200):
        nodes = draw.randint(1, 9)
        parents = [draw.choice([None, *range(node)]) for node in range(nodes)]
        lengths = [draw.randint(0, 4) for _ in range(nodes)]
        paths = [path_of(draw.randrange(nodes), parents) for _ in range(draw.randint(1, 6))]
        found.append(("prefix_tree", (lengths, paths), {}))
    return found


def path_of(node, parents):
    parent = parents[node]
    return [node] if parent is None else [*path_of(parent, parents), node]


def same(left, right):
    """Whether two values are equal to the dtype, and to the order of keys."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_every_answer_is_the_peers():
    folder = Path(str(PEERS)) / "0.7.0"
    assert (folder / "nemo_automodel").is_dir(), f"{folder} has no package nemo_automodel, and NIELS_GPT_PEERS is set"
    asked, peer = calls(), Peer(folder)
    answers = peer.call("", "fold_answers", asked)
    peer.close()
    pairs = zip(asked, [answer(OURS, *call) for call in asked], answers, strict=True)
    different = [(call, ours, theirs) for call, ours, theirs in pairs if not same(ours, theirs)]
    assert not different, different[0]
    assert {found[0] for found in answers} == {"ok", "raised"}
    assert len(answers) > 800
