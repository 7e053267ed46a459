"""Every damage of an EAGLE-3 cache is named with its shard, its sample and what was expected; a good one passes."""

import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import eagle3_runs
from support.eagle3_damage import ALL_FORMS, FORMS, copy_of, flip_bit, put, stored
from support.small_eagle3 import fields_of, manifest_of

from niels_gpt.eagle3.cache import verify as verify_checksums
from niels_gpt.eagle3.cache import write_manifest, write_shard, write_target_embeddings
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.inspect.checks import CHECKS, RECOMPUTED
from niels_gpt.eagle3.inspect.published.row_checks import tolerance
from niels_gpt.eagle3.inspect.recompute import Target, recomputed
from niels_gpt.eagle3.inspect.show import slot_rows, summary
from niels_gpt.eagle3.inspect.stats import stats
from niels_gpt.eagle3.inspect.verify import verify
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError

GOOD = Verdict([])
VERIFIED = [name for name in CHECKS if name != RECOMPUTED]
BEHIND = "Run the same precompute command with --resume"
Copy = Callable[..., Path]


@pytest.fixture
def copied(eagle3_caches: dict[str, Path], tmp_path: Path) -> Copy:
    return lambda form="dense": copy_of(eagle3_caches[form], tmp_path)


def problems(cache: Path, name: str) -> list[str]:
    return verify(cache, names=[name])[name].problems


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_good_cache_passes_every_check(eagle3_caches: dict[str, Path], tmp_path: Path, form: str) -> None:
    seen: list[tuple[int, int, int | None]] = []
    (tmp_path / "link").symlink_to(eagle3_caches[form])
    verdicts = verify(tmp_path / "link", progress=lambda *given: seen.append(given))
    assert verdicts == dict.fromkeys(VERIFIED, GOOD)
    assert [*VERIFIED, RECOMPUTED] == list(CHECKS)
    (total,) = {total for _, _, total in seen}
    assert seen == sorted(seen)
    assert total is not None and 0.8 * total < seen[-1][1] <= total


def test_names_of_good_samples_are_not_read(eagle3_caches: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "open", lambda folder: pytest.fail("the samples were read"))
    names = ["checksums", "finite", "distribution"]
    assert verify(eagle3_caches["dense"], names=names) == dict.fromkeys(names, GOOD)
    with pytest.raises(ValueError, match="no check 'speed', expected some of complete, checksums"):
        verify(eagle3_caches["dense"], names=["speed"])


