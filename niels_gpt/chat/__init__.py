"""Any chat template: a chat becomes ids, and a mask of those that carry loss.

    tokenizers.py        opens a target's tokenizer, or that of a cache
    protocol.py          what encodes chats, what it returns, and the counters of what is dropped
    template_tokenizer.py  chats -> ids and mask by a template; which roles are accepted, which tokens are supervised
    backends.py          the tokenizer beneath a template: of transformers, or of a cache without transformers
    turns.py             which turns of the assistant carry loss
    values.py            which values a chat may hold
    rows.py              chats or given ids -> rows: what is truncated, dropped and counted; prints rows
    templates.py         which characters of a chat carry loss, for a template with marks and for one without
    template_code.py     what a template's jinja says: has it marks, does it ask for the date
    template_process.py  where templates are rendered safely: starts and limits the process below
    template_worker.py   the process that renders templates, with limits on memory and CPU time
    prefix_tokens.py     offsets -> mask of tokens; checks that a chat's beginning has the same ids alone

The project's own chats: niels_gpt/chat_template.py makes their ids, niels_gpt/cache/formats.py their loss mask.
"""
