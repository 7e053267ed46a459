"""The commands for EAGLE-3 caches.

tools.py       all of them, as `niels-gpt eagle3` and python -m niels_gpt.eagle3; those for finished caches
precompute.py  eagle3 precompute, and the estimate that it prints; python -m niels_gpt.eagle3.precompute
respond.py     eagle3 respond; python -m niels_gpt.eagle3.respond
"""
