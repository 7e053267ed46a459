"""Megatron-LM, litdata, datatrove, OLMo-core, SkyRL and `datasets`: each in a process that runs its own code.

As a module: `library(name)` starts this file as a script with the installed package on the path, or skips the test. As
that script it serves the functions below: `read_*` return what the library's public reader gives of a folder, `write_*`
let the library write documents. Nothing of niels_gpt is imported there.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from support.peer_exchange import Tool, serve

FOLDERS = {
    "megatron": "megatron-core-0.16.1",
    "litdata": "litdata-0.2.76",
    "datatrove": "datatrove-0.10.1",
    "olmo": "ai2-olmo-core-3.0.0",
    "hf": None,
    "skyrl": "skyrl-0.4.0",
}
"""Of each format's library the folder below the one that NIELS_GPT_PEERS names; None: installed with the project."""


@contextmanager
def library(name):
    """Run a library; skips the test where NIELS_GPT_PEERS is not set. Raises: AssertionError for a missing folder."""
    import pytest

    peers, folder = os.environ.get("NIELS_GPT_PEERS"), FOLDERS[name]
    if peers is None:
        pytest.skip(f"set NIELS_GPT_PEERS to a folder with {folder or 'the packages of the peers'}, see .ci/run")
    path = Path(peers) / folder if folder else Path(peers)
    assert path.is_dir(), f"{path} is missing, and NIELS_GPT_PEERS is set"
    tool = Tool(path, __file__)
    yield tool
    tool.close()


def _seen(ids, ends=None, **more):
    """Return the ids of one file, or of all, as int64, and where documents end in them."""
    numbers = np.concatenate([np.asarray(part, dtype=np.int64) for part in ids]) if len(ids) else np.zeros(0, np.int64)
    return {"ids": numbers, "ends": None if ends is None else [int(end) for end in ends], **more}


