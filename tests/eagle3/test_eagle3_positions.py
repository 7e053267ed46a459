"""A cache from which a draft can learn nothing is refused, one with little is warned of, and both shares are shown."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import eagle3_runs
from support.small_eagle3 import fields_of, manifest_of

from niels_gpt.commands.eagle3 import main
from niels_gpt.eagle3.cache import CachedEagle3Dataset, write_manifest, write_shard, write_target_embeddings
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.storage.errors import CacheError

SELECTED = eagle3_runs.manifest()["selected_token_ids"]


def never_in_the_draft_vocabulary(device: torch.device) -> Any:
    """Return a target whose most probable token is none of SELECTED."""
    model = copy.deepcopy(eagle3_runs.load(device))
    model.lm_head.weight[SELECTED] = 0
    return model


def test_a_target_that_never_chooses_a_draft_token_gives_no_cache(tmp_path: Path) -> None:
    for resume in (False, True):  # the same command again says the same
        with pytest.raises(CacheError, match=r"0 positions.*draft's vocabulary.*--draft-vocab-size"):
            eagle3_runs.run(tmp_path, load=never_in_the_draft_vocabulary, resume=resume)
        assert not (tmp_path / "meta.json").exists()


def test_a_long_run_without_a_position_stops_before_its_first_shard_is_done(tmp_path: Path) -> None:
    many = [eagle3_runs.Row(f"{number}", [number % 7] * 24, [1] * 24) for number in range(600)]
    samples = Samples.of_rows(many)
    plan = eagle3_runs.plan(samples, batch_size=64, max_batch_tokens=4096, shard_size=600)
    with pytest.raises(CacheError, match="0 positions"):
        eagle3_runs.run(tmp_path, samples=samples, given=plan, load=never_in_the_draft_vocabulary)
    assert not list(tmp_path.glob("shard-*"))


def test_few_positions_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = eagle3_runs.samples_of(40)
    everything = {"draft_vocab_size": eagle3_runs.VOCAB, "selected_token_ids": list(range(eagle3_runs.VOCAB))}
    eagle3_runs.run(tmp_path / "all", samples=samples, given=eagle3_runs.plan(samples, **everything))
    assert not caplog.records
    chosen = torch.zeros(eagle3_runs.VOCAB, dtype=torch.int64)
    for sample in CachedEagle3Dataset(tmp_path / "all"):
        where = sample["position_mask"][:, 0]
        chosen += torch.bincount(sample["target_probs"][where].argmax(-1), minlength=eagle3_runs.VOCAB)
    rarest = int(torch.where(chosen > 0, chosen, 10**6).argmin())
    assert 0 < chosen[rarest] < 0.05 * chosen.sum()
    given = eagle3_runs.plan(samples, draft_vocab_size=1, selected_token_ids=[rarest])
    eagle3_runs.run(tmp_path / "few", samples=samples, given=given)
    assert "few positions" in caplog.text and f"{int(chosen[rarest]):,} of " in caplog.text


@pytest.mark.parametrize(("positions", "status"), [(0, 1), (1, 0), (30, 0)])
def test_both_shares_are_shown(tmp_path: Path, positions: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    fields = fields_of(10, slots=9)
    fields["loss_mask"][:, :-2], fields["loss_mask"][:, -2:] = 1, 0  # 70 slots of 90 tokens
    fields["position_mask"][:] = False
    fields["position_mask"].view(-1)[torch.arange(90).view(10, 9)[:, :-2].flatten()[:positions]] = True
    write_shard(tmp_path, 0, fields)
    write_manifest(tmp_path, manifest_of(samples=10, shard_size=10, slots=9))
    write_target_embeddings(tmp_path, torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
    assert main(["verify", str(tmp_path)]) == status
    out = capsys.readouterr().out
    if positions:
        assert re.search(rf"positions +ok: 77\.8% of the tokens supervised, {positions / 70:.1%}", out)
    else:
        assert "0 positions" in out
    assert ("few positions" in out) is (positions == 1)
    assert main(["stats", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "77.8% of the tokens" in out and f"{positions} ({positions / 70:.1%} of those with loss)" in out
    assert Path(shard_path(tmp_path, 0)).is_file()
