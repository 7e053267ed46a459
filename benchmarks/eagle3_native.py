"""The native form: its batches and fields beside a copy, distributions beside reading them, bytes a token.

Sections `native`, `fields`, `probs` and `bytes` of eagle3.py, at the sizes of an 8B target: H=4,096, K=3, D=32,000.
"""

import argparse
import gc
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Seconds, Ways, measured, ratio
from numpy.typing import NDArray

from niels_gpt.eagle3 import cache
from niels_gpt.eagle3.format.drafters import manifest_keys
from niels_gpt.eagle3.format.layout import AUX_DTYPES, Layout
from niels_gpt.eagle3.format.native import NativeLayout, NativeSample, row_counts
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter, ShardWriter
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset, build_native_dataloader, native_batch, token_batch

HIDDEN, LAYERS, DRAFT, VOCAB, WIDTH = 4096, 3, 32_000, 128_256, 2048
BATCH = 8
VERSION_1 = Layout(WIDTH, LAYERS * HIDDEN, DRAFT, 0, "bf16")
LONGEST = 600  # tokens of the samples that are timed
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


class States:
    """Random states, of which samples take the first rows."""

    def __init__(self, width: int, dtypes: Iterable[torch.dtype]) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(width, LAYERS, HIDDEN, generator=generator).add_(1)
        self.aux = {dtype: drawn.to(dtype) for dtype in dtypes}
        self.last = drawn[:, 0].bfloat16()
        self.probs = torch.rand(width, DRAFT, generator=generator).bfloat16()

    def native(self, mask: NDArray[np.bool_], aux_dtype: str, targets: str) -> NativeSample:
        """Return a sample with this loss mask."""
        ((length, aux, rows),) = row_counts(np.array([0, len(mask)]), mask, targets).tolist()
        return NativeSample(
            input_ids=np.arange(length, dtype=np.uint32),
            loss_mask=mask,
            aux_hidden_states=self.aux[AUX_DTYPES[aux_dtype]][:aux],
            aux_scales=torch.ones(aux, LAYERS) if aux_dtype == "fp8" else None,
            last_hidden_states=self.last[:rows],
            log_normalizers=torch.ones(rows),
            argmax_ids=torch.arange(rows),
            targets=targets,
        )


def write_native(
    folder: Path, masks: Sequence[NDArray[np.bool_]], states: States, aux_dtype: str, targets: str = "loss"
) -> None:
    """Write a native cache, but for the target's weights."""
    layout = NativeLayout(HIDDEN, LAYERS, "bf16", aux_dtype, targets)
    counts = row_counts(np.cumsum([0, *map(len, masks)]), np.concatenate(masks), targets)
    cuts = layout.cut(counts)
    for shard, (first, behind) in enumerate(pairwise(cuts)):
        writer = NativeShardWriter(folder, shard, layout, counts[first:behind])
        for row, mask in enumerate(masks[first:behind]):
            writer.write(row, states.native(mask, aux_dtype, targets))
        writer.commit()
    conventions = {"layer_index": "block_output_0based", "last_hidden": "pre_norm", "shift": "none", "loss_mask": "raw"}
    head = {"norm": "none", "eps": None, "logit_scale": 1.0, "softcap": None, "tied": False, "compute_dtype": "fp32"}
    sizes = {"target_vocab_size": VOCAB, "draft_vocab_size": DRAFT, "hidden_size": HIDDEN, "seq_length": WIDTH}
    sizes |= {"num_samples": len(masks), "num_shards": len(cuts) - 1, "shard_bytes": 2**30}
    manifest = {"format_version": "native-1", "target_model": "none", "dtype": "bf16", "aux_dtype": aux_dtype, **sizes}
    manifest |= {"aux_layer_ids": [1, 15, 28], "selected_token_ids": list(range(DRAFT))}
    manifest |= manifest_keys(targets, manifest["aux_layer_ids"])
    cache.write_manifest(folder, manifest | {"conventions": conventions, "head": head})


