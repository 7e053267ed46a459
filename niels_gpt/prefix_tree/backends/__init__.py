"""How a model runs a folded row: its attention mask, which models can be folded, which forward passes are refused.

architectures.py    which models of transformers can be folded, and why others are refused
masks.py            the dense mask; rectangles; the form that "sdpa" and "eager" take, windows included
block_mask.py       FlexAttention's BlockMask in closed form
segments.py         the attention implementation "prefix_tree" of transformers, which needs no T x T mask
segments_plan.py    which queries meet which keys: the attention of a folded row as few calls
segments_kernel.py  these calls by torch's flash kernel for CPUs, forward and backward; and block by block by autograd
segments_probe.py   whether a model can run a folded row by its segments
checks.py           the arguments of a forward pass, checked before it runs: check_model_inputs, guard
"""
