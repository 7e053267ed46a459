"""The commands for EAGLE-3 caches.

tools.py       the groups `niels-gpt eagle3` and python -m niels_gpt.eagle3, and the commands for finished caches
exchange.py    eagle3 import, watch and export: the files of other tools
shared.py      what the commands of these two share
precompute.py  eagle3 precompute and its estimate; python -m niels_gpt.eagle3.precompute
respond.py     eagle3 respond; python -m niels_gpt.eagle3.respond
"""
