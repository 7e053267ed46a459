"""A program: a run of eagle3/targets whose process is killed after its first shard, and its re-execution.

    NIELS_GPT_EAGLE3_TARGET=... python -c 'from support import target_runs; target_runs.main()'

In the current folder, whose dagster.yaml it reads, with the caches in cache/. A program, because the steps are
processes that load this module.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import dagster as dg

from support.partition_runs import logged

KILLS = Path("kills")
"""While this file is there, the process is killed at the first progress after a shard."""
_FIRST = "shard-000000.safetensors"


def job() -> dg.JobDefinition:
    """Return the job of the one asset, with the executor of the checkout. Each process of a run calls this."""
    from pipelines import steps

    steps.NETWORK_RETRIES = dg.RetryPolicy(max_retries=0)  # before the steps are defined
    from pipelines import definitions, partitions

    steps.progress_log = partitions.progress_log = _killing
    one = dg.define_asset_job("one", selection='key:"eagle3/targets"')
    return dg.Definitions.merge(definitions.defs, dg.Definitions(jobs=[one])).resolve_job_def("one")


def _killing(context: dg.AssetExecutionContext, *_: str) -> Any:
    step = str(context.op_execution_context.get_step_execution_context().step.key)

    def progress(*_):
        if KILLS.exists() and _shards() and not step.endswith("[p00001]"):
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def _shards():
    """Return the inodes of the first shard, of an unfinished version or of the committed one."""
    return [file.stat().st_ino for file in Path("cache/eagle3/.versions/targets").rglob(_FIRST)]


def main():
    """Print one line of JSON: what was logged of each of the two runs, and the first shard's inodes after it."""
    KILLS.touch()
    with dg.DagsterInstance.from_config(".") as instance:
        again = None
        runs = []
        for _ in range(2):
            how = {"instance": instance, "reexecution_options": again, "raise_on_error": False}
            config = {"ops": {"eagle3__targets": {"config": {"force": True}}}}
            with dg.execute_job(dg.reconstructable(job), run_config=config, **how) as result:
                runs.append({**logged(result), "inodes": _shards()})
            again = dg.ReexecutionOptions.from_failure(result.run_id, instance)
            KILLS.unlink(missing_ok=True)
    print(json.dumps(runs))
