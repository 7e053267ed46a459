"""A run of transformers' Trainer or of TRL's SFTTrainer, which logs what each step trained on; see trainer_runs.py.

    python transformers_script.py FOLDER CACHES STREAM '{"per_device_train_batch_size": 4, ...}'

It saves every fifth step, and resumes from the last checkpoint in the folder `out` of the settings if there is one.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream
from niels_gpt.trainers import transformers, trl
from support.byte_tokenizer import ByteTokenizer
from support.tiny_texts import TINY_TEXTS
from support.trainer_runs import STEPS, Log

T = 48


def build_caches(root, documents=TINY_TEXTS):
    """Build text/ of 72 documents, and chats/ of 90 chats of 1 or 2 replies, some of them longer than T + 1 tokens."""
    how = {"max_train_tokens": 100_000, "max_val_tokens": 0, "shard_bytes": 1 << 20, "seed": 0, "shuffle_buffer": None}
    build_pretrain([(None, text) for text in documents], root / "text", tokenizer=ByteTokenizer(), **how)
    chats = []
    for number in range(90):
        words = TINY_TEXTS[number % len(TINY_TEXTS)].split()
        turns = [("user", words[1]), ("assistant", " ".join(words[2 : 4 + number % 9]))]
        turns += [("user", f"{number}?"), ("assistant", words[number % 7])] * (number % 2)
        chats.append([{"role": role, "content": content} for role, content in turns])
    build_sft(chats, root / "chats", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    return root


def open_stream(root, name, size=8, **how):
    """Open a stream by name. size: its global batch."""
    common = {"T": T, "global_batch_size": size, "seed": 3}
    if name == "mixture":
        parts = [EpochStream(root / "text" / "train", documents=True, **common), PackedStream(root / "chats", **common)]
        return MixtureStream(parts, [2, 1], seed=5, **how)
    kinds = {
        "windows": lambda: EpochStream(root / "text" / "train", **common, **how),
        "packed": lambda: PackedStream(root / "text", split="train", **common, **how),
        "packed chats": lambda: PackedStream(root / "chats", split="train", **common, **how),
        "chats": lambda: SFTStream(root / "chats", split="train", over_length="split", **common, **how),
    }
    return kinds[name]()


def llama(dtype=torch.float64):
    """Return a Llama of 2 layers, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=ByteTokenizer.vocab_size, initializer_range=0.1, **sizes)).to(dtype)


def tokenizer():
    """Return a tokenizer of transformers, which SFTTrainer asks for its padding."""
    from tokenizers import Tokenizer, models

    model = models.WordLevel({"<eot>": 4, "<pad>": 0}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eot>", pad_token="<pad>")


def settings(folder, kind=TrainingArguments, **changes):
    """Return the settings of a run on the CPU: 40 steps of 8 rows unless they are changed."""
    chosen = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if kind is SFTConfig:
        chosen |= {"bf16": False, "activation_checkpointing": False, "max_length": None}
        chosen["dataset_kwargs"] = {"skip_prepare_dataset": True}
    return kind(str(folder), **{**chosen, **changes})


def logged(base):
    """Return a trainer class that keeps each step's rows: int64 [tokens] of ids and of labels, and its loss."""

    class Logged(base):
        seen, losses, micro, steps = [], [], [], None  # of this class alone: each call makes one

        def training_step(self, model, inputs, num_items_in_batch=None):
            rows, targets = unpadded(inputs), int((inputs["labels"][:, 1:] != -100).sum())
            loss = super().training_step(model, inputs, num_items_in_batch)
            summed = loss.item() * float(num_items_in_batch) / self.args.world_size
            self.micro.append((rows, summed, targets))
            if self.accelerator.gradient_state.sync_gradients:
                batches, losses, counts = zip(*self.micro, strict=True)
                self.seen.append([row for batch in batches for row in zip(*batch, strict=True)])
                self.losses.append(sum(losses) / max(1, sum(counts)))
                if self.steps is not None:
                    self.steps.step(self.state.global_step + 1, batches, self.losses[-1], sum(counts))
                self.micro.clear()
            return loss

    return Logged


def unpadded(inputs):
    """Return ids and labels of each row, or where rows were joined of each document, without padding."""
    pair = inputs["input_ids"], inputs["labels"]
    if (starts := inputs.get("cu_seq_lens_q")) is not None:
        return [list(column[0].split(starts.diff().tolist())) for column in pair]
    mask = inputs.get("attention_mask")
    lengths = mask.sum(1).tolist() if mask is not None and mask.dim() == 2 else [pair[0].shape[1]] * len(pair[0])
    return [[row[:length] for row, length in zip(column, lengths, strict=True)] for column in pair]


def trainer(stream, args, *, keep=True, how=None):
    """Return a Trainer, or by the kind of its settings an SFTTrainer, of a stream.

    keep: whether checkpoints have its state. how: of the callback's `load_state_dict`.
    """
    model, more = llama(), {}
    if isinstance(args, SFTConfig):
        (rows, position), base, more = trl.as_rows(stream, args), SFTTrainer, {"processing_class": tokenizer()}
    else:
        (rows, position), base = transformers.as_rows(stream, args, dtype=torch.float64), Trainer
    position.how = how or {}
    return logged(base)(model=model, args=args, train_dataset=rows, callbacks=[position] * keep, **more)


def main(folder, caches, name, changes):
    chosen = json.loads(changes)
    kind = SFTConfig if chosen.pop("sft", False) else TrainingArguments
    args = settings(chosen.pop("out"), kind, save_strategy="steps", save_steps=5, **chosen)
    run = trainer(open_stream(Path(caches), name), args)
    run.steps = Log(folder)
    os.makedirs(args.output_dir, exist_ok=True)
    run.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))


if __name__ == "__main__":
    main(*sys.argv[1:])
