"""A producer makes what its plan says: by any number of processes, after any interruption, or it says why not."""

import dataclasses
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle3_runs as small
import pytest
import torch
from eagle3_runs import HIDDEN, LENGTH, run, samples_of, times, whole_tree
from safetensors.torch import load_file, save_file

from niels_gpt.eagle3 import folder as folder_module
from niels_gpt.eagle3 import forward, producer
from niels_gpt.eagle3.cache import CachedEagle3Dataset, convert, reconstruct_target_probs, verify
from niels_gpt.eagle3.plan import Plan
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.shards import ShardWriter
from niels_gpt.eagle3.supervision import NonFiniteError
from niels_gpt.fileio import CacheError
from niels_gpt.locks import file_lock

CPU, PAD = torch.device("cpu"), 5
EMBEDDINGS = ("target_embeddings.safetensors", "sidecar/embeddings.json")
FORMS: dict[str, dict[str, Any]] = {
    "version 1": {},
    "version 2": {"format_version": 2, "target_probs_topk": 0},
    "top-k": small.TOPK,
    "fp32": {"dtype": "fp32"},
    "fp16": {"dtype": "fp16"},
}


def never(device: torch.device) -> Any:
    raise AssertionError("the target was loaded")


# --- what is stored ---------------------------------------------------------------------------------------------------


