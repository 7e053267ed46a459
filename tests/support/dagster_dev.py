"""Dagster's services as processes on loopback, asked over GraphQL: runs launched and watched, all killed at once."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from support.dagster_runs import environment

SECONDS = 240.0
"""How long anything is waited for."""
_LAUNCH = """mutation ($given: ExecutionParams!) { launchRun(executionParams: $given) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
_RUNS = "{ runsOrError { ... on Runs { results { runId status } } } }"
_BACKFILL = """mutation ($given: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $given) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
_BACKFILLED = """query ($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill {
  runs(limit: 100) { id status tags { key value } } } } }"""
_AGAIN = """mutation ($given: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $given) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_PARTITIONS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  partitionStats { numMaterialized numFailed } } } }"""
_TERMINATE = """mutation ($run: String!, $policy: TerminateRunPolicy) {
  terminateRun(runId: $run, terminatePolicy: $policy) { __typename } }"""


def until(question, what):
    """Return the first answer that is not empty; a connection refused is none."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if answer := question():
                return answer
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {SECONDS:.0f} s")


DEV = "dagster dev -h 127.0.0.1 -p 3000"


class Dev:
    """Commands of Dagster that run: webserver, daemon, code servers, and the runs they launch, all in one session."""

    def __init__(self, home, *commands, **more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        # A shell in the background ignores SIGINT, and dagster maps SIGTERM to it: without env it could not be stopped.
        lines = [f"env --default-signal=INT,TERM {each.replace(' 3000', f' {port}')} &" for each in commands or (DEV,)]
        with open(home / "dev.log", "ab") as log:
            how = {"stdout": log, "stderr": log, "start_new_session": True}
            command = ["bash", "-c", " ".join([*lines, "wait"])]
            self.process = subprocess.Popen(command, cwd=home, env=environment(**more), **how)
        until(lambda: self.ask("{ version }"), f"{lines}, see {home / 'dev.log'}")

    def ask(self, query, **variables):
        """Return what the webserver's GraphQL answers."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return found["data"]

    def launch(self, *assets, location="niels_gpt", tags=None):
        """Launch a run of assets as the UI's button does, and return its id. It waits in the queue for the daemon."""
        selector = {
            "repositoryLocationName": location,
            "repositoryName": "__repository__",
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": key.split("/")} for key in assets],
        }
        named = [{"key": key, "value": value} for key, value in (tags or {}).items()]
        given = {"selector": selector, "mode": "default", "runConfigData": {}, "executionMetadata": {"tags": named}}
        answer = self.ask(_LAUNCH, given=given)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def backfill(self, asset, total):
        """Backfill all partitions of an asset as the UI's button does; return each one's run and its status."""
        given = {"assetSelection": [{"path": asset.split("/")}], "allPartitions": True}
        answer = self.ask(_BACKFILL, given=given)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer

        def finished():  # the backfill's own status comes half a minute later
            runs = self.ask(_BACKFILLED, id=answer["backfillId"])["partitionBackfillOrError"]["runs"]
            return [run for run in runs if run["status"] in ("SUCCESS", "FAILURE")][total - 1 :] and runs

        runs = until(finished, "the backfill")
        tags = [{tag["key"]: tag["value"] for tag in run["tags"]} for run in runs]
        return {each["dagster/partition"]: (run["id"], run["status"]) for each, run in zip(tags, runs, strict=True)}

    def again(self, run):
        """Execute a failed run again as the UI's button does, and return the new one's id."""
        answer = self.ask(_AGAIN, given={"parentRunId": run, "strategy": "FROM_FAILURE"})["launchRunReexecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def partitions(self, asset):
        """Return how many partitions of an asset the UI shows as materialized, and as failed."""
        stats = self.ask(_PARTITIONS, key={"path": asset.split("/")})["assetNodeOrError"]["partitionStats"]
        return stats["numMaterialized"], stats["numFailed"]

    def statuses(self):
        """Return the status of every run by its id."""
        return {run["runId"]: run["status"] for run in self.ask(_RUNS)["runsOrError"]["results"]}

    def finished(self, *runs):
        """Wait until the runs are over, and return their statuses."""

        def statuses():
            found = self.statuses()
            return [found[run] for run in runs if found[run] in ("SUCCESS", "FAILURE", "CANCELED")]

        return until(lambda: len(statuses()) == len(runs) and statuses(), "the runs")

    def built(self, key):
        """Return the ids of the runs that have materialized an asset, the newest first."""
        path = json.dumps(key.split("/"))
        query = (
            f"{{ assetOrError(assetKey: {{path: {path}}}) {{ ... on Asset {{ assetMaterializations {{ runId }} }} }} }}"
        )
        return [each["runId"] for each in self.ask(query)["assetOrError"].get("assetMaterializations", [])]

    def terminate(self, run, policy):
        """Terminate a run as the UI does; return the kind of the answer."""
        return str(self.ask(_TERMINATE, run=run, policy=policy)["terminateRun"]["__typename"])

    def processes(self):
        """Return all living processes of the session: dev, webserver, daemon, code servers, runs and their steps."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has ended
                continue
            threads = list(stat.parent.glob("task/*"))  # a dead first thread is a zombie while others still end
            if int(session) == self.process.pid and (state != "Z" or len(threads) > 1):
                found.append(int(stat.parent.name))
        return found

    def kill(self):
        """Kill every process of the session with SIGKILL, as when the machine goes down."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()


@contextmanager
def dagster_dev(home, *commands, **more):
    """Run `dagster dev`, or other commands that serve at the port 3000, in `home` with its yaml files.

    Another port is taken for it. more: variables of the environment.
    """
    running = Dev(home, *commands, **more)
    try:
        yield running
        os.killpg(running.process.pid, signal.SIGTERM)
        until(lambda: not running.processes(), "the end of all processes")
    finally:
        running.kill()
