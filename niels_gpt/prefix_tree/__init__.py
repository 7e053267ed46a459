"""Prefix-tree folding: rollouts that share a prefix become one deduplicated row, with its mask, positions and loss.

fold.py        the published contract: one prompt, its completions, one label per row
forest.py      PrefixForest: any tree, in pre-order, whose one array `subtree_end` is the whole mask
ids.py radix.py stats.py
               ids as they come -> a radix tree -> its layout; what folding saves
edges.py       LossEdges: every target supervised exactly, the first token of each completion too
attention.py   the mask as the attention of a model takes it; routes that would be silently wrong are refused
verify.py      verify_fold: is this folding (ours or another's) the same as no folding?
demo.py        python -m niels_gpt.prefix_tree.demo: one policy-gradient step both ways
__main__.py savings.py
               python -m niels_gpt.prefix_tree stats | show: what folding would bring
"""
