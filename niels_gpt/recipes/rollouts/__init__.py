"""Recorded rollouts, or message trees + tokenizer -> a committed rollout cache.

groups.py   what the builder reads: recorded groups as they are, and the threads of a tree, encoded by message
checks.py   the earlier place of niels_gpt.kinds.verify, for one release
caches.py   the recipes of rollouts/NAME and trees/NAME
"""
