"""Positions of segments as a GPU computes them: those of the CPU, which is asked without one here."""

import torch

from niels_gpt.sampling import Batch
from niels_gpt.sampling.batch import positions_on_device


def test_positions_on_a_device_are_those_of_the_cpu():
    x, numbers = torch.zeros((3, 4), dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    batch = Batch(x, x, {}, None, torch.tensor([0, 3, 4, 8, 10, 12], dtype=torch.int32), numbers, numbers, 4)
    assert torch.equal(positions_on_device(batch.cu_seqlens, 12).view(3, 4), batch.position_ids)
