"""An EAGLE-3 cache: the Python of docs/tutorials/eagle3.md, which explains it.

python examples/eagle3.py
"""

import torch
from torch import Tensor, nn

from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader, read_target_embeddings
from niels_gpt.eagle3.target import write_small_target
from niels_gpt.tokenizer import load_tokenizer

_ = write_small_target("target", load_tokenizer("cache/sample/tokenizer"))


cache = CachedEagle3Dataset("targets")
for name, tensor in cache[0].items():
    print(f"{name:18}{list(tensor.shape)} {tensor.dtype}")


class Draft(nn.Module):
    def __init__(self, embeddings: Tensor, draft_vocab: int) -> None:
        super().__init__()
        width = embeddings.shape[1]
        self.embeddings = nn.Embedding.from_pretrained(embeddings)  # the target's, frozen
        self.body = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, draft_vocab))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross entropy with the target's probabilities, in nats, over the slots with loss."""
        hidden = batch["aux_hidden_states"].float()  # [B, S, 3H]
        logits = self.body(torch.cat([hidden, self.embeddings(batch["input_ids"])], dim=-1))  # [B, S, D]
        entropies = -(batch["target_probs"].float() * logits.log_softmax(-1)).sum(-1, keepdim=True)
        return entropies[batch["position_mask"]].mean()


torch.manual_seed(0)
draft = Draft(read_target_embeddings("targets"), cache.manifest["draft_vocab_size"])
optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
for epoch in range(1, 21):
    losses = []
    for batch in build_cached_eagle3_dataloader("targets", batch_size=8, shuffle=True):
        loss = draft(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 5 == 0:
        print(f"epoch {epoch}: {sum(losses) / len(losses):.3f} nats")
