"""A producer makes what its plan says: by any number of processes, after any interruption, or it says why not."""

import copy
import json
import multiprocessing
import os
import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle3_runs as small
from support.commands import niels_gpt
from support.eagle3_damage import flip_bit
from support.eagle3_runs import EAGLE3, HIDDEN, LENGTH, has_shard, never, patched, run, samples_of, times, whole_tree
from support.errors import refused
from support.small_eagle3 import fields_of, manifest_of

from niels_gpt.eagle3.cache import (
    CachedEagle3Dataset,
    shard_path,
    verify,
    write_manifest,
    write_shard,
    write_target_embeddings,
)

Tree = dict[str, bytes]
CPU, PAD = torch.device("cpu"), 5
EMBEDDINGS = ("target_embeddings.safetensors", "sidecar/embeddings.json")


def outputs_of(ids):
    """Return what the target says of one sample alone: captured hidden states [L, 3H] and logits [L, V]."""
    with torch.no_grad():
        out = small.load(CPU)(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[layer + 1][0] for layer in (1, 3, 4)], -1), out.logits[0]


def expected_row(sample):
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


def test_a_row_holds_what_the_target_says_of_its_sample(tmp_path):
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
    masses = []
    for sample in samples:
        mass = torch.softmax(outputs_of(list(sample.input_ids))[1], -1)[:, small.manifest()["selected_token_ids"]].sum(
            -1
        )
        masses += [mass[slot].item() for slot in range(1, len(mass)) if sample.loss_mask[slot]]
    assert meta["draft_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-5)


def test_a_cache_of_top_k_keeps_the_largest_probabilities_and_says_how_much_they_are(tmp_path):
    plan = small.plan(samples_of(), dtype="fp32", **small.TOPK)
    meta = run(tmp_path / "c", given=plan).meta
    rows = [expected_row(sample) for sample in small.rows()]
    dataset, kept = CachedEagle3Dataset(tmp_path / "c"), []
    for number, expected in enumerate(rows):
        found = dataset[number]["target_probs"]
        values, indices = expected["target_probs"].topk(4, -1)
        right = torch.zeros(LENGTH, 12).scatter(-1, indices, values / values.sum(-1, keepdim=True).clamp_min(1e-9))
        inner = slice(0, len(small.rows()[number].input_ids) - 1)  # the last slot is uniform: any four
        torch.testing.assert_close(found[inner], right[inner], rtol=1e-4, atol=1e-6)
        kept += values.sum(-1)[expected["position_mask"].squeeze(-1)].tolist()
    assert meta["kept_mass"] == pytest.approx(sum(kept) / len(kept), rel=1e-5)
    assert meta["manifest"]["target_probs_topk"] == 4 and meta["manifest"]["format_version"] == 2


@pytest.mark.parametrize("form", [{}, {"format_version": 2, "target_probs_topk": 0}, small.TOPK, {"dtype": "fp16"}])
def test_a_shard_is_the_file_that_safetensors_writes(tmp_path, form):
    run(tmp_path / "c", given=small.plan(samples_of(), **form))
    for shard in range(3):
        path = tmp_path / "c" / f"shard-{shard:06d}.safetensors"
        save_file(load_file(path), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert verify(str(tmp_path / "c")) == []


def test_the_padding_is_the_only_thing_that_another_pad_id_changes(tmp_path):
    for pad in (0, 39):
        run(tmp_path / str(pad), given=small.plan(samples_of(), tokenizer={"pad_id": pad}))
    for shard in range(3):
        left, right = (load_file(tmp_path / pad / f"shard-{shard:06d}.safetensors") for pad in ("0", "39"))
        assert all(torch.equal(left[name], right[name]) for name in left if name != "input_ids")
        changed = left["input_ids"] != right["input_ids"]
        assert changed.any() and set(right["input_ids"][changed].tolist()) == {39}
        lengths = right["attention_mask"].sum(-1, keepdim=True)
        assert not (changed & (torch.arange(LENGTH) < lengths - 1)).any()


@pytest.mark.parametrize("workers", [2, 8])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path, whole, workers):
    torch.set_num_threads(1)
    run(tmp_path / "many", workers=workers, start="fork")
    assert whole_tree(tmp_path / "many") == whole
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("seed", range(4))
def test_what_is_missing_is_made_and_what_is_there_stays(tmp_path, seed):
    chance, cache = random.Random(seed), tmp_path / "c"
    samples = samples_of(22)
    plan = small.plan(samples, **(small.NATIVE if seed % 2 else {}))
    weights = {each.replace("embeddings", "weights") if seed % 2 else each for each in EMBEDDINGS}
    run(cache, samples=samples, given=plan)
    whole = whole_tree(cache)
    names = [name for name in sorted(whole) if name != "sidecar/plan.json"]
    for name in chance.sample(names, chance.randint(1, 6)):
        (cache / name).unlink()
    broken = {shard for shard in range(small.planned(plan).num_shards) if not has_shard(cache, shard)}
    before = times(cache)
    made = run(cache, samples=samples, given=plan, resume=True)
    assert whole_tree(cache) == whole and made.shards == len(broken)
    after = times(cache)
    again = {
        name.format(shard) for shard in broken for name in ("shard-{:06d}.safetensors", "sidecar/shard-{:06d}.json")
    }
    if not weights <= before.keys():
        again |= weights
    kept = {name for name in whole if name in before} - again - {"meta.json"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept} and len(kept) > 4


SPOIL = {
    "cut": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0",
    "empty": lambda raw: b"",
    "other": lambda raw: raw.replace(b'"plan": "', b'"plan": "0'),
}
NOT_WHOLE = {  # and how many shards are made again
    "shard-000001.safetensors": (["cut", "longer", "empty"], 1),
    "sidecar/shard-000001.json": (["cut", "empty", "other"], 1),
    "target_embeddings.safetensors": (["cut"], 0),
    "sidecar/embeddings.json": (["cut", "empty"], 0),
    **{f"sidecar/{name}": (["cut", "empty"], 0) for name in ("samples.safetensors", "ids.txt", "batches.jsonl")},
    "meta.json": (["cut"], 0),
}


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, (hows, _) in NOT_WHOLE.items() for how in hows])
def test_a_file_that_is_not_whole_is_written_again(cache, whole, name, how):
    (cache / name).write_bytes(SPOIL[how]((cache / name).read_bytes()))
    assert run(cache, resume=True).shards == NOT_WHOLE[name][1]
    assert whole_tree(cache) == whole


