"""Every damage of an EAGLE-3 cache is named with its shard, its sample and what was expected; a good one passes.

Run: pytest tests/test_eagle3_verify.py
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3_runs
import numpy as np
import pytest
import torch
from small_eagle3 import fields_of, manifest_of

from niels_gpt.eagle3.cache import convert, write_manifest, write_shard, write_target_embeddings
from niels_gpt.eagle3.cache import verify as verify_checksums
from niels_gpt.eagle3.checks import DESCRIPTIONS, RECOMPUTED
from niels_gpt.eagle3.layout import read_header, row_bytes_of, shard_path
from niels_gpt.eagle3.plan import Plan, open_plan
from niels_gpt.eagle3.recompute import Target, recomputed
from niels_gpt.eagle3.row_checks import tolerance
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.show import slot_rows, summary
from niels_gpt.eagle3.stats import stats
from niels_gpt.eagle3.verify import CHECKS, Verdict, verify
from niels_gpt.fileio import CacheError

FORMS = {"dense": {}, "topk": eagle3_runs.TOPK}
GOOD = Verdict([])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished cache of ten samples in three shards of each form."""
    samples, folder = Samples.of_rows(eagle3_runs.rows()), tmp_path_factory.mktemp("made")
    for form, changed in FORMS.items():
        eagle3_runs.run(folder / form, samples=samples, given=eagle3_runs.plan(samples, **changed))
    return {form: folder / form for form in FORMS}


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Gives a copy of a cache to damage."""

    def copy(form: str = "dense") -> Path:
        return Path(shutil.copytree(made[form], tmp_path / form))

    return copy


def stored(cache: Path, shard: int, field: str) -> np.ndarray[Any, Any]:
    """Return a field of a shard as it stands in the file, to be written to: [n, S, bytes]."""
    path = shard_path(cache, shard)
    fields, rows, header = read_header(path)
    begin = len(header)
    for name, form in fields.items():
        size = rows * row_bytes_of(form)
        if name == field:
            return np.memmap(path, np.uint8, "r+", begin, (rows, form[1][0], size // rows // form[1][0]))
        begin += size
    raise KeyError(field)


def put(cache: Path, field: str, sample: int, slot: int, column: int, value: float) -> None:
    """Write one number into a cache."""
    form = read_header(shard_path(cache, sample // 4))[0][field]
    raw = torch.tensor([value], dtype=form[0]).view(torch.uint8).numpy()
    place = slice(column * len(raw), (column + 1) * len(raw))
    stored(cache, sample // 4, field)[sample % 4, slot, place] = raw


def problems(cache: Path, name: str) -> list[str]:
    """Return what one check finds."""
    return verify(cache, names=[name])[name].problems


def described(cache: Path) -> dict[str, str]:
    """Return what `inspect` prints, by name."""
    return {row[0]: row[1] for row in summary(cache)}


def length(cache: Path, sample: int) -> int:
    return len(Samples.open(cache / "sidecar").row(sample)[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_good_cache_passes_every_check(made: dict[str, Path], form: str) -> None:
    seen: list[tuple[int, int]] = []
    verdicts = verify(made[form], progress=lambda done, total: seen.append((done, total)))
    assert verdicts == dict.fromkeys(CHECKS, GOOD)
    assert [*CHECKS, RECOMPUTED] == list(DESCRIPTIONS)
    (total,) = {total for _, total in seen}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert 0.9 * total < seen[-1][0] <= total


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_rounding_does_to_a_distribution_is_no_damage(tmp_path: Path, dtype: str) -> None:
    samples = Samples.of_rows(eagle3_runs.rows(3))
    eagle3_runs.run(tmp_path / "c", samples=samples, given=eagle3_runs.plan(samples, dtype=dtype))
    assert verify(tmp_path / "c", names=["distribution"]) == {"distribution": GOOD}


def test_the_tolerance_of_a_sum_holds_for_the_worst_of_many_distributions() -> None:
    chance = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 1.0, 10.0):
        probs = torch.softmax(sharpness * torch.randn(200, 32_000, generator=chance), -1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            off = (probs.to(dtype).sum(-1, dtype=torch.float32) - 1).abs().max()
            assert off < tolerance(dtype, 32_000) < 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", ["input_ids", "aux_hidden_states", "position_mask", "target_probs"])
def test_one_flipped_bit_is_told_with_its_shard_and_sample(copied: Callable[..., Path], form: str, field: str) -> None:
    cache = copied(form)
    name = "target_probs_indices" if form == "topk" and field == "target_probs" else field
    stored(cache, 1, name)[2, 0, 0] ^= 1
    (found,) = problems(cache, "checksums")
    assert found.startswith(f"{cache}/shard-000001.safetensors: sample 2 of the shard: ")
    assert (
        "It is sample 6 ('chat\\n6')" in found
        and "Remove the file, then run the same precompute command with --resume" in found
    )
    assert len(verify_checksums(cache)) == 1, "the public function of the format says so too"


@pytest.mark.parametrize("name", ["manifest.json", "target_embeddings.safetensors", "sidecar/ids.txt"])
def test_a_flipped_bit_in_any_other_file_is_told_too(copied: Callable[..., Path], name: str) -> None:
    cache = copied()
    content = bytearray((cache / name).read_bytes())
    content[-3] ^= 1
    (cache / name).write_bytes(content)
    if name == "manifest.json":  # it is no JSON any more, or another number
        content[-3] ^= 1
        (cache / name).write_bytes(content.replace(b'"small"', b'"smell"'))
    found = problems(cache, "checksums")
    assert any(problem.startswith(f"{cache}/{name}: sha256 ") for problem in found)


def test_a_changed_meta_is_told_by_its_own_checksum(copied: Callable[..., Path]) -> None:
    cache = copied()
    meta = (cache / "meta.json").read_text()
    (cache / "meta.json").write_text(meta.replace('"positions": ', '"positions": 1'))
    assert any("meta_crc32" in problem for problem in problems(cache, "checksums"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_told_with_sample_layer_and_slot(
    copied: Callable[..., Path], value: float
) -> None:
    cache = copied()
    put(cache, "aux_hidden_states", 5, 1, eagle3_runs.HIDDEN + 2, value)
    put(cache, "aux_hidden_states", 5, 3, 0, value)
    put(cache, "target_probs", 8, 0, 3, value)
    layer, probs = problems(cache, "finite")
    assert layer.startswith(
        f"{cache}/shard-000001.safetensors: sample 5 ('chat\\n5'): aux_hidden_states of block 3 is "
    )
    assert f"{value} at slot 1, column 18" in layer and "2 slots" in layer
    assert "shard-000002" in probs and "sample 8" in probs and f"target_probs is {value} at slot 0" in probs


def test_an_embedding_that_is_not_finite_is_told_with_its_token(copied: Callable[..., Path]) -> None:
    cache = copied()
    weight = torch.zeros(eagle3_runs.VOCAB, eagle3_runs.HIDDEN)
    weight[7, 3] = torch.nan
    write_target_embeddings(cache, weight)
    (found,) = problems(cache, "finite")
    assert "target_embeddings.safetensors: the embedding of token 7 is not finite" in found


@pytest.mark.parametrize("field", ["input_ids", "attention_mask", "loss_mask"])
def test_an_id_or_a_mask_that_is_not_the_sources_is_told_with_its_slot(copied: Callable[..., Path], field: str) -> None:
    cache = copied()
    was = int(stored(cache, 0, field)[1, 4, :8].view(np.int64)[0])
    put(cache, field, 1, 4, 0, 1 - was if field != "input_ids" else was + 1)
    (found,) = problems(cache, "ids_match")
    assert f"sample 1 ('chat\\n1'): {field} is " in found and f"at slot 4, expected {was} " in found
    assert "it differs in 1 slot" in found


def test_other_samples_beside_the_shards_are_told(copied: Callable[..., Path]) -> None:
    cache = copied()
    Samples.of_rows(eagle3_runs.rows(10, seed=3)).write(cache / "sidecar")
    found = problems(cache, "ids_match")
    assert "these are not the rows that the target was run on" in found[0]


@pytest.mark.parametrize("value", [0.9, -0.5])
def test_probabilities_that_are_no_distribution_are_told(copied: Callable[..., Path], value: float) -> None:
    cache = copied()
    put(cache, "target_probs", 1, 6, 2, value)
    found = problems(cache, "distribution")
    assert all("sample 1 ('chat\\n1'): " in problem for problem in found)
    assert any("probabilities sum to " in problem and "at slot 6, expected 1 within" in problem for problem in found)
    assert any("a probability is -0.5 at slot 6" in problem for problem in found) == (value < 0)


def test_a_top_k_that_is_none_is_told(copied: Callable[..., Path]) -> None:
    cache, name = copied("topk"), "target_probs_indices"
    twice = stored(cache, 0, name)[1, 2]
    put(cache, name, 1, 0, 1, 12)
    twice[4:8] = twice[:4]
    values = stored(cache, 0, "target_probs_values")[1, 5]
    values[:] = values.view(np.uint16)[::-1].copy().view(np.uint8)
    outside, double, rising = problems(cache, "distribution")
    assert "draft id 12 at slot 0, expected 0 to 11" in outside
    assert "a draft id is there twice at slot 2" in double
    assert "target_probs_values rise at slot 5" in rising


def test_a_position_without_loss_and_numbers_behind_the_tokens_are_told(copied: Callable[..., Path]) -> None:
    cache = copied()
    sample = next(number for number in range(10) if length(cache, number) < eagle3_runs.LENGTH)
    end = length(cache, sample)
    put(cache, "position_mask", sample, end - 1, 0, True)
    put(cache, "aux_hidden_states", sample, end, 5, 0.5)
    position, padding = problems(cache, "distribution")
    assert f"position_mask is true at slot {end - 1} where loss_mask is 0" in position
    assert f"aux_hidden_states is not zero at slot {end}, expected zeros behind its {end} tokens" in padding


def test_what_is_missing_or_too_much_is_told(copied: Callable[..., Path]) -> None:
    cache = copied()
    assert problems(cache, "complete") == []
    Path(shard_path(cache, 1)).rename(shard_path(cache, 7))
    missing, strange = problems(cache, "complete")
    assert missing.startswith(
        f"{shard_path(cache, 1)}: no such file, expected 3 shards of 10 samples by manifest.json. "
    )
    assert missing.endswith("Run the same precompute command with --resume, or materialize eagle3/targets again")
    assert strange.startswith(f"{shard_path(cache, 7)}: a shard too many, expected 3 shards")
    (cache / "meta.json").unlink()
    assert "production has not finished" in problems(cache, "complete")[0]


def test_a_short_shard_in_the_middle_is_told(copied: Callable[..., Path]) -> None:
    cache = copied()
    shutil.copyfile(shard_path(cache, 2), shard_path(cache, 1))
    (found,) = problems(cache, "complete")
    assert "shard-000001.safetensors: 2 samples, expected 4 of the manifest's 10" in found
    assert all(problems(cache, name) for name in ("checksums", "finite", "ids_match", "distribution"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "fp16"}, "aux_hidden_states is bfloat16 [24, 48], expected float16 [24, 48]"),
        ({"seq_length": 25}, "input_ids is int64 [24], expected int64 [25]"),
        ({"selected_token_ids": [0] * 12}, "12 ids, 1 different ones"),
        ({"selected_token_ids": [*range(11), 40]}, "1 beyond the target's 40"),
        ({"selected_token_ids": None}, "selected_token_ids is None, expected a list of 12"),
        ({"aux_hidden_dim": 51}, "expected 40 rows of weight float32 [17]"),
        ({"shard_size": 0}, "shard_size is 0, expected an integer of 1 or more"),
    ],
)
def test_a_manifest_that_does_not_fit_the_files_is_told(
    copied: Callable[..., Path], changed: dict[str, Any], said: str
) -> None:
    cache = copied()
    manifest = json.loads((cache / "manifest.json").read_text())
    write_manifest(cache, {**manifest, **changed})
    assert any(said in problem for problem in problems(cache, "complete"))
    assert verify(cache)["complete"].problems, "whatever the other checks make of it"


def test_without_a_manifest_there_is_no_cache_and_an_unknown_check_is_refused(copied: Callable[..., Path]) -> None:
    cache = copied()
    with pytest.raises(ValueError, match="no check 'speed', expected some of complete, checksums"):
        verify(cache, names=["speed"])
    (cache / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="manifest not found"):
        verify(cache)


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_shard_that_is_cut_is_a_problem_of_every_check_that_reads_it(copied: Callable[..., Path], cut: int) -> None:
    cache = copied()
    path = Path(shard_path(cache, 0))
    path.write_bytes(path.read_bytes()[:cut])
    verdicts = verify(cache)
    for name, verdict in verdicts.items():
        assert len(verdict.problems) == 1 and str(path) in verdict.problems[0], name


def test_many_problems_end_with_and_more(copied: Callable[..., Path], tmp_path: Path) -> None:
    samples = Samples.of_rows(eagle3_runs.rows(30))
    eagle3_runs.run(tmp_path / "c", samples=samples, given=eagle3_runs.plan(samples))
    for shard in range(8):
        stored(tmp_path / "c", shard, "loss_mask")[:, 0, 0] ^= 2
    found = problems(tmp_path / "c", "ids_match")
    assert len(found) == 21 and found[-1] == "... and more"


@pytest.mark.parametrize("form", FORMS)
def test_any_changed_byte_of_any_file_is_told_and_nothing_else_is_raised(
    copied: Callable[..., Path], form: str
) -> None:
    cache, chance = copied(form), random.Random(0)
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size)
    for round in range(60):
        path = chance.choice(files)
        content = path.read_bytes()
        at = chance.randrange(min(len(content), 2000))  # headers, counts and ids more often than hidden states
        rest = b"" if round % 5 == 0 else bytes([content[at] ^ 1 << round % 8]) + content[at + 1 :]
        path.write_bytes(content[:at] + rest)
        told = False
        for look in (verify, stats, summary, lambda cache: slot_rows(cache, 5)):
            try:
                found = look(cache)
                told |= look is verify and any(verdict.problems for verdict in found.values())
            except (CacheError, FileNotFoundError):
                told |= look is verify
        assert told, (path, at)
        path.write_bytes(content)


# --- what is gone, and what does not belong there ---------------------------------------------------------------------

PARTS = [
    *("meta.json", "target_embeddings.safetensors", "shard-000001.safetensors", "shard-000002.safetensors"),
    *("sidecar/plan.json", "sidecar/batches.jsonl", "sidecar/samples.safetensors", "sidecar/ids.txt"),
    *("sidecar/shard-000000.json", "sidecar/shard-000002.json", "sidecar/embeddings.json"),
]


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file_is_named_with_what_to_run(copied: Callable[..., Path], name: str) -> None:
    cache = copied()
    (cache / name).unlink()
    verdicts = verify(cache)
    (said,) = verdicts["complete"].problems[:1]
    assert said.startswith(f"{cache / name}: no such file")
    every = [problem for verdict in verdicts.values() for problem in verdict.problems]
    assert not any("Errno" in problem or "no such file. Remove" in problem for problem in every)
    assert all("--resume" in problem for problem in every)
    if name.endswith("plan.json"):
        assert "Run the same precompute command with --resume, which writes it again" in said


@pytest.mark.parametrize(
    "names",
    [
        ["sidecar/plan.json", "meta.json"],
        ["sidecar"],
        [name for name in PARTS if name.endswith((".txt", ".jsonl", "samples.safetensors", "n.json", "a.json"))],
        [name for name in PARTS if name.startswith("sidecar/") and "shard-" not in name] + ["meta.json"],
    ],
)
def test_a_cache_of_which_much_is_gone_is_no_other_tools(copied: Callable[..., Path], names: list[str]) -> None:
    cache = copied()
    for path in [cache / name for name in names]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    verdicts = verify(cache)
    said = verdicts["complete"].problems
    gone = [f"{cache / name}: no such file" for name in PARTS if not (cache / name).exists()]
    assert gone and all(any(problem.startswith(begin) for problem in said) for begin in gone)
    assert not any(verdict.note for verdict in verdicts.values())
    assert verdicts["ids_match"].problems
    assert "plan.json is missing" in described(cache)["sidecar"]


def test_a_sidecar_of_nothing_but_the_lock_lacks_its_receipts(copied: Callable[..., Path]) -> None:
    cache = copied()
    for path in [cache / "meta.json", *(cache / "sidecar").iterdir()]:
        path.unlink()
    (cache / "sidecar" / "lock").touch()
    verdicts = verify(cache)
    assert [problem.split(":")[0] for problem in verdicts["complete"].problems] == [
        f"{cache}/sidecar/shard-{shard:06d}.json" for shard in range(3)
    ]
    assert len(verdicts["checksums"].problems) == 3


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
@pytest.mark.parametrize("name", [*PARTS, "manifest.json"])
def test_what_is_no_file_in_the_place_of_one_is_told_and_not_waited_for(
    copied: Callable[..., Path], name: str, kind: str
) -> None:
    cache = copied()
    path = cache / name
    path.unlink()
    if kind == "link":
        path.symlink_to(cache / "nowhere")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    try:
        assert any(str(path) in said for verdict in verify(cache).values() for said in verdict.problems)
    except (CacheError, FileNotFoundError) as error:
        assert name == "manifest.json" and str(path) in str(error)


def test_a_damaged_list_of_names_is_read_once_and_told(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, opened = copied(), []
    (cache / "sidecar" / "ids.txt").write_bytes((cache / "sidecar" / "ids.txt").read_bytes()[:-3])
    for sample in range(10):
        put(cache, "aux_hidden_states", sample, 0, 0, torch.nan)
    read = Samples.open

    def counted(folder: Any, **how: Any) -> Samples:
        opened.append(folder)
        return read(folder, **how)

    monkeypatch.setattr(Samples, "open", counted)
    verdicts = verify(cache)
    assert len(opened) == 1
    assert (
        "not the samples of a cache" in verdicts["ids_match"].problems[0] and len(verdicts["ids_match"].problems) == 1
    )
    assert len(verdicts["finite"].problems) == 10


def test_the_names_of_samples_are_not_read_where_nothing_is_wrong(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = copied()
    monkeypatch.setattr(Samples, "open", lambda folder: pytest.fail("the samples were read"))
    assert verify(cache, names=["finite", "distribution", "checksums"]) == dict.fromkeys(
        ("checksums", "finite", "distribution"), GOOD
    )


def test_files_that_do_not_belong_there_are_told(copied: Callable[..., Path]) -> None:
    cache = copied()
    for name in (".shard-000001.safetensors.deadbeef.tmp", "sidecar/.ids.txt.deadbeef.tmp", "sidecar/notes"):
        (cache / name).write_bytes(b"x")
    verdict = verify(cache)["complete"]
    assert verdict.problems == [] and verdict.note is None
    assert [remark.split(":")[0] for remark in verdict.remarks] == [
        f"{cache}/.shard-000001.safetensors.deadbeef.tmp",
        f"{cache}/sidecar/.ids.txt.deadbeef.tmp",
        f"{cache}/sidecar/notes",
    ]
    (cache / "sidecar" / "shard-000003.json").write_bytes(b"{}")
    shutil.copy(shard_path(cache, 2), shard_path(cache, 3))
    shard, receipt = verify(cache)["complete"].problems
    assert shard.startswith(f"{shard_path(cache, 3)}: a shard too many, expected 3 shards of 10 samples")
    assert receipt.startswith(f"{cache}/sidecar/shard-000003.json: a receipt too many")


# --- caches of other tools --------------------------------------------------------------------------------------------


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
    unchecked = {name for name, verdict in verdicts.items() if verdict.note}
    assert unchecked == {"checksums", "ids_match"}
    assert "no sidecar" in str(verdicts["checksums"].note)
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
    assert verify(tmp_path) == {**dict.fromkeys(CHECKS, GOOD), "ids_match": unchecked}
    assert "write_shard wrote this cache" in described(tmp_path)["sidecar"]
    receipt = tmp_path / "sidecar" / "shard-000000.json"
    kept = receipt.read_bytes()
    receipt.unlink()
    for name in ("complete", "checksums"):
        (found,) = problems(tmp_path, name)
        assert found.startswith(
            f"{receipt}: no such file, expected the checksums of shard-000000.safetensors. Write it"
        )
    receipt.write_bytes(kept)
    raw = bytearray(Path(shard_path(tmp_path, 0)).read_bytes())
    raw[-1] ^= 1
    Path(shard_path(tmp_path, 0)).write_bytes(raw)
    (found,) = problems(tmp_path, "checksums")
    assert "It is sample 1." in found


# --- recomputed -------------------------------------------------------------------------------------------------------


def target(plan: Plan, *, seed: int = 0, **run: Any) -> Target:
    """Return the target of a cache of eagle3_runs, or one of other weights that says that it is the same."""
    return Target(plan.target, lambda device: eagle3_runs.load(device, seed=seed), {**plan.run, **run})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [1, 4, 100])
def test_samples_that_are_run_once_more_are_equal_bit_for_bit(made: dict[str, Path], form: str, k: int) -> None:
    threads = torch.get_num_threads()
    assert recomputed(made[form], target(open_plan(made[form])), k=k) == GOOD
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("form", FORMS)
def test_another_target_gives_other_numbers_which_are_told_by_field(made: dict[str, Path], form: str) -> None:
    found = recomputed(made[form], target(open_plan(made[form]), seed=1), k=4).problems
    assert any("aux_hidden_states of block " in problem for problem in found)
    assert any("target_probs" in problem and "run once more" in problem for problem in found)
    assert all("expected equal bits" in problem for problem in found)
    embeddings, *elsewhere = recomputed(made[form], target(open_plan(made[form]), seed=1, torch="3.0"), k=4).problems
    assert embeddings == found[0] and "the embedding of token 0 is not the target's" in embeddings
    assert elsewhere and all("where the environment has another torch" in problem for problem in elsewhere)


@pytest.mark.parametrize("form", FORMS)
def test_in_another_environment_rounding_is_let_pass(made: dict[str, Path], form: str) -> None:
    def load(device: torch.device) -> Any:
        return jittered(eagle3_runs.load(device))

    plan = open_plan(made[form])
    here = Target(plan.target, load, plan.run)
    assert recomputed(made[form], here, k=10).problems
    there = Target(plan.target, load, {**plan.run, "processor": "another"})
    assert recomputed(made[form], there, k=10) == GOOD


def jittered(model: Any) -> Any:
    """Move each weight but the embeddings a little, as another processor's order of sums moves what comes of them."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "model.embed_tokens.weight":
                continue  # nothing is computed to write them down
            weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=chance))
    return model


