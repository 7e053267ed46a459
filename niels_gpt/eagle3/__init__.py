"""The target cache: a frozen target model's outputs on disk, so that a draft (EAGLE-3, DFlash, ...) trains without it.

Public:

cache.py         reader, loader and writer of every form, under the names of NeMo Automodel's offline cache
native.py        reader and batches of the native form
stream.py        Eagle3Stream: serves each sample exactly once an epoch, over any ranks and workers
target.py        runs a target and captures hidden states and logits; chooses the captured layers
head.py          the target's final norm and lm_head; turns stored hidden states into logits
vocab.py         chooses the tokens that the draft knows; reads and writes that choice
precompute.py    python -m niels_gpt.eagle3.precompute (commands/eagle3/precompute.py)
respond.py       python -m niels_gpt.eagle3.respond (commands/eagle3/respond.py)
__main__.py      python -m niels_gpt.eagle3 verify | inspect | convert | seal | stats (commands/eagle3/tools.py)

Build:

build.py         builds a cache from plan, samples and target; decides the order of writes, meta.json last; seals, joins
resume.py        decides whether a rerun may continue a folder, and which shards are finished
partitions.py    locks the partitions of one folder, and compares the code of the machines that build them
shard_units.py   shards as units of niels_gpt/engine/units.py
workers.py       runs the target in this process or in several, and hands out the shards
tensor_parallel.py  splits one copy of the target over several processes, which run in lockstep
forward.py       runs one batch through the target and makes the stored fields of each form
totals.py        counts a cache: the content of its meta.json
disk.py          estimates the size of a cache and checks that it fits on the disk
models.py        loads target models, by folder or hub id; writes the small model of the sample
checkpoint.py    loads what a target has outside its blocks: embeddings, final norm, lm_head
placement.py     where a target's weights lie, and in which form: device map, quantization, load dtype
replies.py       gives chats the target's own replies, turn by turn, and writes them to a file
speaker.py       a target that replies to prompts
server.py        replies from a server with the chat-completions API
degenerate.py    says which replies are degenerate: empty, cut, or a few tokens over and over

Files, and finished caches:

format/          the files of a cache: their content, writers and readers, and the plan
kind.py          the kind eagle3: answers what niels_gpt.kinds asks of a finished cache
draft_kind.py    the kind draft_vocab: the file of the draft's tokens
inspect/         checks a finished cache, compares it with its target, prints it
derive.py        redraft and convert: makes another cache of a native one, without the target
exchange/        imports the folders of other tools as native caches, and exports native caches

Earlier names, for one release:

produce/         of make_target_cache, in build.py

Two forms: dense (versions 1 and 2, NeMo Automodel's offline cache: padded rows with distributions) and native (this
project's: ragged rows with hidden states, a third of the bytes). A part is a partition of a build; a chunk is a piece
of a tensor.

cache.py and format/ need torch and safetensors; the rest also needs transformers (the extra eagle3). niels_gpt/chat
tokenizes the input; recipes/eagle3 connects input, target and build.py. The package passes on `Eagle3Stream` with
its `Eagle3Batch`, and `make_target_cache`, for a program with its own samples and target.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.eagle3.build import make_target_cache
    from niels_gpt.eagle3.stream import Eagle3Batch, Eagle3Stream

_HOMES = {
    "Eagle3Batch": "niels_gpt.eagle3.stream",
    "Eagle3Stream": "niels_gpt.eagle3.stream",
    "make_target_cache": "niels_gpt.eagle3.build",
}

__all__ = ["Eagle3Batch", "Eagle3Stream", "make_target_cache"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # torch is loaded at the first use
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
