"""TRL's GRPOTrainer on folded rows, beside the same trainer unfolded: docs/folded_training.md explains it.

python examples/folded_grpo.py [--prompt 512] [--completion 64 128] [--group 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from niels_gpt.prefix_tree.edges import edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.padded import PaddedRollouts


class GroupedGRPOTrainer(GRPOTrainer):
    """Keeps the completions of a prompt in one micro-batch; TRL shuffles samples over the micro-batches."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:  # generated just now, and shuffled
            self._buffered_inputs = grouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


def grouped(batches: list[dict[str, Any]], count: int | None = None) -> list[dict[str, Any]]:
    """Return as many micro-batches, or `count`, with the samples of a prompt side by side, prompts still shuffled."""
    prompts = [tuple(row) for batch in batches for row in batch["prompt_ids"].tolist()]
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    parts = torch.tensor(sorted(range(len(prompts)), key=lambda i: first[prompts[i]])).chunk(count or len(batches))

    def column(name: str, part: torch.Tensor) -> Any:
        values = [batch[name] for batch in batches]
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            return torch.cat(values)[part.to(values[0].device)]
        if values[0] is None or isinstance(values[0], torch.Tensor):  # one number of the whole generation
            return values[0]
        raise TypeError(f"{name} is a {type(values[0]).__name__}; expected tensors: images cannot be folded")

    return [{name: column(name, part) for name in batches[0]} for part in parts]


class FoldedGRPOTrainer(GroupedGRPOTrainer):
    """Log-probs and entropies of policy and reference from rows in which each shared prefix stands once."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        given = sorted(name for name, value in more.items() if value is not None)
        if compute_aux_loss:  # it counts how many tokens each expert has
            raise ValueError(
                "a folded row has no auxiliary loss: pass router_aux_loss_coef=0.0 to GRPOConfig to train without it, "
                "or use GRPOTrainer"
            )
        if given:
            raise ValueError(f"a folded row has no {', '.join(given)}: use GRPOTrainer")
        size, found = batch_size or len(input_ids), []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            batch = PaddedRollouts.from_padded(ids, mask, mask[:, -logits_to_keep:])
            with self.accelerator.autocast():
                found.append(scores(model, batch, self.temperature))
        logps, entropies = map(torch.cat, zip(*found, strict=True))
        return logps, entropies if compute_entropy else None, None


def scores(model: Any, batch: PaddedRollouts, temperature: float) -> list[torch.Tensor]:
    """Return log-prob and entropy at each completion token, 0 at padding: [B, logits_to_keep] each."""
    hidden, head = body_forward(model, batch.forest)  # through DistributedDataParallel, FSDP and PEFT
    both = edge_logprobs(hidden, batch.edges, head, temperature=temperature, entropies=True)
    return [batch.unfold(sample_logprobs(each, batch.edges)) for each in both]


# --- the comparison: a tiny random model, trained by both -------------------------------------------------------------

VOCAB_SIZE = 128
METRICS = {name: name for name in ("loss", "grad_norm", "kl", "entropy")} | {"clip share": "clip_ratio/region_mean"}


class Timed:
    """Measures the seconds in which completions are generated."""

    generating = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        begin = time.perf_counter()
        generated = super()._generate(prompts)  # type: ignore[misc]
        self.generating += time.perf_counter() - begin
        return generated


class Unfolded(Timed, GroupedGRPOTrainer):
    """TRL's own log-probs, from the same micro-batches as Folded."""


class Folded(Timed, FoldedGRPOTrainer):
    """Log-probs from folded rows."""


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w2, w3, ... that needs no file."""
    vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, size)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def prompts_of(count: int, longest: int) -> Dataset:
    """Return prompts of three quarters of the longest length to the longest."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest * 3 // 4, longest, count).long().tolist()
    ids = [torch.randint(2, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})


