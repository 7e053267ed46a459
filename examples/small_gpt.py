"""Train a small GPT: the Python of docs/tutorials/small_gpt.md, which explains it.

python examples/small_gpt.py
"""

import itertools

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from niels_gpt.sampling import EpochStream, MixtureStream, bits_per_byte, iter_eval
from niels_gpt.tokenizer import load_tokenizer

CACHES = {"fineweb_edu": 0.6, "wikitext": 0.3, "roam": 0.1}  # name: its share of the batches
T, BATCH, STEPS = 64, 8, 200  # tokens of a row, rows of a step, steps


def open_mixture() -> MixtureStream:
    streams = [
        EpochStream(f"cache/sample/pretrain/{name}/train", T=T, global_batch_size=BATCH, seed=0) for name in CACHES
    ]
    return MixtureStream(streams, list(CACHES.values()), seed=0)


tokenizer = load_tokenizer("cache/sample/tokenizer")
x, y = next(iter(open_mixture()))
print(tuple(x.shape), x.dtype)
for part in (x, y):
    print(repr(tokenizer.decode(part[0, :16].tolist())))


class SmallGPT(nn.Module):
    def __init__(self, vocab_size: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(T, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # int64 [B, T] each; returns nats, summed over all targets
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.blocks(self.tokens(x) + self.places.weight, mask=causal, is_causal=True)
        logits = hidden @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")


torch.manual_seed(0)
model = SmallGPT(tokenizer.vocab_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


@torch.no_grad()
def evaluate() -> str:
    bits = {}
    for name in CACHES:
        val = f"cache/sample/pretrain/{name}/val"
        bits[name] = bits_per_byte(sum(model(x, y).item() for x, y in iter_eval(val, B=BATCH, T=T)), val)
    return ", ".join(f"{name} {value:.2f}" for name, value in bits.items())


def train_step(x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x, y) / y.numel()
    loss.backward()
    optimizer.step()
    return loss.item()


print("bits per byte before:", evaluate())
losses = []
for step, batch in enumerate(itertools.islice(open_mixture(), STEPS), start=1):
    losses.append(train_step(*batch))
    if step == 150:
        torch.save([model.state_dict(), optimizer.state_dict(), batch.state], "checkpoint.pt")
    if step % 50 == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.2f}")
print("bits per byte after:", evaluate())

figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None))
figure.savefig("small_gpt.png", dpi=100)


weights, momenta, state = torch.load("checkpoint.pt")
model.load_state_dict(weights)
optimizer.load_state_dict(momenta)
mixture = open_mixture()
mixture.load_state_dict(state)
resumed = [train_step(*batch) for batch in itertools.islice(mixture, 50)]
print("largest difference:", max(abs(a - b) for a, b in zip(resumed, losses[150:], strict=True)))
