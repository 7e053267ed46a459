"""The earlier place of niels_gpt/recipes/units.py, for one release.

run.py   the functions that it had
"""
