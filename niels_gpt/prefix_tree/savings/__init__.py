"""What folding would save on files of recorded rollouts, without a model.

rollouts.py   which lines a file may have, and what is wrong with a bad one
count.py      which lines are folded together; every figure of `stats`, as a table and as JSON
plot.py       the picture of `stats --plot`, and the mask of one forest
"""
