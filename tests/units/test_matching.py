"""Which documents of two caches belong together."""

import itertools
import random
from collections import Counter

import numpy as np

from niels_gpt.kinds.diff import match


def test_matching_is_right_for_small_multisets_of_all_kinds():
    """Against counting by hand: what is common, what stays in its split, what moves."""
    draw = random.Random(0)
    for _ in range(300):
        a, b = ([[draw.randrange(4) for _ in range(draw.randrange(5))] for _ in range(2)] for _ in range(2))
        digests = np.array([[n, 7] for split in (*a, *b) for n in split], dtype=np.uint64).reshape(-1, 2)
        found = match(digests, [len(split) for split in (*a, *b)])
        of_a, of_b = (Counter(itertools.chain(*x)) for x in (a, b))
        stays = sum((Counter(mine) & Counter(theirs)).total() for mine, theirs in zip(a, b, strict=True))
        assert sum(map(len, found.only_a)) == (of_a - of_b).total()
        assert sum(map(len, found.only_b)) == (of_b - of_a).total()
        assert sum(len(left) for left, _ in found.moved) == (of_a & of_b).total() - stays
        for split, (left, right) in enumerate(found.moved):
            assert [a[split][i] for i in left] == [b[1 - split][i] for i in right] and sorted(left) == list(left)
            for value in range(4):  # the k-th with the k-th
                numbers = [j for i, j in zip(left, right, strict=True) if a[split][i] == value]
                assert numbers == sorted(numbers)
