"""A target that replies to prompts.

Replies come from transformers' generate, in batches padded on the left. A reply is greedy or sampled. A sampled
token is the first whose cumulative probability, in the order of the ids, exceeds a uniform number; a reply's random
numbers depend only on the seed and the prompt's name. So neither the other prompts of a batch nor their order choose a
token. They may still change the rounding of the logits, as padding and batch size select other kernels: where two
tokens are that close, replies of another batch size differ from there on. For a random Llama of four layers, with flat
logits, none of 48 replies of 64 tokens differed in fp32 between batch sizes 1, 4, 8 and 16; in bf16 a third to a half
did, and most of the sampled ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.eagle3.replies import STOP, Prompt, Reply, Sampling, chance_of, up_to_stop


@dataclass(frozen=True)
class Speaker:
    """A target with all it needs to reply."""

    model: nn.Module
    stop_ids: tuple[int, ...]
    """Tokens that end a turn."""
    pad_id: int
    vocab_size: int
    """Size of the tokenizer: rows of the model beyond it have no text and are never chosen."""
    max_positions: int | None = None
    """Most tokens of prompt and reply; None: no limit."""

    def replies(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Return the reply to each prompt. A prompt without room for a token gets an empty reply that ends by CONTEXT.

        Prompts with less room than max_new_tokens run alone, all others together.

        Raises: ValueError for an empty prompt.
        """
        if any(not prompt.ids for prompt in prompts):
            raise ValueError("a prompt without tokens, expected one or more")
        rooms: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, prompt in enumerate(prompts):
            room = sampling.room(len(prompt.ids), self.max_positions)
            rooms[room, 0 if room == sampling.max_new_tokens else number + 1].append(number)
        found: dict[int, Reply] = {}
        for (room, _), numbers in rooms.items():
            ids = self._generate([prompts[number] for number in numbers], room, sampling)
            for number, each in zip(numbers, ids, strict=True):
                own, end = up_to_stop(each, self.stop_ids)
                found[number] = Reply(own, end, sampling.cut_at(room) if end is None else STOP)
        return [found[number] for number in range(len(prompts))]

    def _generate(self, prompts: list[Prompt], room: int, sampling: Sampling) -> list[list[int]]:
        """Return up to `room` new tokens of each prompt; tokens after the end of the turn are arbitrary."""
        from transformers import GenerationConfig, LogitsProcessorList

        if room == 0:
            return [[] for _ in prompts]
        width = max(len(prompt.ids) for prompt in prompts)
        device = next(self.model.parameters()).device
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=room, do_sample=False, eos_token_id=list(self.stop_ids) or None, pad_token_id=self.pad_id
        )
        chances = [random.Random(chance_of(sampling.seed, prompt.name)) for prompt in prompts]
        with _neutral(self.model), torch.inference_mode():
            made: Tensor = self.model.generate(  # type: ignore[operator]
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Choice(sampling, self.vocab_size, chances)]),
            )
        new: list[list[int]] = made[:, width:].tolist()
        return new


class _Choice:
    """A logits processor that leaves one token, so that greedy search takes it."""

    def __init__(self, sampling: Sampling, vocab_size: int, chances: list[random.Random]) -> None:
        self._sampling, self._vocab_size, self._chances = sampling, vocab_size, chances

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        scores[:, self._vocab_size :] = -torch.inf
        if self._sampling.temperature == 0:
            return scores
        uniform = torch.tensor([chance.random() for chance in self._chances], dtype=torch.float64)
        tokens = _sampled(scores / self._sampling.temperature, self._sampling.top_p, uniform.to(scores.device))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def _sampled(logits: Tensor, top_p: float, uniform: Tensor) -> Tensor:
    """Sample one token of each row [B]. logits: float32 [B, V]; uniform: float64 [B], each below 1."""
    probs = torch.softmax(logits, -1, dtype=torch.float64)
    if top_p < 1:
        ordered, ids = torch.sort(probs, stable=True, dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p  # the most probable one stays
        probs = probs.scatter(1, ids, ordered.masked_fill(dropped, 0.0))
    sums = probs.cumsum(-1)
    # Not sorted: near-equal probabilities that swap places would move all tokens after them.
    return torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


@contextmanager
def _neutral(model: Any) -> Iterator[None]:
    """Set a model's own generation config aside: generate would silently merge its temperature, penalties and stops."""
    from transformers import GenerationConfig

    before = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = before
