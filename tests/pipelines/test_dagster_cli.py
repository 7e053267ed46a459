"""The commands as people and CI type them, each in a process of its own and a folder of its own."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._cli import cli
from support import ROOT
from support.dagster_runs import environment, shell
from support.data_files import write
from support.documents import blocks_of
from support.pipeline_seams import building, turn_taken

from niels_gpt.cache import PretrainTokenStreamDataset
from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from pipelines.definitions import EXECUTOR


@pytest.fixture
def home(tmp_path):
    """A folder as a fresh clone is for Dagster: its yaml files, dg.toml and no cache."""
    for name in ("dagster.yaml", "workspace.yaml", "dg.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def events(home, monkeypatch):
    """Return what each asset went through, newest first: its key -> the states of its materializations."""
    monkeypatch.chdir(home)  # the paths of dagster.yaml are relative
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return {
            key.to_user_string(): [
                str(record.asset_materialization.metadata["run/state"].value)
                for record in instance.fetch_materializations(key, limit=10).records
                if record.asset_materialization
            ]
            for key in instance.all_asset_keys()
            if instance.fetch_materializations(key, limit=1).records
        }


def processes_of_steps(home, monkeypatch):
    """Return the process ids of the steps of all runs, each step's own."""
    monkeypatch.chdir(home)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        logs = [record.dagster_event for run in instance.get_runs() for record in instance.all_logs(run.run_id)]
        return {event.step_key: event.pid for event in logs if event and event.event_type_value == "STEP_START"}


NAMES = ("dolly15k", "oasst1", "support")


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
def test_the_command_of_the_readme_builds_exactly_the_sft_caches(home, monkeypatch, in_process):
    chats = [{"prompt": f"What is {number} plus 1?", "response": f"{number + 1}."} for number in range(30)]
    (home / "chats.json").write_text(json.dumps(chats))
    (home / "sources.toml").write_text('[sft.support]\nfiles = "chats.json"\nattribution = "The support team"\n')
    config = """ --config-json '{"execution": {"config": {"in_process": true}}}'""" if in_process else ""
    command = "DAGSTER_MODULE_NAME=pipelines.definitions dagster asset materialize --select sft/*"
    done = shell(home, command + config)
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(" - ")[2] for line in done.stderr.splitlines()]
    assert len(lines) < 20 and lines[-1] == "caches: cache/sample; niels-gpt list cache/sample"
    assert {line.split(":")[0] for line in lines if ": built in " in line} == {f"sft/{name}" for name in NAMES}
    processes = processes_of_steps(home, monkeypatch)
    assert len(set(processes.values())) == (1 if in_process else len(processes))
    states = events(home, monkeypatch)
    assert len(states.pop("tokenizer")) >= 1, "which the caches' steps have made"
    assert states == {f"sft/{name}": ["built"] for name in NAMES}
    built = {str(path.parent.relative_to(home)) for path in home.glob("cache/sample/*/*/meta.json")}
    assert built == {f"cache/sample/sft/{name}" for name in NAMES}
    assert read_meta("cache/sample/sft/support/meta.json")["source"]["attribution"] == "The support team"
    assert not list(home.glob(".tmp_dagster_home_*"))  # history is in .dagster/, nothing is left beside it
    if in_process:  # the command of the page, over what is up to date
        (block,) = [each for each in blocks_of((ROOT / "docs/dagster.md").read_text()) if '"force"' in each.body]
        done = shell(home, block.body.replace("$ ", ""))
        assert done.returncode == 0, done.stderr
        again = events(home, monkeypatch)
        assert all(again[f"sft/{name}"][0] == "built" for name in ("dolly15k", "oasst1"))


@dg.job(executor_def=EXECUTOR)
def of_no_step():
    pass


def test_the_last_line_of_a_run_can_be_pasted_into_a_shell(monkeypatch):
    monkeypatch.setenv("NIELS_GPT_CACHE_DIR", "my caches")
    with dg.DagsterInstance.ephemeral() as instance:
        config = {"execution": {"config": {"in_process": True}}}
        run = dg.execute_job(dg.reconstructable(of_no_step), instance, run_config=config)
        (line,) = [each.user_message for each in instance.all_logs(run.run_id) if "caches: " in each.user_message]
    assert shlex.split(line.split("; ")[1]) == ["niels-gpt", "list", "my caches/sample"]


@pytest.mark.slow
def test_a_selection_in_quotes_and_one_by_key_are_that_of_the_readme(home, monkeypatch):
    # Dagster resolves a selection alike for `list` and `materialize`, and in this process as in one of its own.
    monkeypatch.chdir(home)
    chats = ["sft/", "sft/dolly15k", "sft/oasst1"]
    for selection, keys in {"sft/*": chats, 'key:"sft/*"': chats, "trees/oasst1": ["trees/oasst1"]}.items():
        done = CliRunner().invoke(cli, ["asset", "list", "-m", "pipelines.definitions", "--select", selection])
        assert done.exit_code == 0, done.output
        assert done.output.split() == keys


def test_the_definitions_validate_without_any_environment_variable(home):
    done = shell(home, "dagster definitions validate")
    assert done.returncode == 0, done.stderr
    assert "Validation successful for code location niels_gpt" in done.stderr + done.stdout


