"""How a model runs a folded row: its attention mask, which models can be folded, which forward passes are refused.

architectures.py  which models of transformers can be folded, and why others are refused
masks.py          the dense mask; rectangles; the form that "sdpa" and "eager" take, windows included
block_mask.py     FlexAttention's BlockMask in closed form
checks.py         the arguments of a forward pass, checked before it runs: check_model_inputs, guard
"""
