"""PrefixForest: sequences that share prefixes, folded into one row of tokens; and what folding saves.

The row is the radix tree of the sequences in depth-first pre-order:

    samples                 row         0  1  2  3  4  5  6
    1 2 10 11               input_ids   1  2 10 11 20 21 22
    1 2 20 21 22            positions   0  1  2  3  2  3  4
                            subtree_end 7  7  4  4  7  7  7

In this order the tokens that see token k are those from k to the end of its subtree. So one array is the whole
attention mask: query q sees key k if and only if k <= q < subtree_end[k]. Groups that share nothing are further roots
of the same row. A padding token sees only itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.prefix_tree import MODEL_7B, radix
from niels_gpt.prefix_tree.sequences import Encode, concatenated, masks, threads, unpadded
from niels_gpt.storage.errors import TreeError, TreeTypeError

MAX_SAMPLE_TOKENS = 2**26
"""The most tokens of all samples of a forest that a file or a few numbers describe: 512 MiB as int64."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide the cost of a token and of an attention pair."""

    parameters: int  # every token is multiplied with them
    layers: int
    d_model: int
    head_parameters: int = 0  # beside `parameters`: only rows with a loss are multiplied with them

    def training_flops(self, tokens: int, pairs: int, head_rows: int = 0) -> int:
        """Return the FLOPs of forward and backward, 3 * (2 * products + 4 * d_model * layers * pairs).

        products: parameters * tokens + head_parameters * head_rows. head_rows: rows with a loss.
        """
        products = self.parameters * tokens + self.head_parameters * head_rows
        return 3 * (2 * products + 4 * self.d_model * self.layers * pairs)


SHAPE_7B = ModelShape(**MODEL_7B)


@dataclass(frozen=True)
class ForestStats:
    """Counts of one forest, or sums over several. `before`: each sample in its own row; `after`: folded.

    An attention pair is a query and a key that it sees. Padding is not counted.
    """

    samples: int
    nodes: int
    tokens_before: int
    tokens_after: int
    pairs_before: int
    pairs_after: int
    max_depth: int  # tokens of the longest sample
    max_levels: int  # nodes of the sample with the most
    max_branching: int  # children of the node with the most; 1 where nothing branches
    shared_samples: int  # duplicates and prefixes of other samples, which add no token
    flops_before: int | None = None  # of training; None without a ModelShape
    flops_after: int | None = None
    head_rows_before: int = 0  # rows with a loss: the only ones that the head is multiplied with
    head_rows_after: int = 0  # each once, however many targets it has

    @property
    def tree_token_ratio(self) -> float:
        """Return tokens after folding over tokens before: 1 saves nothing."""
        return self.tokens_after / self.tokens_before

    @property
    def pair_ratio(self) -> float:
        """Return attention pairs after folding over pairs before."""
        return self.pairs_after / self.pairs_before

    @property
    def flop_ratio(self) -> float:
        """Return FLOPs after folding over FLOPs before. Raises: TreeError (E801) without a ModelShape."""
        if self.flops_before is None or self.flops_after is None:
            raise TreeError("FLOPs need a shape: forest.stats(ModelShape(parameters=..., layers=..., d_model=...))")
        return self.flops_after / self.flops_before

    def __add__(self, other: ForestStats) -> ForestStats:
        """Return the sums of the counts; of each maximum the larger one."""
        sums: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if mine is None or theirs is None:
                sums[name] = None
            else:
                sums[name] = max(mine, theirs) if name.startswith("max_") else mine + theirs
        return ForestStats(**sums)


