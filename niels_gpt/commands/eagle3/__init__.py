"""The commands for EAGLE-3 caches.

group.py       all of them, as `niels-gpt eagle3` and python -m niels_gpt.eagle3
precompute.py  eagle3 precompute, the estimate and progress that it prints; python -m niels_gpt.eagle3.precompute
look.py        eagle3 verify, inspect, stats
change.py      eagle3 convert, redraft, join
exchange.py    eagle3 import, export
respond.py     eagle3 respond; python -m niels_gpt.eagle3.respond
"""
