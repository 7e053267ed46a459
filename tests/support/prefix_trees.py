"""Trees of samples for tests, drawn by hypothesis or a seed, and their folded rows by brute force."""

import importlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

if TYPE_CHECKING:
    pass

Samples = list[list[int]]

# Three ids make most prefixes shared; some samples are equal, some a prefix of another, some of one token.
SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def grown(generator, *, samples=22, levels=6, vocab=97):
    """Return samples cut from a random tree of several levels, with a duplicate, a prefix and a one-token sample."""

    def ids(longest):
        return [generator.randrange(vocab) for _ in range(generator.randint(1, longest))]

    paths = [ids(6), ids(3)]
    while len(paths) < samples - 3:
        stem = generator.choice(paths)
        for _ in range(generator.randint(1, levels)):
            cut = generator.randint(1, len(stem))
            stem = [*stem[:cut], *ids(4)]
        paths.append(stem)
    paths += [list(paths[0]), paths[-1][: (len(paths[-1]) + 1) // 2], [paths[0][0]]]
    generator.shuffle(paths)
    return paths


def prefixes(samples):
    """Return the distinct prefixes of the samples: one for each token of the folded row."""
    return list(dict.fromkeys(tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))))


def plain_rows(samples):
    """Return the prefix of each row: depth first, siblings in the order of the samples."""
    rows = []
    waiting = [()]
    known = prefixes(samples)
    while waiting:
        prefix = waiting.pop()
        rows += [prefix] if prefix else []
        waiting += reversed([other for other in known if other[:-1] == prefix])
    return rows


def tree(seed, depth=7):
    """Return a forest of nodes of 1 to 90 tokens, with padding."""
    from niels_gpt.prefix_tree.forest import PrefixForest

    draw = random.Random(seed)
    samples = []

    def grow(above, levels):
        longest = draw.choice([2, 4, 90])
        path = [*above, *(draw.randrange(50) for _ in range(draw.randint(1, longest)))]
        if not levels or draw.random() < 0.2:
            samples.append(path)
        else:
            for _ in range(draw.randint(1, 3)):
                grow(path, levels - 1)

    grow([], depth)
    grow([], 1)
    draw.shuffle(samples)
    return PrefixForest.from_sequences(samples[:60]).padded(8)


def tree_keys(forest):
    """Return TRL's keys of a forest without padding."""
    import torch

    kv = []
    bounds_q, bounds_k, paths = [0], [0], []
    columns = (forest.node_starts, forest.node_lengths, forest.node_parents)
    for start, length, parent in zip(*(column.tolist() for column in columns), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, start + length)])
        kv += paths[-1]
        bounds_q.append(start + length)
        bounds_k.append(len(kv))
    bounds = (torch.tensor(each, dtype=torch.int32) for each in (bounds_q, bounds_k))
    return dict(
        zip(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), (torch.tensor(kv), *bounds), strict=True)
    )


def register_segments():
    """Let transformers know the attention by segments, "prefix_tree"."""
    from niels_gpt.prefix_tree.segments import register

    register()


def advice(finding):
    """The last line of a report whose first finding this is."""
    from niels_gpt.prefix_tree.verify import ADVICE

    return f"What to do: {ADVICE[finding]}"


@contextmanager
def calls_of(name):
    """The arguments of each call of a function of the package, such as "attention.dense_mask"."""
    module, *owners, last = name.split(".")
    owner = importlib.import_module(f"niels_gpt.prefix_tree.{module}")
    for each in owners:
        owner = getattr(owner, each)
    real, calls = getattr(owner, last), []

    def called(*args, **how):
        calls.append((args, how))
        return real(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, last, called)
        yield calls


@contextmanager
def window_of_all(window):
    """Let every model be taken for one whose layers have this window."""
    from niels_gpt.prefix_tree import masks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "windows_of", lambda *_: {"": window})
        yield
