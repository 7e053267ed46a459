"""What an EAGLE-3 cache is to be made of, and how: one frozen dataclass, of which the command line makes flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from niels_gpt.eagle3.hub import is_local

DTYPE_NAMES = ("bf16", "fp16", "fp32")
ATTENTIONS = ("sdpa", "eager")
DEVICES = ("cpu", "cuda")
COMPUTE_DTYPES = ("bf16", "fp32")
_LEAST = {
    "seq_length": 2,
    "draft_vocab_size": 1,
    "target_probs_topk": 0,
    "batch_size": 1,
    "max_batch_tokens": 1,
    "shard_size": 1,
    "workers": 1,
    "threads": 1,
    "limit": 1,
    "show": 0,
}
_CHOICES = {
    "dtype": DTYPE_NAMES,
    "format_version": (1, 2),
    "attention": ATTENTIONS,
    "device": DEVICES,
    "compute_dtype": COMPUTE_DTYPES,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a cache is to be made of, and how. Each field is the flag of its name."""

    target_model: str
    """Folder or hub id."""
    input_data: str
    """As `input_rows` takes it."""
    output_dir: Path | None = None
    """Folder of the cache; None: no folder is looked at before `carry_out`."""
    revision: str | None = None
    """Of the target, on the hub."""
    target_name: str | None = None
    """What manifest.json and the plan call the target; None: as target_model is given."""
    seq_length: int = 2048
    """Slots of a row, in tokens; longer samples are cut."""
    draft_vocab_size: int | None = None
    """None: the target's whole vocabulary."""
    draft_vocab_from: str | None = None
    """A file of a token mapping, or a cache; None: the tokens that are supervised most often."""
    target_probs_topk: int = 0
    """0: all probabilities."""
    batch_size: int = 4
    """Rows of a batch, at most."""
    max_batch_tokens: int = 16_384
    """Rows times width of a batch, at most."""
    shard_size: int = 256
    """Samples."""
    dtype: str = "bf16"
    """Of what is stored."""
    format_version: int | None = None
    """None: 2 where top-k compresses, else 1 (D22)."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Three decoder blocks, counted from 0; None: a low, a middle and a high one."""
    workers: int = 1
    """Processes."""
    resume: bool = False
    """Whether a folder that was begun, or is finished, is gone on with."""
    device: str | None = None
    """cpu or cuda; None: as recorded, at first cuda where there is one."""
    compute_dtype: str | None = None
    """Of the target's weights and arithmetic; None: as recorded, at first bf16 on cuda and fp32 on the cpu."""
    chat_template: str | None = None
    """Text of a jinja template in place of the tokenizer's own."""
    attention: str = "sdpa"
    """transformers' attention implementation."""
    threads: int | None = None
    """Torch threads of each worker; None: as recorded, at first one per usable core."""
    limit: int | None = None
    """Samples, at most."""
    show: int = 0
    """Samples to be kept as `Prepared.shown`."""

    def __post_init__(self) -> None:
        """Refuse what no cache can be made of. Raises: ValueError naming the flag."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{_flag(name)} is {value}, expected {least} or more")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{_flag(name)} is {value!r}, expected one of {', '.join(map(str, choices))}")
        if self.format_version == 1 and self.target_probs_topk:
            raise ValueError(
                f"--format-version 1 stores every probability, and --target-probs-topk is {self.target_probs_topk}: "
                "leave one of them out"
            )
        if self.revision is not None and is_local(self.target_model):
            raise ValueError(
                f"--revision {self.revision}: {self.target_model} is a folder, which has no revisions. Leave it out, "
                "or name a model of the hub by its id"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
