"""Train a small target for examples/train_eagle3_draft.py on short chats: docs/eagle3_draft.md shows it.

    python examples/small_target.py run --source-root MIRROR --longest 200

Writes run/target, a Llama of 4 layers with a tokenizer of the project, and the chats as files: train.jsonl, which the
target has learned, and held_out.jsonl, 100 that neither it nor its tokenizer has seen. The chats are the first question
and reply of dolly15k and oasst1 where both together are short. Equal runs give equal weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.chat import Chat, open_tokenizer
from niels_gpt.chat.rows import Row, chat_rows
from niels_gpt.commands.console import with_progress
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.tokenizer_training import train_tokenizer, write_tokenizer

Messages = list[dict[str, str]]
SEQ_LENGTH = 160  # tokens


def short_chats(source_root: str, longest: int) -> list[Messages]:
    """Return the short chats in an order drawn from seed 0, each first question once. longest: characters of a chat."""
    found: dict[str, Messages] = {}
    samples = chain(iter_dolly_sft(source_root=source_root), iter_oasst1_sft(split="all", source_root=source_root))
    for sample in samples:
        first = sample.messages[:2]
        if sum(len(message.content) for message in first) <= longest:
            found.setdefault(first[0].content, [{"role": each.role, "content": each.content} for each in first])
    chats = [found[question] for question in sorted(found)]
    random.Random(0).shuffle(chats)
    return chats


def write_chats(path: Path, chats: Iterable[Messages]) -> None:
    """Write one chat a line, as precompute and respond read them."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def batches(rows: list[Row], size: int, epochs: int) -> Iterator[Tensor]:
    """Yield ids [B, S], padded with -100; rows of about equal length share a batch."""
    for epoch in range(epochs):
        chance = random.Random(epoch)
        ordered = sorted(rows, key=lambda row: len(row.input_ids) + 8 * chance.random())
        parts = [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]
        for part in chance.sample(parts, len(parts)):
            ids = [torch.from_numpy(row.input_ids).long() for row in part]
            yield pad_sequence(ids, batch_first=True, padding_value=IGNORE_INDEX)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens of a batch, in nats."""
    loss: Tensor = model(input_ids=ids.clamp_min(0), labels=ids, use_cache=False).loss  # padding follows the tokens
    return loss


def main(argv: list[str] | None = None) -> None:
    """Train the tokenizer and the target; print the losses."""
    options = parse(argv)
    torch.manual_seed(0)
    chats = short_chats(options.source_root, options.longest)
    folder = options.out / "target"
    held_out, train = chats[: options.held_out], chats[options.held_out :]
    options.out.mkdir(exist_ok=True)
    write_chats(options.out / "held_out.jsonl", held_out)
    write_chats(options.out / "train.jsonl", train)
    texts = (message["content"] for chat in train for message in chat)
    write_tokenizer(train_tokenizer(texts, vocab_size=options.vocab_size), folder)
    tokenizer = open_tokenizer(str(folder))
    rows = [
        list(
            chat_rows(
                (Chat(str(n), c) for n, c in enumerate(part)), tokenizer, seq_length=SEQ_LENGTH, counters=Counter()
            )
        )
        for part in (train, held_out)
    ]
    model = LlamaForCausalLM(config(tokenizer.vocab_size, int(rows[0][0].input_ids[-1]), options.hidden))
    total = options.epochs * math.ceil(len(rows[0]) / options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total, pct_start=0.1)
    losses: list[float] = []
    for ids in with_progress(batches(rows[0], options.batch_size, options.epochs), "target", "updates", total):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 250 == 0:
            print(f"step {len(losses)} of {total}: {sum(losses[-250:]) / 250:.3f} nats a token", flush=True)
    model.save_pretrained(folder)
    with torch.no_grad():
        val = [loss_of(model, ids).item() for ids in batches(rows[1], options.batch_size, 1)]
    print(
        f"{len(rows[0]):,} chats of {sum(len(row.input_ids) for row in rows[0]):,} tokens; held out: "
        f"{sum(val) / len(val):.3f} nats a token"
    )


def config(vocab_size: int, end: int, hidden: int) -> LlamaConfig:
    """Return the config of 4 layers. end: the id that ends a reply."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=2 * SEQ_LENGTH,
        bos_token_id=None,
        eos_token_id=end,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("out", type=Path, help="folder that receives the target and the chats")
    made.add_argument("--source-root", default="hub", help="where dolly15k and oasst1 are: hub, or a mirror's folder")
    made.add_argument("--longest", type=int, default=400, metavar="N", help="characters of a chat")
    made.add_argument("--held-out", type=int, default=100, metavar="N", help="chats that are not trained on")
    made.add_argument("--vocab-size", type=int, default=2048, metavar="N", help="of the tokenizer")
    made.add_argument("--hidden", type=int, default=160, metavar="N", help="width, a multiple of 32")
    made.add_argument("--epochs", type=int, default=8, metavar="N")
    made.add_argument("--batch-size", type=int, default=16, metavar="N", help="chats of a step")
    made.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    return made.parse_args(argv)


if __name__ == "__main__":
    main()
