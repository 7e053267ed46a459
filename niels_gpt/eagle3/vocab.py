"""The draft's vocabulary: chooses the target's tokens that a draft knows; reads and writes that choice.

The draft's id i stands for the target's id `selected_token_ids[i]`: special tokens first, then by falling frequency
among the supervised tokens. The list is not sorted.

    ids, mask = build_eagle3_token_mapping(batches, target_vocab_size=128_256, draft_vocab_size=32_000)
    save_token_mapping("draft_vocab.pt", ids, target_vocab_size=128_256)
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from niels_gpt.eagle3.cache import read_manifest
from niels_gpt.eagle3.format.layout import MANIFEST_NAME
from niels_gpt.eagle3.format.meta import compare_once
from niels_gpt.eagle3.format.torch_files import load_dict, refuse_odd_tensor
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import REBUILD, CacheError, NotFound, VocabularyError
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, open_regular, parse_object, read_regular, shortened

MAPPING_NAME = "draft_vocab.json"
"""File of eagle3/draft_vocab: JSON with the keys of `save_token_mapping`; no library decides its bytes."""
_EXPECTED = "a file of save_token_mapping"
_COUNT = "or leave it out to count the tokens of this input"


def build_eagle3_token_mapping(
    dataloader: Iterable[Mapping[str, Any]],
    *,
    target_vocab_size: int,
    draft_vocab_size: int | None,
    special_token_ids: Sequence[int | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the draft's tokens by how often each target token is supervised.

    Order: `special_token_ids`; then supervised ids by falling frequency, ties by id; then the others, ascending. Within
        torch.distributed the counts of all ranks are added.

    dataloader: batches of `input_ids` and `loss_mask`, unshifted tensors or arrays of equal shape; read once.
    draft_vocab_size: None, or the target's size or more: all ids, ascending; no batch is read.
    special_token_ids: bos, eos, pad and unk. None and ids out of range are skipped.
    Returns: selected_token_ids int64 [D], and selected_token_mask bool [V], true at the D ids.
    Raises: ValueError for sizes that are not positive integers, or a batch whose two fields differ in shape.
    """
    for name, size in (("target_vocab_size", target_vocab_size), ("draft_vocab_size", draft_vocab_size)):
        none = size is None and name == "draft_vocab_size"
        if not none and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
            raise VocabularyError(
                f"{name}={size!r}: expected a positive integer{' or None' if name == 'draft_vocab_size' else ''}"
            )
    if draft_vocab_size is None or draft_vocab_size >= target_vocab_size:
        return torch.arange(target_vocab_size), torch.ones(target_vocab_size, dtype=torch.bool)
    counts = _counts(dataloader, target_vocab_size)
    special = [
        int(token_id) for token_id in special_token_ids or () if token_id is not None and 0 <= token_id < len(counts)
    ]
    by_count = torch.argsort(counts, descending=True, stable=True)  # ties by id
    frequent = by_count[: int((counts > 0).sum())]
    in_order = dict.fromkeys([*special, *frequent.tolist(), *range(target_vocab_size)])
    selected = torch.tensor(list(in_order)[:draft_vocab_size], dtype=torch.int64)
    return selected, _mask(selected, target_vocab_size)


def _counts(dataloader: Iterable[Mapping[str, Any]], target_vocab_size: int) -> Tensor:
    """Count how often each id is supervised on all ranks: int64 [V]."""
    counts = torch.zeros(target_vocab_size, dtype=torch.int64)
    for number, batch in enumerate(dataloader):
        ids, mask = _tensor(batch["input_ids"]), _tensor(batch["loss_mask"])
        if ids.shape != mask.shape:
            raise VocabularyError(
                f"batch {number}: input_ids of shape {tuple(ids.shape)}, loss_mask of shape {tuple(mask.shape)}: "
                "expected the same"
            )
        supervised = ids[mask.bool()].to(torch.int64)
        known = supervised[(supervised >= 0) & (supervised < target_vocab_size)]
        counts.scatter_add_(0, known, torch.ones_like(known))
    if dist.is_available() and dist.is_initialized():
        # NCCL adds on a device only.
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else counts.device
        shared = counts.to(device)
        dist.all_reduce(shared, op=dist.ReduceOp.SUM)
        counts = shared.cpu()
    return counts


def _tensor(values: Any) -> Tensor:
    # Arrays are copied: torch warns about read-only ones, such as memory maps.
    return values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _mask(selected_token_ids: Tensor, target_vocab_size: int) -> Tensor:
    mask = torch.zeros(target_vocab_size, dtype=torch.bool)
    mask[selected_token_ids] = True
    return mask


