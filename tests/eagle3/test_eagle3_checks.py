"""Which check of an EAGLE-3 cache tells what, with what to run; caches of other tools; what is read once."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import eagle3_runs
from support.eagle3_damage import ALL_FORMS, NATIVE_FORMS, copy_of, flip_bit, put, stored
from support.eagle3_looks import check_names, run_again, summary
from support.eagle3_looks import verdicts as verify
from support.errors import refused
from support.small_eagle3 import fields_of, manifest_of

from niels_gpt.eagle3.cache import (
    CachedEagle3Dataset,
    read_manifest,
    shard_path,
    write_manifest,
    write_shard,
    write_target_embeddings,
)
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.verify import tolerance
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.eagle3.vocab import load_token_mapping
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError

GOOD = Verdict([])
VERIFIED, RECOMPUTED = check_names()[:-1], check_names()[-1]
BEHIND = "Run the same precompute command with --resume"
Copy = Callable[..., Path]


@pytest.fixture
def copied(eagle3_caches, tmp_path):
    return lambda form="dense": copy_of(eagle3_caches[form], tmp_path)


def problems(cache, name):
    return verify(cache, names=[name])[name].problems


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_good_cache_passes_every_check(eagle3_caches, tmp_path, form):
    seen = []
    (tmp_path / "link").symlink_to(eagle3_caches[form])
    verdicts = verify(tmp_path / "link", progress=lambda *given: seen.append(given))
    assert verdicts == dict.fromkeys(VERIFIED, GOOD)
    assert RECOMPUTED == "recomputed"
    (total,) = {total for _, _, total in seen}
    assert seen == sorted(seen)
    assert total is not None and 0.8 * total < seen[-1][1] <= total


def test_names_of_good_samples_are_not_read(eagle3_caches, monkeypatch):
    monkeypatch.setattr(Samples, "open", lambda folder: pytest.fail("the samples were read"))
    names = ["checksums", "finite", "distribution"]
    assert verify(eagle3_caches["dense"], names=names) == dict.fromkeys(names, GOOD)
    with refused("E102", "'speed'", "complete, checksums", kind=ValueError):
        verify(eagle3_caches["dense"], names=["speed"])


def test_the_tolerance_of_a_sum_holds_for_the_worst_of_many_distributions():
    chance = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 1.0, 10.0):
        probs = torch.softmax(sharpness * torch.randn(60, 32_000, generator=chance), -1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            off = (probs.to(dtype).sum(-1, dtype=torch.float32) - 1).abs().max()
            assert off < tolerance(dtype, 32_000) < 0.01


def test_many_problems_end_with_and_more(tmp_path):
    samples = eagle3_runs.rows(22)
    eagle3_runs.run(tmp_path / "c", samples=samples, given=eagle3_runs.plan(samples))
    for shard in range(6):
        stored(tmp_path / "c", shard, "loss_mask")[:, 0, 0] ^= 2
    found = problems(tmp_path / "c", "ids_match")
    assert len(found) == 21 and found[-1] == "... and more"


def test_what_is_missing_or_does_not_belong_there_is_told(copied):
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


def test_a_short_shard_in_the_middle_is_told(copied):
    cache = copied()
    shutil.copyfile(shard_path(cache, 2), shard_path(cache, 1))
    (found,) = problems(cache, "complete")
    assert "shard-000001.safetensors: 2 samples, expected 4 of the manifest's 10" in found
    assert all(problems(cache, name) for name in ("checksums", "finite", "ids_match", "distribution"))


@pytest.mark.parametrize("text", [None, '{"format_version": 3}', '{"format_version": 1, "num_samples": "ten"}', "[]"])
def test_without_a_manifest_that_can_be_read_there_is_no_cache(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises((CacheError, FileNotFoundError), match=r"manifest|format_version"):
        verify(tmp_path)


@pytest.mark.parametrize("form", ["dense", "native"])
@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_shard_that_is_cut_is_a_problem_of_every_check_that_reads_it(copied, form, cut):
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
def test_a_missing_file_is_named_with_what_to_run(copied, name):
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
def test_a_cache_of_which_much_is_gone_is_no_other_tools(copied, names):
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


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_flipped_bit_anywhere_in_a_shard_is_reported_with_the_bytes_of_its_sample(form, copied, tmp_path):
    folder = copied(form)
    (tmp_path / "targets").symlink_to(folder)
    draw, path = random.Random(6), folder / "shard-000001.safetensors"
    size = path.stat().st_size
    for byte in [2, 100, *(draw.randrange(1_000, size) for _ in range(9)), size - 1]:
        flip_bit(path, byte)
        found = find_damage(tmp_path / "targets", deep=True)
        flip_bit(path, byte)
        assert {damage.file for damage in found} == {path.name}, found
        assert all(0 <= damage.offset <= byte < damage.end <= size for damage in found)
        named = " ".join(damage.problem for damage in found).replace(",", "")  # the parts of a sample
        spans = [(int(begin), int(end)) for begin, end in re.findall(r"(\d+) to (\d+)", named)]
        assert any(begin <= byte < end and end - begin < size / 3 for begin, end in spans) == (byte >= 1_000), found
        assert not any(str(tmp_path / "targets" / path.name) in damage.problem for damage in found)
    assert find_damage(tmp_path / "targets", deep=True) == []


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "sidecar/shard-000001.json", "sidecar/ids.txt"])
def test_another_file_of_targets_is_named(name, copied):
    folder = copied()
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    size = (folder / name).stat().st_size
    begin = size if name == "meta.json" else 0  # where it ends too soon
    assert (name, begin, size) in [damage[:3] for damage in find_damage(folder, deep=True)]
    (folder / name).unlink()
    if name != "manifest.json":  # without it the folder is of no kind
        assert any(damage[:3] == (name, 0, 0) for damage in find_damage(folder, deep=True))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_changed_manifest_is_refused_and_resuming_writes_it_again(copied, form):
    cache = copied(form)
    path, good = cache / "manifest.json", (cache / "manifest.json").read_bytes()
    manifest = read_manifest(cache)
    manifest["selected_token_ids"].reverse()  # the draft's ids would stand for other tokens
    write_manifest(cache, manifest)
    sizes = {"target_vocab_size": eagle3_runs.VOCAB, "draft_vocab_size": 12}
    readers = [CachedEagle3Dataset, lambda folder: load_token_mapping(folder, **sizes)]
    readers += [NativeEagle3Dataset, TargetHead.of_cache] if form in NATIVE_FORMS else []
    for read in readers:
        with refused("E701", f"{path}: sha256", "by meta.json", "--resume"):
            read(cache)
    path.unlink()
    samples = eagle3_runs.samples_of()
    eagle3_runs.run(cache, samples=samples, given=eagle3_runs.plan(samples, **ALL_FORMS[form]), resume=True)
    assert path.read_bytes() == good
    for read in readers:
        read(cache)
    (cache / "meta.json").unlink()  # as another tool's: there is nothing to compare with
    write_manifest(cache, manifest)
    assert CachedEagle3Dataset(cache).manifest["selected_token_ids"] == manifest["selected_token_ids"]


def test_a_changed_plan_and_a_changed_draft_vocabulary_are_refused(copied, tmp_path):
    plan = copied("native") / "sidecar" / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"pad_id": 5', b'"pad_id": 6'))
    with refused("E701", f"{plan}: sha256"):
        CachedEagle3Dataset(plan.parent.parent)
    NativeEagle3Dataset(plan.parent.parent)  # which does not read it
    mapping, sizes = tmp_path / "draft_vocab.json", {"target_vocab_size": 9, "draft_vocab_size": 2}
    mapping.write_text('{"selected_token_ids": [7, 1], "target_vocab_size": 9}')
    record = {"name": mapping.name, "bytes": mapping.stat().st_size, "sha256": "0" * 64}
    (tmp_path / "meta.json").write_text(json.dumps({"kind": "draft_vocab", "files": [record]}))
    with refused("E201", f"{mapping}: sha256"):
        load_token_mapping(tmp_path, **sizes)
    assert load_token_mapping(mapping, **sizes)[0].tolist() == [7, 1]  # a file by itself has no checksum


def test_a_damaged_list_of_names_is_read_once_and_told(copied, monkeypatch):
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


def foreign(folder, topk=0):
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
def test_of_a_cache_without_a_sidecar_only_what_needs_none_is_checked(tmp_path, topk):
    cache = foreign(tmp_path / "c", topk)
    verdicts = verify(cache)
    assert not any(verdict.problems for verdict in verdicts.values())
    assert {name for name, verdict in verdicts.items() if verdict.note} == {"checksums", "ids_match"}
    assert "no sidecar" in str(verdicts["checksums"].note)
    assert "another tool wrote this cache" in dict(row[:2] for row in summary(cache))["sidecar"]
    other = run_again(cache, {}, eagle3_runs.load, {"device": "cpu", "threads": 1})
    assert other.note is None and other.problems, "it is compared by what its shards hold"


def test_damage_of_a_cache_without_a_sidecar_is_told_with_the_samples_number(tmp_path):
    cache = foreign(tmp_path / "c")
    fields = fields_of(2)
    fields["aux_hidden_states"][1, 0, 0] = torch.nan
    fields["target_probs"][0, 3] *= 0.5
    write_shard(cache, 1, fields)
    shutil.rmtree(cache / "sidecar")
    verdicts = verify(cache)
    assert "shard-000001.safetensors: sample 4: aux_hidden_states of block 1 is nan" in verdicts["finite"].problems[0]
    assert any("sample 3: probabilities sum to 0.5 at slot 3" in said for said in verdicts["distribution"].problems)


def test_of_a_cache_that_write_shard_wrote_all_but_the_source_is_checked(tmp_path):
    fields = fields_of(2)
    fields["position_mask"] &= (fields["loss_mask"] == 1)[..., None]
    write_shard(tmp_path, 0, fields)
    write_manifest(tmp_path, manifest_of(samples=2, shard_size=2))
    write_target_embeddings(tmp_path, torch.zeros(20, 2))
    unchecked = Verdict([], "cannot be checked: no plan, as precompute did not make this cache")
    assert verify(tmp_path) == {**dict.fromkeys(VERIFIED, Verdict([])), "ids_match": unchecked}
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


@pytest.mark.parametrize("form", ["dense", "native"])
def test_weights_and_samples_that_are_both_gone_are_both_told(copied, form):
    cache = copied(form)
    names = ["target_embeddings.safetensors" if form == "dense" else "target_weights.safetensors"]
    names.append("sidecar/samples.safetensors")
    for name in names:
        (cache / name).unlink()
    found = problems(cache, "complete")
    assert all(any(said.startswith(f"{cache / name}: no such file") for said in found) for name in names)
