"""One function per artifact: source + tokenizer + builder -> a committed folder. The CLI and Dagster call these.

    own.py         the user's own sources: lines of the settings, and sources.toml
    origins.py     what each source is under the current settings: dataset, files, revision, licence
    sources.py     its stream of texts or chats, without what is left out
    produce.py     the part all recipes share: nothing to do? build, measure, record
    tokenizer.py   ensure_tokenizer
    pretrain.py    build_fineweb_edu, build_wikitext, build_roam, build_gutenberg, build_own
    sft.py         build_dolly15k, build_oasst1, build_chats
    plan.py        every recipe by its key, and what a run would do
    snapshot.py    the raw text of a hub source, kept as a mirror
    report.py      all of that as tables of text
    progress.py    a bar on a terminal

A recipe's fingerprint is made of the settings it reads, the tokenizer's sha256, the source's fingerprint and the format
version; a cache whose recorded fingerprint is equal, and whose files have the right sizes, is not built again (D12).
"""
