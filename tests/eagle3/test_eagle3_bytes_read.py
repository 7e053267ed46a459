"""verify and stats of an EAGLE-3 cache read what they need of its tensors once, not again for each row or token."""

import pytest
import torch
from support.commands import niels_gpt
from support.kinds import files_of, fresh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PICKS = ("aten.index.", "aten.index_select.", "aten.embedding.", "aten.gather.")
"""Operations that read of a tensor what they return."""
MOST = {"dense": (3.0, 1.0), "topk": (3.0, 1.0), "native": (4.0, 2.5), "fp8": (4.5, 4.0)}
"""What verify and stats may read, as a multiple of the cache: each value goes through a few operations."""


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
    size = sum((cache / name).stat().st_size for name in files_of(cache))
    for command, most in zip(("verify", "stats"), MOST[kind], strict=True):
        with BytesRead() as read:
            assert niels_gpt("eagle3", command, cache).status == 0
        assert most / 3 < read.count / size < most, command
