"""A damaged cache is built from scratch by one click, and by `force`; a run waits for another builder, or says who."""

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml
from support.dagster_runs import builder_of, built, check_alone, metadata, run, verdicts
from support.pipeline_seams import check_never_passes, noted_restarts, recipe_is, turn_of

from niels_gpt.cache.meta import read_meta
from niels_gpt.commands.report import checked
from niels_gpt.recipes.request import restart
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings

KEY = "sft/dolly15k"
CHECK = "ids_below_vocab_size"


def damage(settings, key=KEY):
    """Write ids that no tokenizer has into a cache; its files keep their sizes, so no build notices."""
    (file,) = Path(settings.cache_dir, key).glob("train_tokens.bin")
    file.write_bytes(b"\xff" * file.stat().st_size)


def said(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> list[str]:
    """Return what a run's log says beside Dagster's own events."""
    return [entry.user_message for entry in instance.all_logs(result.run_id) if entry.dagster_event is None]


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    """Return what the step that failed says."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    return str(event.step_failure_data.user_failure_data.description)


def test_a_damaged_cache_is_repaired_by_materializing_it_once_more(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    content = metadata(run(instance, settings, KEY))[KEY]["content_sha256"]
    damage(settings)
    assert built(run(instance, settings, KEY, raise_on_error=False)) == set(), "nothing has failed before its step"
    again = run(instance, settings, KEY)
    assert built(again) == {KEY} and metadata(again)[KEY]["content_sha256"] == content
    assert verdicts(again)[CHECK][0]
    assert any(f"from scratch: its check {CHECK} has failed" in line for line in said(instance, again))
    assert built(run(instance, settings, KEY)) == set()
    damage(settings)
    assert not check_alone(instance, settings, KEY, CHECK).success
    restart(settings, KEY)
    build_token_cache(settings, "dolly15k")  # the command line has repaired it
    assert built(run(instance, settings, KEY)) == set()
    damage(settings)
    assert build_token_cache(settings, "dolly15k").reused, "no check has failed"
    assert not check_alone(instance, settings, KEY, CHECK).success
    repaired = build_token_cache(settings, "dolly15k")
    assert not repaired.reused and checked(repaired, settings) == []
    damage(settings)
    assert not check_alone(instance, settings, KEY, CHECK).success
    assert not build_token_cache(settings, "dolly15k").reused, "the build before has helped, so another one may"
    assert check_alone(instance, settings, KEY, CHECK).success and built(run(instance, settings, KEY)) == set()


@pytest.mark.slow
def test_a_check_that_is_not_recorded_names_the_run_config_that_repairs(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    run(instance, settings, KEY)
    damage(settings)
    with builder_of(settings, KEY):
        failed = check_alone(instance, settings, KEY, CHECK)
    assert not failed.success
    (found,) = failed.get_asset_check_evaluations()
    asset, config = str(found.description).split("\n\n")[1].split("`")[1::2]
    assert asset == KEY and "repairs" not in str(found.description)
    repaired = run(instance, settings, KEY, run_config=yaml.safe_load(config))
    assert built(repaired) == {KEY} and verdicts(repaired)[CHECK][0]


def test_force_builds_from_scratch_and_a_retry_goes_on_with_that(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    first = metadata(run(instance, settings, KEY))[KEY]["content_sha256"]
    damage(settings)
    result = run(instance, settings, KEY, build={"force": True})
    assert built(result) == {KEY} and verdicts(result)[CHECK][0]
    assert metadata(result)[KEY]["content_sha256"] == first
    assert any("force is set" in line for line in said(instance, result))
    calls = []

    def failing_once(build, *given, **named):
        calls.append("build")
        if calls.count("build") == 1:
            raise ConnectionError("the hub is away for a moment")
        return build(*given, **named)

    with recipe_is(failing_once), noted_restarts(lambda: calls.append("restart")):
        assert built(run(instance, settings, KEY, build={"force": True})) == {KEY}
    assert calls == ["restart", "build", "build"]


@pytest.mark.slow
def test_a_check_that_a_build_from_scratch_does_not_repair_starts_no_other(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    with check_never_passes("examples_supervised", "an example has no token with loss"):
        results = [run(instance, settings, KEY, raise_on_error=False) for _ in range(4)]
        assert [built(result) for result in results] == [{KEY}, {KEY}, set(), set()]
        for result in results[2:]:
            assert any("another one does not help" in line and "force" in line for line in said(instance, result))
        assert built(run(instance, settings, KEY, build={"force": True}, raise_on_error=False)) == {KEY}
    damage(settings)  # another check: that a build can repair
    assert built(run(instance, settings, KEY, raise_on_error=False)) == set()
    assert built(run(instance, settings, KEY)) == {KEY}
    damage(settings)
    assert not check_alone(instance, settings, KEY, CHECK).success
    assert built(run(instance, settings, KEY)) == {KEY}, "the same content, and it helped"


def one_wrong_bit(version):
    """Change a bit of a sealed cache in partitions. Returns its partition, its file, and all good files."""
    first = {file: file.read_bytes() for file in sorted(version.rglob("*")) if file.is_file()}
    shards = [each["train_shards"] for each in read_meta(str(version / "meta.json"))["partitions"]["of_each"]]
    owner = max(number for number, of_it in enumerate(shards) if of_it)
    shard = sorted((version / "train").iterdir())[sum(shards[:owner])]
    content = bytearray(first[shard])
    content[100] ^= 1
    shard.write_bytes(content)
    return owner, shard, first


@pytest.mark.slow
def test_one_wrong_bit_builds_the_partition_that_wrote_it_and_no_other(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    key, settings = "pretrain/wikitext", replace(settings, partitions=4)
    run(instance, settings, key)
    version = Path(settings.cache_dir, key).resolve()
    owner, shard, first = one_wrong_bit(version)
    wrong = shard.read_bytes()

    deep = {"deep_checks": True}
    assert not run(instance, settings, key, config=deep, raise_on_error=False).success
    result = run(instance, settings, key, config=deep)
    steps = {event.step_key or "" for event in result.all_events if event.is_step_success}
    assert {step for step in steps if "build_partition" in step} == {
        f"pretrain__wikitext.build_partition[p{owner:05d}]"
    }
    assert {file: file.read_bytes() for file in sorted(version.rglob("*")) if file.is_file()} == first
    assert Path(settings.cache_dir, key).resolve() == version and verdicts(result)["files_match_meta"][0]
    assert not [*version.parent.glob("partitions-*")]
    assert built(run(instance, settings, key, config=deep)) == set()

    shard.write_bytes(wrong)
    assert not run(instance, settings, key, config=deep, raise_on_error=False).success
    build_token_cache(settings, "wikitext")
    assert shard.read_bytes() == first[shard], "the command line repairs it too"


@pytest.mark.slow
def test_one_wrong_bit_of_static_partitions_is_mended_by_the_seal(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    key, settings, how = "pretrain/wikitext", replace(settings, partitions=4), {"static_partitions": True}
    for number in range(4):
        run(instance, settings, f"partitions/{key}", partition=f"{number:05d}", **how)
    run(instance, settings, key, **how)
    owner, _, first = one_wrong_bit(Path(settings.cache_dir, key).resolve())
    deep = {"deep_checks": True}
    assert not run(instance, settings, key, config=deep, raise_on_error=False, **how).success
    result = run(instance, settings, key, config=deep, **how)
    assert re.findall(r"partition (\d+) of 4 built", " ".join(said(instance, result))) == [str(owner)]
    assert {file: file.read_bytes() for file in first} == first and verdicts(result)["files_match_meta"][0]


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_damage_in_several_partitions_is_mended_by_all_of_them(
    instance: dg.DagsterInstance, settings: Settings, static: bool
) -> None:
    key, settings, how = "pretrain/wikitext", replace(settings, partitions=4), {"static_partitions": static}
    build_token_cache(settings, "wikitext")
    version = Path(settings.cache_dir, key).resolve()
    first = {file: file.read_bytes() for file in version.rglob("*.bin")}
    for shard in (version / "train").iterdir():
        shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert not check_alone(instance, settings, key, CHECK).success
    result = run(instance, settings, key, config={"deep_checks": True}, **how)
    assert {file: file.read_bytes() for file in first} == first and verdicts(result)["files_match_meta"][0]
    assert not [*version.parent.glob("partitions-*")] and not (version.parent / "failed.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", [KEY, "tokenizer"])
def test_a_cache_that_is_away_for_a_while_fails_its_checks_and_is_not_built_again(
    instance: dg.DagsterInstance, settings: Settings, key: str
) -> None:
    run(instance, settings, key)
    caches = Path(settings.cache_dir)
    away = caches.rename(caches.parent / "away")
    result = check_alone(instance, settings, key, "files_match_meta")
    assert not result.success
    evaluations = result.get_asset_check_evaluations()
    assert [found.check_name for found in evaluations] == ["files_match_meta"]
    for found in evaluations:
        assert not found.passed and str(caches) in str(found.description) and "force" not in str(found.description)
    away.rename(caches)
    assert built(run(instance, settings, key)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 3])
def test_force_builds_a_pretrain_cache_from_scratch_whole_or_in_partitions(
    instance: dg.DagsterInstance, settings: Settings, partitions: int
) -> None:
    key, settings = "pretrain/wikitext", replace(settings, partitions=partitions)
    first = metadata(run(instance, settings, key))[key]["content_sha256"]
    assert metadata(run(instance, settings, key))[key]["run/state"] != "built"
    again = metadata(run(instance, settings, key, build={"force": True}))[key]
    assert (again["run/state"], again["content_sha256"]) == ("built", first)


def test_a_damaged_tokenizer_is_copied_again(instance: dg.DagsterInstance, settings: Settings) -> None:
    run(instance, settings, "tokenizer")
    model = next(Path(settings.cache_dir, "tokenizer").glob("*.model"))
    good = model.read_bytes()
    for build in ({"force": True}, None):
        model.write_bytes(b"x" * (len(good) - (build is None)))
        if build is None:
            assert not check_alone(instance, settings, "tokenizer", "files_match_meta").success
        else:
            assert ensure_tokenizer(settings).reused, "a build alone does not see it"
        assert built(run(instance, settings, "tokenizer", build=build)) == {"tokenizer"}
        assert model.read_bytes() == good
    assert built(run(instance, settings, "tokenizer")) == set()


@pytest.mark.slow
def test_a_tokenizer_is_trained_again_to_the_same_bytes(
    instance: dg.DagsterInstance, mirror: Path, tmp_path: Path
) -> None:
    settings = Settings(source_root=str(mirror), cache_dir=str(tmp_path / "cache"), vocab_size=600)
    keys = ("tokenizer", KEY)
    run(instance, settings, *keys)
    before = read_meta(str(tmp_path / "cache" / "tokenizer" / "meta.json"))
    result = run(instance, settings, "tokenizer", build={"force": True})
    assert built(result) == {"tokenizer"}
    assert read_meta(str(tmp_path / "cache" / "tokenizer" / "meta.json")) == before
    assert built(run(instance, settings, *keys)) == set()


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer",
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("sft/oasst1", "trees/oasst1", "pretrain/roam")),
    ],
)
def test_a_run_waits_for_another_builder_and_says_for_whom(
    instance: dg.DagsterInstance, settings: Settings, key: str
) -> None:
    with builder_of(settings, key):
        refused = run(instance, settings, key, build={"wait": False}, raise_on_error=False)
        assert "is being built by user " in failure_of(refused) and "pid " in failure_of(refused)
        result = run(instance, settings, key)
    assert built(result) == {key}
    (line,) = [line for line in said(instance, result) if "is being built by user " in line]
    assert line.endswith("; waiting")


@pytest.mark.slow
def test_a_pretrain_build_waits_for_its_turn_also_where_the_run_waits_for_no_other_builder(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    waits = threading.Event()

    class Waiting(logging.Handler):
        def emit(self, record):
            if record.getMessage().endswith("; waiting"):
                waits.set()

    handler, ours = Waiting(), logging.getLogger("niels_gpt")
    ours.addHandler(handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            with turn_of(settings, "pretrain/wikitext"):
                found = pool.submit(run, instance, settings, "pretrain/roam", build={"wait": False})
                assert waits.wait(60), "it has failed"
            assert built(found.result()) == {"pretrain/roam"}
    finally:
        ours.removeHandler(handler)


def test_an_instance_that_passes_the_cores_log_on_has_each_line_once(settings):
    overrides = {"python_logs": {"managed_python_loggers": ["niels_gpt"], "python_log_level": "INFO"}}
    with dg.instance_for_test(overrides=overrides) as instance, builder_of(settings, KEY):
        result = run(instance, settings, KEY)
        assert sum("; waiting" in line for line in said(instance, result)) == 1
