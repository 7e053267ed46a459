"""Prefix-tree folding: rollouts that share a prefix become one deduplicated row, with its mask, positions and loss.

The published contract:

    fold.py         one prompt, its completions, one label per row; the batch that an attention backend takes

Any tree, every target:

    forest.py       PrefixForest: the row, in pre-order, whose one array `subtree_end` is the whole mask
    ids.py messages.py radix.py stats.py
                    ids and trees of messages as they come -> a radix tree -> its layout; what folding saves
    edges.py        LossEdges: each target at the row that predicts it, log-probs and losses
    fields.py       values per sample and token, brought into order

What a model needs, and whether it gets it:

    masks.py attention.py
                    the mask; as attention takes it, with every way refused that would be silently wrong
    architectures.py heads.py
                    which models can be folded; their heads as functions of hidden states
    fold_batch.py verify.py fold_report.py
                    verify_fold: is this folding, ours or another's, the same as no folding?

Commands:

    rollout_lines.py savings.py plot.py
                    python -m niels_gpt.prefix_tree stats | show (__main__.py)
    demo.py         python -m niels_gpt.prefix_tree.demo: one policy-gradient step both ways
"""