def share_of_low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that a random model can raise: the share of ids in the lower half of the vocabulary."""
    return [sum(token < VOCAB_SIZE // 2 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(kind: type[GRPOTrainer], options: argparse.Namespace, folder: str, **more: Any) -> GRPOTrainer:
    """Return a trainer with two micro-batches of two prompts a step, which trains twice on each generation."""
    config = GRPOConfig(
        f"{folder}/out",
        max_steps=options.steps,
        num_generations=options.group,
        per_device_train_batch_size=2 * options.group,
        gradient_accumulation_steps=2,
        num_iterations=2,
        beta=0.04,
        epsilon=0.05,  # so little that the second step on a generation clips some tokens
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_completion_length=options.completion[1],
        generation_kwargs={"min_new_tokens": options.completion[0]},
        temperature=0.9,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = kind(
        model=f"{folder}/model",
        args=config,
        reward_funcs=share_of_low_ids,
        train_dataset=prompts_of(16, options.prompt),
        processing_class=tokenizer_of(VOCAB_SIZE),
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def save_model(folder: str, options: argparse.Namespace) -> None:
    """Write a random Llama, which TRL reads as policy and as reference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(f"{folder}/model")


def trained(kind: type[GRPOTrainer], options: argparse.Namespace, folder: str, **more: Any) -> tuple[Any, float]:
    """Train; return the trainer and the seconds that it took."""
    trainer = trainer_of(kind, options, folder, **more)
    begin = time.perf_counter()
    trainer.train()
    return trainer, time.perf_counter() - begin


def metrics_of(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    return [{name: row[key] for name, key in METRICS.items()} for row in trainer.state.log_history if "loss" in row]


def token_ratio(batches: list[dict[str, Any]]) -> float:
    """Return tokens before / tokens after folding each micro-batch."""
    before = after = 0
    for batch in batches:
        ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        forest = PrefixForest.from_padded(ids, mask, batch["completion_mask"])
        before, after = before + len(forest.loss_mask), after + forest.num_tokens
    return before / after


def main(arguments: list[str] | None = None) -> None:
    """Train both ways in turns; print the metrics, how far they are apart, and the times."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options)
        seconds: dict[Any, list[tuple[float, float]]] = {Unfolded: [], Folded: []}
        trainers: dict[Any, Any] = {}
        for _ in range(options.rounds):
            for kind, taken in seconds.items():
                trainers[kind], whole = trained(kind, options, folder)
                taken.append((whole - trainers[kind].generating, trainers[kind].generating))
        kept = trainers[Folded]._buffered_inputs
    if not trainers[Folded].accelerator.is_main_process:
        return
    print_metrics(*(metrics_of(each) for each in trainers.values()))
    torch.manual_seed(0)
    shuffled = split_tensor_dict(shuffle_sequence_dict(grouped(kept, 1)[0]), len(kept))
    print(
        f"tokens per micro-batch: {token_ratio(kept):.2f}x fewer folded; {token_ratio(shuffled):.2f}x if TRL shuffles"
    )
    (plain, waited), (folding, _) = (min(taken) for taken in seconds.values())
    print(f"without generation: {plain:.2f} s unfolded, {folding:.2f} s folded: {plain / folding:.2f}x")
    print(
        f"generation: {waited:.2f} s, {waited / (waited + plain):.0%} of the unfolded run; with it the ratio is "
        f"{(plain + waited) / (folding + waited):.2f}x"
    )


def print_metrics(unfolded: list[dict[str, float]], folded: list[dict[str, float]]) -> None:
    """Print the folded trainer's metrics of each step, and the largest difference of each."""
    print("step  " + "".join(f"{name:>12}" for name in METRICS))
    for step, row in enumerate(folded, 1):
        print(f"{step:<6}" + "".join(f"{value:>12.4f}" for value in row.values()))
    apart = [max(abs(a[name] - b[name]) for a, b in zip(unfolded, folded, strict=True)) for name in METRICS]
    print("apart " + "".join(f"{value:>12.1e}" for value in apart))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options; the defaults run for about a minute on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="length of the longest prompt")
    parser.add_argument("--completion", type=int, nargs=2, default=(64, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--group", type=int, default=8, metavar="N", help="completions of a prompt")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer, in turns; the fastest counts")
    parser.add_argument("--hidden", type=int, default=128, help="the model's hidden size")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    disable_progress_bar()
    main()
