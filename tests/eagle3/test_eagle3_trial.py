"""A target that cannot be loaded or run leaves the output folder as it was, and says what to do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import eagle3_runs
from torch import nn

from niels_gpt.eagle3.targets.loading import load_target


def does_not_load(device: torch.device) -> Any:
    raise ValueError("its weights are not there")


class Broken(nn.Module):
    """A block that does not run."""

    def forward(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError("sdpa cannot run this")


def does_not_run(device: torch.device) -> Any:
    model = copy.deepcopy(eagle3_runs.load(device))
    model.model.layers[2] = Broken()
    return model


def has_fewer_tokens(device: torch.device) -> Any:
    model = copy.deepcopy(eagle3_runs.load(device))
    model.lm_head = nn.Linear(eagle3_runs.HIDDEN, eagle3_runs.VOCAB - 1, bias=False)
    return model.requires_grad_(False)


FAILING = {
    "its weights are not there": does_not_load,
    "sdpa cannot run this.*--attention eager": does_not_run,
    "39 logits a token, expected 48 and 40": has_fewer_tokens,
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("said", FAILING)
def test_a_failing_target_leaves_no_folder(tmp_path: Path, said: str, workers: int) -> None:
    with pytest.raises(ValueError, match=said):
        eagle3_runs.run(tmp_path / "c", load=FAILING[said], workers=workers, start="fork")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_target_leaves_a_folder_as_it_was_for_one_that_runs(tmp_path: Path) -> None:
    eagle3_runs.run(tmp_path / "c")
    (tmp_path / "c" / "shard-000001.safetensors").unlink()
    before = eagle3_runs.times(tmp_path / "c")
    with pytest.raises(ValueError, match="--attention eager"):
        eagle3_runs.run(tmp_path / "c", load=does_not_run, resume=True)
    assert eagle3_runs.times(tmp_path / "c") == before
    assert eagle3_runs.run(tmp_path / "c", resume=True).shards == 1


def test_an_attention_that_a_model_does_not_have_is_named_with_the_flag(tmp_path: Path) -> None:
    import transformers

    bloom = transformers.BloomConfig(hidden_size=8, n_layer=8, n_head=2, vocab_size=40)
    transformers.BloomForCausalLM(bloom).save_pretrained(tmp_path)
    how: dict[str, Any] = {"revision": None, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(ValueError, match=r"no attention 'sdpa'.*--attention eager"):
        load_target(str(tmp_path), attention="sdpa", **how)
    load_target(str(tmp_path), attention="eager", **how)
