"""The EAGLE-3 target cache: a frozen target model's supervision on disk, so that a draft trains without the target.

    cache.py        the public face of the format: manifest, shards, embeddings, reader, loader, convert, verify
    shards.py       one shard: its bytes, its writer, its receipt
    target.py       the target model: which layers are captured, and how its outputs are shifted
    supervision.py  a batch of the target's outputs -> the fields of the cache
    vocab.py        which target tokens the draft knows
    chats.py        chats -> ids and loss mask, by the target's tokenizer and template
    samples.py      the tokenized input, as it stands in the sidecar
    plan.py         everything that decides the bytes, fixed before the first forward
    producer.py     a plan and a target -> shards, by any number of workers, resumable
    precompute.py   python -m niels_gpt.eagle3.precompute
    verify.py       is a finished cache good?
    stats.py        what is in it
    __main__.py     python -m niels_gpt.eagle3 verify | inspect | convert | stats

Needs the extra `eagle3` (transformers) to run a target; reading and writing caches needs torch and safetensors only.
"""
