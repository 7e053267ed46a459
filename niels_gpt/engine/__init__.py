"""Builds caches: iterables in, files out. Knows no source, no network and no kind.

units.py   a cache in units: the plan that all share, the state of each by its receipt, and the seal
"""
