"""The asset eagle3/targets: built, checked, reused, resumed, and rebuilt only where its inputs changed."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support import ROOT, TESTS, dagster_runs, numbered_datasets
from support.commands import niels_gpt
from support.dagster_runs import builder_of, built, check_alone, metadata, mirrors, run, shell, stale
from support.data_files import lines, write
from support.disk import change_meta, versions_dir
from support.errors import refused
from support.loopback_hub import LoopbackHub
from support.made_tokenizers import made_tokenizer
from support.pipeline_seams import (
    TARGET_CHECKS,
    build_draft_vocab,
    build_targets,
    facts_of_target,
    failing,
    failing_commit,
    fingerprint_in_parts,
    fingerprints,
    flip_state,
    killed_at_write,
    shard,
    without_target,
)

from niels_gpt.cache.meta import read_meta
from niels_gpt.eagle3.cache import CachedEagle3Dataset, read_manifest
from niels_gpt.eagle3.target import write_small_target
from niels_gpt.eagle3.vocab import load_token_mapping
from niels_gpt.recipes.asked import code_versions
from niels_gpt.recipes.eagle3 import prepare
from niels_gpt.recipes.plan import plan
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import sha256_file
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.sentinels import add_sentinels
from pipelines.definitions import niels_definitions

KEY = "eagle3/targets"
VOCAB = "eagle3/draft_vocab"
DOLLY = Settings().dolly_dataset
SAMPLE = 7  # row 2 of shard 1


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_model_path):
    """A small Llama in a folder of its own, as a user's model is."""
    return write_small_target(tmp_path_factory.mktemp("models") / "tiny-llama", load_tokenizer(tiny_model_path))


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Run the target in one thread: two that share a busy core wait for each other most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def settings(settings, target):
    """Settings for a cache of twelve chats of the mirror in three shards, which takes a tenth of a second."""
    small = {"max_samples": 12, "seq_length": 64, "draft_vocab_size": 40, "shard_size": 5, "device": "cpu"}
    named = {f"eagle3_{name}": value for name, value in small.items()}
    return dataclasses.replace(settings, eagle3_target=str(target), **named)


def cache_of(settings):
    return Path(settings.cache_dir, *KEY.split("/"))


def assert_equal_folders(one, other):
    """Compare all files of two versions of a cache."""

    def sums(folder):
        return {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}

    assert sums(one.resolve()) == sums(other.resolve())


