"""PaddedRollouts: a padded batch of rollouts as a forest, with values per token folded along, and put back.

    columns = {"old_logprobs": old_log_probs, "advantages": advantages}  # [B, R] or [B, L], or one value a row [B]
    batch = PaddedRollouts.from_padded(input_ids, attention_mask, response_mask, uid=uid, columns=columns)
    hidden, head = body_forward(model, batch.forest)
    logp = sample_logprobs(edge_logprobs(hidden, batch.edges, head), batch.edges)  # [M], as batch.columns
    log_probs = batch.unfold(logp)                                                 # [B, R], 0 at padding

The batch of verl has left-padded prompts and right-padded responses in [B, L], and columns [B, R] of the responses. The
batch of NeMo-RL is padded on the right, and its columns are [B, L]. A value belongs to the token at its own place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.storage.errors import TreeError, TreeTypeError


@dataclass(frozen=True, eq=False, repr=False)
class PaddedRollouts:
    """A batch [B, L] of S = B samples with M supervised tokens, folded. All tensors are on one device.

    M values are in the order of `sample_logprobs`: row after row, and within a row from left to right.
    """

    forest: PrefixForest
    edges: LossEdges
    columns: dict[str, Tensor]  # [M] each
    places: Tensor  # int64 [2, M], the row of each supervised token in the batch, and its column, of L
    shape: tuple[int, int, int]  # B, L, and R, the columns of response_mask

    @classmethod
    @torch.inference_mode(False)  # a batch made while rollouts are generated must be usable in training
    def from_padded(
        cls,
        input_ids: Any,
        attention_mask: Any,
        response_mask: Any,
        *,
        uid: Any = None,
        columns: Mapping[str, Any] | None = None,
    ) -> PaddedRollouts:
        """Fold a padded batch and its columns, on the device of input_ids.

        Takes the arguments of `PrefixForest.from_padded`, which also says what it refuses, and these:

        Args:
            columns: values by name, in any form that `fold` takes.
        """
        device = input_ids.device if isinstance(input_ids, Tensor) else torch.device("cpu")
        on_cpu = input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids
        forest = PrefixForest.from_padded(on_cpu, attention_mask, response_mask, uid=uid)
        edges, mask = LossEdges.from_forest(forest), _tensor(response_mask, device)
        rows, length = np.shape(on_cpu)
        places = mask.nonzero().T
        places[1] += length - mask.shape[1]
        batch = cls(forest.to(device), edges.to(device), {}, places, (rows, length, mask.shape[1]))
        batch.columns.update({name: batch.fold(values) for name, values in (columns or {}).items()})
        return batch

    def fold(self, values: Any) -> Tensor:
        """Return the values of the supervised tokens: [M], differentiable, with the dtype of values.

        Args:
            values: a tensor, array or list [B, L]; or [B, R], for the last R columns; or [B], one for each row, such
                as a group-normalised advantage.

        Raises: TreeError (E801) for another shape; TreeTypeError (E801) for what holds no numbers.
        """
        tensor, (row, column) = _tensor(values, self.places.device), self.places
        rows, length, width = self.shape
        if tensor.shape == (rows,):
            return tensor[row]
        if tensor.shape not in ((rows, length), (rows, width)):
            raise TreeError(
                f"a column has shape {list(tensor.shape)}; expected [{rows}, {length}], [{rows}, {width}] or [{rows}]"
            )
        return tensor[row, column - (length - tensor.shape[1])]

    def unfold(self, values: Tensor, *, fill: float = 0.0, whole: bool = False) -> Tensor:
        """Return values of the supervised tokens at their places in the batch: [B, R, ...], differentiable.

        Args:
            values: [M, ...], such as log-probs or entropies of `sample_logprobs`, or values of `at_predictions`.
            fill: the value of all other places, such as padding, prompts, and tokens that response_mask leaves out.
            whole: return [B, L, ...] also where response_mask has fewer columns.

        Raises: TreeError (E801) for another shape.
        """
        row, column = self.places
        if values.shape[:1] != row.shape:
            raise TreeError(f"values have shape {list(values.shape)}; expected [{len(row)}, ...]: M values")
        rows, length, width = self.shape
        width = length if whole else width
        out = values.new_full((rows, width, *values.shape[1:]), fill)
        return out.index_put((row, column - (length - width)), values)

    def __repr__(self) -> str:
        """Return the sizes: `PaddedRollouts(2 rows of 9 columns, 9 tokens in 7, 5 supervised)`."""
        rows, length, _ = self.shape
        tokens = f"{len(self.forest.loss_mask)} tokens in {self.forest.num_tokens}"
        return f"PaddedRollouts({rows} rows of {length} columns, {tokens}, {self.edges.num_loss_tokens} supervised)"


def _tensor(values: Any, device: torch.device) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(device)
    try:
        return torch.from_numpy(np.array(values)).to(device)  # a copy: it may be written, whatever its strides were
    except (TypeError, ValueError) as error:
        raise TreeTypeError(f"values are {values!r:.100}; expected a tensor, array or list of numbers") from error
