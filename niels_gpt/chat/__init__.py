"""Any chat template: a chat becomes ids, and a mask of those that carry loss.

    tokenizers.py        opens a target's tokenizer; which roles are accepted, and which tokens are supervised
    rows.py              chats or given ids -> rows: what is truncated, dropped and counted; prints rows
    templates.py         which characters of a chat carry loss, for a template with marks and for one without
    template_code.py     what a template's jinja says: has it marks, does it ask for the date
    template_process.py  where templates are rendered safely: starts and limits the process below
    template_worker.py   the process that renders templates, with limits on memory and CPU time
    prefix_tokens.py     offsets -> mask of tokens; checks that a chat's beginning has the same ids alone

The project's own chats: niels_gpt/chat_template.py makes their ids, niels_gpt/cache/formats.py their loss mask.
"""