def test_other_embeddings_than_the_targets_are_told_with_the_token(copied: Callable[..., Path]) -> None:
    cache = copied()
    path = cache / "target_embeddings.safetensors"
    content = bytearray(path.read_bytes())
    content[-4 * eagle3_runs.HIDDEN * 3] ^= 1  # the last bit of a number of the third token from the end
    path.write_bytes(content)
    for there in (target(open_plan(cache)), target(open_plan(cache), torch="3.0")):
        (found,) = recomputed(cache, there, k=1).problems
        assert found.startswith(f"{path}: the embedding of token {eagle3_runs.VOCAB - 3} is not the target's")
        assert "so of 1 of 40 tokens" in found
    path.unlink()
    assert recomputed(cache, target(open_plan(cache)), k=1).problems[0].startswith(f"{path}: no such file")
    write_target_embeddings(cache, torch.zeros(3, 2))
    assert "weight is [3, 2], the target's [40, 16]" in recomputed(cache, target(open_plan(cache)), k=1).problems[0]


@pytest.mark.parametrize("name", ["plan.json", "batches.jsonl", "samples.safetensors"])
def test_what_is_missing_for_running_the_target_is_told(
    made: dict[str, Path], copied: Callable[..., Path], name: str
) -> None:
    cache = copied()
    (cache / "sidecar" / name).unlink()
    (found,) = recomputed(cache, target(open_plan(made["dense"])), k=1).problems
    assert found.startswith(f"{cache}/sidecar/{name}: no such file") and "with --resume" in found