def outputs_of(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the target says of one sample alone: captured hidden states [L, 3H] and logits [L, V]."""
    with torch.no_grad():
        out = small.load(CPU)(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[layer + 1][0] for layer in (1, 3, 4)], -1), out.logits[0]


def expected_row(sample: small.Row) -> dict[str, torch.Tensor]:
    """Work out a stored row slot by slot, in float32 and dense."""
    ids, mask, length = list(sample.input_ids), list(sample.loss_mask), len(sample.input_ids)
    hidden, logits = outputs_of(ids)
    selected = small.manifest()["selected_token_ids"]
    found = {
        "input_ids": torch.full((LENGTH,), PAD),
        "attention_mask": torch.zeros(LENGTH, dtype=torch.int64),
        "loss_mask": torch.zeros(LENGTH, dtype=torch.int64),
        "aux_hidden_states": torch.zeros(LENGTH, 3 * HIDDEN),
        "target_probs": torch.zeros(LENGTH, len(selected)),
        "position_mask": torch.zeros(LENGTH, 1, dtype=torch.bool),
    }
    found["input_ids"][-1] = 0
    for slot in range(length):
        found["attention_mask"][slot] = 1
        found["aux_hidden_states"][slot] = hidden[slot]
        found["target_probs"][slot] = 1 / len(selected)
        if slot < length - 1:
            found["input_ids"][slot], found["loss_mask"][slot] = ids[slot + 1], mask[slot + 1]
            found["target_probs"][slot] = torch.softmax(logits[slot + 1][selected].float(), 0)
            known = int(logits[slot + 1].argmax()) in selected
            found["position_mask"][slot] = bool(mask[slot + 1] == 1 and known)
    return found


def test_a_row_holds_what_the_target_says_of_its_sample(tmp_path: Path) -> None:
    meta = run(tmp_path / "c", given=small.plan(samples_of(), dtype="fp32")).meta
    dataset, samples = CachedEagle3Dataset(str(tmp_path / "c")), small.rows()
    rows = [expected_row(sample) for sample in samples]
    assert len(dataset) == len(samples)
    for number, expected in enumerate(rows):
        for name, value in expected.items():  # alone, a sample's outputs differ in the last bits
            torch.testing.assert_close(dataset[number][name], value, rtol=1e-4, atol=1e-6, msg=f"{number} {name}")
    assert meta["totals"] == {
        "samples": 10,
        "shards": 3,
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "supervised_tokens": sum(int(row["loss_mask"].sum()) for row in rows),
        "positions": sum(int(row["position_mask"].sum()) for row in rows),
    }
    assert 0 < meta["totals"]["positions"] < meta["totals"]["supervised_tokens"]


def test_a_cache_of_top_k_keeps_the_largest_probabilities_and_says_how_much_they_are(tmp_path: Path) -> None:
    plan = small.plan(samples_of(), dtype="fp32", **small.TOPK)
    meta = run(tmp_path / "c", given=plan).meta
    rows = [expected_row(sample) for sample in small.rows()]
    stored = [load_file(tmp_path / "c" / f"shard-{shard:06d}.safetensors") for shard in range(3)]
    kept = []
    for number, expected in enumerate(rows):
        fields = {name: tensor[number % 4] for name, tensor in stored[number // 4].items()}
        found = reconstruct_target_probs(fields["target_probs_values"], fields["target_probs_indices"], 12)
        values, indices = expected["target_probs"].topk(4, -1)
        right = torch.zeros(LENGTH, 12).scatter(-1, indices, values / values.sum(-1, keepdim=True).clamp_min(1e-9))
        inner = slice(0, len(small.rows()[number].input_ids) - 1)  # the last slot is uniform: any four
        torch.testing.assert_close(found[inner], right[inner], rtol=1e-4, atol=1e-6)
        kept += values.sum(-1)[expected["position_mask"].squeeze(-1)].tolist()
    assert meta["kept_mass"] == pytest.approx(sum(kept) / len(kept), rel=1e-5)
    assert meta["manifest"]["target_probs_topk"] == 4 and meta["manifest"]["format_version"] == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_shard_is_the_file_that_safetensors_writes(tmp_path: Path, form: str) -> None:
    run(tmp_path / "c", given=small.plan(samples_of(), **FORMS[form]))
    for shard in range(3):
        path = tmp_path / "c" / f"shard-{shard:06d}.safetensors"
        save_file(load_file(path), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert verify(str(tmp_path / "c")) == []


def test_the_mass_of_the_draft_vocabulary_is_that_of_the_supervised_slots(tmp_path: Path) -> None:
    meta = run(tmp_path / "c").meta
    masses = []
    for sample in small.rows():
        _, logits = outputs_of(list(sample.input_ids))
        mass = torch.softmax(logits.float(), -1)[:, small.manifest()["selected_token_ids"]].sum(-1)
        masses += [mass[slot].item() for slot in range(1, len(mass)) if sample.loss_mask[slot]]
    assert meta["draft_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-5)


def test_the_padding_is_the_only_thing_that_another_pad_id_changes(tmp_path: Path) -> None:
    for pad in (0, 39):
        run(tmp_path / str(pad), given=small.plan(samples_of(), tokenizer={"pad_id": pad}))
    for shard in range(3):
        left, right = (load_file(tmp_path / pad / f"shard-{shard:06d}.safetensors") for pad in ("0", "39"))
        assert all(torch.equal(left[name], right[name]) for name in left if name != "input_ids")
        changed = left["input_ids"] != right["input_ids"]
        assert changed.any() and set(right["input_ids"][changed].tolist()) == {39}
        lengths = right["attention_mask"].sum(-1, keepdim=True)
        assert not (changed & (torch.arange(LENGTH) < lengths - 1)).any()


# --- any number of processes, any subset of shards --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    run(tmp_path / "one")
    torch.set_num_threads(1)
    run(tmp_path / "many", workers=workers, start="fork")
    assert whole_tree(tmp_path / "many") == whole_tree(tmp_path / "one")
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("seed", range(4))
def test_what_is_missing_is_made_and_what_is_there_stays(tmp_path: Path, seed: int) -> None:
    chance, cache = random.Random(seed), tmp_path / "c"
    samples = samples_of(22)
    run(cache, samples=samples)
    whole = whole_tree(cache)
    names = [name for name in sorted(whole) if name != "sidecar/plan.json"]
    for name in chance.sample(names, chance.randint(1, 6)):
        (cache / name).unlink()
    broken = {shard for shard in range(6) if not complete(cache, shard)}
    before = times(cache)
    made = run(cache, samples=samples, resume=True)
    assert whole_tree(cache) == whole and made.shards == len(broken)
    after = times(cache)
    again = {
        name.format(shard) for shard in broken for name in ("shard-{:06d}.safetensors", "sidecar/shard-{:06d}.json")
    }
    if not {*EMBEDDINGS} <= before.keys():
        again |= {*EMBEDDINGS}
    kept = {name for name in whole if name in before} - again - {"meta.json"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept} and len(kept) > 4


def complete(cache: Path, shard: int) -> bool:
    name = f"shard-{shard:06d}"
    return (cache / f"{name}.safetensors").exists() and (cache / "sidecar" / f"{name}.json").exists()


def spoil(path: Path, how: str) -> None:
    raw = path.read_bytes()
    path.write_bytes(
        {
            "cut": raw[:-1],
            "longer": raw + b"\0",
            "empty": b"",
            "other": raw.replace(b'"plan": "', b'"plan": "0'),
            "flipped": raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:],
        }[how]
    )


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("shard-000001.safetensors", "cut"),
        ("shard-000001.safetensors", "longer"),
        ("shard-000001.safetensors", "empty"),
        ("sidecar/shard-000001.json", "cut"),
        ("sidecar/shard-000001.json", "empty"),
        ("sidecar/shard-000001.json", "other"),
        ("target_embeddings.safetensors", "cut"),
        ("target_embeddings.safetensors", "flipped"),
        ("sidecar/embeddings.json", "cut"),
        ("sidecar/embeddings.json", "empty"),
        ("sidecar/samples.safetensors", "cut"),
        ("sidecar/ids.txt", "empty"),
        ("sidecar/batches.jsonl", "cut"),
        ("meta.json", "cut"),
    ],
)
def test_a_file_that_is_not_whole_is_written_again(tmp_path: Path, name: str, how: str) -> None:
    run(tmp_path / "c")
    whole = whole_tree(tmp_path / "c")
    spoil(tmp_path / "c" / name, how)
    run(tmp_path / "c", resume=True)
    assert whole_tree(tmp_path / "c") == whole


def test_an_embedding_table_that_was_changed_is_written_again_by_a_run_that_has_nothing_else_to_do(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "c"
    run(cache)
    whole = whole_tree(cache)
    spoil(cache / "target_embeddings.safetensors", "flipped")
    loaded: list[torch.device] = []

    def noting(device: torch.device) -> Any:
        loaded.append(device)
        return small.load(device)

    assert run(cache, resume=True, load=noting, workers=2).shards == 0
    assert loaded == [CPU] and whole_tree(cache) == whole
    assert "sidecar/embeddings.json" in [record["name"] for record in json.loads(whole["meta.json"])["files"]]


def test_a_shard_is_made_again_only_where_it_or_its_receipt_is_not_whole(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    run(cache)
    spoil(cache / "shard-000002.safetensors", "cut")
    assert run(cache, resume=True).shards == 1
    (cache / "sidecar" / "ids.txt").unlink()
    assert run(cache, resume=True, load=never).shards == 0


def test_a_finished_cache_is_left_alone(tmp_path: Path) -> None:
    first = run(tmp_path / "c")
    before = times(tmp_path / "c" / "sidecar"), times(tmp_path / "c")["meta.json"]
    again = run(tmp_path / "c", resume=True, load=never)
    assert (again.shards, again.meta) == (0, first.meta)
    after = times(tmp_path / "c" / "sidecar"), times(tmp_path / "c")["meta.json"]
    before[0].pop("lock"), after[0].pop("lock")
    assert after == before


def test_temporary_files_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    (cache / "sidecar").mkdir(parents=True)
    left = [cache / ".shard-000001.safetensors.0123abcd.tmp", cache / "sidecar" / ".shard-000000.json.89abcdef.tmp"]
    mine = [cache / ".notes.tmp", cache / "shard.tmp", cache / "sidecar" / "notes"]
    (cache / "sidecar" / "lock").touch()
    for path in left:
        path.write_bytes(b"x")
    run(cache)  # what a run leaves that had no plan yet is nothing
    for path in [*left, *mine]:
        path.write_bytes(b"x")
    (cache / "meta.json").unlink()
    run(cache, resume=True)
    assert not any(path.exists() for path in left) and all(path.exists() for path in mine)


# --- what is refused, with nothing changed ----------------------------------------------------------------------------


def refused(cache: Path, text: str, **how: Any) -> str:
    """Assert that a run is refused, and that it changed nothing, the time of a file included; returns the message."""
    before = whole_tree(cache), times(cache)
    with pytest.raises(CacheError, match=text) as caught:
        run(cache, load=never, **how)
    assert (whole_tree(cache), times(cache)) == before
    return str(caught.value)


CHANGES: dict[str, dict[str, Any]] = {
    "manifest.aux_layer_ids": {"aux_layer_ids": [1, 2, 3]},
    "manifest.dtype": {"dtype": "fp32"},
    "manifest.target_model": {"target_model": "other"},
    "target.config_sha256": {"target": {"config_sha256": "d" * 64}},
    "tokenizer.sha256": {"tokenizer": {"sha256": "b" * 64}},
    "source.limit": {"source": {"limit": 10}},
    "run.threads": {"run": {"threads": 2}},
    "run.torch": {"run": {"torch": "1.0"}},
    "dropped.empty": {"dropped": {"empty": 3}},
}


@pytest.mark.parametrize("unfinished", [True, False])
@pytest.mark.parametrize("field", CHANGES)
def test_another_plan_is_refused_by_its_fields(tmp_path: Path, field: str, unfinished: bool) -> None:
    cache = tmp_path / "c"
    run(cache)
    if unfinished:
        (cache / "meta.json").unlink()
        (cache / "shard-000001.safetensors").unlink()
        (cache / "target_embeddings.safetensors").write_bytes(b"what is there")
    message = refused(
        cache, "does not match the current run", given=small.plan(samples_of(), **CHANGES[field]), resume=True
    )
    assert f"(mismatched fields: ['{field}'])" in message


def test_all_fields_that_differ_are_named_in_order(tmp_path: Path) -> None:
    run(tmp_path / "c")
    plan = small.plan(samples_of(), dtype="fp32", run={"threads": 2}, batch_size=1)
    message = refused(tmp_path / "c", "mismatched fields", given=plan, resume=True)
    fields = ["batches.batch_size", "batches.sha256", "manifest.dtype", "run.threads"]
    assert f"(mismatched fields: {fields})" in message
    told = "batches.batch_size: 3, now 1; manifest.dtype: 'bf16', now 'fp32'; run.threads: 1, now 2"
    assert message.endswith(f"({told})")  # what follows from these is left out


def test_six_of_many_values_are_told(tmp_path: Path) -> None:
    run(tmp_path / "c")
    plan = small.plan(samples_of(9), seq_length=32, dtype="fp32", run={"threads": 2, "torch": "1", "device": "cuda"})
    plan = dataclasses.replace(plan, source={**plan.source, "limit": 9}, batch_size=2)
    message = refused(tmp_path / "c", "mismatched fields", given=plan, resume=True)
    assert message.count(", now ") == 6 and message.endswith("run.torch: None, now '1'; and 1 more)")


def test_the_limit_is_told_and_not_what_follows_from_it(tmp_path: Path) -> None:
    run(tmp_path / "c")
    samples = samples_of(9)
    plan = small.plan(samples, source={"limit": 9}, dropped={"empty": 1})
    message = refused(tmp_path / "c", "'samples.count'", samples=samples, given=plan, resume=True)
    assert message.endswith("(source.limit: None, now 9)")


def test_other_samples_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "c")
    rows = small.rows()
    rows[3] = small.Row(rows[3].id, rows[3].input_ids, [1 - bit for bit in rows[3].loss_mask])
    samples = Samples.of_rows(rows)
    message = refused(tmp_path / "c", "samples.sha256", samples=samples, resume=True)
    assert "samples.supervised_tokens" in message and "ids_sha256" not in message


def test_a_manifest_that_was_changed_since_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "c")
    convert(tmp_path / "c", 2)
    message = refused(tmp_path / "c", "mismatched fields", resume=True)
    assert "['manifest.format_version', 'manifest.target_probs_topk']" in message
    assert "was converted to version 2 since: convert it back first" in message
    assert f"(python -m niels_gpt.eagle3 convert {tmp_path / 'c'} --format-version 1)" in message
    convert(tmp_path / "c", 1)
    path = tmp_path / "c" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"bf16", b"fp16"))
    assert "manifest.dtype: 'fp16', now 'bf16'" in refused(tmp_path / "c", "mismatched fields", resume=True)


def test_a_folder_that_holds_a_cache_is_refused_without_resume(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    run(cache)
    refused(cache, r"c already has shards; pass --resume to continue or use a fresh dir\.")
    for shard in cache.glob("shard-*"):
        shard.unlink()
    refused(cache, "c already has a plan; pass --resume")
    shutil.rmtree(cache / "sidecar")
    refused(cache, "c already has a manifest; pass --resume")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["meta.json", "train.bin", "meta.json/keep", "sidecar/notes.txt", "sidecar"])
def test_a_folder_with_anything_of_others_is_refused(tmp_path: Path, name: str, resume: bool) -> None:
    path = tmp_path / "c" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"kind": "sft"}')
    named = re.escape(name.removesuffix("/keep"))
    text = rf"c holds a file that no EAGLE-3 cache put there \(such as {named}\)\. Name a fresh folder"
    refused(tmp_path / "c", text, resume=resume)
    if "/" not in name:
        (tmp_path / "c" / "x").touch()
        refused(tmp_path / "c", "c holds 2 files that no EAGLE-3 cache put there", resume=resume)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"x")
    with pytest.raises(CacheError, match="c: is no folder"):
        run(tmp_path / "c", load=never)
    assert (tmp_path / "c").read_bytes() == b"x"


def test_the_meta_json_of_another_cache_is_never_removed(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    run(cache)
    (cache / "meta.json").write_text('{"kind": "sft"}')
    refused(cache, r"meta\.json: kind 'sft', expected 'eagle3': another cache's", resume=True)
    (cache / "meta.json").unlink()
    (cache / "meta.json").mkdir()
    refused(cache, r"meta\.json: not a regular file", resume=True)
    (cache / "meta.json").rmdir()
    (cache / "meta.json").symlink_to(tmp_path / "elsewhere")
    refused(cache, r"meta\.json: a symbolic link", resume=True)


# --- without a plan ---------------------------------------------------------------------------------------------------

LOSSES: dict[str, Any] = {
    "lost": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b'"threads": 1', b'"threads": 7')),
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("how", LOSSES)
def test_a_plan_that_is_lost_or_damaged_is_written_again_where_the_shards_are_of_it(
    tmp_path: Path, how: str, finished: bool
) -> None:
    cache = tmp_path / "c"
    run(cache)
    whole = whole_tree(cache)
    if not finished:
        (cache / "meta.json").unlink()
        (cache / "shard-000001.safetensors").unlink()
    LOSSES[how](cache / "sidecar" / "plan.json")
    if how != "changed":
        message = refused(
            cache, "these settings give another plan", given=small.plan(samples_of(), dtype="fp32"), resume=True
        )
        assert "Run it with the original settings" in message
        assert ("plan.json is missing" if how == "lost" else "plan.json is damaged") in message
    made = run(cache, resume=True, load=never if finished else small.load).shards
    assert whole_tree(cache) == whole and made == (0 if finished else 1)


def test_finished_shards_are_not_made_again_by_settings_of_a_plan_that_was_changed(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    run(cache)
    whole = whole_tree(cache)
    LOSSES["changed"](cache / "sidecar" / "plan.json")
    changed = small.plan(samples_of(), run={"threads": 7})
    refused(cache, r"damaged \(its shards name another plan\).*original settings", given=changed, resume=True)
    assert run(cache, resume=True, load=never).shards == 0 and whole_tree(cache) == whole


def test_a_damaged_plan_without_any_shard_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    (cache / "sidecar").mkdir(parents=True)
    (cache / "sidecar" / "plan.json").write_bytes(b"{")
    refused(cache, r"its sidecar/plan\.json is damaged \(.*\), and nothing else says", resume=True)
    refused(cache, "already has a plan; pass --resume")


def test_a_cache_of_another_tool_is_not_continued(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    run(cache)
    (cache / "meta.json").unlink()
    shutil.rmtree(cache / "sidecar")
    refused(cache, r"it has no sidecar/plan\.json: another tool wrote it.*Name a fresh folder", resume=True)
    (cache / "manifest.json").unlink()
    refused(cache, "its manifest is missing, so the shards in it cannot be compared", resume=True)


def test_a_shard_that_the_plan_does_not_have_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "c")
    shutil.copy(tmp_path / "c" / "shard-000001.safetensors", tmp_path / "c" / "shard-000003.safetensors")
    refused(tmp_path / "c", r"shard-000003\.safetensors: the plan has 3 shards. Move it away", resume=True)


def test_a_folder_in_which_somebody_works_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "c")
    (tmp_path / "c" / "meta.json").unlink()
    with file_lock(tmp_path / "c" / "sidecar" / "lock", "x", wait=False):
        refused(tmp_path / "c", r"c: is being written by user .*, host .*, pid \d+", resume=True)
    run(tmp_path / "c", resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_was_overtaken_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    @contextmanager
    def late(*arguments: Any, **how: Any) -> Iterator[None]:
        monkeypatch.setattr(producer, "file_lock", file_lock)
        run(tmp_path / "c")
        with file_lock(*arguments, **how):
            yield

    monkeypatch.setattr(producer, "file_lock", late)
    if resume:
        assert run(tmp_path / "c", resume=True).shards == 0
    else:
        with pytest.raises(CacheError, match="already has shards"):
            run(tmp_path / "c")
    assert verify(str(tmp_path / "c")) == []


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def broken(device: torch.device) -> Any:
    """The target, which gives no numbers for token 13 from its block 3 on."""
    model = small.load(CPU, seed=0).__class__(small.load(CPU).config).eval()
    model.load_state_dict(small.load(CPU).state_dict())

    def spoil(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        (ids,) = seen
        return output.masked_fill((ids == 13).unsqueeze(-1), float("nan"))

    seen: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: seen.__setitem__(slice(None), [given[0]]))
    model.model.layers[3].register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("workers", [1, 2])
def test_a_number_that_is_not_finite_stops_the_run_by_sample_and_layer(tmp_path: Path, workers: int) -> None:
    rows = [small.Row(f"chat {number}", [13 if number == 9 else 1, 2, 3], [1, 1, 1]) for number in range(12)]
    samples = Samples.of_rows(rows)
    with pytest.raises(NonFiniteError, match=r"sample 'chat 9', slot 0, block 3: nan"):
        run(tmp_path / "c", samples=samples, load=broken, workers=workers, start="fork")
    assert not (tmp_path / "c" / "meta.json").exists() and not list((tmp_path / "c").rglob("*.tmp"))
    if workers == 1:  # of two, the other one may have been stopped before
        assert [complete(tmp_path / "c", shard) for shard in range(3)] == [True, True, False]
    run(tmp_path / "c", samples=samples, resume=True)
    run(tmp_path / "d", samples=samples)
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


def large(device: torch.device) -> Any:
    model = small.load(CPU).__class__(small.load(CPU).config).eval()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1e9)
    return model


def test_a_hidden_state_that_fp16_cannot_hold_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"block 3: .*expected a finite number that fits into torch\.float16"):
        run(tmp_path / "c", given=small.plan(samples_of(), dtype="fp16"), load=large)
    run(tmp_path / "d", given=small.plan(samples_of(), dtype="bf16"), load=large)


def dies(device: torch.device) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_stops_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"worker process \d+ died \(killed by SIGKILL; is there too little memory\?\)"
    ):
        run(tmp_path / "c", load=dies, workers=2, start="fork")
    assert multiprocessing.active_children() == []
    run(tmp_path / "c", resume=True)
    run(tmp_path / "d")
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


class Unpicklable(ValueError):
    """An error that cannot be sent from one process to another."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} of {b}")


