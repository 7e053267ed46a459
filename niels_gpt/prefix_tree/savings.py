"""What folding would save on recorded rollouts: which lines are folded together, and every figure that is reported.

    savings = count_savings(forests(lines))
    print(savings.as_json()["token_factor"], savings.interpretation())

Forests are counted one by one and dropped, so that memory depends on the largest forest, not on the file. FLOPs are of
a model of given sizes, or of the model that a config.json describes.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import nn

from niels_gpt.prefix_tree import ROWS
from niels_gpt.prefix_tree.forest import MAX_SAMPLE_TOKENS, SHAPE_7B, ForestStats, ModelShape, PrefixForest
from niels_gpt.prefix_tree.rollouts.records import Sample
from niels_gpt.storage.errors import TreeError
from niels_gpt.storage.meta_json import printable
from niels_gpt.tokenizers.library import needs_transformers

LITTLE = 1.3
"""A smaller factor of FLOPs is called little: a prompt of 256 tokens with 8 completions of 1,024 gives 1.21."""


def computed_pairs(stats: ForestStats, attention: str) -> int:
    """Return the query-key pairs that an attention computes for a forest: the pairs of the mask, or T x T."""
    return stats.pairs_after if attention == "prefix_tree" else stats.tokens_after**2


def flop_factor(stats: ForestStats, shape: ModelShape, attention: str) -> float:
    """Return the training FLOPs of a forest's samples over the FLOPs of its row."""
    after = shape.training_flops(stats.tokens_after, computed_pairs(stats, attention), stats.head_rows_after)
    return shape.training_flops(stats.tokens_before, stats.pairs_before, stats.head_rows_before) / after


class Rollouts(NamedTuple):
    """One row of a file of rollouts."""

    path: str
    line: int
    """The number, from 1, of a line, an item of an array, or a row of parquet."""
    samples: list[Sample]
    is_group: bool
    """Whether the row is a prompt with its completions, and not one sample."""
    key: str | None
    """The name of the row's group; None if it names none."""

    @property
    def where(self) -> str:
        """FILE:LINE."""
        return f"{self.path}:{self.line}"


class Folded(NamedTuple):
    """A forest and the lines that are folded in it."""

    forest: PrefixForest
    lines: list[Rollouts]


def forests(lines: Iterable[Rollouts], *, rows: int = ROWS) -> Iterator[Folded]:
    """Fold each group by itself, and samples without a group in runs of `rows` consecutive lines; 0: all of a file.

    Consecutive lines with the same group key are folded together, in either form. No forest holds lines of two files,
    and a run ends before it has more than MAX_SAMPLE_TOKENS.

    Raises: TreeError E804 for a group of several lines with more than MAX_SAMPLE_TOKENS.
    """
    run: list[Rollouts] = []
    tokens = 0
    for line in lines:
        size = sum(len(sample.ids) for sample in line.samples)
        if run and not _belongs_to(run, line, rows, tokens + size):
            yield Folded(_folded(run), run)
            run, tokens = [], 0
        run.append(line)
        tokens += size
    if run:
        yield Folded(_folded(run), run)


def _belongs_to(run: list[Rollouts], line: Rollouts, rows: int, tokens: int) -> bool:
    """Return whether a line is folded with the lines before it; tokens: of all of them together."""
    if run[0].path != line.path or run[-1].line >= line.line or run[0].key != line.key:  # a file may be given twice
        return False
    if line.key is None:
        is_run = not line.is_group and not run[0].is_group
        return is_run and (rows == 0 or len(run) < rows) and tokens <= MAX_SAMPLE_TOKENS
    if tokens > MAX_SAMPLE_TOKENS:
        text = f"{line.where}: found a group of more than {MAX_SAMPLE_TOKENS:,} tokens, expected smaller groups"
        raise TreeError(text, code="E804")
    return True


def _folded(lines: list[Rollouts]) -> PrefixForest:
    samples = [sample for line in lines for sample in line.samples]
    masks = [sample.loss_mask for sample in samples]
    return PrefixForest.from_sequences([sample.ids for sample in samples], loss_mask=masks)


