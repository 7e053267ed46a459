"""The checks of an EAGLE-3 cache by name, and what each of them asks. Kept apart so that naming them loads no torch."""

from __future__ import annotations

RECOMPUTED = "recomputed"
DESCRIPTIONS = {
    "complete": "Production has finished; shards, receipts, plan, embeddings and draft vocabulary are there, none too "
    "many, in the form that manifest.json says.",
    "checksums": "Every file and every sample has the checksum that was written down when it was made.",
    "finite": "No hidden state, probability or embedding is NaN or infinite: one of them makes a draft's loss NaN.",
    "ids_match": "The stored ids and masks, shifted and padded, are those of the source's rows.",
    "distribution": "The target's probabilities are none below 0 and sum to 1, top-k ones fall and have different "
    "draft ids, the mask is true only where there is loss, and behind a sample's tokens there are zeros.",
    "positions": "There are slots that a draft learns from: with loss, and the target's most probable token in the "
    "draft's vocabulary. Fewer than a twentieth of the slots with loss are remarked upon.",
    RECOMPUTED: "The stored embeddings are the target's, bit for bit. Some samples, drawn by a seed, were run through "
    "it once more, in the batches of the plan, and gave what is stored: bit for bit in the environment of the plan, "
    "else within a tolerance.",
}
"""Name -> one or two sentences. A cache that fails any of them must not be used."""
