"""niels_gpt: reproducible, verifiable training-data caches for language models.

Read in this order:
    settings.py            every default, with its unit and its source
    fileio.py              atomic files, checksums, CacheError
    versions.py            caches that are replaced in one step; records.py: what their meta.json says of files
    tokenizer.py           SentencePiece; tokenizer_training.py trains it, chat_template.py puts chats into ids
    data/                  where text and chats come from: hub, mirror folder, bundled sample
    build/                 the engine: iterables in, token files out
    cache/                 the formats, the builders' public face, the two readers and the CLI
    inspection/            looking into a finished cache
    recipes/               one function per cache: source + tokenizer + builder -> folder

This module imports nothing, so that a step that only looks at metadata does not pay for torch.
"""

__version__ = "0.1.0"
