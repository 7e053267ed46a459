"""SpecForge's offline features: a tree of *.ckpt or *.ckpt.gz, one a sample, in the order of their paths.

Each is a dict of torch.save: `input_ids` [L], `loss_mask` [L], `hidden_state` [1, L, H], which is what lm_head takes,
and `aux_hidden_state` [1, L, 3H]. Ids and mask are not shifted. No file says which blocks were captured.

SpecForge's trainer later shifts ids and target states by one token, but not the mask, whose last value it sets to 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignSample, checked_sample, unreadable
from niels_gpt.eagle3.format.torch_files import load_tensors
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import printable

USUAL_LAST = "post_norm"
NUM_LAYERS = 3
"""What SpecForge's EAGLE-3 takes."""
_KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
_SUFFIXES = (".ckpt", ".ckpt.gz")
_FILES_OF_A_FOLDER = 2000


class SpecForgeFiles:
    """A folder of SpecForge's features."""

    usual_last = USUAL_LAST

    def __init__(self, folder: Path, hidden_size: int, vocab_size: int, *, follow_links: bool = False) -> None:
        """Raises: CacheError where there is no such file, and for folders that are links; OSError."""
        paths = (os.path.join(root, name) for root, names in _walked(folder, follow_links) for name in names)
        self._paths = [Path(path) for path in sorted(path for path in paths if path.endswith(_SUFFIXES))]
        if not self._paths:
            raise CacheError(folder, "has no *.ckpt and no *.ckpt.gz", "the files of SpecForge", code="E711")
        self.names = [printable(str(path.relative_to(folder))) for path in self._paths]
        self._sizes, self._follow_links = (hidden_size, vocab_size), follow_links

    def read(self, index: int) -> ForeignSample:
        """Return a sample. Raises: BadSample."""
        path, name = self._paths[index], self.names[index]
        try:
            tensors = load_tensors(path, _KEYS, follow_links=self._follow_links)
        except FileNotFoundError as error:
            if os.fspath(error.filename or "") != str(path):  # no folder for the temporary file
                raise
            raise BadSample("missing", name, "no such file") from error
        except CacheError as error:
            raise unreadable(name, error) from error
        except ValueError as error:
            raise BadSample("unreadable", name, str(error)) from error
        states, last = tensors["aux_hidden_state"], tensors["hidden_state"]
        for key, tensor in (("aux_hidden_state", states), ("hidden_state", last)):
            if tensor.dim() != 3 or len(tensor) != 1:
                raise BadSample("mismatched", name, f"{key} is {list(tensor.shape)}, expected [1, tokens, values]")
        return checked_sample(name, tensors["input_ids"], tensors["loss_mask"], states[0], last[0], *self._sizes)


def _walked(folder: Path, follow_links: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below one, with the names of its files. Raises: CacheError; OSError."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for root, below, names in os.walk(folder, onerror=refuse, followlinks=follow_links):
        if linked := sorted(name for name in below if not follow_links and os.path.islink(os.path.join(root, name))):
            where, found = os.path.join(root, linked[0]), "a link to a folder, whose samples would be left out"
            raise CacheError(where, found, remedy="Pass --follow-links, or remove it", code="E711")
        if (real := os.path.realpath(root)) in seen:
            raise CacheError(root, "a folder that is reached twice, by a link", "each sample once", code="E711")
        seen.add(real)
        yield root, names


class SpecForgeWriter:
    """Writes a folder of SpecForge's features; names sort in the order of the samples."""

    last_hidden = USUAL_LAST

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._folder, self._digits = folder, max(6, len(str(num_samples)))

    def write(self, index: int, sample: ForeignSample) -> int:
        """Write a sample and return its bytes."""
        begin = index - index % _FILES_OF_A_FOLDER
        rows = f"rows_{begin:0{self._digits}d}-{begin + _FILES_OF_A_FOLDER:0{self._digits}d}"
        path = self._folder / rows / f"data_{index:0{self._digits}d}.ckpt"
        path.parent.mkdir(exist_ok=True)
        held = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.to(torch.int64),
            "hidden_state": sample.last[None],
            "aux_hidden_state": sample.aux.flatten(1)[None],
        }
        torch.save(held, path)
        return path.stat().st_size

    def finish(self) -> None:
        """Nothing is left to write."""
