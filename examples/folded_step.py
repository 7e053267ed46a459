"""One folded policy-gradient step: the Python of docs/tutorials/folded_step.md, which explains it.

python examples/folded_step.py
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.chat_template import format_prompt
from niels_gpt.prefix_tree.attention import dense_mask
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.plot import plot_mask
from niels_gpt.tokenizer import load_tokenizer

tokenizer = load_tokenizer("cache/sample/tokenizer/spm.model")
question = "What should a beginner know about volcanoes? Answer in one plain sentence, for a child of ten."
prompt = format_prompt(tokenizer, [{"role": "user", "content": question}])
answers = [
    "Sticky magma explodes.",
    "Sticky magma traps gas, and thin magma runs away.",
    "Keep away.",
    "Thin magma runs away in glowing rivers.",
]
eot = tokenizer.special_token_ids()["eot"]
completions = [[*tokenizer.encode(answer), eot] for answer in answers]
rewards = torch.tensor([-float(len(answer)) for answer in answers])
advantages = (rewards - rewards.mean()) / rewards.std()
print("prompt:", len(prompt), "tokens; completions:", [len(each) for each in completions])


forest = PrefixForest.from_rollout_group(prompt, completions)
print(forest)
_ = Path("folded_step.png").write_bytes(plot_mask(forest))


small = PrefixForest.from_rollout_group([1, 2], [[5, 6], [5, 7], [8]])
print("ids      ", small.input_ids.tolist())
print("positions", small.position_ids.tolist())
print(dense_mask(small).int())
edges = LossEdges.from_forest(small)
print("edges", list(zip(edges.row.tolist(), edges.target.tolist(), edges.weight.tolist(), strict=True)))


torch.manual_seed(0)
config = LlamaConfig(vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
model = LlamaForCausalLM(config)
edges = LossEdges.from_forest(forest)


def folded() -> Tensor:
    """Return the log-probability of each completion token: [M], completion after completion."""
    hidden, head = body_forward(model, forest)  # the model may be in DistributedDataParallel, FSDP2 or PEFT
    return sample_logprobs(edge_logprobs(hidden, edges, head), edges)


def unfolded() -> Tensor:
    """Return the same, one sample at a time."""
    found = []
    for completion in completions:
        ids = torch.tensor([prompt + completion])
        logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def policy_loss(logp: Tensor) -> Tensor:
    """Return the clipped loss of PPO."""
    ratio, advantage = (logp - old).exp(), edges.field(advantages, per="sample")
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


before = folded().detach()
old = before + 0.1 * torch.randn(before.shape)
losses, gradients = [], []
for logprobs in (folded, unfolded):
    model.zero_grad()
    loss = policy_loss(logprobs())
    loss.backward()
    losses.append(loss.item())
    gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
print(f"loss: folded {losses[0]:.4f}, unfolded {losses[1]:.4f}")
apart = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
print("gradients are equal but for rounding:", bool(apart < 1e-5))


optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer.step()
change = torch.stack([part.sum() for part in (folded() - before).split([len(each) for each in completions])])
for answer, advantage, gain in zip(answers, advantages.tolist(), change.tolist(), strict=True):
    print(f"advantage {advantage:+.2f}, log-probability {gain:+.2f}: {answer}")
