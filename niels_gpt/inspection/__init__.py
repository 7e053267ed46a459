"""Looking into a finished cache.

show.py    a decoded window, or an example with its loss mask
"""