def fails(device: torch.device) -> Any:
    raise Unpicklable(1, 2)


class Gone(multiprocessing.context.ForkProcess):
    """Asks for a shard and is gone before it is told which."""

    def __init__(self, *, args: tuple[Any, ...], **_: Any) -> None:
        super().__init__(target=gone, args=args, daemon=True)

    def start(self) -> None:
        super().start()
        self.join()


def gone(job: Any, number: int, parent: Any) -> None:
    parent.send(("next",))
    parent.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_before_its_answer_is_told_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "c")
    for shard in (0, 1):
        (tmp_path / "c" / f"shard-{shard:06d}.safetensors").unlink()
    monkeypatch.setattr(multiprocessing.get_context("fork"), "Process", Gone)
    with pytest.raises(RuntimeError, match=r"worker process \d+ died \(killed by SIGKILL"):
        run(tmp_path / "c", workers=2, start="fork", resume=True)


def offline(device: torch.device) -> Any:
    raise ConnectionError("the hub cannot be reached")


def test_an_error_without_a_number_keeps_its_text(tmp_path: Path) -> None:
    for workers in (1, 2):
        with pytest.raises(ConnectionError, match=r"^the hub cannot be reached$"):
            run(tmp_path / str(workers), load=offline, workers=workers, start="fork")


