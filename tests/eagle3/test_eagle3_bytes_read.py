"""verify, stats and inspect of an EAGLE-3 cache read what they need of its tensors once, not again for each row."""

import pytest
import torch
from support.commands import niels_gpt
from support.kinds import fresh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PICKS = ("aten.index.", "aten.index_select.", "aten.embedding.", "aten.gather.")
"""Operations that read of a tensor what they return."""
LOOKS = ("verify", "stats", "inspect", "inspect --sample 0", "inspect --sample 0 --slot 3 --slots 1")
MOST = {
    "dense": (2.30, 0.55, 0, 0.16, 0.030),
    "topk": (2.46, 0.40, 0, 0.13, 0.028),
    "native": (5.11, 3.67, 0, 0.60, 0.157),
    "fp8": (5.72, 6.47, 0, 1.57, 0.246),
}
"""What each of LOOKS may read, as a multiple of the shards: each value goes through a few operations. Of a native cache
the target's weights are read too, which take as much as the shards of so small a cache."""


class BytesRead(TorchDispatchMode):
    """Counts the bytes that operations on tensors read. A view reads nothing, and neither does a map."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith("aten.set_."):
            read = out if str(func).startswith(PICKS) else (args, kwargs)
            self.count += sum(each.nbytes for each in tree_leaves(read) if isinstance(each, torch.Tensor))
        return out


@pytest.mark.parametrize("kind", MOST)
def test_what_looks_at_a_cache_reads_no_tensor_again_and_again(tmp_path, kind):
    cache = fresh(kind, tmp_path / "caches")
    size = sum(path.stat().st_size for path in cache.glob("shard-*"))
    for look, most in zip(LOOKS, MOST[kind], strict=True):
        name, *options = look.split()
        with BytesRead() as read:
            assert niels_gpt("eagle3", name, cache, *options).status == 0
        assert most / 3 <= read.count / size <= most, look