@dataclass(frozen=True, eq=False, repr=False)
class PrefixForest:
    """S samples as T flat tokens in N nodes. A ragged field has one value per token of each sample, sample by sample.

    Make one by `from_sequences`, `from_rollout_group`, `from_padded`, `from_node_paths`, `from_message_tree` or
    `joined`. The same input gives the same layout. All tensors are on one device.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], tokens above this one in every sample through it; 0 for padding
    subtree_end: Tensor  # int64 [T], flat end of the subtree of the token's node; i + 1 for padding at row i
    node_starts: Tensor  # int64 [N]
    node_lengths: Tensor  # int64 [N], at least 1
    node_parents: Tensor  # int64 [N], smaller than the node's own number; -1 for a root
    sample_ends: Tensor  # int64 [S], the node whose last token is the sample's last; may be an inner node
    sample_offsets: Tensor  # int64 [S + 1], where a sample begins in a ragged field
    loss_mask: Tensor  # bool [sum of sample lengths], ragged: which tokens are targets
    completion_starts: Tensor  # int64 [S], tokens of a sample before its completion; -1 where it is not known

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Any],
        *,
        loss_mask: Iterable[Any] | None = None,
        prompt_lengths: Iterable[int] | None = None,
    ) -> PrefixForest:
        """Fold whole sequences: a prefix that several of them share is stored once.

        Args:
            sequences: [S] of ids: lists, tuples, integer arrays or tensors, none empty. Cut padding off first: here it
                would count as tokens. Duplicates and prefixes of other sequences stay samples, and add no tokens.
            loss_mask: [S] of 0 and 1 for each token: which ones are targets. Default: all.
            prompt_lengths: [S] tokens of each sequence before its completion, which a mask does not tell: the first
                token of a completion need not be a target. Only `LossEdges.field(per="completion")` needs them.

        Raises:
            TreeError (a ValueError, E801): there is no sequence, one is empty, an id is below 0 or above 2**31 - 1, a
                mask does not fit, or a prompt is longer than its sequence.
            TreeTypeError (a TypeError, E801): an id, or a length of a prompt, is not an integer.

        >>> forest = PrefixForest.from_sequences([[1, 2, 10, 11], [1, 2, 20, 21, 22]])
        >>> forest.input_ids.tolist(), forest.subtree_end.tolist()
        ([1, 2, 10, 11, 20, 21, 22], [7, 7, 4, 4, 7, 7, 7])
        """
        ids, offsets = concatenated(sequences, "sequence")
        layout, lengths = radix.radix_layout(ids, offsets), np.diff(offsets)
        starts = None if prompt_lengths is None else _prompt_lengths(prompt_lengths, lengths)
        return cls._laid_out(layout, ids, offsets, masks(loss_mask, offsets), starts)

    @classmethod
    def from_rollout_group(
        cls, prompt_ids: Any, completions: Iterable[Any], *, completion_mask: Iterable[Any] | None = None
    ) -> PrefixForest:
        """Fold one prompt and its completions.

        Args:
            prompt_ids: a list, tuple, integer array or tensor; may be empty: then no row predicts the first token of a
                completion.
            completions: such sequences, none empty. Unlike in `fold_shared_prefix_rollouts`, completions share equal
                first tokens.
            completion_mask: 0 and 1 for each token of each completion: which ones are targets. Mask out the output of
                tools, for example. Default: all.

        Raises:
            TreeError (E801): there is no completion, one is empty, an id is out of range, or a mask does not fit.
            TreeTypeError (E801): an id is not an integer.
        """
        pieces, bounds = concatenated([prompt_ids, *completions], "completion", first="the prompt")
        prompt, offsets = int(bounds[1]), bounds[1:]
        targets = None if completion_mask is None else masks(completion_mask, offsets - prompt)
        runs = np.full((len(offsets) - 1, 2), prompt)
        runs[:, 1] = offsets[1:] - offsets[:-1]
        loss_mask = np.array([False, True] * len(runs)).repeat(runs.ravel())
        if targets is not None:
            loss_mask[loss_mask] = targets
        layout = radix.radix_layout(pieces, offsets, prompt)
        offsets = offsets + prompt * np.arange(-1, len(runs))
        return cls._laid_out(layout, pieces, offsets, loss_mask, np.full(len(runs), prompt))

    @classmethod
    def from_padded(
        cls, input_ids: Any, attention_mask: Any, response_mask: Any, *, uid: Iterable[Hashable] | Tensor | None = None
    ) -> PrefixForest:
        """Fold a padded batch: sample b is row b without its padding.

        `PaddedRollouts` of niels_gpt.prefix_tree.padded takes the same arguments, and brings values per token along and
        back.

        Args:
            input_ids: integers [B, L], padded on the left, on the right, or on both sides.
            attention_mask: 0 and 1 [B, L], one run of 1 in each row; or the lengths [B] of rows that are padded on the
                right only.
            response_mask: 0 and 1, which tokens are targets: [B, L], or [B, R] for the last R columns. It may have
                zeros inside a response, such as at the output of tools.
            uid: [B], the group of each row, such as numbers or texts. Rows of two groups share no token, equal or not.
                Default: rows share equal tokens.

        The layout is made on the CPU; the forest is on the device of input_ids.

        Raises:
            TreeError (E801): there is no row, a shape does not fit, a mask has values other than 0 and 1, an id is out
                of range, a row has no token or padding between its tokens, or a target is padding or the first token
                of its row.
            TreeTypeError (E801): the ids are no integers, something is no array, or a uid is a list or array.
        """
        batch = unpadded(input_ids, attention_mask, response_mask)
        layout = radix.radix_layout(batch.ids, batch.offsets, groups=_groups(uid, len(batch.prompts)))
        forest = cls._laid_out(layout, batch.ids, batch.offsets, batch.targets, batch.prompts)
        return forest.to(input_ids.device) if isinstance(input_ids, Tensor) and not input_ids.is_cpu else forest

    @classmethod
    def from_node_paths(
        cls,
        node_lengths: Sequence[int],
        sample_paths: Sequence[Sequence[int]],
        input_ids: Any = None,
        *,
        loss_nodes: Iterable[int] | None = None,
    ) -> PrefixForest:
        """Take a given tree, such as in a `FoldedRollouts`: nodes with equal first tokens are not merged.

        Args:
            node_lengths: [N] tokens of each node, in the order of `input_ids`; may be 0.
            sample_paths: [S] the nodes of each sample, from its root. Nodes of length 0 are left out of paths.
            input_ids: [sum of node_lengths]. Default: all 0, if only the structure matters.
            loss_nodes: nodes whose tokens are targets. Default: all.

        Nodes are reordered into pre-order; siblings keep the order of their numbers.

        Raises:
            TreeError (E801): a path is empty or names no node, a node has two parents or is on no path, or the ids do
                not fit the lengths.
        """
        sizes = _numbers(node_lengths, "node_lengths")
        chosen = [_numbers(path, "a path") for path in sample_paths]
        tokens = sum(sizes[node] for path in chosen for node in path if 0 <= node < len(sizes))
        if max(tokens, sum(sizes)) > MAX_SAMPLE_TOKENS:
            raise TreeError(f"the samples have {tokens} tokens; expected {MAX_SAMPLE_TOKENS} at most")
        tree, paths = radix.tree_of_paths(sizes, chosen)
        flat = [input_ids[0] if getattr(input_ids, "ndim", 1) == 2 and len(input_ids) == 1 else input_ids]
        ids = np.zeros(sum(sizes), np.int64) if input_ids is None else concatenated(flat, "input_ids")[0]
        if len(ids) != sum(sizes):
            raise TreeError(f"node_lengths add up to {sum(sizes)} tokens, but there are {len(ids)} input_ids")
        wanted = set(range(len(sizes)) if loss_nodes is None else _numbers(loss_nodes, "loss_nodes"))
        if not wanted <= set(range(len(sizes))):
            raise TreeError(f"loss_nodes has {sorted(wanted)}; expected nodes from 0 to {len(sizes) - 1}")
        targets = np.repeat(
            [node in wanted for path in paths for node in path], [sizes[n] for path in paths for n in path]
        )
        offsets = np.cumsum([0, *(sum(sizes[node] for node in path) for path in paths)])
        return cls._laid_out(radix.pre_order(tree), ids, offsets, targets)

    @classmethod
    def from_message_tree(
        cls, tree: Mapping[str, Any], encode: Encode, *, counters: Counter[str] | None = None
    ) -> PrefixForest:
        """Fold a tree of messages, such as a line of OASST1's `*.trees.jsonl`.

        Args:
            tree: a message with its `replies`, or a record that has it as `prompt`.
            encode: returns the ids of one message, role tags included, and a mask with 1 for each target. Messages are
                encoded one by one, so that threads share tokens exactly where they share messages, or begin alike.
            counters: "cut_messages" counts the messages that are in no sample: they and those below have no target.

        The samples are the threads from the root to each last message with a target. `sequences.threads` yields them
        with that message, for ranks or rewards by sample.

        Raises:
            TreeError (E801): no message of the tree has a target, or ids and mask of a message differ in length.
        """
        samples = list(threads(tree, encode, Counter() if counters is None else counters))
        if not samples:
            raise TreeError("no message of the tree has a target: encode gave masks of zeros only")
        return cls.from_sequences([thread.ids for thread in samples], loss_mask=[thread.mask for thread in samples])

    @classmethod
    @torch.inference_mode(False)  # a forest made while rollouts are generated must be usable in training
    def joined(cls, forests: Sequence[PrefixForest]) -> PrefixForest:
        """Put several forests into one row, one after another, without padding. They share no tokens."""
        if not forests:
            raise TreeError("joined() got no forest; expected at least one")
        columns: dict[str, list[Tensor]] = {field.name: [] for field in fields(cls)}
        tokens = nodes = before = 0
        for forest in forests:
            size = forest.num_tokens
            for name, shift in {"input_ids": 0, "position_ids": 0, "subtree_end": tokens}.items():
                columns[name].append(getattr(forest, name)[:size] + shift)
            columns["node_starts"].append(forest.node_starts + tokens)
            columns["node_lengths"].append(forest.node_lengths)
            columns["node_parents"].append(torch.where(forest.node_parents < 0, -1, forest.node_parents + nodes))
            columns["sample_ends"].append(forest.sample_ends + nodes)
            columns["sample_offsets"].append(forest.sample_offsets[int(before > 0) :] + before)
            columns["loss_mask"].append(forest.loss_mask)
            columns["completion_starts"].append(forest.completion_starts)
            tokens, nodes, before = tokens + size, nodes + len(forest.node_starts), before + len(forest.loss_mask)
        return cls(**{name: torch.cat(column) for name, column in columns.items()})

    @torch.inference_mode(False)
    def subset(self, samples: Any) -> PrefixForest:
        """Return the forest of some samples, by their rising numbers [S]: their nodes, without padding.

        Raises: TreeError (E801) for no sample, and for numbers that do not rise or are not samples of this forest.
        """
        chosen = torch.as_tensor(samples, device=self.input_ids.device)
        if not len(chosen) or bool((chosen.diff() < 1).any()) or not 0 <= chosen[0] <= chosen[-1] < self.num_samples:
            raise TreeError(f"samples is {samples!r:.200}; expected rising numbers from 0 to {self.num_samples - 1}")
        if len(chosen) == self.num_samples and self.num_tokens == len(self.input_ids):
            return self
        ends, offsets, sizes = self.sample_ends[chosen], self.sample_offsets[chosen], self.sample_lengths[chosen]
        columns = (self.node_starts, self.node_lengths, self.node_parents, ends)
        part = radix.part_of_samples(*(each.numpy(force=True) for each in columns))
        starts, lengths, parents, last, kept = (torch.from_numpy(each).to(chosen.device) for each in part)
        bounds = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        tokens = torch.arange(int(bounds[-1]), device=chosen.device)
        tokens += (offsets - bounds[:-1]).repeat_interleave(sizes)
        return PrefixForest(
            input_ids=self.input_ids[kept],
            position_ids=self.position_ids[kept],
            subtree_end=torch.searchsorted(kept, self.subtree_end[kept]),
            node_starts=starts,
            node_lengths=lengths,
            node_parents=parents,
            sample_ends=last,
            sample_offsets=bounds,
            loss_mask=self.loss_mask[tokens],
            completion_starts=self.completion_starts[chosen],
        )

    @classmethod
    @torch.inference_mode(False)
    def _laid_out(
        cls, layout: radix.Layout, ids: radix.Ints, offsets: radix.Ints, loss_mask: Any, starts: Any = None
    ) -> PrefixForest:
        starts = np.full(len(offsets) - 1, -1) if starts is None else starts
        columns = (ids[layout.source], *layout[1:], offsets, loss_mask, starts)
        return cls(*map(torch.from_numpy, columns))

    def __repr__(self) -> str:
        """Return the sizes: `PrefixForest(2 samples of 9 tokens in 7, 3 nodes)`."""
        before, nodes = len(self.loss_mask), len(self.node_starts)
        return f"PrefixForest({self.num_samples} samples of {before} tokens in {self.num_tokens}, {nodes} nodes)"

    @property
    def num_samples(self) -> int:
        """Return S, the number of samples."""
        return len(self.sample_ends)

    @cached_property
    def num_tokens(self) -> int:
        """Return the number of flat tokens without padding."""
        return int(self.node_lengths.numpy(force=True).sum())

    @property
    def sample_lengths(self) -> Tensor:
        """Return the tokens of each sample, int64 [S]."""
        return self.sample_offsets.diff()

    @cached_property
    @torch.inference_mode(False)
    def sample_rows(self) -> Tensor:
        """Return the flat row of every token of every sample, int64 [sum of sample lengths], sample after sample."""
        tensors = (self.node_starts, self.node_lengths, self.node_parents, self.sample_ends, self.sample_offsets)
        rows = radix.rows_of_samples(*(tensor.numpy(force=True) for tensor in tensors))
        return torch.from_numpy(rows).to(self.input_ids.device)

    @property
    def rows_above(self) -> Tensor:
        """Return the row that predicts each flat token, its predecessor in the samples: int64 [T]; -1 for none."""
        nodes = (x.numpy(force=True) for x in (self.node_starts, self.node_lengths, self.node_parents))
        return torch.from_numpy(radix.rows_above(len(self.input_ids), *nodes)).to(self.input_ids.device)

    def samples(self) -> list[list[int]]:
        """Return the sequences that were folded."""
        return [part.tolist() for part in torch.split(self.input_ids[self.sample_rows], self.sample_lengths.tolist())]

    @torch.inference_mode(False)
    def padded(self, multiple_of: int, pad_id: int = 0) -> PrefixForest:
        """Return the forest with T rounded up to a multiple of a number. Padding sees only itself; nothing sees it."""
        if multiple_of < 1:
            raise TreeError(f"multiple_of is {multiple_of}; expected at least 1")
        rows = torch.arange(len(self.input_ids), -(-len(self.input_ids) // multiple_of) * multiple_of).to(
            self.input_ids
        )
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, torch.full_like(rows, pad_id)]),
            position_ids=torch.cat([self.position_ids, torch.zeros_like(rows)]),
            subtree_end=torch.cat([self.subtree_end, rows + 1]),
        )

    def to(self, device: torch.device | str) -> PrefixForest:
        """Return the forest with every tensor on a device."""
        return PrefixForest(*(getattr(self, field.name).to(device) for field in fields(self)))

    def stats(self, shape: ModelShape | None = None) -> ForestStats:
        """Return tokens and attention pairs before and after folding, and FLOPs for the shape of a model."""
        lengths, size = self.sample_lengths, self.num_tokens
        before = int(lengths.sum())
        pairs_before = int((lengths * (lengths + 1) // 2).sum())
        ends = self.subtree_end[:size]
        pairs_after = int((ends - torch.arange(size, device=ends.device)).sum())
        heads = self._head_rows()
        parents = self.node_parents.tolist()
        levels: list[int] = []
        for parent in parents:
            levels.append(1 if parent < 0 else levels[parent] + 1)
        children = torch.bincount(self.node_parents[self.node_parents >= 0])
        leaves = set(range(len(parents))) - set(parents)
        return ForestStats(
            samples=self.num_samples,
            nodes=len(parents),
            tokens_before=before,
            tokens_after=size,
            pairs_before=pairs_before,
            pairs_after=pairs_after,
            max_depth=int(lengths.max()),
            max_levels=max(levels),
            max_branching=int(children.max()) if len(children) else 1,
            shared_samples=self.num_samples - len(leaves),  # every leaf is the end of a sample
            flops_before=shape.training_flops(before, pairs_before, heads[0]) if shape else None,
            flops_after=shape.training_flops(size, pairs_after, heads[1]) if shape else None,
            head_rows_before=heads[0],
            head_rows_after=heads[1],
        )

    def _head_rows(self) -> tuple[int, int]:
        """Return how many rows predict a target: of all samples, and of the folded row."""
        wanted = self.loss_mask.clone()
        wanted[self.sample_offsets[:-1]] = False  # no row predicts the first token of a sample
        used = self.rows_above[self.sample_rows[wanted]]
        return len(used), int(torch.zeros_like(self.input_ids, dtype=torch.bool).index_fill_(0, used, True).sum())


def _groups(uid: Any, rows: int) -> list[list[int]] | None:
    """Return the rows of each group, groups in the order of their first rows; None without groups."""
    if uid is None:
        return None
    groups: dict[Hashable, list[int]] = {}
    try:
        keys = uid.tolist() if hasattr(uid, "tolist") else [k.tolist() if isinstance(k, Tensor) else k for k in uid]
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
    except TypeError as error:
        raise TreeTypeError(f"uid is {uid!r:.100}; expected a number or text for each row") from error
    if len(keys) != rows:
        raise TreeError(f"uid has {len(keys)} values; expected one for each of {rows} rows")
    return list(groups.values())


def _prompt_lengths(values: Iterable[int], lengths: radix.Ints) -> radix.Ints:
    prompts = _numbers(values, "prompt_lengths")
    if len(prompts) != len(lengths):
        raise TreeError(f"there are {len(prompts)} prompt_lengths; expected one for each of {len(lengths)} sequences")
    for sample, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        if not 0 <= prompt <= length:
            raise TreeError(f"prompt_lengths[{sample}] is {prompt}; expected 0 to {length}, the sequence's length")
    return np.array(prompts, dtype=np.int64)


def _numbers(values: Iterable[Any], what: str) -> list[int]:
    """Return a list, array or tensor of integers as a list. Refuses bools too: they are a mask."""
    numbers = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(type(number) is int or isinstance(number, np.integer) for number in numbers):
        raise TreeTypeError(f"{what} is {values!r}; expected integers")
    return [int(number) for number in numbers]