def test_an_error_of_a_worker_is_told_whatever_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 1 of 2"):
        run(tmp_path / "c", load=fails, workers=2, start="fork")


def test_a_cache_that_is_mended_is_not_called_finished_meanwhile(tmp_path: Path) -> None:
    run(tmp_path / "c")
    for shard in range(3):
        (tmp_path / "c" / f"shard-{shard:06d}.safetensors").unlink()
    with pytest.raises(NonFiniteError):
        run(tmp_path / "c", load=broken, resume=True)
    assert not (tmp_path / "c" / "meta.json").exists()


def test_an_error_of_the_writer_stops_the_run_and_what_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = ShardWriter.write, []

    def full(self: ShardWriter, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "shard-000001.safetensors")
        write(self, *arguments)

    small.load(CPU)
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(
        OSError, match=r"left on device\. 1 of 3 shards are done and kept.*--resume.*shard-000001"
    ) as caught:
        run(tmp_path / "c")
    assert caught.value.errno == errno.ENOSPC and not list((tmp_path / "c").rglob("*.tmp"))
    assert len(calls) == 3 and len(os.listdir("/proc/self/fd")) <= opened
    monkeypatch.undo()
    assert run(tmp_path / "c", resume=True).shards == 2
    run(tmp_path / "d")
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, size: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", progress=interrupt)
    assert not list((tmp_path / "c").rglob("*.tmp")) and not (tmp_path / "c" / "meta.json").exists()
    run(tmp_path / "c", resume=True)
    run(tmp_path / "d")
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