@dataclass
class Savings:
    """Sums over forests, and the savings of each. A factor is the number before folding over the number after it."""

    shape: ModelShape
    """Sizes of the model for FLOPs."""
    attention: str = "prefix_tree"
    """One of ATTENTIONS: decides which pairs are computed after folding."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts of the reading: lines and samples left out, by reason, and more."""
    lines: int = 0
    groups: int = 0
    """Lines with a prompt and completions; each other one is a sample."""
    total: ForestStats | None = None
    """None before the first forest."""
    first_tokens: int = 0
    """First tokens of completions after a prompt: one label per row has no loss for them."""
    completion_tokens: int = 0
    """Tokens of completions, in samples with a known prompt."""
    computed_pairs: int = 0
    """Query-key pairs that the attention computes: the pairs of the mask, or T x T for each forest."""
    longest: tuple[int, str] = (0, "")
    """Tokens of the longest forest after folding, and its first line."""
    best: tuple[float, str] = (0.0, "")
    """The largest token factor of a forest, and its first line."""
    worst: tuple[float, str] = (math.inf, "")
    token_factors: array[float] = field(default_factory=lambda: array("d"))
    """The factor of each forest, in order."""
    flop_factors: array[float] = field(default_factory=lambda: array("d"))

    @property
    def sums(self) -> ForestStats:
        """Return the counts of all forests together, with FLOPs. Raises: TreeError (E801) without a forest."""
        if self.total is None:
            raise TreeError("no rollouts: expected at least one forest")
        return self.total

    def add(self, folded: Folded) -> None:
        """Count one more forest."""
        stats = folded.forest.stats(self.shape)
        self.total = stats if self.total is None else self.total + stats
        self.lines += len(folded.lines)
        self.groups += sum(line.is_group for line in folded.lines)
        for sample in (sample for line in folded.lines for sample in line.samples if sample.prompt_length >= 0):
            self.first_tokens += sample.prompt_length > 0
            self.completion_tokens += len(sample.ids) - sample.prompt_length
        size = stats.tokens_after
        self.computed_pairs += computed_pairs(stats, self.attention)
        where, factor = folded.lines[0].where, stats.tokens_before / size
        self.token_factors.append(factor)
        self.flop_factors.append(flop_factor(stats, self.shape, self.attention))
        self.longest = max(self.longest, (size, where), key=_number)
        self.best = max(self.best, (factor, where), key=_number)
        self.worst = min(self.worst, (factor, where), key=_number)

    @property
    def flops_after(self) -> int:
        """Return the training FLOPs of all forests, by `attention`."""
        return self.shape.training_flops(self.sums.tokens_after, self.computed_pairs, self.sums.head_rows_after)

    @property
    def flop_factor(self) -> float:
        """Return the training FLOPs before folding over the FLOPs after it."""
        sums = self.sums
        before = self.shape.training_flops(sums.tokens_before, sums.pairs_before, sums.head_rows_before)
        return before / self.flops_after

    @property
    def flop_factor_of_any_model(self) -> tuple[float, float]:
        """Return the least and the largest factor of any model: all work in attention, other weights, or the head.

        The head counts only if `shape` has one.
        """
        sums = self.sums
        factors = [sums.pairs_before / self.computed_pairs, sums.tokens_before / sums.tokens_after]
        if self.shape.head_parameters and sums.head_rows_after:
            factors.append(sums.head_rows_before / sums.head_rows_after)
        return min(factors), max(factors)

    def as_json(self) -> dict[str, Any]:
        """Return every figure by name, fit for JSON; for single forests the median, best and worst factor."""
        sums, (tokens, place) = self.sums, self.longest
        least, most = self.flop_factor_of_any_model
        return {
            "lines": self.lines,
            "counters": dict(self.counters),
            "groups": self.groups,
            "forests": len(self.token_factors),
            **{name: value for name, value in vars(sums).items() if name not in ("nodes", "flops_after")},
            "flops_after": self.flops_after,
            "tree_token_ratio": sums.tree_token_ratio,
            "token_factor": sums.tokens_before / sums.tokens_after,
            "pair_factor": sums.pairs_before / sums.pairs_after,
            "attention": self.attention,
            "computed_pairs": self.computed_pairs,
            "flop_factor": self.flop_factor,
            "flop_factor_of_any_model": {"least": least, "most": most},
            "model_shape": vars(self.shape),
            "first_tokens": self.first_tokens,
            "completion_tokens": self.completion_tokens,
            "median_token_factor": median(self.token_factors),
            "best": {"token_factor": self.best[0], "where": self.best[1]},
            "worst": {"token_factor": self.worst[0], "where": self.worst[1]},
            "longest_row": {"tokens": tokens, "where": place}
            | ({"mask_bytes": tokens * tokens} if self.attention == "dense" else {}),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures of `as_json` as pairs of a name and a value in words."""
        figures: list[tuple[str, Any]] = []
        for name, value in self.as_json().items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            figures += [(f"{name} {part}".strip(), figure) for part, figure in parts]
        return [(name.replace("_", " "), _shown(figure)) for name, figure in figures]

    def interpretation(self) -> str:
        """Return advice in words: whether folding pays, and how much."""
        factor, (least, most) = self.flop_factor, self.flop_factor_of_any_model
        parameters, head = self.shape.parameters + self.shape.head_parameters, self.shape.head_parameters
        sizes = f"{parameters:,} parameters in {self.shape.layers} layers of width {self.shape.d_model:,}"
        share = f"{1 - 1 / factor:.1%} of the training FLOPs of a model of {sizes}"
        if factor < 1:
            verdict = (
                f"Folding does not pay: a step takes {1 / factor:.2f} times the training FLOPs of a model of {sizes}."
            )
        elif factor < LITTLE:
            verdict = (
                f"Folding saves little: {share}. The samples share few tokens, or their rows are not side by side."
            )
        else:
            verdict = f"Folding saves {share} where a batch holds whole forests."
        anywhere = (
            f"Other models: {least:.2f} to {most:.2f} times fewer; the first where attention "
            f"{'or the head ' if head else ''}is most of the work."
        )
        if self.attention == "dense":
            return f"{verdict} {anywhere} A dense mask computes all pairs of a row, also those that it forbids."
        return f"{verdict} {anywhere}"


def _number(record: tuple[float, str]) -> float:
    return record[0]


def _shown(figure: float | str) -> str:
    if isinstance(figure, int) and figure < 10**12:
        return f"{figure:,}"
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def count_savings(folded: Iterable[Folded], shape: ModelShape = SHAPE_7B, attention: str = "prefix_tree") -> Savings:
    """Return the savings on some forests. A Savings without a forest raises TreeError (E801) when asked for figures."""
    savings = Savings(shape, attention)
    for forest in folded:
        savings.add(forest)
    return savings


# --- the shape of a model from its config.json ------------------------------------------------------------------------


_LARGEST = 1 << 28  # the most of any size of a model
_MOST_BYTES = 4 << 20
_MOST_COUNTED = 10_000  # labels, layers, heads and such: the config's class may make an object for each
_COUNTS = re.compile(
    r"(^|_)(num|n|layers?|depths?|blocks?|labels?|experts?|stages?|heads?)(_|$)"
    r"(?!.*(size|dim|embd|inner|positions|embeddings|ctx|tokens?|seq|id|theta)(_|$))"
)
_MOST_LAYERS, _MOST_EXPERTS = 1_000, 10_000  # they decide how many modules are built
_BUILT = 100_000  # modules of experts, layers times experts
_REMEDY = "Give --parameters, --layers and --d-model instead"


def shape_of(folder: Path) -> ModelShape:
    """Return the shape of the model whose config.json is in a folder.

    transformers builds the model on the meta device, so without weights. Nothing is read but the config, no code of the
    model's repository runs, and a config with sizes that no model has is refused before transformers reads it.

    Raises: TreeError (E801) if transformers cannot build such a causal language model, or its sizes are absurd;
        FileNotFoundError without a config.json; ImportError without transformers.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise needs_transformers("--model") from error
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, expected the config of a transformers model")
    try:
        _check_file(path)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        _check(text)
        if text is not config and type(text) not in AutoModelForCausalLM._model_mapping:
            raise TreeError(f"the language model of a {config.model_type} cannot be built without its other parts")
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(text, trust_remote_code=False, attn_implementation="eager")
    except Exception as error:  # any error of the config's class
        reason = printable(" ".join(str(error).split())[:200])
        raise TreeError(f"{path}: no causal language model can be built from it ({reason}). {_REMEDY}") from error
    return shape_of_model(model)


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a causal language model of transformers, with weights or without.

    Parameters count if a token is multiplied with them: all matrices but embeddings, of experts the active share. The
    head is apart. The width is the sum over query heads; if values have another width than keys, the mean of both. A
    shape has no sliding window: each layer counts as full attention.
    """
    config = model.config.get_text_config()
    experts, active = _experts(config)
    head = model.get_output_embeddings()
    apart = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    apart |= set() if head is None else {id(head.weight)}
    total = 0
    for name, weight in model.named_parameters():
        if id(weight) not in apart and weight.ndim > 1:
            of_experts = experts and ".experts." in name
            total += weight.numel() * active // experts if of_experts else weight.numel()
    of_head = 0 if head is None else head.weight.numel()
    return ModelShape(total, config.num_hidden_layers, _width(config), head_parameters=of_head)


def _width(config: Any) -> int:
    """Return the width of attention: a pair costs as many products for its score and again for its value."""
    heads, values = config.num_attention_heads, getattr(config, "v_head_dim", None)
    keys: list[Any] = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if values and all(keys):
        return int(heads * (sum(keys) + values) // 2)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _experts(config: Any) -> tuple[int, int]:
    """Return the experts of a layer, and how many of them a token gets; 0 and 0 without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(value) for name in names if (value := getattr(config, name, None))), 0)
    active = getattr(config, "num_experts_per_tok", None) or experts
    return experts, min(int(active), experts)


def _check_file(path: Path) -> None:
    """Raise TreeError for a config of absurd size or with an absurd number: its class may make a list as long."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise TreeError(f"it has {size:,} bytes; expected {_MOST_BYTES:,} at most")
    waiting = [("the config", json.loads(path.read_bytes()))]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
        elif isinstance(value, int):
            most = _MOST_COUNTED if _COUNTS.search(name) else _LARGEST
            if not -most <= value <= most and "theta" not in name:
                raise TreeError(f"{name} is {value:.3g}; expected {most:,} at most")


def _check(config: Any) -> None:
    """Raise TreeError for sizes that no model has."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise TreeError(f"{name} is {value:.3g}; expected {_LARGEST:,} at most")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    experts = _experts(config)[0]
    if not 0 < layers <= _MOST_LAYERS or not 0 < heads <= _LARGEST or not 0 <= experts <= _MOST_EXPERTS:
        raise TreeError(f"it has {layers} layers, {heads} heads and {experts} experts")
    if layers * experts > _BUILT:
        raise TreeError(f"it has {layers} layers of {experts} experts; expected {_BUILT:,} experts at most")
