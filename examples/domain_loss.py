"""Loss by domain and by document, of a mixture of packed rows.

    python examples/domain_loss.py cache/sample/pretrain/wikitext cache/sample/sft/oasst1

`by_source` and `by_document` take the loss of each token, of any model. With several ranks reduce both with a sum: each
rank has other rows. The model here knows only the token before; a real one also takes batch.cu_seqlens.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.sampling import Batch, MixtureStream, PackedStream

T, ROWS, EVERY = 256, 8, 20


def by_source(losses: Tensor, batch: Batch, sources: int) -> Tensor:
    """Return of each source the sum of its losses and the number of its targets: [2, sources]. losses: [B, T]."""
    assert batch.source is not None
    has_loss = batch.y != IGNORE_INDEX
    source = batch.source.to(losses.device)[:, None].expand_as(has_loss)[has_loss]
    sums = torch.bincount(source, losses[has_loss], sources)
    return torch.stack((sums, torch.bincount(source, minlength=sources).to(sums.dtype)))


def by_document(losses: Tensor, batch: Batch) -> Iterator[tuple[tuple[int, int], float, int]]:
    """Yield (source, document), sum of losses and number of targets of each piece of a document. losses: [B, T]."""
    assert batch.source is not None and batch.cu_seqlens is not None and batch.documents is not None
    lengths, has_loss = batch.cu_seqlens.diff(), (batch.y != IGNORE_INDEX).flatten()
    segment = torch.arange(len(lengths), device=losses.device).repeat_interleave(lengths)[has_loss]
    sums = torch.bincount(segment, losses.flatten()[has_loss], len(lengths))
    counts = torch.bincount(segment, minlength=len(lengths))
    sources = batch.source[batch.cu_seqlens[:-1].cpu() // batch.x.shape[1]]
    keys = zip(sources.tolist(), batch.documents.tolist(), strict=True)
    yield from zip(keys, sums.tolist(), counts.tolist(), strict=True)


def main(folders: list[str], steps: int) -> None:
    """Train for some steps; print the loss of each source, and at the end its document with the highest loss."""
    torch.manual_seed(0)
    streams = [PackedStream(folder, T=T, global_batch_size=ROWS, seed=0) for folder in folders]
    vocab_size = max(stream.split.vocab_size or 1 << 16 for stream in streams)
    model = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    totals = torch.zeros(2, len(folders))
    documents: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    mixture = MixtureStream(streams, [1.0] * len(streams), seed=0)
    for step, batch in zip(range(1, steps + 1), mixture, strict=False):
        losses = functional.cross_entropy(model(batch.x).transpose(1, 2), batch.y, reduction="none")
        optimizer.zero_grad()
        (losses.sum() / (batch.y != IGNORE_INDEX).sum()).backward()
        optimizer.step()
        totals += by_source(losses.detach(), batch, len(folders))
        for key, total, count in by_document(losses.detach(), batch):
            documents[key] = [documents[key][0] + total, documents[key][1] + count]
        if step % EVERY == 0:
            named = zip(folders, (totals[0] / totals[1]).tolist(), strict=True)
            print(f"step {step}:", ", ".join(f"{folder} {mean:.2f}" for folder, mean in named))
            totals.zero_()
    for source, folder in enumerate(folders):
        means = {key[1]: total / count for key, (total, count) in documents.items() if count and key[0] == source}
        worst = max(means, key=means.__getitem__)
        print(f"{folder}: document {worst} has the highest loss of {len(means)}, {means[worst]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="folders of caches with the same tokenizer")
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
