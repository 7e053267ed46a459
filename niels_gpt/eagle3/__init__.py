"""The EAGLE-3 target cache: a frozen target model's supervision on disk, so that a draft trains without the target.

cache.py         public: reader, loader, writer of shards; every name of the published contract
native.py        public: reader and batches of the native form, and the six keys of version 1 made of it
target.py        public: the target's hidden states and logits, shifted left by one slot; which layers are captured
head.py          public: hidden states -> logits by the target's norm and lm_head, without the rest of the target
vocab.py         public: which of the target's tokens the draft knows, and the files of that choice
precompute.py    public: python -m niels_gpt.eagle3.precompute (commands/eagle3/precompute.py)
respond.py       public: python -m niels_gpt.eagle3.respond (commands/eagle3/respond.py)
__main__.py      public: python -m niels_gpt.eagle3 verify | inspect | convert | seal | stats (commands/eagle3/tools.py)
kind.py          the kind eagle3: what niels_gpt.kinds asks of a finished cache
draft_kind.py    the kind draft_vocab: the file of the tokens that a draft knows
build.py         plan + samples + target -> a finished cache: the order of writes, parts, the seal, join
resume.py        what a rerun may continue, and which shards are finished
partitions.py    several machines make one cache in one folder: the locks of partitions, and their common settings
shard_units.py   shards as units of niels_gpt/engine/units.py
workers.py       the target, here or in processes: who makes which shard, and how
forward.py       a batch through the target -> the stored fields of each form
totals.py        what a cache counts, and the meta.json of a finished one
disk.py          whether a folder can be written, what a cache takes there, and whether it fits
produce/         the earlier place of make_target_cache
models.py        loads target models: by folder or hub id, or the sample's small one
replies.py       the target's own replies to chats, which are input of a cache
format/          the files of a cache: what is in them, their writers and readers, the plan
inspect/         a finished cache: is it good, does the target still agree, what is in it
derive.py        a finished native cache -> another draft vocabulary, or version 1 or 2, without the target
exchange/        other tools' folders -> a native cache, and back

cache.py and format/ need torch and safetensors, the rest also transformers (the extra eagle3). The input is tokenized
by niels_gpt/chat; recipes/eagle3 connects input, target and build.py. The package passes on `make_target_cache`, the
build for a program that has its own samples and target.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.eagle3.build import make_target_cache

__all__ = ["make_target_cache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # torch is loaded at the first use
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("niels_gpt.eagle3.build"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
