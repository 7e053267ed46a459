"""The names of the checks of an EAGLE-3 cache, and their questions. Loads no torch, for Dagster's UI and --help."""

from __future__ import annotations

from niels_gpt.storage.checks import Check

RECOMPUTED = "recomputed"
"""The check that runs the target. `verify` does not make it: see recompute.py."""
CHECKS = {
    check.name: check
    for check in (
        Check(
            "complete",
            "The producer has finished: shards, receipts, plan, the target's weights and the draft vocabulary are "
            "there, no shard or receipt is left over, and all have the form that manifest.json says. In a native "
            "cache each sample has the rows that its loss mask needs, and no others. The reader opens every shard.",
        ),
        Check("checksums", "Every file and every sample has the checksum that was recorded when it was written."),
        Check(
            "finite",
            "No hidden state, scale, probability, log-normalizer or weight is NaN or infinite: one of them makes a "
            "draft's loss NaN.",
        ),
        Check(
            "ids_match",
            "The stored ids and masks are those of the source's rows, shifted and padded in versions 1 and 2.",
        ),
        Check(
            "distribution",
            "The target's probabilities are at least 0 and sum to 1; top-k probabilities fall and have different "
            "draft ids; the mask is true only where there is loss; after a sample's tokens there are zeros. Of a "
            "native cache: argmax ids are the target's, and at some target rows of each shard log-normalizer and "
            "argmax are what the stored weights give for the stored state.",
        ),
        Check(
            "positions",
            "There are slots that a draft learns from: with loss, and with the target's most probable token in the "
            "draft's vocabulary. A cache where these are fewer than a twentieth of the slots with loss gets a remark.",
        ),
        Check(
            RECOMPUTED,
            "The stored weights are the target's, bit for bit. Some samples, drawn by a seed, were run through the "
            "target again in the batches of the plan and gave the stored values: bit for bit in the environment of "
            "the plan, else within a tolerance.",
        ),
    )
}
"""All of them block: a cache that fails one must not be used."""
