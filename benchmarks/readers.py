"""How fast the readers serve batches: as a share of a bare gather (the limit), and against the nanoGPT loader (a peer).

Run: make bench. All of it in one process, the ways in turn, the best of several rounds of each: this is about ratios.
The peer is written anew from what its README describes: one memmap slice a row for x and one for y, stacked by torch.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_pretrain_cache, build_sft_cache

NUM_TOKENS = 20_000_000
SHAPES = ((8, 256), (32, 1024), (64, 2048))  # B rows of T tokens
ROUNDS, SECONDS = 5, 0.3


class Bytes:
    """A tokenizer of bytes: the readers do not care where ids come from."""

    vocab_size = 300

    def encode(self, text: str, /) -> list[int]:
        """Return one id for each byte."""
        return [byte + 10 for byte in text.encode()]

    def special_token_ids(self) -> dict[str, int]:
        """Return four ids that no byte has."""
        return {"sys": 1, "usr": 2, "asst": 3, "eot": 4}


def batches_per_second(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the best rate of each way over ROUNDS rounds, the ways taken in turn within a round."""
    best = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for name, draw in ways.items():
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < SECONDS:
                draw()
                count += 1
            best[name] = max(best[name], count / (time.perf_counter() - begin))
    return best


def report(title: str, rates: dict[str, float]) -> None:
    """Print each rate and its ratio to the first one, ours."""
    ours = next(iter(rates.values()))
    print(title, "; ".join(f"{name} {rate:,.0f}/s (ours is {ours / rate:.2f} of it)" for name, rate in rates.items()))


def bench_pretrain(root: Path) -> None:
    """Compare get_batch with a bare gather of int64 rows and with the nanoGPT loader."""
    texts = ("x" * 100_000 for _ in range(NUM_TOKENS // 100_000))
    build_pretrain_cache(
        texts,
        root / "p",
        tokenizer=Bytes(),
        max_train_tokens=NUM_TOKENS,
        max_val_tokens=0,
        shard_bytes=2**27,
        seed=0,
        shuffle_buffer=None,
    )
    shard = np.memmap(root / "p/train/shard_00000.bin", dtype="<u2", mode="r")
    plain = np.asarray(shard)
    for B, T in SHAPES:
        data = PretrainTokenStreamDataset(root / "p/train", T=T, device="cpu")
        generator = torch.Generator().manual_seed(0)

        def gather(B: int = B, T: int = T) -> torch.Tensor:
            rows = np.empty((B, T + 1), dtype=np.uint16)
            for row, start in enumerate(torch.randint(len(plain) - T, (B,)).tolist()):
                rows[row] = plain[start : start + T + 1]
            return torch.from_numpy(rows.astype(np.int64))

        def nanogpt(B: int = B, T: int = T) -> tuple[torch.Tensor, torch.Tensor]:
            starts = torch.randint(len(shard) - T, (B,)).tolist()
            x = torch.stack([torch.from_numpy(shard[s : s + T].astype(np.int64)) for s in starts])
            return x, torch.stack([torch.from_numpy(shard[s + 1 : s + 1 + T].astype(np.int64)) for s in starts])

        def ours(data: PretrainTokenStreamDataset = data, B: int = B, generator: torch.Generator = generator) -> object:
            return data.get_batch(B=B, generator=generator)

        rates = batches_per_second({"get_batch": ours, "bare gather": gather, "nanoGPT": nanogpt})
        report(f"pretrain B={B} T={T}:", rates)


def bench_sft(root: Path) -> None:
    """Compare get_batch with the same rows and a mask made by a Python loop over their tokens."""
    chat = [{"role": "user", "content": "q" * 100}, {"role": "assistant", "content": "a" * 700}]
    build_sft_cache([chat] * 2000, root / "s", tokenizer=Bytes(), val_frac=0.1, seed=0)
    for B, T in SHAPES[:2]:
        data = SFTExampleDataset(root / "s/train_tokens.bin", root / "s/train_idx.npy", T=T, device="cpu", eot_id=4)
        generator = torch.Generator().manual_seed(0)

        def ours(data: SFTExampleDataset = data, B: int = B, generator: torch.Generator = generator) -> object:
            return data.get_batch(B=B, generator=generator)

        def looped(data: SFTExampleDataset = data, B: int = B, generator: torch.Generator = generator) -> object:
            _, y, masked = data.get_batch(B=B, generator=generator)
            for row in range(B):
                inside = False
                for column, token in enumerate(y[row].tolist()):
                    masked[row, column] = token if inside else -100
                    inside = token == 3 or (inside and token != 4)
            return masked

        report(f"sft B={B} T={T}:", batches_per_second({"get_batch": ours, "mask by a loop": looped}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        bench_pretrain(Path(folder))
        bench_sft(Path(folder))
