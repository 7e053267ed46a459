"""What the tests of pipelines/ share: a run in this process with a real instance, a command, and the UI's staleness."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from niels_gpt.settings import Settings
from niels_gpt.storage.locks import kernel
from niels_gpt.storage.versions import build_lock
from pipelines.definitions import niels_definitions
from support import ROOT


@contextmanager
def dagster_instance(home: Path) -> Iterator[dg.DagsterInstance]:
    """A real Dagster instance with its files in a folder, which keeps no step's output: four processes a step would."""
    no_output = {"compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager"}}
    no_output["compute_logs"]["class"] = "NoOpComputeLogManager"
    with dg.instance_for_test(overrides=no_output, temp_dir=str(home)) as instance:
        yield instance


def run(
    instance: dg.DagsterInstance,
    settings: Settings,
    *keys: str,
    config: dict[str, Any] | None = None,
    build: dict[str, Any] | None = None,
    run_config: dict[str, Any] | None = None,
    raise_on_error: bool = True,
    partition: str | None = None,
    tags: dict[str, str] | None = None,
    **deployment: Any,
) -> dg.ExecuteInProcessResult:
    """Materialize or observe the assets `keys`, checks included; where none is named, the tokenizer and its caches.

    config, build: settings, and the config of the steps of `keys`, in the run's config, as a Launchpad gives them.
    deployment: more of `niels_definitions`.
    """
    quiet = dg.Definitions(loggers={"console": dg.colored_console_logger})  # named, it speaks from INFO on
    definitions = dg.Definitions.merge(niels_definitions(settings=settings, **deployment), quiet)
    named = dg.AssetSelection.assets(*[key.split("/") for key in keys])
    selection = named if keys else dg.AssetSelection.all() - dg.AssetSelection.groups("eagle3")
    job = definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection=selection.resolve(definitions.resolve_asset_graph())
    )
    given = {"resources": {"settings": {"config": config}}} if config else run_config or {}
    if build:
        given = {**given, "ops": {key.replace("/", "__"): {"config": build} for key in keys}}
    how = {"run_config": given, "raise_on_error": raise_on_error, "partition_key": partition, "tags": tags}
    return job.execute_in_process(instance=instance, **how)


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    """Return the metadata values of every materialization: the asset's key -> name -> value."""
    found = typed_metadata(result)
    return {key: {name: entry.value for name, entry in entries.items()} for key, entries in found.items()}


def typed_metadata(result: dg.ExecuteInProcessResult) -> dict[str, dict[str, dg.MetadataValue[Any]]]:
    """Return the same with Dagster's types."""
    return {
        made.asset_key.to_user_string(): dict(made.metadata)
        for event in result.get_asset_materialization_events()
        if (made := event.step_materialization_data.materialization)
    }


def mirrors(shown, expected):
    """Return whether each key is shown under its own name, settings that are numbers as text: those are not plotted."""
    return all(shown[key] in (value, str(value)) for key, value in expected.items())


def built(result: dg.ExecuteInProcessResult) -> set[str]:
    """Return the keys of the assets that were built and not reused."""
    return {key for key, entries in metadata(result).items() if entries["run/state"] == "built"}


def stale(instance: dg.DagsterInstance, settings: Settings, **deployment: Any) -> dict[str, str]:
    """Return the caches, their partitions and the tokenizer that the UI shows as stale, each with its first reason.

    The UI's GraphQL server asks the same resolver (dagster_graphql/schema/asset_graph.py).
    """
    return stale_in(instance, niels_definitions(settings=settings, **deployment))


def stale_in(instance: dg.DagsterInstance, definitions: dg.Definitions) -> dict[str, str]:
    """Return the same of the assets of any definitions."""
    graph = definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = dict[str, str]()
    for key in graph.materializable_asset_keys:
        partitions = graph.get(key).partitions_def
        for number in [None] if partitions is None else partitions.get_partition_keys():
            if resolver.get_status(key, number).value == "STALE":
                name = "/".join([*key.path, *([number] if number else [])])
                found[name] = resolver.get_stale_causes(key, number)[0].reason
    return found


def verdicts(result: dg.ExecuteInProcessResult) -> dict[str, tuple[bool, str]]:
    """Return each check's verdict: name -> (passed, severity)."""
    return {found.check_name: (found.passed, found.severity.value) for found in result.get_asset_check_evaluations()}


def check_alone(
    instance: dg.DagsterInstance, settings: Settings, key: str, *names: str, **more: Any
) -> dg.ExecuteInProcessResult:
    """Run checks of an asset as the UI's button does, without building it. more: arguments of the definitions."""
    wanted = {dg.AssetCheckKey(dg.AssetKey(key.split("/")), name) for name in names}
    job = niels_definitions(settings=settings, **more).resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection=wanted)
    return subset.execute_in_process(instance=instance, raise_on_error=False)


@contextmanager
def builder_of(settings, key):
    """Hold the lock of a cache as another builder does, until somebody waits for it."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with build_lock(Path(settings.cache_dir, key)):
            held.set()
            done.wait()

    class Waiting(logging.Handler):
        def emit(self, record):
            if record.getMessage().endswith("; waiting"):
                done.set()

    builder, handler = threading.Thread(target=hold), Waiting()
    builder.start()
    held.wait()
    kernel.logger.addHandler(handler)
    try:
        yield
    finally:
        done.set()
        kernel.logger.removeHandler(handler)
        builder.join()


def environment(**more):
    """Return this environment without what Dagster or the settings would take from it."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "NIELS_GPT_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), ours["PATH"]])
    return {**ours, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **more}


def shell(home, command, **more):
    """Run a line of bash in `home`."""
    how = {"cwd": home, "env": environment(**more), "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", command], check=False, **how)


def settings_with(lines, folder, tokenizer, **more):
    """Settings of the sample, with a sources.toml of these lines and the caches in a folder."""
    (folder / "sources.toml").write_text(lines)
    where = {"cache_dir": str(folder / "cache"), "sources_file": str(folder / "sources.toml")}
    return Settings(source_root="sample", tokenizer=str(tokenizer), **where, **more)