def test_the_tolerance_of_a_sum_holds_for_the_worst_of_many_distributions() -> None:
    chance = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 1.0, 10.0):
        probs = torch.softmax(sharpness * torch.randn(60, 32_000, generator=chance), -1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            off = (probs.to(dtype).sum(-1, dtype=torch.float32) - 1).abs().max()
            assert off < tolerance(dtype, 32_000) < 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", ["input_ids", "aux_hidden_states", "position_mask", "target_probs"])
def test_one_flipped_bit_is_told_with_its_shard_and_sample(copied: Copy, form: str, field: str) -> None:
    cache = copied(form)
    name = "target_probs_indices" if form == "topk" and field == "target_probs" else field
    stored(cache, 1, name)[2, 0, 0] ^= 1
    (found,) = problems(cache, "checksums")
    assert found.startswith(f"{cache}/shard-000001.safetensors: sample 2 of the shard: ")
    assert "It is sample 6 ('chat\\n6')" in found and f"Remove the file. {BEHIND}" in found
    assert len(verify_checksums(cache)) == 1, "the public function of the format reports it too"


CHANGED = {
    "manifest.json": ('"small"', '"smell"', "manifest.json: sha256 "),
    "meta.json": ('"positions": ', '"positions": 1', "meta_crc32"),
    "./meta.json": ('"content_sha256": "', '"content_sha256": "0', "content_sha256 is '0"),
    "sidecar/ids.txt": ("chat", "chit", "sidecar/ids.txt: sha256 "),
}


@pytest.mark.parametrize("name", [*CHANGED, "target_embeddings.safetensors"])
def test_a_change_in_any_other_file_is_told_too(copied: Copy, name: str) -> None:
    cache = copied()
    if name in CHANGED:
        old, new, said = CHANGED[name]
        (cache / name).write_text((cache / name).read_text().replace(old, new, 1))
    else:
        flip_bit(cache / name, -3)
        said = f"{cache}/{name}: sha256 "
    assert any(said in problem for problem in problems(cache, "checksums"))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_any_changed_byte_of_any_file_is_told_and_nothing_else_is_raised(copied: Copy, form: str) -> None:
    cache, chance = copied(form), random.Random(form)
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(30):
        path = chance.choice(files)
        content = path.read_bytes()
        at = chance.randrange(min(len(content), 2000))  # headers, counts and ids more often than hidden states
        rest = b"" if number % 5 == 0 else bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
        path.write_bytes(content[:at] + rest)
        is_told = False
        for look in (verify, stats, summary, lambda cache: slot_rows(cache, 5)):
            try:
                found = look(cache)
                is_told |= look is verify and any(verdict.problems for verdict in found.values())
            except (CacheError, FileNotFoundError):
                is_told |= look is verify
        assert is_told, (path, at)
        path.write_bytes(content)


def many(cache: Path, *numbers: tuple[str, int, int, int, float]) -> None:
    """Write several numbers: field, sample, slot, column and value."""
    for number in numbers:
        put(cache, *number)


def nan_embedding(cache: Path) -> None:
    weight = torch.zeros(eagle3_runs.VOCAB, eagle3_runs.HIDDEN)
    weight[7, 3] = torch.nan
    write_target_embeddings(cache, weight)


def changed_id(cache: Path, field: str) -> None:
    was = int(stored(cache, 0, field)[1, 4, :8].view(np.int64)[0])
    put(cache, field, 1, 4, 0, was + 1 if field == "input_ids" else 1 - was)


def no_top_k(cache: Path) -> None:
    put(cache, "target_probs_indices", 1, 0, 1, 12)
    twice = stored(cache, 0, "target_probs_indices")[1, 2]
    twice[4:8] = twice[:4]
    values = stored(cache, 0, "target_probs_values")[1, 5]
    values[:] = values.view(np.uint16)[::-1].copy().view(np.uint8)


def behind(cache: Path) -> None:
    end = len(Samples.open(cache / "sidecar").row(0)[0])
    assert end < eagle3_runs.LENGTH
    many(cache, ("position_mask", 0, end - 1, 0, True), ("aux_hidden_states", 0, end, 5, 0.5))


SAMPLE_1 = r"/shard-000000.safetensors: sample 1 \('chat\\n1'\): "
SAMPLE_5 = r"/shard-000001.safetensors: sample 5 \('chat\\n5'\): aux_hidden_states of block 3 is "
PROBS = f"{SAMPLE_1}probabilities sum to .* at slot 6, expected 1 within"
OTHERS = "/sidecar/samples.safetensors: sha256 .*not the rows that the target was run on"
TOP_K = ["id 12 at slot 0, expected 0 to 11", "id is there twice at slot 2", "target_probs_values rise at slot 5"]
BEHIND_THEM = [
    "position_mask is true at slot .* where loss_mask is 0",
    "aux_hidden_states is not zero at slot .* tokens",
]
WRONG_VALUES: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "an embedding that is not finite": (
        "finite",
        nan_embedding,
        ["safetensors: the embedding of token 7 is not finite"],
    ),
    "other samples beside the shards": (
        "ids_match",
        lambda cache: Samples.of_rows(eagle3_runs.rows(10, seed=3)).write(cache / "sidecar"),
        [OTHERS],
    ),
    "a sum above 1": ("distribution", lambda cache: put(cache, "target_probs", 1, 6, 2, 0.9), [PROBS]),
    "a negative probability": (
        "distribution",
        lambda cache: put(cache, "target_probs", 1, 6, 2, -0.5),
        [f"{SAMPLE_1}a probability is -0.5 at slot 6", "probabilities sum to "],
    ),
    "a top k that is none": ("distribution", no_top_k, TOP_K),
    "a position without loss and numbers behind the tokens": ("distribution", behind, BEHIND_THEM),
}
for value in ("nan", "inf", "-inf"):
    hidden, number = ("aux_hidden_states", 5), float(value)
    at = ((*hidden, 1, eagle3_runs.HIDDEN + 2, number), (*hidden, 3, 0, number), ("target_probs", 8, 0, 3, number))
    said = [
        f"{SAMPLE_5}{value} at slot 1, column 18.*2 slots",
        f"shard-000002.*sample 8.*target_probs is {value} at slot 0",
    ]
    WRONG_VALUES[f"a number that is {value}"] = ("finite", lambda cache, at=at: many(cache, *at), said)
