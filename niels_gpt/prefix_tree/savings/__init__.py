"""What folding would save on recorded rollouts, without a model. niels_gpt/commands/prefix_tree.py reads the files.

count.py      which lines are folded together; every figure of `stats`, as a table and as JSON
models.py     the shape of a model from its config.json
plot.py       the picture of `stats --plot`, and the mask of one forest
"""

ATTENTIONS = ("prefix_tree", "dense")
"""How a folded row is run: only the pairs of its mask, or all T x T pairs under a dense mask."""
ROWS = 1000
"""Consecutive `ids` rows that are folded together where no group key is given."""
MODEL_7B = {"parameters": 7_000_000_000, "layers": 32, "d_model": 4096}
"""The sizes of a model of 7 billion parameters: the arguments of `forest.ModelShape`."""