def test_a_changed_embedding_table_is_written_again_by_a_run_that_has_nothing_else_to_do(cache, whole):
    flip_bit(cache / "target_embeddings.safetensors", -5)
    loaded = []

    def noting(device):
        loaded.append(device)
        return small.load(device)

    assert run(cache, resume=True, load=noting, workers=2).shards == 0
    assert loaded == [CPU] and whole_tree(cache) == whole
    assert "sidecar/embeddings.json" in [record["name"] for record in json.loads(whole["meta.json"])["files"]]


def test_a_finished_cache_is_left_alone_and_holds_nothing_else(cache):
    shards = [f"shard-{shard:06d}.safetensors" for shard in range(3)]
    names = sorted(path.name for path in cache.iterdir())
    assert names == ["manifest.json", "meta.json", *shards, "sidecar", "target_embeddings.safetensors"]
    assert not [path for path in cache.rglob("*") if path.name.startswith(".")]
    before = times(cache / "sidecar"), times(cache)["meta.json"]
    again = run(cache, resume=True, load=never)
    assert (again.shards, again.meta) == (0, json.loads((cache / "meta.json").read_bytes()))
    after = times(cache / "sidecar"), times(cache)["meta.json"]
    before[0].pop("lock"), after[0].pop("lock")
    assert after == before
    (cache / "sidecar" / "ids.txt").unlink()
    assert run(cache, resume=True, load=never).shards == 0