for field in ("input_ids", "attention_mask", "loss_mask"):
    expected = f"{SAMPLE_1}{field} is .* at slot 4, expected .* by sidecar.*wrong in 1 slot"
    WRONG_VALUES[f"{field} that is not the source's"] = ("ids_match", partial(changed_id, field=field), [expected])


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_told_with_sample_slot_and_what_was_expected(copied: Copy, name: str) -> None:
    check, damage, expected = WRONG_VALUES[name]
    cache = copied("topk" if "top k" in name else "dense")
    damage(cache)
    found = problems(cache, check)
    assert len(found) == len(expected) or "other samples" in name  # every id differs then
    for problem, pattern in zip(found, expected, strict=False):
        assert problem.startswith(f"{cache}/") and re.search(pattern, problem)


def test_many_problems_end_with_and_more(tmp_path: Path) -> None:
    samples = Samples.of_rows(eagle3_runs.rows(22))
    eagle3_runs.run(tmp_path / "c", samples=samples, given=eagle3_runs.plan(samples))
    for shard in range(6):
        stored(tmp_path / "c", shard, "loss_mask")[:, 0, 0] ^= 2
    found = problems(tmp_path / "c", "ids_match")
    assert len(found) == 21 and found[-1] == "... and more"


def test_what_is_missing_or_does_not_belong_there_is_told(copied: Copy) -> None:
    cache = copied()
    names = (".shard-000001.safetensors.deadbeef.tmp", "sidecar/.ids.txt.deadbeef.tmp", "sidecar/notes")
    for name in names:
        (cache / name).write_bytes(b"x")
    verdict = verify(cache)["complete"]
    assert verdict.problems == [] and verdict.note is None
    assert [remark.split(":")[0] for remark in verdict.remarks] == [f"{cache}/{name}" for name in names]
    Path(shard_path(cache, 1)).rename(shard_path(cache, 7))
    (cache / "sidecar" / "shard-000003.json").write_bytes(b"{}")
    missing, strange, receipt = problems(cache, "complete")
    expected = f"{shard_path(cache, 1)}: no such file, expected 3 shards of 10 samples by manifest.json. "
    assert missing == f"{expected}{BEHIND}, or materialize eagle3/targets again"
    assert strange.startswith(f"{shard_path(cache, 7)}: a shard too many, expected 3 shards of 10 samples")
    assert receipt.startswith(f"{cache}/sidecar/shard-000003.json: a receipt too many")
    (cache / "meta.json").unlink()
    assert "production has not finished" in problems(cache, "complete")[0]


def test_a_short_shard_in_the_middle_is_told(copied: Copy) -> None:
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
def test_a_manifest_that_does_not_fit_the_files_is_told(copied: Copy, changed: dict[str, Any], said: str) -> None:
    cache = copied()
    write_manifest(cache, {**json.loads((cache / "manifest.json").read_text()), **changed})
    assert any(said in problem for problem in verify(cache)["complete"].problems), "whatever the other checks find"


