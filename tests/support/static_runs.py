"""A code location with static partitions, by the settings of the environment: the step of partition 1 is killed.

That is so while there is a file `kills` in the current folder. Dagster's processes load this module.
"""

import os
import signal
from pathlib import Path
from typing import Any

import dagster as dg

from pipelines import steps

steps.NETWORK_RETRIES = dg.RetryPolicy(max_retries=0)  # before the steps are defined

from pipelines import definitions, partitions  # noqa: E402

KILLS = Path("kills")


def _killing(context: dg.AssetExecutionContext, *_: str) -> Any:
    is_killed = KILLS.exists() and context.has_partition_key and context.partition_key == "00001"

    def progress(*_):
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


partitions.progress_log = _killing
defs = dg.Definitions.merge(
    definitions.niels_definitions(static_partitions=True),
    dg.Definitions(executor=dg.multiprocess_executor.configured({"start_method": {"forkserver": {}}})),
)