def test_a_target_that_is_not_the_plans_is_told_and_not_loaded(made: dict[str, Path]) -> None:
    plan = open_plan(made["dense"])

    def load(device: torch.device) -> Any:
        raise AssertionError("loaded")

    other = Target({**plan.target, "config_sha256": "d" * 64, "name": "larger"}, load, plan.run)
    (found,) = recomputed(made["dense"], other).problems
    assert "made from another target: config_sha256 of small in the plan differ from those of larger" in found


def test_a_wrong_sample_is_found_if_it_is_drawn_and_the_seed_decides_the_draw(copied: Callable[..., Path]) -> None:
    cache = copied()
    put(cache, "aux_hidden_states", 4, 0, 0, 2.5)
    plan = open_plan(cache)
    (found,) = recomputed(cache, target(plan), k=10).problems
    assert "sample 4 ('chat\\n4'): aux_hidden_states of block 1 is 2.5 at slot 0, column 0, run once more " in found
    by_seed = [bool(recomputed(cache, target(plan), k=1, seed=seed).problems) for seed in range(20)]
    assert by_seed == [bool(recomputed(cache, target(plan), k=1, seed=seed).problems) for seed in range(20)]
    assert 0 < sum(by_seed) < 20
    with pytest.raises(ValueError, match="k=0"):
        recomputed(cache, target(plan), k=0)