def write_version_1(folder: Path, masks: Sequence[NDArray[np.bool_]], states: States, shard_size: int = 32) -> None:
    """Write a cache of version 1, whose padding is holes, but for the embeddings."""
    whole = torch.zeros(3, 1, WIDTH, dtype=torch.int64)
    for begin in range(0, len(masks), shard_size):
        some = masks[begin : begin + shard_size]
        writer = ShardWriter(folder, begin // shard_size, VERSION_1.fields, len(some))
        for row, mask in enumerate(some):
            tensors = dict(zip(("input_ids", "attention_mask", "loss_mask"), whole, strict=True))
            tensors["aux_hidden_states"] = states.aux[torch.bfloat16][None, : len(mask)].flatten(2)
            tensors["target_probs"] = states.probs[None, : len(mask)]
            tensors["position_mask"] = torch.ones(1, len(mask), 1, dtype=torch.bool)
            writer.write([row], [len(mask)], tensors)
        writer.commit()
    sizes = {"seq_length": WIDTH, "num_samples": len(masks), "shard_size": shard_size, "draft_vocab_size": DRAFT}
    sizes |= {"target_vocab_size": VOCAB, "aux_hidden_dim": LAYERS * HIDDEN}
    cache.write_manifest(folder, {"target_model": "none", "dtype": "bf16", **sizes})


def masks_of(samples: int) -> list[NDArray[np.bool_]]:
    """Return loss masks of 150 to 600 tokens, of which the last two thirds carry loss."""
    lengths = np.random.default_rng(0).integers(150, LONGEST, samples).tolist()
    return [np.arange(length) >= length // 3 for length in lengths]


def taken(samples: Iterable[NativeSample]) -> list[NDArray[np.uint8]]:
    """Return the bytes of the states that a batch takes of some samples, as views of the map."""
    tensors = [
        tensor
        for sample in samples
        for tensor in (sample.aux_hidden_states, sample.aux_scales, sample.last_hidden_states)
        if tensor is not None and len(tensor)
    ]
    return [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in tensors]


def copied(views: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the bytes of some views in new memory."""
    buffer, begin = np.empty(sum(view.nbytes for view in views), np.uint8), 0
    for view in views:
        np.copyto(buffer[begin : begin + view.nbytes], view)
        begin += view.nbytes
    return buffer


def bench_native(arguments: argparse.Namespace, folder: Path) -> None:
    """Compare batches without distributions with copies of the same bytes."""
    for aux_dtype in ("bf16", "fp8"):
        compare(arguments, folder / aux_dtype, aux_dtype, "loss")


def bench_fields(arguments: argparse.Namespace, folder: Path) -> None:
    """Compare batches with a state for each token with copies of the same bytes, and with `native_batch`."""
    for aux_dtype in ("bf16", "fp8"):
        compare(arguments, folder / aux_dtype, aux_dtype, "all")


def compare(arguments: argparse.Namespace, path: Path, aux_dtype: str, targets: str) -> None:
    """Write a cache, and print the speed of its batches and of copies of the bytes that they read."""
    samples, rounds = (2 * BATCH, 1) if arguments.quick else (6 * BATCH, arguments.rounds)
    masks, order = masks_of(samples), np.random.default_rng(1).permutation(samples).tolist()
    write_native(path, masks, States(LONGEST, [AUX_DTYPES[aux_dtype], torch.bfloat16]), aux_dtype, targets)
    dataset, fields = NativeEagle3Dataset(path), None if targets == "loss" else FIELDS
    parts = [[dataset[index] for index in order[begin : begin + BATCH]] for begin in range(0, samples, BATCH)]
    size, ids = sum(view.nbytes for part in parts for view in taken(part)), dataset.selected_token_ids

    def each(made: Callable[[Any], object], of: Iterable[Any]) -> None:
        for one in of:
            made(one)

    limit, loader = "copies of the same bytes", "the dataloader, in this process"
    ways: Ways = {
        "native_batch": partial(each, partial(native_batch, selected_token_ids=ids), parts),
        limit: partial(each, lambda part: copied(taken(part)), parts),
        loader: partial(each, lambda _: None, build_native_dataloader(path, BATCH, True, fields=fields)),
    }
    if fields is not None:
        ways["token_batch"] = partial(each, token_batch, parts)
    seconds = measured(ways, rounds, clock=time.process_time)
    print(f"{aux_dtype}, targets {targets}: {samples} samples in batches of {BATCH}, {size / 1e6:.0f} MB, {limit} = 1")
    show(seconds, size, limit)
    found, least = ratio(seconds, loader, limit), {"bf16": 0.85, "fp8": 0.5}[aux_dtype]
    print(f"  {'met ' if found >= least else 'MISSED'} the dataloader / the copy: {found:.2f}, aim {least}")
    shutil.rmtree(path)


def show(seconds: Seconds, size: int, limit: str) -> None:
    """Print a line for each way: its median time, the bytes a second, and its share of the limit's speed."""
    for name, found in seconds.items():
        middle = statistics.median(found)
        shares = f"{ratio(seconds, name, limit):6.2f} of the limit"
        print(f"  {name:<40} {middle * 1e3:9.1f} ms {size / middle / 1e9:6.2f} GB/s {shares}", flush=True)


def dropped(folder: Path) -> None:
    """Drop a folder's files from the page cache. What is mapped stays there, so nothing may be."""
    gc.collect()
    for path in folder.iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def bench_probs(arguments: argparse.Namespace, folder: Path) -> None:
    """Compare distributions that TargetHead makes on the CPU with those that version 1 reads from a disk."""
    samples, rounds = (2, 1) if arguments.quick else (4, min(arguments.rounds, 5))
    masks, states = masks_of(samples), States(LONGEST, [torch.bfloat16])
    write_native(folder / "native", masks, states, "bf16")
    write_version_1(folder / "version 1", masks, states)
    head = TargetHead({"lm_head": torch.rand(DRAFT, HIDDEN)})

    def read(name: str, then: Callable[[Path], object]) -> None:
        then(folder / name)

    def native(path: Path, *, probs: bool) -> None:
        (batch,) = build_native_dataloader(path, samples, False)
        if probs:
            head.target_probs(batch)

    def version_1(path: Path) -> None:
        dataset = cache.CachedEagle3Dataset(path)
        for index in range(samples):
            dataset[index]["aux_hidden_states"].clone(), dataset[index]["target_probs"].clone()

    def forget() -> None:
        dropped(folder / "native"), dropped(folder / "version 1")

    ways: Ways = {
        "native, cold": partial(read, "native", partial(native, probs=False)),
        "native, cold, and its distributions": partial(read, "native", partial(native, probs=True)),
        "version 1, cold": partial(read, "version 1", version_1),
    }
    forget()
    seconds = measured(ways, rounds, after=forget)
    rows = sum(int(mask[1:].sum()) for mask in masks)
    print(f"probs: {samples} samples, {sum(map(len, masks)):,} tokens, {rows:,} target rows, D={DRAFT:,}; on the CPU")
    for name, found in seconds.items():
        print(f"  {name:<40} {statistics.median(found) * 1e3:9.1f} ms", flush=True)
    made = statistics.median(seconds["native, cold, and its distributions"]) - statistics.median(
        seconds["native, cold"]
    )
    print(f"  {rows / made:,.0f} distributions a second of this CPU; {torch.get_num_threads()} threads")
    shutil.rmtree(folder / "native")
    shutil.rmtree(folder / "version 1")


def real_masks(chats: int) -> list[NDArray[np.bool_]] | None:
    """Return the loss masks of chats of Dolly and OASST1, by GPT-2's tokenizer; None where they are not here."""
    from niels_gpt.chat import open_tokenizer
    from niels_gpt.recipes.eagle3.input import input_rows
    from niels_gpt.settings import Settings

    names = ("NIELS_GPT_TEST_DATA", "NIELS_GPT_TEST_MODELS")
    if not all(name in os.environ for name in names):
        print(f"bytes: left out, as one of {', '.join(names)} is not set")
        return None
    settings = Settings(source_root=os.environ[names[0]], seed=42)
    tokenizer = open_tokenizer(str(Path(os.environ[names[1]], "gpt2_tokenizer")), chat_template=CHATML)
    masks = []
    for source in ("dolly15k", "oasst1"):
        rows = input_rows(settings, source, tokenizer, seq_length=WIDTH, counters=Counter())
        masks += [row.loss_mask.astype(np.bool_) for row in islice(rows, chats // 2)]
    return masks


def disk_bytes(folder: Path) -> int:
    """Return what the shards of a folder take on the disk, as du counts it."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("shard-*"))


def bench_bytes(arguments: argparse.Namespace, folder: Path) -> None:
    """Print the size of both forms by token, for real chats: with padding, without, and as du counts it."""
    masks = real_masks(4 if arguments.quick else 100)
    if masks is None:
        return
    tokens, states = sum(map(len, masks)), States(WIDTH, [torch.bfloat16, torch.float8_e4m3fn])
    counts = row_counts(np.cumsum([0, *map(len, masks)]), np.concatenate(masks))
    loss = sum(int(mask.sum()) for mask in masks) / tokens
    print(f"by token: {len(masks)} chats, {tokens:,} tokens, {loss:.3f} of them with loss; H={HIDDEN:,}, D={DRAFT:,}")
    write_version_1(folder / "1", masks, states)
    ragged, padded = VERSION_1.slot_bytes * tokens, VERSION_1.row_bytes * len(masks)
    on_disk = disk_bytes(folder / "1")
    shutil.rmtree(folder / "1")
    for name, size in {"version 1, padded": padded, "version 1, a slot": ragged, "version 1, du": on_disk}.items():
        print(f"  {name:<30} {size / tokens:12,.1f}")
    for aux_dtype, least_ragged, least_padded in (("bf16", 0.36, 0.10), ("fp8", 0.21, 0.06)):
        write_native(folder / aux_dtype, masks, states, aux_dtype)
        size = disk_bytes(folder / aux_dtype)
        shutil.rmtree(folder / aux_dtype)
        layout = NativeLayout(HIDDEN, LAYERS, "bf16", aux_dtype)
        stated = {name: round(each, 2) for name, each in layout.token_bytes(counts).items()}
        print(f"  native, {aux_dtype:<22} {layout.shard_bytes(counts) / tokens:12,.1f}  by tensor: {stated}")
        print(f"  native, {aux_dtype + ', du':<22} {size / tokens:12,.1f}")
        for other, limit, least in (
            ("ragged", ragged, least_ragged),
            ("padded", padded, least_padded),
            ("du", on_disk, least_ragged),
        ):
            found = size / limit
            print(f"  {'met ' if found <= least else 'MISSED'} of version 1, {other}: {found:.3f}, at most {least}")


SECTIONS = {"native": bench_native, "fields": bench_fields, "probs": bench_probs, "bytes": bench_bytes}
