"""Recorded rollouts, or message trees + tokenizer -> a committed rollout cache.

trees.py    the table of the caches of message trees: trees/oasst1
groups.py   what the builder reads: recorded groups as they are, and the threads of a tree, encoded by message
checks.py   public: is a rollout cache good; every damage
look.py     public: stats, the picture of what folding saves, the samples of a group, the group at a token
caches.py   the recipes of rollouts/NAME and trees/NAME
"""