def read_megatron(prefixes):
    """Return the documents of each pair of .bin and .idx, each sequence by `get`."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = []
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        sequences = [data.get(number) for number in range(len(data))]
        ends = np.concatenate([[0], np.cumsum(data.sequence_lengths)])[data.document_indices[1:]]
        found.append(_seen(sequences, ends, dtype=str(sequences[0].dtype)))
    return found


def write_megatron(prefix, documents, dtype):
    """Write documents of one sequence each, as Megatron-LM's preprocess_data.py does."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for ids in documents:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def read_litdata(folder, block):
    """Return the blocks of a StreamingDataset, and the ends of the items by the offsets in its chunks."""
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    data = StreamingDataset(folder, item_loader=TokensLoader(block_size=block), shuffle=False)
    blocks = [data[number] for number in range(len(data))]
    items, tokens = [], []
    for chunk in data.cache._reader.config._chunks:  # no public name: TokensLoader gives blocks, never items
        head = np.fromfile(Path(folder) / chunk["filename"], dtype="<u4", count=chunk["chunk_size"] + 2)
        assert head[0] == chunk["chunk_size"]
        items.append(((head[2:] - head[1]) // blocks[0].element_size()).tolist())
        tokens.append(chunk["dim"])
    return _seen(blocks, None, items=items, tokens=tokens, dtype=str(blocks[0].dtype))


def write_litdata(folder, documents, dtype, chunk_bytes):
    """Write documents as items by `optimize`, each chunk as full as it may be."""
    import torch
    from litdata import optimize
    from litdata.streaming.item_loader import TokensLoader

    items = [torch.tensor(ids, dtype=getattr(torch, dtype)) for ids in documents]
    optimize(
        fn=items.__getitem__,
        inputs=list(range(len(items))),
        output_dir=folder,
        chunk_bytes=chunk_bytes,
        num_workers=1,
        item_loader=TokensLoader(),
        reorder_files=False,
        keep_data_ordered=True,
        verbose=False,
    )


def read_datatrove(folder, window, width):
    """Return the windows of a DatatroveFolderDataset, and the positions in documents that it gives beside them."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    data = DatatroveFolderDataset(folder, window - 1, filename_pattern="*.ds", token_size=width, return_positions=True)
    rows = [data[number] for number in range(len(data))]
    positions = np.concatenate([row["positions"].numpy() for row in rows])
    return _seen([row["input_ids"] for row in rows], None, positions=positions.tolist())


def write_datatrove(folder, name, documents, width, loss, tokenizer):
    """Write a .ds file with its index and metadata by the class that datatrove's DocumentTokenizer uses."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        folder,
        name,
        save_loss_metadata=loss is not None,
        tokenizer_name_or_path=tokenizer,
        save_final_metadata=True,
        token_size=width,
    )
    for number, ids in enumerate(documents):
        file.write(ids, None if loss is None else np.array(loss[number]))
    file.close()


def read_olmo(paths, masks, length, dtype, eos, vocab_size):
    """Return the instances of a NumpyFSLDataset with their label masks, and the documents of each file."""
    from olmo_core.data import NumpyFSLDataset
    from olmo_core.data.utils import iter_document_indices

    data = NumpyFSLDataset(
        *paths,
        sequence_length=length,
        pad_token_id=eos,
        eos_token_id=eos,
        vocab_size=vocab_size,
        dtype=np.dtype(dtype).type,
        label_mask_paths=masks,
    )
    rows = [data[number] for number in range(len(data))]
    labels = None if masks is None else np.concatenate([row["label_mask"].numpy() for row in rows]).tolist()
    documents = [list(iter_document_indices(path)) for path in paths]
    by_id = [list(iter_document_indices(path, eos_token_id=eos, dtype=np.dtype(dtype).type)) for path in paths]
    return _seen([row["input_ids"] for row in rows], None, labels=labels, documents=documents, by_id=by_id)


def write_olmo(path, documents, dtype, eos, mask):
    """Write a token file, its label mask and its document indices by OLMo-core's own functions."""
    from olmo_core.data.utils import write_array_to_disk, write_document_indices

    write_array_to_disk(np.concatenate([np.array(ids, dtype=dtype) for ids in documents]), Path(path))
    write_document_indices(Path(path), dtype=np.dtype(dtype).type, eos_token_id=eos)
    if mask is not None:
        beside = Path(path).parent / "label_mask" / Path(path).name
        beside.parent.mkdir(exist_ok=True)
        write_array_to_disk(np.array(mask, dtype=np.bool_), beside)


def read_hf(folder, split):
    """Return the rows of a folder of parquet files as `datasets` finds them, and as torch takes them."""
    import datasets

    rows = datasets.load_dataset(folder, split=split)
    tensors = rows.with_format("torch")
    assert all(tensor.tolist() == row for tensor, row in zip(tensors["input_ids"], rows["input_ids"], strict=True))
    return list(rows)


def write_hf(folder, name, documents, labels, dtype):
    """Write a tokenized dataset as one parquet file."""
    import datasets

    columns = {"input_ids": documents} | ({} if labels is None else {"labels": labels})
    types = {"input_ids": dtype, "labels": "int64"}
    features = datasets.Features({column: datasets.List(datasets.Value(types[column])) for column in columns})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(Path(folder) / name)


def read_skyrl(folder, max_length):
    """Return the rows that SkyRL's SFT trainer would collate: ids, and the whole mask, of which it keeps one window.

    Its packages import Ray and vLLM, the loader does not: packages without content stand in their place.
    """
    from importlib import import_module
    from types import ModuleType

    for name in ("skyrl", "skyrl.train", "skyrl.train.dataset"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(Path(sys.argv[1], *name.split(".")))]
    data = import_module("skyrl.train.dataset.pretokenized").load_from_pretokenized(folder, max_length)
    rows = [data[number] for number in range(len(data))]
    assert all(set(row) == {"id", "input_ids", "attention_mask", "num_actions", "loss_mask"} for row in rows)
    return [(row["input_ids"], [0] * (len(row["input_ids"]) - row["num_actions"]) + row["loss_mask"]) for row in rows]


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    serve(globals())
