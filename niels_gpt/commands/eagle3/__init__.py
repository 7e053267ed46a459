"""The commands for EAGLE-3 caches.

tools.py       the groups `niels-gpt eagle3` and python -m niels_gpt.eagle3, and the commands for finished caches
precompute.py  eagle3 precompute and its estimate; python -m niels_gpt.eagle3.precompute
respond.py     eagle3 respond; python -m niels_gpt.eagle3.respond
"""
