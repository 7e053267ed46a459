"""Batches through the adapters of niels_gpt.trainers, beside each trainer's own loader of the same tokens.

Run: python benchmarks/trainers.py [--only grain] [--tokens 8000000] [--rounds 7]

    grain   StreamDataset, and rows of StreamSource in Grain's `.batch`. Beside it Grain's own way: for windows a source
            over a memmap with `.shuffle`, for packed rows documents of that memmap, shuffled, in its first-fit packing;
            and the stream itself
    torchtitan  StreamDataLoader. Beside it HuggingFaceTextDataLoader over the same documents and the same tokenizer,
            which encodes, or gives ids that are there; and the stream. NIELS_GPT_PEERS names the packages' folder, see
            .ci/run
    automodel  StreamDataset, and beside it NanogptDataset, both in NeMo Automodel's ParallelAwareDataloader with its
            default_collater. NIELS_GPT_PEERS names the folder of its wheel, as .ci/run unpacks it
    lightning  StreamDataModule in a Trainer whose step does nothing. Beside it the same Trainer with a DataLoader over
            windows of a memmap, shuffled
    transformers   batches of Trainer's get_train_dataloader(). Beside them the same rows from a dataset of `datasets`
            on disk, as tensors, shuffled by Trainer's sampler; for packed rows its collator makes the masks, too
    trl     the same of SFTTrainer with padding_free=True, for packed rows, which `datasets` gives as numpy arrays

Each way gives batches of 8 x 1,024 tokens of one cache, in turns with the others; its speed is a median of the rounds'
ratios. Seconds are CPU time of this process with all of its threads.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_caches import Letters
from loader_streams import texts
from measuring import Ways, measured, ratio
from numpy.typing import NDArray
from torchtitan_texts import Texts

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.sampling import EpochStream, PackedStream, block_causal_mask

B, T = 8, 1_024


def cache_of(root: Path, tokens: int) -> Path:
    """Build documents of 1,000 tokens, on average, in shards."""
    sizes = {"max_train_tokens": tokens, "max_val_tokens": 0, "shard_bytes": tokens, "shuffle_buffer": None}
    build_pretrain_cache(texts(2 * tokens), root / "notes", tokenizer=Letters(), seed=0, **sizes)
    return root / "notes"


def compare(name: str, ways: dict[str, Iterable[Any]], own: str, rounds: int, batches: int = 200) -> None:
    """Print how many times the speed of the trainer's own loader each other way has. own: its name."""
    iterators: dict[str, Iterator[Any]] = {way: iter(found) for way, found in ways.items()}

    def draw(iterator: Iterator[Any]) -> None:
        for _ in islice(iterator, batches):
            pass

    turns: Ways = {way: partial(draw, iterator) for way, iterator in iterators.items()}
    seconds = measured(turns, rounds, clock=time.process_time)
    shares = (f"{way} {ratio(seconds, way, own):.2f}" for way in ways if way != own)
    print(f"  {name}, times {own}: {', '.join(shares)}", flush=True)


# --- grain ------------------------------------------------------------------------------------------------------------


class Memmap:
    """A source of a user's own: ranges of tokens of memory-mapped files."""

    def __init__(self, ranges: list[tuple[NDArray[Any], int, int]], targets: bool) -> None:
        """ranges: of a file, from token to token. targets: split into inputs and labels, of one token less."""
        self.ranges, self.targets = ranges, targets

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        tokens, begin, end = self.ranges[index]
        ids = tokens[begin:end].astype(np.int64)
        return {"input_ids": ids[:-1], "labels": ids[1:]} if self.targets else {"input_ids": ids}


def memmaps(cache: Path) -> tuple[Memmap, Memmap]:
    """Return windows of T + 1 tokens at stride T, and documents in pieces of at most T tokens."""
    files = [np.memmap(path, np.uint16, mode="r") for path in sorted((cache / "train").glob("*.bin"))]
    windows = [(file, at, at + T + 1) for file in files for at in range(0, len(file) - T, T)]
    starts = np.load(cache / "index" / "train_docs.npy")
    firsts = np.cumsum([0, *map(len, files)])
    pieces = []
    for file, first in zip(files, firsts.tolist(), strict=False):
        inside = np.unique(np.clip(starts - first, 0, len(file))).tolist()
        for begin, end in pairwise(inside):
            pieces += [(file, at, min(at + T, end)) for at in range(begin, end, T)]
    return Memmap(windows, True), Memmap(pieces, False)