def test_temporary_files_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    cache = tmp_path / "c"
    (cache / "sidecar").mkdir(parents=True)
    left = [cache / ".shard-000001.safetensors.0123abcd.tmp", cache / "sidecar" / ".shard-000000.json.89abcdef.tmp"]
    left.append(cache / ".meta.json.76543210.tmp")
    mine = [cache / ".notes.tmp", cache / ".notes.0123abcd.tmp", cache / "shard.tmp", cache / "sidecar" / "notes"]
    (cache / "sidecar" / "lock").touch()
    for path in left:
        path.write_bytes(b"x")
    run(cache)  # what a run leaves that had no plan yet is nothing
    for path in [*left, *mine]:
        path.write_bytes(b"x")
    mine += [cache / ".meta.json.0123abcd.tmp" / "notes"]
    mine[-1].parent.mkdir()
    mine[-1].write_bytes(b"x")
    (cache / "meta.json").unlink()
    run(cache, resume=True)
    assert not any(path.exists() for path in left) and all(path.is_file() for path in mine)


def test_a_shard_is_written_while_the_next_one_is_computed(tmp_path):
    started, order = threading.Event(), []

    def slow_commit(commit, *given):
        order.append(started.wait(60))  # a writer that is not waited for: the next shard begins meanwhile
        return commit(*given)

    def noted(call, forward, shard, batch):
        if shard == 1:
            started.set()
        return call(forward, shard, batch)

    with patched(commit=slow_commit, forward=noted):
        run(tmp_path / "c")
    assert order == [True, True, True]


def test_the_forward_waits_for_a_writer_two_batches_behind(tmp_path):
    computed, written, ahead = [0], [0], []
    may_write = threading.Event()

    def counted(call, *given):
        computed[0] += 1
        ahead.append(computed[0] - written[0])
        if computed[0] == 3:  # two are given to the writer, which has not started: the third is the last before it must
            may_write.set()
        return call(*given)

    def slow(write, *given):
        assert may_write.wait(60)
        time.sleep(0.03)  # a forward that did not wait would be done with all ten batches
        write(*given)
        written[0] += 1

    with patched(forward=counted, write=slow):
        run(tmp_path / "c", given=small.plan(samples_of(), shard_size=10, batch_size=1))
    assert computed == [10] and max(ahead) == 3


def test_progress_begins_with_what_was_there_and_ends_with_all(tmp_path):
    told = []
    run(tmp_path / "c", progress=lambda *each: told.append(each))
    lengths = [len(row.input_ids) for row in samples_of()]
    total = sum(lengths)
    assert told[0] == (0, 0, total) and told[-1][1:] == (total, total) and told[-1][0] > 0
    assert told == sorted(told)
    (tmp_path / "c" / "shard-000002.safetensors").unlink()
    again = []
    torch.set_num_threads(1)
    run(tmp_path / "c", resume=True, progress=lambda *each: again.append(each))
    assert again[0] == (0, sum(lengths[:8]), total) and again[-1][1:] == (total, total)
    many = []
    run(tmp_path / "d", workers=2, start="fork", progress=lambda *each: many.append(each))
    assert many[-1] == told[-1] and many == sorted(many)


def test_torch_has_the_threads_of_the_plan_meanwhile_and_its_own_and_its_random_state_after(tmp_path):
    seen = []

    def noting(device):
        seen.append(torch.get_num_threads())
        return small.load(device)

    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    run(tmp_path / "c", given=small.plan(samples_of(), run={"threads": 3}), load=noting)
    assert seen == [3] and torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_file_of_a_cache_names_this_machine(finished, whole):
    for name, content in whole.items():
        assert finished.parent.name.encode() not in content and os.uname().nodename.encode() not in content, name
    assert (finished / "sidecar" / "lock").read_bytes() == b""


