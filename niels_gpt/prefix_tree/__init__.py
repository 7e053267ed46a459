"""Prefix-tree folding: sequences that share prefixes become one row without duplicates, with mask, positions and loss.

The row and its supervision:

    fold.py           public (the spec's): one prompt and its completions, one label per row; the collate function
    forest.py         PrefixForest: the row, its positions and mask for any tree; ForestStats: what folding saves
    sequences.py      which input is accepted: ids and masks as arrays, message trees as threads
    layout/           the integers of a forest: the radix tree and its pre-order
    edges.py          LossEdges: which row predicts which target, with which weight; log-probs and losses from logits
    bins.py           groups of samples as forests under a token budget, for micro-batches and ranks

What a model needs:

    attention.py      public: the arguments of a forward pass, the masks, the guard
    backends/         how a model runs a folded row: masks, which models can be folded, which passes are refused
    tree_rows.py      a forest as the batch of TRL's AsyncGRPOTrainer, and such a batch as a forest
    heads.py          body_forward: hidden states and the model's head, through wrappers; logits_head: the head alone

Caches:

    rollouts/         groups of sampled sequences with their fields on disk, as an epoch of forests

Proof that folding changes nothing:

    verify.py         verify_fold: compares a fold, of this package or another tool, with its samples run one by one
    fold_checks.py    FoldReport and its advice; which samples, positions and targets of a batch are wrong

Commands:

    savings/          what folding would save on files of recorded rollouts
    __main__.py       python -m niels_gpt.prefix_tree stats | show; the code is niels_gpt/commands/prefix_tree.py
"""