def compare_grain(cache: Path, rounds: int) -> None:
    """Compare windows and packed rows, without and with threads that read ahead."""
    import grain

    from niels_gpt.trainers.grain import StreamDataset, StreamSource

    windows, pieces = memmaps(cache)
    for threads in (0, 16):
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)

        def own(source: Memmap, read: Any = read) -> Any:
            return grain.MapDataset.source(source).shuffle(seed=0).repeat(1_000)

        def rows(stream: Any, read: Any = read) -> Any:
            return grain.MapDataset.source(StreamSource(stream)).batch(B).to_iter_dataset(read)

        packed = grain.experimental.FirstFitPackIterDataset(
            own(pieces).to_iter_dataset(read), length_struct={"input_ids": T}, num_packing_bins=64
        )
        kinds: dict[str, tuple[Any, Callable[[], Any]]] = {
            "windows": (own(windows).batch(B).to_iter_dataset(read), partial(EpochStream, cache / "train")),
            "packed rows": (packed.batch(B), partial(PackedStream, cache)),
        }
        for kind, (grains, opened) in kinds.items():
            made = partial(opened, T=T, global_batch_size=B, seed=0, epochs=1_000)
            ways = {"Grain's own": grains, "StreamSource": rows(made())}
            ways |= {"StreamDataset": StreamDataset(made()), "the stream": made()}
            compare(f"{kind}, {threads} threads", ways, "Grain's own", rounds)


# --- torchtitan -------------------------------------------------------------------------------------------------------


def compare_torchtitan(_: Path, rounds: int) -> None:
    """Compare with HuggingFaceTextDataLoader, which tokenizes or gets ids. Prints why not where it is missing."""
    if "NIELS_GPT_PEERS" not in os.environ:
        print("  left out: NIELS_GPT_PEERS is not set")
        return
    sys.path.append(str(Path(os.environ["NIELS_GPT_PEERS"]) / "torchtitan-0.3.0"))
    from datasets import Dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    from niels_gpt.trainers.torchtitan import CacheRows, StreamDataLoader

    class Made(HuggingFaceTokenizer):  # type: ignore[misc]
        """Gives the ids that a row has."""

        def encode(self, ids: list[int], **_: Any) -> list[int]:
            return ids

    with tempfile.TemporaryDirectory() as folder:
        texts = Texts(Path(folder), 2_000_000)
        tokenizer, made = (of(tokenizer_path=str(texts.tokenizer)) for of in (HuggingFaceTokenizer, Made))
        rows = [{"text": text, "ids": tokenizer.encode(text, add_bos=True, add_eos=True)} for text in texts.documents]
        data = Dataset.from_list(rows)
        for name in ("text", "ids"):
            DATASETS[name] = DatasetConfig("", lambda _: data, lambda sample, name=name: sample[name])

        def loader(config: Any, of: Any = tokenizer) -> Iterable[Any]:
            sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": T, "local_batch_size": B}
            batches: Iterable[Any] = config.build(tokenizer=of, snapshot_every_n_steps=None, **sizes)
            return batches

        def ours(**rows: Any) -> Iterable[Any]:
            return loader(StreamDataLoader.Config(sources=[CacheRows(cache=str(texts.cache / "train"), **rows)]))

        kinds = {"packed rows": ours(rows="packed"), "windows of documents": ours(rows="documents")}
        for own, config, of in (
            ("its loader, which tokenizes", HuggingFaceTextDataLoader.Config(dataset="text"), tokenizer),
            ("its loader, of ids that are there", HuggingFaceTextDataLoader.Config(dataset="ids"), made),
        ):
            compare("StreamDataLoader", {own: loader(config, of), **kinds}, own, rounds, batches=30)
        stream = EpochStream(texts.cache / "train", T=T, global_batch_size=B, seed=0)
        compare("StreamDataLoader", {"the stream": stream, "windows": ours()}, "the stream", rounds)


# --- automodel --------------------------------------------------------------------------------------------------------


def compare_automodel(cache: Path, rounds: int) -> None:
    """Compare windows. Prints why not where the wheel is missing."""
    if "NIELS_GPT_PEERS" not in os.environ:
        print("  left out: NIELS_GPT_PEERS is not set")
        return
    sys.path.insert(0, str(Path(os.environ["NIELS_GPT_PEERS"], "0.7.0")))
    from nemo_automodel.components.datasets.llm.nanogpt_dataset import NanogptDataset
    from nemo_automodel.components.datasets.loader import ParallelAwareDataloader
    from nemo_automodel.components.datasets.utils import default_collater

    from niels_gpt.exchange.exporting import export_cache
    from niels_gpt.trainers.automodel import StreamDataset

    export_cache(cache, "modded-nanogpt", cache.parent / "bins")
    load: Callable[..., Any] = partial(
        ParallelAwareDataloader, dp_rank=0, dp_world_size=1, batch_size=B, collate_fn=default_collater
    )
    stream = StreamDataset(EpochStream, local_batch_size=B, shards_dir=cache / "train", T=T, seed=0)
    own = NanogptDataset(str(cache.parent / "bins" / "train*.bin"), T)
    compare("windows", {"NanogptDataset": load(own), "StreamDataset": load(stream)}, "NanogptDataset", rounds)


# --- lightning --------------------------------------------------------------------------------------------------------