def test_samples_that_are_there_are_not_put_together_again(cache):
    (cache / "shard-000001.safetensors").unlink()
    calls = []
    with patched(files=lambda real, samples: (calls.append(samples), real(samples))[1]):
        assert run(cache, resume=True).shards == 1
    assert len(calls) == 1, "for the checksums of the plan"


SELECTED = small.manifest()["selected_token_ids"]


def never_in_the_draft_vocabulary(device):
    """Return a target whose most probable token is none of SELECTED."""
    model = copy.deepcopy(small.load(device))
    model.lm_head.weight[SELECTED] = 0
    return model


def test_a_target_that_never_chooses_a_draft_token_gives_no_cache(tmp_path):
    for resume in (False, True):  # the same command again says the same
        with refused("E709", "0 positions", "--draft-vocab-size"):
            run(tmp_path, load=never_in_the_draft_vocabulary, resume=resume)
        assert not (tmp_path / "meta.json").exists()


def test_a_long_run_without_a_position_stops_before_its_first_shard_is_done(tmp_path):
    many = [small.Row(f"{number}", [number % 7] * 24, [1] * 24) for number in range(600)]
    plan = small.plan(many, batch_size=64, max_batch_tokens=4096, shard_size=600)
    with refused("E709", "0 positions"):
        run(tmp_path, given=plan, load=never_in_the_draft_vocabulary)
    assert not list(tmp_path.glob("shard-*"))


def test_few_positions_are_warned_of(tmp_path, caplog):
    samples = samples_of(40)
    everything = {"draft_vocab_size": small.VOCAB, "selected_token_ids": list(range(small.VOCAB))}
    run(tmp_path / "all", samples=samples, given=small.plan(samples, **everything))
    assert not caplog.records
    chosen = torch.zeros(small.VOCAB, dtype=torch.int64)
    for sample in CachedEagle3Dataset(tmp_path / "all"):
        where = sample["position_mask"][:, 0]
        chosen += torch.bincount(sample["target_probs"][where].argmax(-1), minlength=small.VOCAB)
    rarest = int(torch.where(chosen > 0, chosen, 10**6).argmin())
    assert 0 < chosen[rarest] < 0.05 * chosen.sum()
    given = small.plan(samples, draft_vocab_size=1, selected_token_ids=[rarest])
    run(tmp_path / "few", samples=samples, given=given)
    assert "few positions" in caplog.text and f"{int(chosen[rarest]):,} of " in caplog.text


@pytest.mark.parametrize(("positions", "status"), [(0, 1), (1, 0), (30, 0)])
def test_both_shares_are_shown(tmp_path, positions, status):
    fields = fields_of(10, slots=9)
    fields["loss_mask"][:, :-2], fields["loss_mask"][:, -2:] = 1, 0  # 70 slots of 90 tokens
    fields["position_mask"][:] = False
    fields["position_mask"].view(-1)[torch.arange(90).view(10, 9)[:, :-2].flatten()[:positions]] = True
    write_shard(tmp_path, 0, fields)
    write_manifest(tmp_path, manifest_of(samples=10, shard_size=10, slots=9))
    write_target_embeddings(tmp_path, torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
    done = niels_gpt("verify", tmp_path, module=EAGLE3)
    assert done.status == status
    if positions:
        assert re.search(rf"positions +ok: 77\.8% of the tokens supervised, {positions / 70:.1%}", done.out)
    else:
        assert "0 positions" in done.out
    assert ("few positions" in done.out) is (positions == 1)
    done = niels_gpt("stats", tmp_path, module=EAGLE3)
    assert done.status == 0
    assert "77.8% of the tokens" in done.out and f"{positions} ({positions / 70:.1%} of those)" in done.out
    assert Path(shard_path(tmp_path, 0)).is_file()
