"""The integers that a forest is made of.

radix.py   sequences -> radix tree -> pre-order: where nodes are split, and the order of the tokens
"""
