"""A program: a run of pretrain/wikitext whose step of partition 1 is killed, and its re-execution.

    NIELS_GPT_PARTITIONS=3 ... python -c 'from support import partition_runs; partition_runs.main()'

In the current folder, whose dagster.yaml it reads. A program, because the steps are processes that load this module.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import dagster as dg

KILLS = Path("kills")
"""While this file is there, the process of partition 1 is killed at its first progress."""
_LOGGED = ("STEP_SUCCESS", "STEP_FAILURE", "ASSET_MATERIALIZATION")


def job() -> dg.JobDefinition:
    """Return the job of the one asset, with the executor of the checkout. Each process of a run calls this."""
    from pipelines import steps

    steps.NETWORK_RETRIES = dg.RetryPolicy(max_retries=0)  # before the steps are defined
    from pipelines import definitions, partitions

    partitions.progress_log = _killing
    one = dg.define_asset_job("one", selection='key:"pretrain/wikitext"')
    return dg.Definitions.merge(definitions.defs, dg.Definitions(jobs=[one])).resolve_job_def("one")


def job_of_notes() -> dg.JobDefinition:
    """Return the job of the asset pretrain/notes by the settings of the environment, with all steps in this process."""
    from pipelines.definitions import niels_definitions
    from pipelines.resources import settings_from_environment

    one = dg.define_asset_job("one", selection='key:"pretrain/notes"', executor_def=dg.in_process_executor)
    definitions = niels_definitions(settings=settings_from_environment())
    return dg.Definitions.merge(definitions, dg.Definitions(jobs=[one])).resolve_job_def("one")


def _killing(context: dg.AssetExecutionContext, *_: str) -> Any:
    is_killed = KILLS.exists() and context.op_execution_context.get_mapping_key() == "p00001"

    def progress(*_):
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def logged(result):
    """Return by kind of event the steps that it was logged of."""
    events = [(event.event_type_value, str(event.step_key)) for event in result.all_events]
    return {kind: sorted(step for found, step in events if found == kind) for kind in _LOGGED}


def main():
    """Print one line of JSON: what was logged of each of the two runs."""
    KILLS.touch()
    with dg.DagsterInstance.from_config(".") as instance:
        again = None
        runs = []
        for _ in range(2):
            how = {"instance": instance, "reexecution_options": again, "raise_on_error": False}
            with dg.execute_job(dg.reconstructable(job), **how) as result:
                runs.append(logged(result))
            again = dg.ReexecutionOptions.from_failure(result.run_id, instance)
            KILLS.unlink(missing_ok=True)
    print(json.dumps(runs))
