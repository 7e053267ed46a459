"""The EAGLE-3 target cache: a frozen target model's supervision on disk, so that a draft trains without the target.

The format, which needs torch and safetensors:

    cache.py        its public face: every name of the published contract, the reader, the loader
    layout.py       the form of a shard: tensors, dtypes, offsets
    manifest.py     manifest.json and the embeddings
    shards.py       the writer of a shard, its receipt, its damage
    shard_set.py    all shards of a cache, checked and mapped
    convert.py      versions 1 and 2

The producer, which needs the extra `eagle3` (transformers):

    tokenizers.py templates.py template_code.py edges.py chats.py
                    chats -> ids and loss mask, by the target's tokenizer and template
    template_process.py template_worker.py
                    a template, rendered where it can neither hang the run nor fill the memory
    hub.py models.py target.py small_target.py
                    the target: opened, listened to, and the sample's own
    supervision.py vocab.py
                    the target's outputs -> the fields of the cache; the draft's vocabulary
    samples.py plan.py estimate.py
                    the tokenized input, everything that decides the bytes, the disk it takes
    forward.py workers.py folder.py cache_folder.py producer.py
                    a plan -> shards, by any number of workers, resumable
    precompute.py   python -m niels_gpt.eagle3.precompute

A finished cache: python -m niels_gpt.eagle3 verify | inspect | convert | stats (__main__.py)

    checks.py verify.py opened.py file_checks.py row_checks.py positions.py
                    is it good?
    recompute.py unplanned.py
                    does the target say so, with a plan and without one?
    show.py stats.py plot.py
                    what is in it?
"""