def d2t_t2d(selected_token_ids: Tensor | Sequence[int], target_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the two tables that inference engines use.

        >>> d2t_t2d([2, 0], target_vocab_size=3)
        (tensor([ 2, -1]), tensor([ True, False,  True]))

    d2t: int64 [D], target id minus draft id. t2d: bool [V], whether the draft knows a target id.
    Raises: ValueError unless the ids are distinct ids of the target.
    """
    try:
        ids = _checked_ids(torch.as_tensor(selected_token_ids), target_vocab_size)
    except ValueError as error:
        raise VocabularyError(f"selected_token_ids: {error}") from error
    return ids - torch.arange(len(ids)), _mask(ids, target_vocab_size)


def save_token_mapping(
    path: str | os.PathLike[str], selected_token_ids: Tensor | Sequence[int], target_vocab_size: int
) -> None:
    """Write a choice of tokens with torch.save, atomically; parent folders are created.

    Raises: ValueError unless the ids are distinct ids of the target.
    """
    d2t_t2d(selected_token_ids, target_vocab_size)
    ids = torch.as_tensor(selected_token_ids).detach().to("cpu", torch.int64).clone()
    content = io.BytesIO()
    torch.save({"selected_token_ids": ids, "target_vocab_size": int(target_vocab_size)}, content)
    fileio.make_dir(Path(path).absolute().parent)
    fileio.write_bytes(path, content.getvalue())


def load_token_mapping(
    path: str | os.PathLike[str], *, target_vocab_size: int, draft_vocab_size: int | None
) -> tuple[Tensor, Tensor]:
    """Read a choice of tokens.

    path: a file of `save_token_mapping`, a JSON file, the folder of eagle3/draft_vocab, or a cache.
    draft_vocab_size: required number of tokens; None: any.
    Returns: selected_token_ids int64 [D], and selected_token_mask bool [V].
    Raises: FileNotFoundError; CacheError E707 for a file that cannot be read or fits another vocabulary size, E201 if
        its sha256 is not the one in the cache's meta.json.
    """
    where = os.fspath(path)
    has_file = os.path.lexists(os.path.join(where, MAPPING_NAME))
    is_cache = os.path.isdir(where) and not has_file
    if is_cache:
        compare_once(where, MANIFEST_NAME)
    elif has_file:
        compare_once(where, MAPPING_NAME, remedy=REBUILD, code="E201")
    mapping = read_manifest(where) if is_cache else _read_file(os.path.join(where, MAPPING_NAME) if has_file else where)
    ids, size = mapping.get("selected_token_ids"), mapping.get("target_vocab_size")
    try:
        if size != target_vocab_size:
            found = f"its target_vocab_size is {shortened(size)}"
            raise VocabularyError(f"{found}, expected {target_vocab_size} of the target")
        checked = _checked_ids(torch.as_tensor(ids), target_vocab_size)
        if draft_vocab_size is not None and len(checked) != min(draft_vocab_size, target_vocab_size):
            raise VocabularyError(f"it has {len(checked)} ids, expected draft_vocab_size={draft_vocab_size}")
    except (ValueError, TypeError, RuntimeError) as error:  # torch raises any of them for what is no tensor
        raise CacheError(
            where, f"no draft vocabulary for this run: {error}", remedy="Name another one", code="E707"
        ) from error
    return checked, _mask(checked, target_vocab_size)


def _read_file(where: str) -> dict[str, Any]:
    real = os.path.realpath(where)  # links are followed
    try:
        content = read_regular(real)
    except CacheError as error:
        found, expected = f"not a regular file of at most {MAX_JSON_BYTES:,} bytes", f"{_EXPECTED} or a cache folder"
        raise CacheError(where, found, expected, f"Name another one, {_COUNT}", code="E707") from error
    except FileNotFoundError:
        raise NotFound(f"{where}: no such file. Name {_EXPECTED} or a cache folder, {_COUNT}", code="E707") from None
    try:
        if content[:1] == b"{":
            return parse_object(content)
        with open(open_regular(real), "rb") as file:
            mapping = load_dict(real, file)
        refuse_odd_tensor("selected_token_ids", mapping.get("selected_token_ids"))
    except ValueError as error:
        found = f"{len(content):,} bytes that cannot be read ({error})"
        raise CacheError(where, found, _EXPECTED, f"Write it again, {_COUNT}", code="E707") from error
    return mapping


def _checked_ids(ids: Tensor, target_vocab_size: int) -> Tensor:
    """Return ids as int64 on the CPU. Raises: ValueError unless they are distinct ids of the target, at least one."""
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise VocabularyError(f"ids of {ids.dtype} and shape {tuple(ids.shape)}, expected integers in one dimension")
    checked = ids.detach().to("cpu", torch.int64)
    foreign = checked[(checked < 0) | (checked >= target_vocab_size)]
    if len(foreign):
        raise VocabularyError(f"id {int(foreign[0])}, expected 0 <= id < target_vocab_size={target_vocab_size}")
    different = len(set(checked.tolist()))
    if different != len(checked):
        raise VocabularyError(f"{len(checked)} ids, only {different} of them different: expected no repetition")
    return checked
