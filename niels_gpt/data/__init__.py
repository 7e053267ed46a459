"""Loaders of training text: one module per source, `local` for anyone's own, `types` for what they yield.

    places.py      the files of a mirror or of the sample, and their rows (json_stream, parquet_stream, parquet_pages)
    text_files.py  encodings, the limit of a document, what is counted; upstream_rows.py: the project's sources so
    hub.py         the rows of the Hugging Face hub, in spite of its network (hub_network, hub_files)
    local.py       a file, a folder or a glob of one's own (chat_rows: the shapes of a chat)
    snapshot.py    rows of the hub, kept as a mirror
    exclude.py     what is to be left out; credits.py: licence and attribution

Importing these modules is cheap: datasets, pyarrow, huggingface_hub and torch load on first use.
"""
