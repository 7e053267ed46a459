"""Caches that other tools, or write_shard alone, wrote: what can be checked there is, and the rest says why not."""

import shutil
from pathlib import Path

import pytest
import torch
from support import eagle3_runs
from support.eagle3_damage import flip_bit
from support.small_eagle3 import fields_of, manifest_of

from niels_gpt.eagle3.cache import write_manifest, write_shard, write_target_embeddings
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.inspect.checks import CHECKS
from niels_gpt.eagle3.inspect.recompute import Target, recomputed
from niels_gpt.eagle3.inspect.show import summary
from niels_gpt.eagle3.inspect.verify import verify
from niels_gpt.storage.checks import Verdict


def foreign(folder: Path, topk: int = 0) -> Path:
    """Write a cache as other tools do: no sidecar, and the target's outputs in every slot."""
    fields = fields_of(5, topk=topk)
    fields["position_mask"] &= (fields["loss_mask"] == 1)[..., None]
    fields["attention_mask"][1, 2:] = 0
    for shard, begin in enumerate((0, 3)):
        write_shard(folder, shard, {name: tensor[begin : begin + 3] for name, tensor in fields.items()})
    write_manifest(folder, manifest_of(samples=5, shard_size=3, topk=topk))
    write_target_embeddings(folder, torch.zeros(20, 2))
    shutil.rmtree(folder / "sidecar")
    return folder


@pytest.mark.parametrize("topk", [0, 3])
def test_of_a_cache_without_a_sidecar_only_what_needs_none_is_checked(tmp_path: Path, topk: int) -> None:
    cache = foreign(tmp_path / "c", topk)
    verdicts = verify(cache)
    assert not any(verdict.problems for verdict in verdicts.values())
    assert {name for name, verdict in verdicts.items() if verdict.note} == {"checksums", "ids_match"}
    assert "no sidecar" in str(verdicts["checksums"].note)
    assert "another tool wrote this cache" in dict(row[:2] for row in summary(cache))["sidecar"]
    other = recomputed(cache, Target({}, eagle3_runs.load, {"device": "cpu", "threads": 1}))
    assert other.note is None and other.problems, "it is compared by what its shards hold"


def test_damage_of_a_cache_without_a_sidecar_is_told_with_the_samples_number(tmp_path: Path) -> None:
    cache = foreign(tmp_path / "c")
    fields = fields_of(2)
    fields["aux_hidden_states"][1, 0, 0] = torch.nan
    fields["target_probs"][0, 3] *= 0.5
    write_shard(cache, 1, fields)
    shutil.rmtree(cache / "sidecar")
    verdicts = verify(cache)
    assert "shard-000001.safetensors: sample 4: aux_hidden_states of block 1 is nan" in verdicts["finite"].problems[0]
    assert any("sample 3: probabilities sum to 0.5 at slot 3" in said for said in verdicts["distribution"].problems)


def test_of_a_cache_that_write_shard_wrote_all_but_the_source_is_checked(tmp_path: Path) -> None:
    fields = fields_of(2)
    fields["position_mask"] &= (fields["loss_mask"] == 1)[..., None]
    write_shard(tmp_path, 0, fields)
    write_manifest(tmp_path, manifest_of(samples=2, shard_size=2))
    write_target_embeddings(tmp_path, torch.zeros(20, 2))
    unchecked = Verdict([], "cannot be checked: no plan, as in caches that write_shard wrote")
    assert verify(tmp_path) == {**dict.fromkeys(list(CHECKS)[:-1], Verdict([])), "ids_match": unchecked}
    assert "write_shard wrote this cache" in dict(row[:2] for row in summary(tmp_path))["sidecar"]
    receipt = tmp_path / "sidecar" / "shard-000000.json"
    kept = receipt.read_bytes()
    receipt.unlink()
    missing = f"{receipt}: no such file, expected the checksums of shard-000000.safetensors. Write it"
    for name in ("complete", "checksums"):
        (found,) = verify(tmp_path)[name].problems
        assert found.startswith(missing)
    receipt.write_bytes(kept)
    flip_bit(Path(shard_path(tmp_path, 0)), -1)
    (found,) = verify(tmp_path)["checksums"].problems
    assert "It is sample 1." in found
