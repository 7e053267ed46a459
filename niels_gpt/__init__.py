"""niels_gpt: reproducible, verifiable training-data caches for language models.

Data goes from top to bottom. Each package's docstring lists its modules.

    settings.py            every setting: its default, unit, limits and help text
    data/                  where text and chats come from: one loader for each source, mirrors, files of your own
    hub/                   everything that uses the network: retries, datasets and models of the Hugging Face hub
    tokenizer.py           SentencePiece: text to ids and back; which models are accepted
    tokenizer_training.py  trains a SentencePiece model or a BPE tokenizer.json reproducibly
    train_tokenizer.py     python -m niels_gpt.train_tokenizer
    tokenizers/            tokenizers of any kind behind one protocol
    documents.py           documents as columns: what a loader of files gives a builder
    encoding.py            how texts are encoded in batches, with checks of what a tokenizer returns
    signals.py             signs that a source is not what it is taken for: counters, and when a build warns of them
    special_tokens.py      the four sentinels, and how text that contains one is recognized
    chat_template.py       how this project turns a chat into ids
    chat/                  chat templates of other models: ids, and which tokens carry loss
    display/               how people look at data: decoded with its loss mask; tables, a bar, pictures
    engine/                iterables in, files out: shuffle, split, encode, write, resume; a cache in units
    cache/                 the builders and readers of token caches (PR-03)
    builders/              the earlier name of engine/, for one release
    kinds/                 every operation for a finished cache of any kind: verify, stats, show, diff, locate
    sampling/              epochs, mixtures of caches and evaluation, with a resumable state
    exchange/              other tools' token files, out and in; caches in buckets
    eagle3/                caches of a target model's outputs for training EAGLE-3 drafts
    prefix_tree/           samples with shared prefixes folded into trees
    recipes/               which source, tokenizer and builder make each cache, and when it is built again
    commands/              every command line: flags, output, exit status
    storage/               files on disk: atomic writes, locks, versions, CacheError
    inspection/            the earlier name of kinds/, for one release
    interop/               the earlier name of exchange/, for one release
    work.py                what long work shares: the Progress callback, and signals that raise KeyboardInterrupt
    paths.py               default folders

meta.json: engine/meta.py decides the keys of every cache, the builders in cache/ and prefix_tree/ those of a kind, and
recipes/request.py what the key `source` says. cache/meta.py writes and reads it, storage/meta_json.py has its
checksum and file records, kinds/verify.py verifies it. Rules such as D5 and PR-03: docs/decisions/README.md.

This module imports nothing, so that reading metadata does not load torch.
"""

__version__ = "0.1.0"
