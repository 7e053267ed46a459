"""niels_gpt: reproducible, verifiable training-data caches for language models.

docs/architecture.md follows one cache from text to batch. The docstring of each package lists its modules.

Text and chats:

    data/                  loaders: built-in sources, mirrors, your own files; drops and counts unusable rows
    hub/                   the network: datasets and models of the Hugging Face hub, retries
    documents.py           a batch of documents as columns, which loaders hand to builders
    signals.py             signs of an odd source: their counters, and the shares that a build warns of

Text to ids:

    tokenizer.py           SentencePiece: text to ids and back; load_tokenizer for any kind
    tokenizers/            one protocol for any tokenizer; tokenizer.json, gigatoken, tokens around documents
    tokenizer_training.py  trains a SentencePiece model or a BPE tokenizer.json reproducibly
    train_tokenizer.py     python -m niels_gpt.train_tokenizer
    encoding.py            encodes texts in batches, and checks the ids of a tokenizer
    special_tokens.py      the four sentinels of the project's own chats; finds them in a text
    chat_template.py       the project's own chat format: a chat to ids
    chat/                  any other chat template: a chat to ids, and which of them carry loss

Building and reading:

    engine/                the build: shuffle, split into train and val, checkpoints, resumption, units and their seal
    cache/                 token caches: builders and readers (PR-03)
    sampling/              training batches: epochs, packed rows, mixtures, evaluation, and a state to resume from
    eagle3/                EAGLE-3: a target model's outputs on disk, for training drafts
    prefix_tree/           samples with shared prefixes folded into one row; rollout caches
    exchange/              other tools' token files, in and out; caches in buckets
    trainers/              these streams inside the trainers that users have: torchtitan, Grain, transformers, Lightning
    kinds/                 a finished cache of any kind: verify, stats, show, diff, locate

What is built, and when:

    settings.py            every setting: default, unit, limits, help
    recipes/               source + tokenizer + builder for each cache; is it current; partitions, Dask, gc
    commands/              the command lines: flags, output, exit codes; Dagster's assets are in pipelines/
    display/               decoded text with its loss, tables, bars, pictures

Under all of it:

    storage/               files on disk: atomic writes, locks, versions and commits, error classes and their codes
    buckets/               files at a URL, and a bounded folder for pieces of them
    work.py                long work: the Progress callback, signals that become KeyboardInterrupt
    paths.py               default folders

Earlier names, for one release, which warn:

    builders/              of engine/
    inspection/            of kinds/
    interop/               of exchange/

Keys of meta.json: engine/meta.py for every cache, the builders in cache/ and prefix_tree/ for their kind,
recipes/request.py for `source`. cache/meta.py writes and reads the file, storage/meta_json.py has its checksum and
file records. Rules such as D5 and PR-03 stand in docs/decisions/README.md.

This module imports nothing, so that reading metadata does not load torch.
"""

__version__ = "0.1.0"