def compare_lightning(cache: Path, rounds: int, batches: int = 800) -> None:
    """Compare windows and packed rows, in fits of some batches that do not train."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from niels_gpt.trainers.lightning import StreamDataModule

    class Nothing(LightningModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> None:
            pass

    def fit(**data: Any) -> None:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=batches, **quiet).fit(Nothing(), **data)

    def opened(kind: Callable[..., Any], rank: int, world_size: int) -> Any:
        folder = cache if kind is PackedStream else cache / "train"
        return kind(folder, T=T, global_batch_size=B, seed=0, rank=rank, world_size=world_size)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader: Any = DataLoader(memmaps(cache)[0], batch_size=B, shuffle=True)  # type: ignore[arg-type]
    ways: Ways = {
        "Lightning's own": lambda: fit(train_dataloaders=loader),
        "windows": lambda: fit(datamodule=StreamDataModule(partial(opened, EpochStream))),
        "packed rows": lambda: fit(datamodule=StreamDataModule(partial(opened, PackedStream))),
    }
    seconds = measured(ways, rounds, clock=time.process_time)
    own = next(iter(ways))
    shares = [f"{way} {ratio(seconds, way, own):.2f}" for way in ways if way != own]
    print(f"  in fits of {batches} batches, times Lightning's own: {', '.join(shares)}", flush=True)


# --- transformers' Trainer and TRL's SFTTrainer -----------------------------------------------------------------------


def on_disk(rows: Iterable[dict[str, Any]], folder: Path, form: str) -> Any:
    """Return rows as a dataset of `datasets` that is memory-mapped. form: "torch" or "numpy"."""
    import datasets

    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, values in row.items():
            columns.setdefault(name, []).append(np.asarray(values))
    datasets.Dataset.from_dict(columns).save_to_disk(folder)
    return datasets.load_from_disk(folder).with_format(form)


def with_masks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows, and make the masks of their documents from the positions."""
    from transformers import default_data_collator

    batch = default_data_collator(rows)
    places = batch["position_ids"]
    starts = (places.view(-1) == 0).nonzero().view(-1)
    ends = torch.tensor([places.numel()])
    batch["attention_mask"] = block_causal_mask(torch.cat((starts, ends)), (len(places), places.shape[1]))
    return batch


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def batches_of(trainer: Any) -> Iterator[Any]:
    """Yield the batches of a trainer's loader, epoch after epoch."""
    while True:
        yield from trainer.get_train_dataloader()


COMMON: dict[str, Any] = {"max_steps": 1_000_000, "per_device_train_batch_size": B, "use_cpu": True, "report_to": []}


def compare_transformers(cache: Path, rounds: int) -> None:
    """Compare windows, and packed rows with their masks, in Trainer."""
    from transformers import Trainer, TrainingArguments

    from niels_gpt.trainers.transformers import as_rows

    how = {"T": T, "global_batch_size": B, "seed": 0}
    kinds: dict[str, tuple[Any, Any]] = {
        "windows": (EpochStream(cache / "train", **how), None),
        "packed rows": (PackedStream(cache, **how), with_masks),
    }
    for kind, (stream, collator) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(folder, train_sampling_strategy="sequential", **COMMON)
            rows, _ = as_rows(stream, args)
            first = (rows[number] for number in range(2_000))
            kept = ({name: row[name] for name in row if name != "attention_mask"} for row in first)
            data = on_disk(kept, Path(folder) / "rows", "torch")
            theirs = {"args": TrainingArguments(folder, **COMMON), "data_collator": collator, "train_dataset": data}
            ways = {
                "datasets": batches_of(Trainer(model=tiny_llama(), **theirs)),
                "as_rows": batches_of(Trainer(model=tiny_llama(), args=args, train_dataset=rows)),
            }
            compare(kind, ways, "datasets", rounds, batches=50 if collator else 200)


def compare_trl(cache: Path, rounds: int) -> None:
    """Compare packed rows in SFTTrainer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from niels_gpt.trainers.trl import as_rows

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    stream = PackedStream(cache, T=T, global_batch_size=B, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        made = partial(SFTConfig, folder, max_length=None, bf16=False, padding_free=True, **COMMON)
        prepared = {"skip_prepare_dataset": True}
        args = made(dataset_kwargs=prepared, train_sampling_strategy="sequential")
        rows, _ = as_rows(stream, args)
        data = on_disk((rows[number] for number in range(2_000)), Path(folder) / "rows", "numpy")
        of_both = {"datasets": (made(dataset_kwargs=prepared), data), "as_rows": (args, rows)}
        ways = {
            way: batches_of(SFTTrainer(tiny_llama(), how, train_dataset=found, processing_class=tokenizer))
            for way, (how, found) in of_both.items()
        }
        compare("packed rows", ways, "datasets", rounds)


CASES: dict[str, Callable[[Path, int], None]] = {
    "grain": compare_grain,
    "automodel": compare_automodel,
    "lightning": compare_lightning,
    "torchtitan": compare_torchtitan,
    "transformers": compare_transformers,
    "trl": compare_trl,
}


def main() -> None:
    """Print the ratios of each trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="this trainer")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of the cache (8,000,000)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        cache = cache_of(Path(root), arguments.tokens)
        for name, case in CASES.items():
            if arguments.only in (None, name):
                print(f"{name}, {B} x {T:,} tokens")
                try:
                    case(cache, arguments.rounds)
                except ModuleNotFoundError as error:
                    print(f"  left out: {error.name} is not installed")


if __name__ == "__main__":
    main()
