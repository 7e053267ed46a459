"""What recipes know of a tokenizer beside its model, which niels_gpt/recipes/tokenizer.py finds or makes.

texts.py      on which sources a tokenizer is trained, in which order, and on how much text of each
earlier.py    versions that earlier runs have made: which is whole, and which these settings trained
change.py     what is logged of a new tokenizer: caches it makes unreadable, sources it was not trained on
templates.py  the chat template of sft caches: its text by the settings, and what a fingerprint has of it
"""