# --- how it runs ------------------------------------------------------------------------------------------------------


def test_a_shard_is_written_while_the_next_one_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, commit, order = threading.Event(), ShardWriter.commit, []
    call = forward.PlannedForward.__call__

    def slow_commit(self: ShardWriter, facts: Any) -> Any:
        order.append(begun.wait(60))  # a writer that is not waited for: the next shard begins meanwhile
        return commit(self, facts)

    def noted(self: Any, shard: int, batch: Any) -> Any:
        if shard == 1:
            begun.set()
        return call(self, shard, batch)

    monkeypatch.setattr(ShardWriter, "commit", slow_commit)
    monkeypatch.setattr(forward.PlannedForward, "__call__", noted)
    run(tmp_path / "c")
    assert order == [True, True, True]


def test_the_forward_waits_where_the_writer_is_two_batches_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, written, ahead = [0], [0], []
    call, write = forward.PlannedForward.__call__, ShardWriter.write
    may_write = threading.Event()

    def counted(self: Any, shard: int, batch: Any) -> Any:
        computed[0] += 1
        ahead.append(computed[0] - written[0])
        if computed[0] == 3:  # two are given to the writer, which has not begun: the third is the last before it must
            may_write.set()
        return call(self, shard, batch)

    def slow(self: ShardWriter, *arguments: Any) -> None:
        assert may_write.wait(60)
        time.sleep(0.03)  # a forward that did not wait would be done with all ten batches
        write(self, *arguments)
        written[0] += 1

    monkeypatch.setattr(forward.PlannedForward, "__call__", counted)
    monkeypatch.setattr(ShardWriter, "write", slow)
    run(tmp_path / "c", given=small.plan(samples_of(), shard_size=10, batch_size=1))
    assert computed == [10] and max(ahead) == 3


