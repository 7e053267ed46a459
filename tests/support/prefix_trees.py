"""Trees of samples for tests, drawn by hypothesis or a seed, and their folded rows by brute force."""

import random

from hypothesis import strategies as st

Samples = list[list[int]]

# Three ids make most prefixes shared; some samples are equal, some a prefix of another, some of one token.
SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def grown(generator: random.Random, *, samples: int = 22, levels: int = 6, vocab: int = 97) -> Samples:
    """Return samples cut from a random tree of several levels, with a duplicate, a prefix and a one-token sample."""

    def ids(longest: int) -> list[int]:
        return [generator.randrange(vocab) for _ in range(generator.randint(1, longest))]

    paths: Samples = [ids(6), ids(3)]
    while len(paths) < samples - 3:
        stem = generator.choice(paths)
        for _ in range(generator.randint(1, levels)):
            cut = generator.randint(1, len(stem))
            stem = [*stem[:cut], *ids(4)]
        paths.append(stem)
    paths += [list(paths[0]), paths[-1][: (len(paths[-1]) + 1) // 2], [paths[0][0]]]
    generator.shuffle(paths)
    return paths


def prefixes(samples: Samples) -> list[tuple[int, ...]]:
    """Return the distinct prefixes of the samples: one for each token of the folded row."""
    return list(dict.fromkeys(tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))))


def plain_rows(samples: Samples) -> list[tuple[int, ...]]:
    """Return the prefix of each row: depth first, siblings in the order of the samples."""
    rows: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [()]
    known = prefixes(samples)
    while waiting:
        prefix = waiting.pop()
        rows += [prefix] if prefix else []
        waiting += reversed([other for other in known if other[:-1] == prefix])
    return rows