def flip(settings):
    """Change one bit of the first hidden state of SAMPLE."""
    flip_state(shard(cache_of(settings), SAMPLE // 5), SAMPLE % 5)


def verdicts(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {name: passed for name, (passed, _) in dagster_runs.verdicts(result).items()}


def test_it_is_built_checked_described_and_reused(instance: dg.DagsterInstance, settings: Settings) -> None:
    result = run(instance, settings, KEY)
    assert result.success
    assert verdicts(result) == dict.fromkeys(TARGET_CHECKS, True)
    cache = cache_of(settings)
    assert len(CachedEagle3Dataset(cache)) == 12
    found, manifest, meta = metadata(result)[KEY], read_manifest(cache), read_meta(str(cache / "meta.json"))
    selected = manifest.pop("selected_token_ids")
    assert found["selected_token_ids"] == {"count": 40, "first": selected[:8]}
    assert mirrors(found, manifest)
    assert manifest["target_model"] == "tiny-llama", "where the model lies is not said"
    for name in ("bytes_per_token", "supervised_share", "kept_mass", "draft_mass"):
        assert found[name] == meta[name]
    assert (found["samples"], found["shards"], found["run/state"]) == (12, 3, "built")
    assert found["picture"].startswith("![samples](<data:image/svg+xml,") and len(found["picture"]) < 1000
    of_vocabulary, event = result.get_asset_materialization_events()
    assert of_vocabulary.asset_key.to_user_string() == VOCAB, "which its step has made"
    assert stale(instance, settings) == {}
    version = (event.step_materialization_data.materialization.tags or {})["dagster/data_version"]
    assert version == meta["content_sha256"]
    before = {path: path.stat().st_mtime_ns for path in cache.resolve().rglob("*")}
    assert metadata(run(instance, settings, KEY))[KEY]["run/state"].startswith("reused")
    assert {path: path.stat().st_mtime_ns for path in cache.resolve().rglob("*")} == before


def test_what_lies_before_it_are_the_chats_and_for_the_small_target_the_tokenizer(settings, tmp_path):
    def parents(**changed):
        chosen = dataclasses.replace(settings, **changed)
        graph = niels_definitions(settings=chosen).resolve_asset_graph()
        return {key.to_user_string() for key in graph.get(dg.AssetKey(KEY.split("/"))).parent_keys}

    assert parents() == {"raw/dolly15k", VOCAB}
    assert parents(eagle3_target=None) == {"raw/dolly15k", "tokenizer", VOCAB}
    assert parents(eagle3_source="oasst1") == {"raw/oasst1", VOCAB}
    (tmp_path / "own.jsonl").write_text('{"messages": []}\n')
    assert parents(sft=f"own={tmp_path / 'own.jsonl'}", eagle3_source="own") == {"raw/own", VOCAB}
    assert parents(eagle3_source=str(tmp_path / "own.jsonl")) == {VOCAB}


def test_the_draft_vocabulary_is_an_asset_that_targets_and_precompute_read(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    settings = dataclasses.replace(settings, eagle3_check_samples=0)
    result = run(instance, settings, VOCAB)
    assert built(result) == {VOCAB} and verdicts(result) == {"mapping_fits": True} and not cache_of(settings).exists()
    found, folder = metadata(result)[VOCAB], Path(settings.cache_dir, *VOCAB.split("/"))
    assert (found["draft_vocab_size"], found["run/state"]) == ("40", "built") and 0.5 < found["coverage"] < 1
    build_targets(settings)
    assert build_draft_vocab(settings).reused
    selected = read_manifest(cache_of(settings))["selected_token_ids"]
    for path in (folder, folder / "draft_vocab.json"):
        size = int(found["target_vocab_size"])
        assert load_token_mapping(path, target_vocab_size=size, draft_vocab_size=40)[0].tolist() == selected
    (folder / "draft_vocab.json").write_bytes((folder / "draft_vocab.json").read_bytes().replace(b"1", b"2"))
    assert verdicts(check_alone(instance, settings, VOCAB, "mapping_fits")) == {"mapping_fits": False}
    assert niels_gpt("verify", settings.cache_dir).status == 3


def test_targets_alone_make_a_draft_vocabulary_that_is_not_current_and_record_that(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    settings = dataclasses.replace(settings, eagle3_check_samples=0)
    run(instance, settings, VOCAB, KEY)
    larger = dataclasses.replace(settings, eagle3_draft_vocab_size=300)
    assert built(run(instance, larger, KEY)) >= {KEY}
    assert stale(instance, larger) == {} and built(run(instance, larger, KEY)) == set()
    for command, said in (("stats", "300 of the target's"), ("show", "draft ids 0 to 199 of 300")):
        done = niels_gpt(command, f"{settings.cache_dir}/{VOCAB}")
        assert done.status == 0 and said in done.out


@pytest.mark.slow
def test_the_targets_of_the_folders_tokenizer_leave_the_draft_vocabulary_current(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    sample = dataclasses.replace(settings, source_root="sample", eagle3_target=None, eagle3_check_samples=0)
    assert built(run(instance, sample, "tokenizer", VOCAB)) >= {VOCAB}
    assert built(run(instance, sample, KEY)) == {KEY} and stale(instance, sample) == {}


def test_it_covers_what_the_counted_tokens_say(settings, tmp_path):
    # Supervised are 7 three times, 9 twice and 11 once. The first of the draft's tokens is the target's end of turn.
    rows = [{"input_ids": [5, 7, 7, 9, 5], "loss_mask": [0, 1, 1, 1, 0]}]
    rows += [{"input_ids": [7, 7, 9, 11], "loss_mask": [0, 1, 1, 1]}]
    path = write(tmp_path / "rows.jsonl", lines(*rows))
    meta = build_draft_vocab(dataclasses.replace(settings, eagle3_source=str(path), eagle3_draft_vocab_size=3)).meta
    assert meta["coverage"] == 5 / 6 and meta["totals"] == {"samples": 2, "tokens": 9, "supervised_tokens": 6}


@pytest.mark.slow
def test_another_draft_vocabulary_of_a_native_cache_runs_no_target_and_copies_no_state(
    instance: dg.DagsterInstance, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    native = dataclasses.replace(settings, eagle3_format="native", eagle3_shard_size=256)
    native = dataclasses.replace(native, eagle3_aux_dtype="fp8", eagle3_aux_layers="2,5")
    result = run(instance, native, VOCAB, KEY)
    assert built(result) == {VOCAB, KEY} and all(verdicts(result).values())
    assert f"{cache_of(native)}: few positions" in caplog.text and "building-" not in caplog.text
    found, first_shard = metadata(result)[KEY], shard(cache_of(native), 0)
    assert (found["format_version"], found["aux_layer_ids"], found["aux_dtype"]) == ("native-1", [2, 5], "fp8")
    assert float(found["token_bytes/input_ids"]) == 4 and float(found["token_bytes/aux_hidden_states"]) < 2 * 64
    larger = dataclasses.replace(native, eagle3_draft_vocab_size=300)
    before, inode, first = (
        first_shard.read_bytes(),
        first_shard.stat().st_ino,
        read_meta(str(cache_of(native) / "meta.json")),
    )
    assert set(stale(instance, larger)) == {VOCAB, KEY}
    with without_target():
        assert built(run(instance, larger, VOCAB, KEY)) == {VOCAB, KEY}
    assert (first_shard.stat().st_ino, first_shard.read_bytes()) == (inode, before)
    cache = cache_of(larger)
    assert read_manifest(cache)["draft_vocab_size"] == 300 and len(CachedEagle3Dataset(cache)) == 12
    fresh = dataclasses.replace(larger, cache_dir=f"{native.cache_dir}-fresh")
    assert build_targets(fresh).meta == read_meta(str(cache / "meta.json"))
    smaller = dataclasses.replace(fresh, eagle3_draft_vocab_size=40)
    with failing("rename"), pytest.raises(OSError, match="No space"):  # after the links, before they have their name
        build_targets(smaller)
    with without_target(), failing("link", number=errno.EPERM):
        assert build_targets(smaller).meta == first
    assert (copied := shard(cache_of(fresh), 0)).read_bytes() == before and copied.stat().st_nlink == 1


def test_settings_that_do_not_fit_are_named_as_settings(settings):
    changes = {
        "eagle3_topk is 4": {"format": "native", "shard_size": 256, "topk": 4},
        "eagle3_aux_dtype is fp8": {"aux_dtype": "fp8"},
        "eagle3_aux_layers 99: ": {"aux_layers": "99"},
        "eagle3_made_for is dspark": {"made_for": "dspark"},
        "eagle3_target_rows is 'some'": {"format": "native", "shard_size": 256, "target_rows": "some"},
        "eagle3_made_for mtp with eagle3_aux_layers 1,2 and eagle3_target_rows reply: ": {
            "format": "native",
            "shard_size": 256,
            "made_for": "mtp",
            "aux_layers": "1,2",
            "target_rows": "reply",
        },
    }
    for said, changed in changes.items():
        with refused("E102", said):
            build_targets(dataclasses.replace(settings, **{f"eagle3_{name}": each for name, each in changed.items()}))


def test_what_only_the_states_need_leaves_the_draft_vocabulary_as_it_is(settings):
    before = build_draft_vocab(settings)
    for changed in ({"dtype": "fp32"}, {"batch_size": 3}, {"format": "native", "shard_size": 256}, {"topk": 4}):
        other = dataclasses.replace(settings, **{f"eagle3_{name}": value for name, value in changed.items()})
        assert build_draft_vocab(other).reused and fingerprints(other)[VOCAB] == fingerprints(settings)[VOCAB]
        assert fingerprints(other)[KEY] != fingerprints(settings)[KEY]
    for changed in ({"draft_vocab_size": 41}, {"seq_length": 32}, {"max_samples": 11}, {"source": "oasst1"}):
        other = dataclasses.replace(settings, **{f"eagle3_{name}": value for name, value in changed.items()})
        after = build_draft_vocab(other)
        assert not after.reused and after.fingerprint != before.fingerprint
        assert fingerprints(other)[VOCAB] != fingerprints(settings)[VOCAB]


def test_a_list_of_exclude_counts_by_what_it_takes_from_the_chats(settings, tmp_path):
    plain, versions = build_targets(settings), code_versions(settings)
    listed = dataclasses.replace(settings, exclude=str(tmp_path / "listed"))
    fineweb, dolly = (
        json.loads(next(Path(settings.source_root, dataset).rglob("*.jsonl")).read_text().splitlines()[0])
        for dataset in (settings.fineweb_edu_dataset, DOLLY)
    )
    fineweb, chat = fineweb["id"], hashlib.sha256(dolly["response"].encode()).hexdigest()
    for entries, counts in ([fineweb], False), ([fineweb, chat], True), ([chat, "no-such-id"], False):
        (tmp_path / "listed").write_text("\n".join(entries))
        planned = {item.key: item.action for item in plan(listed, [VOCAB, KEY])}
        assert planned == dict.fromkeys([VOCAB, KEY], "build" if counts else "up to date")
        changed = {path for path, version in code_versions(listed).items() if version != versions[path]}
        assert changed & {KEY, VOCAB} == ({KEY, VOCAB} if counts else set())
        outcome, versions = build_targets(listed), code_versions(listed)
        assert outcome.reused != counts and build_draft_vocab(listed).reused
    assert outcome.meta["content_sha256"] != plain.meta["content_sha256"]
    assert not build_targets(settings).reused


def test_the_fingerprint_of_caches_of_earlier_versions_stays(settings):
    assert fingerprints(Settings(source_root="sample", eagle3_max_samples=6))[KEY] == "240dbab57c5f"
    in_parts, whole = (fingerprint_in_parts(settings, part) for part in ((0, 2), None))
    assert in_parts == whole, "which shards a folder has decides no byte"
    native = dataclasses.replace(settings, eagle3_format="native", eagle3_shard_size=256)
    named = dataclasses.replace(native, eagle3_aux_layers="eagle3")
    assert (fingerprints(named), fingerprint_in_parts(named, None)) == (
        fingerprints(native),
        fingerprint_in_parts(native, None),
    )
    usual = {"eagle3": "eagle3 loss", "peagle": "eagle3 loss", "dspark": "dspark:5 all", "mtp": "none all"}
    for kind, layers, rows in ((name, *texts.split()) for name, texts in usual.items()):
        made = native if kind == "eagle3" else dataclasses.replace(native, eagle3_made_for=kind)
        stated = {"eagle3_made_for": kind, "eagle3_aux_layers": layers, "eagle3_target_rows": rows}
        assert fingerprints(dataclasses.replace(native, **stated)) == fingerprints(made)
    stated = dataclasses.replace(native, eagle3_made_for="eagle3", eagle3_target_rows="loss")
    assert fingerprint_in_parts(stated, None) == fingerprint_in_parts(native, None)
    others = [{"made_for": "peagle"}, {"made_for": "dspark"}, {"target_rows": "reply"}, {"target_rows": "all"}]
    changed = [dataclasses.replace(native, **{f"eagle3_{key}": each[key] for key in each}) for each in others]
    assert len({fingerprint_in_parts(each, None) for each in (native, *changed)}) == 5
    assert len({fingerprints(each)[KEY] for each in (native, *changed)}) == 5
    assert {fingerprints(each)[VOCAB] for each in changed} == {fingerprints(native)[VOCAB]}


def test_a_cache_for_a_kind_of_draft_is_built_by_its_setting_and_described(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    native = dataclasses.replace(settings, eagle3_format="native", eagle3_shard_size=256, eagle3_made_for="dspark")
    result = run(instance, native, VOCAB, KEY)
    assert built(result) == {VOCAB, KEY} and all(verdicts(result).values())
    found, manifest = metadata(result)[KEY], read_manifest(cache_of(native))
    manifest.pop("selected_token_ids")
    assert mirrors(found, manifest) and (found["targets"], found["made_for"]) == ("all", "dspark")
    assert found["enough_for"] == ["dflash", "dspark", "eagle3", "mtp", "peagle"]
    assert found["target_rows"] == found["tokens"]
    done = niels_gpt("stats", cache_of(native))
    assert done.status == 0 and "all: enough for dflash, dspark, eagle3, mtp, peagle" in " ".join(done.out.split())
    fewer = dataclasses.replace(native, eagle3_made_for=None, eagle3_target_rows="reply")
    assert set(stale(instance, fewer)) == {KEY}
    again = run(instance, fewer, VOCAB, KEY)
    assert built(again) == {KEY} and metadata(again)[KEY]["targets"] == "reply"
    assert stale(instance, fewer) == {} and niels_gpt("verify", native.cache_dir, "--deep").status == 0


def test_a_flipped_bit_fails_the_checks_and_one_more_run_builds_from_scratch(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    good = build_targets(settings).meta
    flip(settings)
    result = check_alone(instance, settings, KEY, *TARGET_CHECKS)
    found = verdicts(result)
    assert not result.success
    assert not found["checksums"] and found["complete"] and found["ids_match"]
    (told,) = [each for each in result.get_asset_check_evaluations() if each.check_name == "checksums"]
    assert f"{cache_of(settings)}/shard-000001.safetensors: sample {SAMPLE - 5} of the shard" in str(told.description)
    assert f"It is sample {SAMPLE} (" in str(told.description)
    assert verdicts(check_alone(instance, settings, KEY, "complete")) == {"complete": True}
    again = run(instance, settings, KEY)
    assert built(again) >= {KEY} and all(verdicts(again).values())
    assert metadata(again)[KEY]["content_sha256"] == good["content_sha256"]
    assert built(run(instance, settings, KEY, build={"force": True})) == {KEY}


def test_it_waits_for_another_builder_and_fails_where_a_run_does_not_wait(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    for key in (VOCAB, KEY):
        with builder_of(settings, key):
            refused = run(instance, settings, key, build={"wait": False}, raise_on_error=False)
            (event,) = [event for event in refused.all_events if event.is_step_failure]
            assert "is being built by user " in event.step_failure_data.user_failure_data.description
            assert built(run(instance, settings, key)) == {key}


def test_a_run_of_more_leaves_it_out_where_no_target_is_named(instance: dg.DagsterInstance, settings: Settings) -> None:
    result = run(instance, dataclasses.replace(settings, eagle3_target=None), "sft/dolly15k", VOCAB, KEY)
    assert result.success and built(result) == {"sft/dolly15k"}
    (line,) = [entry.user_message for entry in instance.all_logs(result.run_id) if "left out" in entry.user_message]
    assert line.startswith("left out [W513]: no target is named")


def test_the_target_is_run_once_more_for_as_many_samples_as_the_setting_says(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    build_targets(settings)
    flip(settings)
    for number, passed in ((12, False), (0, True)):
        changed = dataclasses.replace(settings, eagle3_check_samples=number)
        assert verdicts(check_alone(instance, changed, KEY, "recomputed")) == {"recomputed": passed}


def test_a_target_that_several_processes_hold_is_spread_over_the_devices_for_that(settings, monkeypatch):
    build_targets(settings)
    maps, real = [], prepare.target_of
    monkeypatch.setattr(
        prepare, "target_of", lambda *given, **how: maps.append(how["device_map"]) or real(*given, **how)
    )
    for ranks in (1, 2):
        assert prepare.check_recomputed(dataclasses.replace(settings, eagle3_tensor_parallel=ranks)).problems == []
    assert maps == [None, "auto"]


@pytest.mark.slow
def test_a_setting_of_its_own_builds_it_anew_and_one_of_an_sft_cache_does_not(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    keys = ("sft/dolly15k", KEY)
    assert built(run(instance, settings, *keys)) == set(keys)
    result = run(instance, settings, *keys, config={"eagle3_topk": 4})
    assert built(result) == {KEY} and all(verdicts(result).values())
    assert metadata(result)[KEY]["format_version"] == "2"
    assert built(run(instance, settings, *keys, config={"eagle3_topk": 4, "sft_val_frac": 0.2})) == {"sft/dolly15k"}


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"eagle3_dtype": "fp32"}, True),
        ({"eagle3_max_samples": 11}, True),
        ({"eagle3_draft_vocab_size": 41}, True),
        ({"eagle3_batch_size": 3}, True),
        ({"eagle3_source": "oasst1"}, True),
        ({"dolly_include_system": True}, True),
        ({"eagle3_load_dtype": "bf16"}, True),
        ({"eagle3_tensor_parallel": 2}, False),
        ({"eagle3_device_map": "auto", "eagle3_max_memory": "cpu=1GB"}, False),
        ({"eagle3_check_samples": 1, "threads": 1, "eagle3_device": None, "sft_val_frac": 0.3, "seed": 3}, False),
    ],
)
def test_what_decides_bytes_makes_another_cache_and_the_rest_does_not(settings, changed, again):
    before = build_targets(settings)
    other = dataclasses.replace(settings, **changed)
    after = build_targets(other)
    assert after.reused != again
    assert (after.fingerprint != before.fingerprint) == again
    assert (fingerprints(settings)[KEY] != fingerprints(other)[KEY]) == again


def test_the_samples_target_takes_any_tokenizer_that_has_the_sentinels(settings, tmp_path):
    plain = dataclasses.replace(settings, source_root="sample", eagle3_target=None, tokenizer=str(made_tokenizer("t5")))
    with refused("E404", "niels-gpt add-sentinels ") as caught:
        build_targets(plain)
    assert str(caught).endswith("eagle3_target")
    add_sentinels(str(plain.tokenizer), tmp_path / "with")
    made = dataclasses.replace(plain, tokenizer=str(tmp_path / "with"))
    outcome = build_targets(made)
    assert outcome.meta["totals"]["samples"] == 12 and build_targets(made).reused
    (small,) = (Path(made.cache_dir) / "sample" / "eagle3" / ".small_target").iterdir()
    installed = Path(made.cache_dir) / "sample" / "tokenizer" / "tokenizer.json"
    assert (small / "tokenizer.json").read_bytes() == installed.read_bytes()


@pytest.mark.slow
def test_new_chats_make_it_stale_and_are_built(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    rows = [{"prompt": "Name a river.", "response": f"River {number}."} for number in range(3)]
    path = write(tmp_path / "chats.jsonl", lines(*rows))
    settings = dataclasses.replace(settings, sft=f"own={path}", eagle3_source="own", eagle3_draft_vocab_size=10_000)
    run(instance, settings, "raw/own", KEY)
    assert KEY not in stale(instance, settings)
    write(path, lines(*reversed(rows)))
    run(instance, settings, "raw/own")
    assert KEY in stale(instance, settings)
    assert built(run(instance, settings, KEY)) == {KEY}
    assert KEY not in stale(instance, settings)


@pytest.mark.slow
def test_a_revision_of_the_hub_that_was_observed_since_is_built(
    instance: dg.DagsterInstance, settings: Settings, loopback_hub: LoopbackHub
) -> None:
    settings = dataclasses.replace(settings, source_root="hub")

    def build():
        result = run(instance, settings, KEY)
        return bool(built(result)), read_meta(str(cache_of(settings) / "meta.json"))["source"]["revision"]

    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=80_000))
    run(instance, settings, "raw/dolly15k")
    assert build() == (True, first)
    second = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=80_100))
    assert build() == (False, first), "nobody has looked"
    run(instance, settings, "raw/dolly15k")
    assert KEY in stale(instance, settings)
    assert build() == (True, second)
    assert build() == (False, second)


def test_a_revision_of_a_target_in_a_folder_is_refused(settings):
    path = build_targets(settings).path
    with refused("E102", "--revision abc"):
        facts_of_target(path, str(settings.eagle3_target), "abc")
    assert facts_of_target(path, str(settings.eagle3_target))["revision"] is None


def test_the_sample_has_a_target_of_its_own_and_real_text_needs_one(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    sample = dataclasses.replace(settings, source_root="sample", eagle3_target=None)
    result = run(instance, sample, "tokenizer", KEY)
    assert result.success and verdicts(result).items() >= dict.fromkeys(TARGET_CHECKS, True).items()
    assert metadata(result)[KEY]["target_model"] == "small_target"
    refused = run(instance, dataclasses.replace(settings, eagle3_target=None), KEY, raise_on_error=False)
    (event,) = [event for event in refused.all_events if event.is_step_failure]
    said = event.step_failure_data.user_failure_data.description
    assert "no target is named" in said and "NIELS_GPT_EAGLE3_TARGET" in said
    assert not cache_of(settings).exists()


def test_another_tokenizer_gives_the_sample_another_target(settings, tmp_path):
    from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

    sample = dataclasses.replace(settings, source_root="sample", eagle3_target=None)
    first = build_targets(sample).meta
    trained = train_tokenizer(["the heron and the otter walk " * 9] * 9, vocab_size=300, trained_on="a test")
    other = write_tokenizer(trained, tmp_path / "other").model_path
    second = build_targets(dataclasses.replace(sample, tokenizer=str(other))).meta
    assert first["target"]["weights_sha256"] != second["target"]["weights_sha256"]
    assert first["content_sha256"] != second["content_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_killed_run_that_is_reexecuted_from_its_failure_keeps_its_shards_and_gives_the_same_bytes(
    settings, tmp_path, monkeypatch, partitions
):
    monkeypatch.undo()  # the number of cores, which the plan has, is that of the program
    directly = build_targets(settings)
    settings = dataclasses.replace(settings, partitions=partitions)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(ROOT / "dagster.yaml", home / "dagster.yaml")
    changed = {each.name for each in dataclasses.fields(Settings) if getattr(settings, each.name) != each.default}
    given = {f"NIELS_GPT_{name.upper()}": str(getattr(settings, name)) for name in changed}
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    program = f"{sys.executable} -c 'from support import target_runs; target_runs.main()'"
    done = shell(home, program, **{**given, "NIELS_GPT_CACHE_DIR": str(home / "cache"), "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    killed, again = json.loads(done.stdout.splitlines()[-1])
    failed = "eagle3__targets" if partitions == 1 else "eagle3__targets.build_partition[p00000]"
    assert killed["STEP_FAILURE"] == [failed] and killed["ASSET_MATERIALIZATION"] == []
    assert again["STEP_FAILURE"] == [] and len(again["inodes"]) == 1
    assert again["inodes"] == killed["inodes"], "the shard is the one of the killed run, although both runs have force"
    assert_equal_folders(directly.path, home / "cache" / KEY)


def test_equal_settings_give_equal_bytes_wherever_the_cache_and_the_target_lie(settings, tmp_path, tiny_model_path):
    elsewhere = write_small_target(tmp_path / "tiny-llama", load_tokenizer(tiny_model_path))
    other = dataclasses.replace(settings, cache_dir=str(tmp_path / "other"), eagle3_target=str(elsewhere))
    first, second = build_targets(settings), build_targets(other)
    assert first.fingerprint == second.fingerprint

    assert_equal_folders(first.path, second.path)
    assert str(tmp_path) not in (first.path / "meta.json").read_text() + (first.path / "manifest.json").read_text()


def test_a_cache_that_lost_a_shard_is_built_again(settings):
    content = build_targets(settings).meta["content_sha256"]
    shard(cache_of(settings), 1).unlink()
    again = build_targets(settings)
    assert not again.reused and again.meta["content_sha256"] == content
    assert shard(cache_of(settings), 1).is_file()
    assert build_targets(settings).reused


def test_a_cache_of_an_earlier_build_gets_the_list_of_its_shards_without_the_target(settings):
    whole = build_targets(settings).meta
    cache = cache_of(settings).resolve()
    files = [record for record in whole["files"] if not record["name"].startswith("shard-")]

    def earlier():
        """Take the shards out of meta.json, and record it so."""
        change_meta(cache, files=files)
        record = versions_dir(cache_of(settings)) / "recipe.json"
        said = json.loads(record.read_bytes()) | {"meta_sha256": sha256_file(cache / "meta.json")}
        record.write_text(json.dumps(said))

    with without_target():
        for step in (None, *range(1, 4)):
            earlier()
            if step is not None:  # killed at each of the three writes
                with killed_at_write(step), pytest.raises(OSError, match="killed"):
                    build_targets(settings)
            again = build_targets(settings)
            assert again.reused and again.meta == whole == read_meta(str(cache / "meta.json"))


def test_a_build_that_failed_goes_on_with_its_finished_shards(settings, tmp_path):
    whole = build_targets(dataclasses.replace(settings, cache_dir=str(tmp_path / "whole"))).meta
    third = failing("shard", lambda file, *_: "shard-000002" in str(file.path))
    with third, pytest.raises(OSError, match="2 of 3 shards"):
        build_targets(settings)
    assert not cache_of(settings).exists()
    (work,) = versions_dir(cache_of(settings)).glob("partitions-*/cache")
    kept = [shard(work, number).stat().st_ino for number in (0, 1)]
    assert build_targets(settings).meta == whole
    assert [shard(cache_of(settings), number).stat().st_ino for number in (0, 1)] == kept
    assert not list(versions_dir(cache_of(settings)).glob("partitions-*"))


@pytest.mark.parametrize("step", ["sync_tree", "rename", "symlink"])
def test_a_commit_that_failed_is_done_by_the_next_run_without_the_target(settings, step):
    with failing_commit(cache_of(settings), step), pytest.raises(OSError, match="No space left"):
        build_targets(settings)
    assert not cache_of(settings).exists()
    with without_target():
        assert build_targets(settings).reused is False
    assert build_targets(settings).reused


def test_the_command_line_lists_verifies_and_clears_it(settings):
    build_targets(settings)
    done = niels_gpt("list", settings.cache_dir)
    (line,) = [line for line in done.out.splitlines() if line.startswith(KEY)]
    assert done.status == 0 and "12 samples" in line
    assert niels_gpt("verify", settings.cache_dir, "--deep").status == 0
    for number in (11, 10, 9):
        build_targets(dataclasses.replace(settings, eagle3_max_samples=number))
    done = niels_gpt("gc", settings.cache_dir)
    assert done.status == 0 and done.out.count(f"{KEY} (version ") == done.out.count(f"{VOCAB} (version ") == 2
    flip(settings)
    assert niels_gpt("verify", settings.cache_dir).status == 0
    done = niels_gpt("verify", settings.cache_dir, "--deep")
    assert done.status == 3 and "shard-000001.safetensors, bytes " in done.out and ": sample 2 of the shard" in done.out


# --- in partitions ----------------------------------------------------------------------------------------------------

STEP = "eagle3__targets."


def steps(result, kind="STEP_SUCCESS"):
    """Return the steps of the graph of eagle3/targets that an event of this kind was logged of."""
    found = (event.step_key for event in result.all_events if event.event_type_value == kind)
    return {step.removeprefix(STEP) for step in found if step.startswith(STEP)}


@pytest.mark.parametrize("form", [{}, {"eagle3_format": "native", "eagle3_shard_size": 256}], ids=["dense", "native"])
def test_each_partition_is_a_step_and_the_bytes_are_those_of_one_run(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path, form: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, partitions=2, eagle3_check_samples=0, **form)
    whole = build_targets(dataclasses.replace(settings, partitions=1, cache_dir=str(tmp_path / "whole")))
    first = run(instance, settings, VOCAB, KEY)
    shards = whole.meta["totals"]["shards"]  # 3, or one that a partition has alone
    builds = {f"build_partition[p{number:05d}]" for number in range(min(2, shards))}
    assert steps(first) == {"plan_partitions", *builds, "seal_cache"} and all(verdicts(first).values())
    assert built(first) == {VOCAB, KEY} and stale(instance, settings) == {}
    assert_equal_folders(whole.path, cache_of(settings))
    assert not list(versions_dir(cache_of(settings)).glob("partitions-*"))
    assert whole.fingerprint == build_targets(settings).fingerprint
    again = run(instance, settings, KEY)
    assert steps(again) == {"plan_partitions", "seal_cache"} and built(again) == set()
    other = dataclasses.replace(settings, partitions=5)  # N is in no fingerprint
    assert steps(run(instance, other, KEY)) == {"plan_partitions", "seal_cache"}


def test_shards_of_any_number_of_partitions_go_on_and_a_step_that_failed_is_repeated(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    settings = dataclasses.replace(settings, eagle3_check_samples=0)
    whole = build_targets(dataclasses.replace(settings, cache_dir=str(tmp_path / "whole")))
    with failing("shard", lambda file, *_: "shard-000002" in str(file.path)), pytest.raises(OSError, match="2 of 3"):
        build_targets(settings)
    (work,) = versions_dir(cache_of(settings)).glob("partitions-*/cache")
    kept = [shard(work, number).stat().st_ino for number in (0, 1)]
    four = dataclasses.replace(settings, partitions=4)
    with failing("shard"):
        result = run(instance, four, KEY, raise_on_error=False)
    assert steps(result, "STEP_FAILURE") == {"build_partition[p00002]"} and not cache_of(settings).exists()
    three = dataclasses.replace(settings, partitions=3)
    result = run(instance, three, KEY)
    assert steps(result) == {"plan_partitions", "build_partition[p00002]", "seal_cache"}
    assert [shard(cache_of(settings), number).stat().st_ino for number in (0, 1)] == kept
    assert_equal_folders(whole.path, cache_of(settings))


def test_one_that_is_not_configured_is_left_out_of_a_run_in_partitions(
    instance: dg.DagsterInstance, settings: Settings, tmp_path: Path
) -> None:
    plain = dataclasses.replace(settings, source_root="sample", eagle3_target=None, tokenizer=str(made_tokenizer("t5")))
    result = run(instance, dataclasses.replace(plain, partitions=2), "pretrain/wikitext", KEY)
    assert result.success and KEY not in built(result) and "pretrain/wikitext" in built(result)