@pytest.mark.parametrize("text", [None, '{"format_version": 3}', '{"format_version": 1, "num_samples": "ten"}', "[]"])
def test_without_a_manifest_that_can_be_read_there_is_no_cache(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises((CacheError, FileNotFoundError), match=r"manifest|format_version"):
        verify(tmp_path)


@pytest.mark.parametrize("form", ["dense", "native"])
@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_shard_that_is_cut_is_a_problem_of_every_check_that_reads_it(copied: Copy, form: str, cut: int) -> None:
    cache = copied(form)
    path = Path(shard_path(cache, 0))
    path.write_bytes(path.read_bytes()[:cut])
    for name, verdict in verify(cache).items():
        assert len(verdict.problems) == 1 and str(path) in verdict.problems[0], name


PARTS = [
    *("meta.json", "target_embeddings.safetensors", "shard-000001.safetensors", "shard-000002.safetensors"),
    *("sidecar/plan.json", "sidecar/batches.jsonl", "sidecar/samples.safetensors", "sidecar/ids.txt"),
    *("sidecar/shard-000000.json", "sidecar/shard-000002.json", "sidecar/embeddings.json"),
]


NATIVE_PARTS = ["target_weights.safetensors", "sidecar/weights.json", "shard-000001.safetensors"]


@pytest.mark.parametrize("name", [*PARTS, *(f"native/{name}" for name in NATIVE_PARTS)])
def test_a_missing_file_is_named_with_what_to_run(copied: Copy, name: str) -> None:
    cache = copied("native" if name.startswith("native/") else "dense")
    name = name.removeprefix("native/")
    (cache / name).unlink()
    verdicts = verify(cache)
    first = verdicts["complete"].problems[0]
    assert first.startswith(f"{cache / name}: no such file")
    found = [problem for verdict in verdicts.values() for problem in verdict.problems]
    assert all("--resume" in problem for problem in found)
    assert not any("Errno" in problem or "no such file. Remove" in problem for problem in found)
    assert name != "sidecar/plan.json" or f"{BEHIND}, which writes it again" in first


@pytest.mark.parametrize(
    "names",
    [
        ["sidecar/plan.json", "meta.json"],
        ["sidecar"],
        [name for name in PARTS if name.endswith((".txt", ".jsonl", "samples.safetensors", "n.json", "a.json"))],
        [name for name in PARTS if name.startswith("sidecar/") and "shard-" not in name] + ["meta.json"],
    ],
)
def test_a_cache_of_which_much_is_gone_is_no_other_tools(copied: Copy, names: list[str]) -> None:
    cache = copied()
    for path in [cache / name for name in names]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    verdicts = verify(cache)
    gone = [f"{cache / name}: no such file" for name in PARTS if not (cache / name).exists()]
    assert gone and all(any(said.startswith(begin) for said in verdicts["complete"].problems) for begin in gone)
    assert not any(verdict.note for verdict in verdicts.values())
    assert verdicts["ids_match"].problems
    assert "plan.json is missing" in dict(row[:2] for row in summary(cache))["sidecar"]
    for path in [cache / "meta.json", *(cache / "sidecar").glob("*")]:
        path.unlink(missing_ok=True)
    (cache / "sidecar").mkdir(exist_ok=True)
    (cache / "sidecar" / "lock").touch()  # a sidecar of nothing but the lock lacks its receipts
    verdicts, receipts = verify(cache), [f"{cache}/sidecar/shard-{shard:06d}.json" for shard in range(3)]
    assert [problem.split(":")[0] for problem in verdicts["complete"].problems] == receipts
    assert len(verdicts["checksums"].problems) == 3


@pytest.mark.parametrize("name", [*PARTS, "manifest.json"])
def test_a_folder_or_a_link_to_nowhere_in_the_place_of_a_file_is_told(copied: Copy, name: str) -> None:
    """Pipes, devices and links that lead somewhere are in the table of attacks."""
    cache = copied()
    path = cache / name
    path.unlink()
    for make, remove in ((path.mkdir, path.rmdir), (lambda: path.symlink_to("nowhere"), path.unlink)):
        make()
        try:
            assert any(str(path) in problem for each in verify(cache).values() for problem in each.problems)
        except (CacheError, FileNotFoundError) as error:
            assert name == "manifest.json" and str(path) in str(error)
        remove()


def test_a_damaged_list_of_names_is_read_once_and_told(copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, opened, read = copied(), [], Samples.open
    (cache / "sidecar" / "ids.txt").write_bytes((cache / "sidecar" / "ids.txt").read_bytes()[:-3])
    for sample in range(10):
        put(cache, "aux_hidden_states", sample, 0, 0, torch.nan)
    monkeypatch.setattr(Samples, "open", lambda folder, **how: (opened.append(folder), read(folder, **how))[1])
    verdicts = verify(cache)
    assert len(opened) == 1
    (found,) = verdicts["ids_match"].problems
    assert "not the samples of a cache" in found
    assert len(verdicts["finite"].problems) == 10


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
    unchecked = Verdict([], "cannot be checked: no plan, as precompute did not make this cache")
    assert verify(tmp_path) == {**dict.fromkeys(list(CHECKS)[:-1], Verdict([])), "ids_match": unchecked}
    assert "precompute did not make this cache" in dict(row[:2] for row in summary(tmp_path))["sidecar"]
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
