"""A run of a mixture of caches here or at a URL, logged step by step: see trainer_runs.py.

url_run.py FOLDER CACHES WORKERS [LOCAL]
"""

import json
import os
import sys
import warnings
from itertools import islice
from pathlib import Path

from torch.utils.data import DataLoader

from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream
from support.trainer_runs import STEPS, Log


def main(folder, caches, workers, *local):
    warnings.simplefilter("ignore")
    log, saved, first = Log(folder), Path(folder) / "saved.json", 1
    opening = {"local": local[0], "max_bytes": "16 MiB"} if local else {}
    how = {"T": 600, "global_batch_size": 6, "seed": 4, "rank": log.rank, "world_size": log.ranks, **opening}
    streams = [EpochStream(f"{caches}/text/train", order="shards", open_shards=1, **how)]
    streams.append(PackedStream(f"{caches}/chats", **how))
    stream = MixtureStream(streams, [2, 1], seed=4)
    if saved.exists():
        found = json.loads(saved.read_text())
        first = found["step"] + 1
        stream.load_state_dict(found["state"])
    start = "spawn" if int(workers) == 1 else None  # a pickled copy mounts the URL itself; a fork has the mount
    batches = iter(DataLoader(stream, batch_size=None, num_workers=int(workers), multiprocessing_context=start))
    for number, batch in enumerate(islice(batches, STEPS - first + 1), first):
        log.step(number, [[batch.x, batch.y]], 0.0, 1)
        if log.rank == 0 and number % 3 == 0:
            saved.with_suffix(".new").write_text(json.dumps({"step": number, "state": batch.state}))
            os.replace(saved.with_suffix(".new"), saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
