"""What manifest.json says of a cache, and the draft's vocabulary in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.eagle3.samples import Samples
    from niels_gpt.recipes.eagle3 import Resolved


def manifest_of(resolved: Resolved, selected: list[int]) -> dict[str, Any]:
    """Return manifest.json's keys but num_samples: those of its version, in the meaning of their contract."""
    from niels_gpt.eagle3.manifest import is_compressed

    options, target = resolved.options, resolved.target
    compressed = is_compressed(options.target_probs_topk, len(selected))
    found = {
        "format_version": options.format_version or (2 if compressed else 1),
        "target_model": options.target_name or options.target_model,
        "target_vocab_size": target.vocab_size,
        "draft_vocab_size": len(selected),
        "seq_length": options.seq_length,
        "dtype": options.dtype,
        "shard_size": options.shard_size,
        "aux_hidden_dim": target.hidden_size * len(resolved.aux_layer_ids),
        "aux_layer_ids": resolved.aux_layer_ids,
        "selected_token_ids": selected,
    }
    if found["format_version"] == 1:
        return found
    return {
        **found,
        "target_probs_topk": options.target_probs_topk,
        "input_data": resolved.source["input_data"],
        "split": None,
        "shuffle_seed": 0,
        "mask_reasoning_content": False,
        "mask_generation_prompt": True,  # the role header carries no loss
    }


def draft_size(resolved: Resolved) -> int:
    """Return how many of the target's tokens the draft knows, where no file says which."""
    vocab = resolved.target.vocab_size
    return min(resolved.options.draft_vocab_size or vocab, vocab)


def known_vocab(resolved: Resolved) -> list[int] | None:
    """Return the target's id of each of the draft's, from a file, a cache, or as recorded; None: by frequency."""
    from niels_gpt.eagle3.manifest import manifest_path, read_manifest

    options = resolved.options
    if resolved.draft_vocab is not None:
        return resolved.draft_vocab
    if options.resume and options.output_dir is not None and os.path.exists(manifest_path(options.output_dir)):
        found = read_manifest(options.output_dir)
        wanted = (resolved.target.vocab_size, draft_size(resolved))
        if (found.get("target_vocab_size"), found.get("draft_vocab_size")) == wanted:
            return list(found["selected_token_ids"])
    return None


def frequent_vocab(resolved: Resolved, samples: Samples) -> list[int]:
    """Return the ids that are supervised most often, the special ones among them."""
    from niels_gpt.eagle3.vocab import build_eagle3_token_mapping

    ids, _ = build_eagle3_token_mapping(
        [{"input_ids": samples.ids, "loss_mask": samples.loss_mask}],
        target_vocab_size=resolved.target.vocab_size,
        draft_vocab_size=resolved.options.draft_vocab_size,
        special_token_ids=resolved.tokenizer.special_token_ids,
    )
    return [int(number) for number in ids]
