"""Builds EAGLE-3 caches from chats and a target model.

options.py  defines every option: default, limits, help, flag, and the setting that supplies it in a build
input.py    reads the chats or rows that the target runs over, and identifies them
request.py  resolves options or settings to target, tokenizer, input and manifest; decides what a resumed run inherits
running.py  decides how the target runs and where its weights lie
prepare.py  tokenizes, chooses the draft's vocabulary, plans, and builds the cache; loads the target again for checks
assets.py   eagle3/draft_vocab and eagle3/targets: decides whether to build, reuse or resume them
respond.py  writes a file of the target's own replies to chats, which may be the input
"""
