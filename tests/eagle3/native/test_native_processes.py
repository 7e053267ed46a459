"""Other processes and threads read what one wrote; a shard that was replaced since is refused."""

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.eagle3_native import write_native
from support.errors import refused

from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.native import NativeEagle3Dataset

MASKS = [[0, 1, 1], [1, 0], [0, 1, 0, 1]]  # tokens 3, 2, 4; target rows [1, 2], [1], [1, 2, 3]; auxiliary rows 2, 1, 3


def first_ids(dataset, queue):
    queue.put([sample.input_ids.tolist() for sample in dataset])


def test_other_processes_and_threads_read_the_same_with_few_maps(tmp_path):
    written = [sample.input_ids.tolist() for sample in write_native(tmp_path, MASKS * 4, cuts=[2, 5, 9])]
    dataset = NativeEagle3Dataset(tmp_path, max_open_shards=1)
    assert (
        [sample.input_ids.tolist() for sample in dataset]
        == written
        == [sample.input_ids.tolist() for sample in pickle.loads(pickle.dumps(dataset))]
    )
    assert len(dataset._shards._open) == 1 and dataset[-1].input_ids.tolist() == written[-1]
    with pytest.raises(IndexError):
        dataset[12]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda index: dataset[index % 12].input_ids.tolist(), range(240))] == written * 20
    for method in ("fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=first_ids, args=(dataset, queue))
        process.start()
        assert queue.get() == written
        process.join()


def test_a_shard_that_was_replaced_since_is_refused_and_a_view_keeps_its_map(tmp_path):
    write_native(tmp_path / "a", MASKS)
    write_native(tmp_path / "b", MASKS[::-1])
    dataset = NativeEagle3Dataset(tmp_path / "a")
    path = shard_path(tmp_path / "a", 0)
    os.replace(shard_path(tmp_path / "b", 0), path)
    with refused("E701", "shard-000000.safetensors"):
        dataset[0]
