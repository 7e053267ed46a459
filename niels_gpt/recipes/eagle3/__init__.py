"""Chats + target model -> an EAGLE-3 cache.

options.py  every option's default, limits, help and flag; which setting it takes its value from
input.py    which chats or rows the target is run over, and what identifies them
request.py  options or settings -> target, tokenizer, input, manifest.json; what a resumed run takes from a plan
prepare.py  that -> the plan, tokenized, with the draft's vocabulary; and the cache
assets.py   eagle3/draft_vocab and eagle3/targets: when they are built, reused or resumed; the target again, for checks
respond.py  chats -> a file of the target's own replies to them, which may be the input
"""
