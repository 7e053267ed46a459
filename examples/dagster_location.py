"""A code location with the caches in it: docs/tutorials/dagster.md explains it.

dagster dev -f examples/dagster_location.py
"""

import dagster as dg

from niels_gpt.cache import SFTExampleDataset
from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions

CACHES = Settings(source_root="sample", cache_dir="cache", sft="workshop=chats.jsonl")


@dg.asset(deps=[dg.AssetKey(["llm", "sft", "workshop"])])
def training() -> dg.MaterializeResult[None]:
    """Stands for your training: it reads the cache."""
    chats = SFTExampleDataset.open("cache/sample/sft/workshop", "train", T=64)
    return dg.MaterializeResult(metadata={"tokens with loss": chats.counts.supervised_tokens})


defs = dg.Definitions.merge(
    niels_definitions(key_prefix="llm", settings=CACHES),
    dg.Definitions(assets=[training], executor=dg.in_process_executor),
)
