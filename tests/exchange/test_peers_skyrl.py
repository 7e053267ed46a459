"""What SkyRL's own loader reads of an export with a loss mask. It lies below the folder that NIELS_GPT_PEERS names."""

import numpy as np
import pytest
from support import small_builds
from support.exchange_peers import library
from support.foreign import tokens_of

from niels_gpt.exchange.exporting import export_cache


@pytest.fixture
def skyrl():
    with library("skyrl") as tool:
        yield tool


def test_every_example_with_loss_is_read_with_its_mask(skyrl, tmp_path):
    small_builds.sft(tmp_path / "cache")
    cache = tokens_of(tmp_path / "cache")
    export_cache(cache.path, "hf", tmp_path / "out", mask="loss_mask")
    for split, name in (("train", "train"), ("val", "validation")):
        stream, loss = (
            np.concatenate([part for file in cache.files(split) for part in parts(file)]).astype(int)
            for parts in (lambda file: [file.ids], lambda file: file.loss())
        )
        examples = [
            (stream[first:end].tolist(), [0, *loss[first + 1 : end].tolist()])
            for first, end in np.lib.stride_tricks.sliding_window_view(cache.bounds(split), 2).tolist()
        ]
        rows = skyrl.call("read_skyrl", str(next((tmp_path / "out/data").glob(f"{name}-*"))), None)
        assert rows == [(ids, mask) for ids, mask in examples if any(mask)]
        assert len(rows) > 5
