"""The published contract beside its reference implementation: nemo-automodel's own code runs and is asked.

Where its wheel lies unpacked in a folder named 0.7.0 (0.5.0 has no prefix trees), and NIELS_GPT_PEERS names the folder
above it. .ci/run makes it so; elsewhere these tests are left out.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from niels_gpt.prefix_tree.attention import AttnMaskSpec
from niels_gpt.prefix_tree.fold import (
    CROSS_ENTROPY_IGNORE_IDX,
    build_mock_rollout_dataset,
    fold_shared_prefix_rollouts,
    prefix_tree_collate_fn,
)

PEERS = os.environ.get("NIELS_GPT_PEERS")
pytestmark = pytest.mark.skipif(
    PEERS is None, reason="nemo-automodel is not here: set NIELS_GPT_PEERS to a folder with its wheels, see .ci/run"
)

# Answers a list of (name, args, kwargs) with ("ok", value) or ("raised", class, text); dataclasses go as dicts.
SERVE = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path.insert(0, sys.argv[1])
from dataclasses import asdict, is_dataclass
from nemo_automodel.components.datasets.llm import mock_prefix_tree, prefix_tree
from nemo_automodel.components.distributed.context_parallel.magi import AttnMaskSpec

def plain(value):
    if isinstance(value, AttnMaskSpec):
        return asdict(value), value.fingerprint()
    if is_dataclass(value):
        return asdict(value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value

def answer(name, args, kwargs):
    owner = next(o for o in (prefix_tree, mock_prefix_tree, AttnMaskSpec) if hasattr(o, name))
    found = getattr(owner, name)
    try:
        return ("ok", plain(found(*args, **kwargs)) if callable(found) else found)
    except Exception as error:
        return ("raised", type(error).__name__, str(error))

pickle.dump([answer(*call) for call in pickle.load(sys.stdin.buffer)], answers)
answers.flush()
os._exit(0)  # at once: taking torch down in order takes seconds
"""
OURS: dict[str, Callable[..., Any]] = {
    "CROSS_ENTROPY_IGNORE_IDX": lambda: CROSS_ENTROPY_IGNORE_IDX,
    "fold_shared_prefix_rollouts": fold_shared_prefix_rollouts,
    "prefix_tree_collate_fn": prefix_tree_collate_fn,
    "build_mock_rollout_dataset": build_mock_rollout_dataset,
    "causal": AttnMaskSpec.causal,
    "varlen": AttnMaskSpec.varlen,
    "prefix_tree": AttnMaskSpec.prefix_tree,
}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls() -> list[Call]:
    """Return what both are asked."""
    draw = random.Random(0)

    def ids(longest: int, shortest: int = 1) -> list[int]:
        return [draw.randrange(4) for _ in range(draw.randint(shortest, longest))]  # equal openings are frequent

    found: list[Call] = [("CROSS_ENTROPY_IGNORE_IDX", (), {})]
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
        found.append(("varlen", (lengths,), {"causal": draw.random() < 0.5}))
        found.append(("causal", (nodes,), {}))
    return found


def path_of(node: int, parents: list[int | None]) -> list[int]:
    """Return the nodes from the root to a node."""
    parent = parents[node]
    return [node] if parent is None else [*path_of(parent, parents), node]


def plain(value: Any) -> Any:
    """Return what SERVE makes of a value."""
    if isinstance(value, AttnMaskSpec):
        return asdict(value), value.fingerprint()
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def ours(call: Call) -> tuple[Any, ...]:
    """Return our answer in the form of the peer's."""
    name, args, kwargs = call
    try:
        return ("ok", plain(OURS[name](*args, **kwargs)))
    except Exception as error:
        return ("raised", type(error).__name__, str(error))


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal to the dtype, and to the order of keys."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_every_answer_is_the_peers() -> None:
    folder = Path(str(PEERS)) / "0.7.0"
    assert (folder / "nemo_automodel").is_dir(), f"{folder} has no package nemo_automodel, and NIELS_GPT_PEERS is set"
    asked = calls()
    command = [sys.executable, "-c", SERVE, str(folder)]
    ran = subprocess.run(command, input=pickle.dumps(asked), stdout=subprocess.PIPE, check=True)
    answers = pickle.loads(ran.stdout)
    different = [
        (call, ours(call), peers) for call, peers in zip(asked, answers, strict=True) if not same(ours(call), peers)
    ]
    assert not different, different[0]
    assert {answer[0] for answer in answers} == {"ok", "raised"}
    assert len(answers) > 1200