def test_progress_begins_with_what_was_there_and_ends_with_all(tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    run(tmp_path / "c", progress=lambda *each: told.append(each))
    total = len(samples_of().ids)
    assert told[0] == (0, total, 0) and told[-1][:2] == (total, total) and told[-1][2] > 0
    assert told == sorted(told)
    (tmp_path / "c" / "shard-000002.safetensors").unlink()
    again: list[tuple[int, int, int]] = []
    torch.set_num_threads(1)
    run(tmp_path / "c", resume=True, progress=lambda *each: again.append(each))
    assert again[0] == (int(samples_of().starts[8]), total, 0) and again[-1][:2] == (total, total)
    many: list[tuple[int, int, int]] = []
    run(tmp_path / "d", workers=2, start="fork", progress=lambda *each: many.append(each))
    assert many[-1] == told[-1] and many == sorted(many)


def test_torch_has_the_threads_of_the_plan_meanwhile_and_its_own_afterwards(tmp_path: Path) -> None:
    seen: list[int] = []

    def noting(device: torch.device) -> Any:
        seen.append(torch.get_num_threads())
        return small.load(device)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    run(tmp_path / "c", given=small.plan(samples_of(), run={"threads": 3}), load=noting)
    assert seen == [3] and torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    run(tmp_path / "c")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_file_of_a_cache_names_this_machine(tmp_path: Path) -> None:
    run(tmp_path / "some_folder")
    for name, content in whole_tree(tmp_path / "some_folder").items():
        assert b"some_folder" not in content and os.uname().nodename.encode() not in content, name
    assert (tmp_path / "some_folder" / "sidecar" / "lock").read_bytes() == b""


# --- room -------------------------------------------------------------------------------------------------------------


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of a given size."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def wide(samples: Samples) -> Plan:
    """Return a plan of a cache of 6 kB a sample."""
    return small.plan(samples, dtype="fp32", shard_size=10)


def test_what_does_not_fit_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    samples = samples_of(2000)
    with disk(tmp_path / "small", "5m") as place:
        with pytest.raises(CacheError, match=r"c: this run writes [\d,]+ bytes, and 5,242,880 are free there"):
            run(place / "c", samples=samples, given=wide(samples), load=never)
        assert list(place.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_told_and_the_run_goes_on_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(300)
    monkeypatch.setattr(producer, "refuse_without_room", lambda *_: None)  # somebody else fills it meanwhile
    with disk(tmp_path / "small", "1m") as place:
        with pytest.raises(OSError, match=r"No space left on device\. \d+ of 30 shards are done and kept") as caught:
            run(place / "c", samples=samples, given=wide(samples))
        assert caught.value.errno == errno.ENOSPC and not list((place / "c").rglob("*.tmp"))
        assert 0 < sum(complete(place / "c", shard) for shard in range(30)) < 30
        subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        assert 0 < run(place / "c", samples=samples, given=wide(samples), resume=True).shards < 30
        run(tmp_path / "d", samples=samples, given=wide(samples))
        assert whole_tree(place / "c") == whole_tree(tmp_path / "d")


def test_a_disk_that_is_full_from_the_beginning_leaves_what_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "refuse_without_room", lambda *_: None)
    with disk(tmp_path / "small", "128k") as place:
        (place / "mine").write_bytes(bytes(108 << 10))
        with pytest.raises(OSError, match="No space left on device"):
            run(place / "c")
        (place / "mine").unlink()
        run(place / "c", resume=True)
        run(tmp_path / "d")
        assert whole_tree(place / "c") == whole_tree(tmp_path / "d")


def test_a_finished_cache_is_up_to_date_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "c")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert run(tmp_path / "c", resume=True, load=never).shards == 0
    (tmp_path / "c" / "meta.json").unlink()
    with pytest.raises(CacheError, match="and 0 are free there"):
        run(tmp_path / "c", resume=True, load=never)


def test_samples_that_are_there_are_not_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "c")
    (tmp_path / "c" / "shard-000001.safetensors").unlink()
    samples = samples_of()
    plan, calls = small.plan(samples), []
    monkeypatch.setattr(Samples, "files", lambda self: calls.append(self))
    assert run(tmp_path / "c", samples=samples, given=plan, resume=True).shards == 1
    assert calls == []


def test_the_folder_names_no_hidden_state(tmp_path: Path) -> None:
    run(tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    shards = [f"shard-{shard:06d}.safetensors" for shard in range(3)]
    assert names == ["manifest.json", "meta.json", *shards, "sidecar", "target_embeddings.safetensors"]
    assert folder_module.leftovers(tmp_path / "c") == []
