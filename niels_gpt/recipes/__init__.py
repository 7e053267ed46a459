"""One function per artifact: source + tokenizer + builder -> a committed folder. The CLI and Dagster call these.

    sources.py     what each source is under the current settings: dataset, files, revision, streams of text
    produce.py     the part all recipes share: nothing to do? build, measure, record
    tokenizer.py   ensure_tokenizer
    pretrain.py    build_fineweb_edu, build_wikitext, build_roam, build_gutenberg
    sft.py         build_dolly15k, build_oasst1
    plan.py        every recipe by its key, and what a run would do

A recipe's fingerprint is made of the settings it reads, the tokenizer's sha256, the source's fingerprint and the format
version; a cache whose recorded fingerprint is equal, and whose files have the right sizes, is not built again (D12).
"""
