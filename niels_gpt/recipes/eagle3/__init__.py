"""Chats + target model -> an EAGLE-3 cache.

options.py  every option's default, limits, help and flag; which setting it takes its value from
input.py    which chats or rows the target is run over, and what identifies them
prepare.py  options -> target, tokenizer, plan; draft vocabulary and manifest.json; what a resumed run takes from a plan
respond.py  chats -> a file of the target's own replies to them, which may be the input
of_settings.py  settings -> what the two assets are made of: target, options, revisions
draft_vocab.py  eagle3/draft_vocab: the tokens that the draft knows, counted without the target's weights
planned.py  what a build would do, for --dry-run
asset.py    eagle3/targets: when it is built, reused or resumed; loads the target that Dagster's checks run again
"""
