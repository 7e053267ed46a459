"""A sample as other tools store it: all L tokens, unshifted, with every state; decides which samples are unusable."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from niels_gpt.eagle3.format.manifest import load_safetensors
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.filemaps import MapError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
REASONS = ("missing", "unreadable", "mismatched", "not finite")
"""Why a sample is refused: its file is not there, cannot be read, does not fit its row, or holds NaN or infinity."""
LAST_HIDDEN = ("pre_norm", "post_norm")
"""The target's last hidden states: the output of its last block, or the input of its lm_head."""


@dataclass(frozen=True)
class ForeignSample:
    """A sample of another tool: L tokens, K auxiliary layers, hidden size H."""

    input_ids: Tensor
    """int64 [L]"""
    loss_mask: Tensor
    """bool [L], raw: of each token itself"""
    aux: Tensor
    """[L, K, H], one of FLOATS"""
    last: Tensor
    """[L, H], one of FLOATS"""
    was_fp8: bool = False
    """Whether the states were stored as float8 with a scale a token."""
    padding: int = 0
    """Slots behind it that were taken for padding."""
    is_unsure: bool = False
    """Whether the first of these slots may be one of its tokens; without such slots, its last token may be padding."""


class ForeignFiles(Protocol):
    """A folder of another tool: its samples in their order, from 0."""

    usual_last: str
    """Side of the final norm of the last hidden states, as the tool documents it: one of LAST_HIDDEN."""
    count: int | None
    """Number of samples; None for a folder that grows and does not say how many will come."""
    aux_layer_ids: tuple[int, ...] | None = None
    """The captured blocks, counted from 0; None where no file says it."""
    made_for: str | None = None
    """The kind of draft that the files have all states for, if they say it."""

    def name(self, index: int) -> str:
        """Return a name of a sample for messages."""

    def read(self, index: int) -> ForeignSample:
        """Return a sample. Raises: BadSample."""

    def refuse_other_target(self, weights: Mapping[str, Tensor], num_layers: int | None) -> None:
        """Raise CacheError if the folder has weights of another target than the one with these.

        weights: `TargetHead.weights`. num_layers: of the target, if known.
        """

    def facts_of_run(self) -> dict[str, Any]:
        """Return the facts that meta.json takes about the run that made the folder."""
        return {}

    def notes(self, padding: Mapping[str, int]) -> Iterator[str]:
        """Yield what a user should know of an import. padding: its counts, as `imported.padding` in the manifest."""
        yield from ()


class GrowingFiles(ForeignFiles, Protocol):
    """A folder to which another tool may still add samples."""

    def look(self) -> int:
        """List the folder again; return the number behind the last sample that has a file. Raises: CacheError."""

    def path(self, index: int) -> Path | None:
        """Return where a sample's file is, or will be; None if that is not known yet."""

    def facts(self) -> dict[str, Any]:
        """Return what a rerun that continues must find unchanged, beside the samples' files."""


class BadSample(Exception):
    """An unusable sample. reason: one of REASONS. found: a sentence with the fault and the expected form."""

    def __init__(self, reason: str, name: str, found: str, remedy: str = "") -> None:
        super().__init__(reason, name, found, remedy)
        self.reason, self.name, self.found = reason, name, found
        self.remedy = remedy or "Write it again with the tool that made it, or leave such samples out: --drop-bad"

    def refusal(self, folder: Path) -> CacheError:
        """Return the error E711 that names the sample."""
        return CacheError(folder, f"{self.name} is {self.reason}: {self.found}", remedy=self.remedy, code="E711")


def unreadable(name: str, error: CacheError, file: str = "") -> BadSample:
    """Return the error for a sample whose file is refused. file: its name, if useful. A link keeps its own remedy."""
    remedy = error.own_remedy if error.code == "E205" else ""
    return BadSample("unreadable", name, f"{file}: {error.problem}" if file else error.problem, remedy)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Yield a file of safetensors, whose header was checked, for the block that reads it.

    Raises: MapError E507 if the machine has no memory for it, which is no fault of the file.
    """
    try:
        with load_safetensors()[1](path, framework="pt") as file:
            yield file
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        if isinstance(error, RuntimeError) and not re.search("unable to mmap|allocate memory", str(error)):
            raise
        found = f"too little memory to map it ({error}). The limits are `ulimit -v` and `ulimit -d`"
        raise MapError(errno.ENOMEM, found, os.fspath(path)) from error


def checked_sample(
    name: str, input_ids: Any, loss_mask: Any, states: Tensor, last: Tensor, hidden_size: int, vocab_size: int
) -> ForeignSample:
    """Return a sample after checking that its tensors fit each other and the target.

    input_ids, loss_mask: integers [L]. states: [L, K * H] or [L, K, H]. last: [L, H].
    Raises: BadSample.
    """
    ids, mask = integers(name, "input_ids", input_ids), integers(name, "loss_mask", loss_mask)
    length = len(ids)
    if not length or len(mask) != length or len(states) != length or len(last) != length:
        found = f"{length} input_ids, {len(mask)} loss_mask, {len(states)} auxiliary and {len(last)} last states"
        raise BadSample("mismatched", name, f"{found}, expected one number of tokens, 1 or more")
    for part, tensor in (("auxiliary", states), ("last", last)):
        if tensor.dtype not in FLOATS:
            raise BadSample("mismatched", name, f"its {part} states are {tensor.dtype}, expected bf16, fp16 or fp32")
    width, is_none = states[0].numel(), states.shape[1:] == (0, hidden_size)
    if last.shape[1:] != (hidden_size,) or (not width and not is_none) or width % hidden_size:
        found = f"{width} auxiliary and {list(last.shape[1:])} last values a token"
        raise BadSample("mismatched", name, f"{found}, expected multiples of the target's hidden size, {hidden_size}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or not bool(((mask == 0) | (mask == 1)).all()):
        found = f"ids from {int(ids.min())} to {int(ids.max())}, loss_mask from {int(mask.min())} to {int(mask.max())}"
        raise BadSample("mismatched", name, f"{found}, expected ids of the target's {vocab_size:,}, and 0 or 1")
    for part, tensor in (("auxiliary", states), ("last", last)):
        if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            flat = torch.isfinite(tensor.reshape(length, -1)).all(dim=-1)
            token = int((~flat).nonzero()[0])
            raise BadSample("not finite", name, f"NaN or infinity in the {part} states of token {token}")
    return ForeignSample(ids, mask == 1, states.reshape(length, width // hidden_size, hidden_size), last)


def integers(name: str, part: str, values: Any) -> Tensor:
    """Return a list or tensor of integers as int64 [L]. Raises: BadSample."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:  # null, text, lists of several lengths, too large
        raise BadSample("mismatched", name, f"{part} is not a list of integers ({error})") from error
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
        found = f"{part} is {tensor.dtype} {list(tensor.shape)}, expected integers in one dimension"
        raise BadSample("mismatched", name, found)
    return tensor.to(torch.int64)