SERVER = """
import json, multiprocessing, os, sys
from pathlib import Path
from pipelines.definitions import PRELOADED

def look(pipe):  # in a process that the server has forked
    threads = [Path(task, "comm").read_text().strip() for task in Path(f"/proc/{os.getppid()}/task").iterdir()]
    cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    pipe.send([threads, cuda, [name for name in PRELOADED if name not in sys.modules]])

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    for _ in range(2):
        ours, its = context.Pipe()
        process = context.Process(target=look, args=(its,))
        process.start()
        print(json.dumps(ours.recv()))
        process.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_the_server_that_forks_the_steps_has_the_modules_and_neither_a_thread_nor_cuda(home):
    (home / "server.py").write_text(SERVER)
    done = shell(home, "python server.py")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        threads, has_cuda, missing = json.loads(line)
        assert len(threads) == 1, threads
        assert not has_cuda and not missing


@pytest.mark.slow
def test_within_one_run_the_pretrain_builds_take_turns(home, monkeypatch):
    selection = 'key:"pretrain/roam" or key:"pretrain/gutenberg"'
    done = shell(home, f"dagster asset materialize -m pipelines.definitions --select '{selection}'")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(home)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        (finished,) = instance.get_runs()
        steps = {
            (record.dagster_event.step_key, record.dagster_event.event_type_value): record.timestamp
            for record in instance.all_logs(finished.run_id)
            if record.dagster_event and str(record.dagster_event.step_key).startswith("pretrain__")
        }
    spans = sorted(
        (began, steps[step, "STEP_SUCCESS"]) for (step, kind), began in steps.items() if kind == "STEP_START"
    )
    (_, first_ended), (second_began, _) = spans
    assert first_ended <= second_began


@pytest.mark.slow
def test_two_runs_with_pretrain_builds_take_turns(home, monkeypatch):
    command = "exec dagster asset materialize -m pipelines.definitions --select "
    assert events(home, monkeypatch) == {}  # makes the history: two runs that do it at once fail in Dagster
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with turn_taken(home / "cache" / "sample"):  # both are at the same point when they are let go
        both = [
            subprocess.Popen(["bash", "-c", command + name], cwd=home, env=environment(), **pipe)
            for name in ("pretrain/roam", "pretrain/gutenberg")
        ]
        for each in both:
            assert each.stdout is not None
            while b"a pretrain cache is being built by user" not in (line := each.stdout.readline()):
                assert line, "the run ended without waiting"
        assert not list(home.glob("cache/sample/pretrain/*/meta.json"))
    for each in both:
        each.communicate()
    assert [each.returncode for each in both] == [0, 0]
    runs = [json.loads(path.read_text()) for path in home.glob("cache/sample/.runs/pretrain.*.jsonl")]
    first, second = sorted(runs, key=lambda run: run["time"])
    assert first["time"] <= second["time"] - second["seconds"]


@pytest.mark.faults
def test_a_step_killed_in_mid_build_leaves_the_version_before_and_the_next_run_completes(
    home, monkeypatch, tiny_model_path
):
    notes = home / "mirror" / "roam"
    write(notes / "a.md", "- a thought\n" * 9)
    write(notes / "b.md", "- another one\n")
    settings = Settings(
        source_root=str(home / "mirror"), cache_dir=str(home / "cache"), tokenizer=str(tiny_model_path), threads=1
    )
    cache = build_token_cache(settings, "roam").path
    before = read_meta(str(cache / "meta.json"))

    for number in range(40):  # 40 MB: seconds of one thread
        (notes / f"long{number}.md").write_text("- the heron walks to the river and finds pebbles\n" * 20_000)
    command = "exec dagster asset materialize -m pipelines.definitions --select pretrain/roam"
    names = ("source_root", "tokenizer", "threads")
    given = {f"NIELS_GPT_{name.upper()}": str(getattr(settings, name)) for name in names}
    run = subprocess.Popen(["bash", "-c", command], cwd=home, env=environment(**given), start_new_session=True)
    try:
        kill_the_builder(run, cache)
        assert read_meta(str(cache / "meta.json")) == before
        assert PretrainTokenStreamDataset(cache / "train", T=8, device="cpu").num_windows > 0
    finally:
        os.killpg(run.pid, signal.SIGKILL)  # as when the machine goes down: the run's own retry never comes
        run.wait()
    again = shell(home, command, **given)
    assert again.returncode == 0, again.stderr
    assert read_meta(str(cache / "meta.json"))["documents_read"] == 42
    assert events(home, monkeypatch)["pretrain/roam"] == ["built"]


def kill_the_builder(run, cache):
    """Kill the process that builds `cache` as soon as it has a checkpoint, and wait until it is gone."""
    versions = cache.parent / ".versions" / cache.name
    while not list(versions.glob("building-*.journal/journal.jsonl")):
        assert run.poll() is None, "the build was over before it could be killed"
        time.sleep(0.01)
    pid = int((versions / "lock").read_text().split("pid ")[1])
    assert pid != run.pid, "a step is a process of its own"
    os.kill(pid, signal.SIGKILL)
    with building(cache, wait=True):  # the kernel drops a dead process's lock
        assert list(versions.glob("building-*.journal/journal.jsonl")), "it was killed before it could commit"