def test_a_target_that_gives_nan_is_told_with_the_sample(made: dict[str, Path]) -> None:
    def load(device: torch.device) -> Any:
        model = copy.deepcopy(eagle3_runs.load(device))
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight.fill_(torch.nan)
        return model

    plan = open_plan(made["dense"])
    found = recomputed(made["dense"], Target(plan.target, load, plan.run), k=1).problems
    assert "run once more" in found[0] and "block 3" in found[0]


# --- convert ----------------------------------------------------------------------------------------------------------


def test_a_converted_cache_passes_every_check(copied: Callable[..., Path]) -> None:
    cache = copied()
    before = open_plan(cache)
    for version in (2, 1):
        assert convert(cache, version)
        assert json.loads((cache / "manifest.json").read_text())["format_version"] == version
        assert verify(cache) == dict.fromkeys(CHECKS, GOOD)
        assert recomputed(cache, target(before), k=2) == GOOD


def test_a_link_to_a_cache_is_as_good_as_the_cache(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made["dense"])
    assert verify(tmp_path / "link", names=["complete", "finite"]) == {"complete": GOOD, "finite": GOOD}


@pytest.mark.parametrize("text", ['{"format_version": 3}', '{"format_version": 1, "num_samples": "ten"}', "[]"])
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CacheError, match=r"manifest|format_version"):
        verify(tmp_path)
