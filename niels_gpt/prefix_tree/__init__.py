"""Prefix-tree folding: sequences that share prefixes become one row without duplicates, with mask, positions and loss.

The row and its supervision:

    fold.py             public (the spec's): one prompt and its completions, one label per row; the collate function
    forest.py           PrefixForest: the row and its positions for any tree; ForestStats: what folding saves
    sequences.py        which input is accepted: ids and masks as arrays, padded batches, message trees as threads
    radix.py            the radix tree of sequences and its pre-order, in integers
    edges.py            LossEdges: which row predicts which target, with which weight; log-probs and losses from logits
    fields.py           ragged fields: values per sample or token, in the order of the supervised tokens
    padded.py           PaddedRollouts: a padded batch of verl, NeMo-RL or TRL folded, and its values put back
    policy.py           PolicyLoss: clipped ratios with KL and entropy, as in GRPO and DAPO; value_loss: of a critic
    bins.py             groups of samples as forests under a token budget, for micro-batches and ranks

What a model needs:

    attention.py        public: the arguments of a forward pass, and the guard that checks them
    masks.py            the mask: dense, as rectangles, as FlexAttention's BlockMask, as a model takes it
    architectures.py    which models of transformers can be folded, and why others are refused
    segments.py         the attention implementation "prefix_tree" of transformers, and which models can use it
    segments_plan.py    which rows meet which keys: the attention of a folded row as few calls
    segments_kernel.py  runs these calls by torch's flash kernel for CPUs, or block by block by autograd
    heads.py            body_forward: hidden states and the model's head, through wrappers; logits_head: the head alone
    tree_rows.py        a forest as the batch of TRL's AsyncGRPOTrainer

Caches:

    rollouts/           groups of sampled sequences with their fields on disk, as an epoch of forests

Proof that folding changes nothing:

    verify.py           verify_fold: compares losses and gradients of any fold with its samples run one by one

Earlier names, for one release:

    backends/           AttentionRouteError, of architectures.py now
    fold_checks.py      FoldReport, of verify.py now

Commands:

    savings.py          what folding would save on recorded rollouts; the shape of a model from its config.json
    plot.py             the picture of `stats --plot`, and the mask of one forest
    __main__.py         python -m niels_gpt.prefix_tree stats | show; the code is niels_gpt/commands/prefix_tree.py
"""

# Here because the commands need these numbers at import, and every module beside it loads torch.
ATTENTIONS = ("prefix_tree", "dense")
"""How a folded row is run: only the pairs of its mask, or all T x T pairs under a dense mask."""
ROWS = 1000
"""Consecutive `ids` rows that are folded together where no group key is given."""
MODEL_7B = {"parameters": 7_000_000_000, "layers": 32, "d_model": 4096}
"""The sizes of a model of 7 billion parameters: the arguments of `forest.ModelShape`."""
