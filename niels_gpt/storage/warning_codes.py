"""The warnings by code, with the hundreds of the errors: W1xx use of streams, W2xx caches, W3xx sources and so on."""

from __future__ import annotations

from niels_gpt.storage.error_codes import rows

WARNINGS = rows("""
W101 short-last-batch
The last batch has fewer rows than the others, so some ranks get fewer rows or none. A mean over their rows is then
wrong.
> Pass `drop_last=True`, or sum the losses and divide by the number of all targets.

W102 fixed-windows
`random_offset` moves none of some windows, because the length of their shard leaves no room.
> Take another T, such as the one that the message names.

W201 failed-check
The cache was built, and a check that does not block its use failed.
> Read the check in the message. If it is expected, raise the limit, for instance `--max-dropped-share`.

W202 short-shards
Some shards are shorter than T + 1 tokens. No window fits into them, so their tokens are not read.
> Take a smaller T, or build with larger shards.

W203 long-examples
Some examples are longer than T. They are truncated or left out, as `over_length` says.
> Take a larger T, or pass `over_length` to choose.

W301 partial-source
The place that the source is read from has only some of its splits, so the cache is marked partial.
> Complete the mirror, or build from the hub.

W302 other-files
The folder holds files of kinds that are not read. They are not part of the cache.
> Name their suffixes with `--as-text` if they are text; otherwise nothing is to be done.

W303 skipped-link
Symbolic links in a source are not followed. Their targets are not part of the cache.
> Pass `--follow-links` if they may be followed.

W304 skipped-file
A file or folder of a source cannot be read, or is a pipe, a device or a broken link. It was skipped.
> Change its permissions or remove it, and build again.

W305 dropped-rows
A row or document cannot be used and was left out. The first one is named; the others are counted in meta.json.
> Correct the rows if there are many: `niels-gpt stats CACHE` prints the counts by reason.

W306 budget-not-reached
The source ended before the number of tokens that was asked for. The cache holds all of the source.
> Nothing, or add text, or ask for fewer tokens.

W307 val-share
The share of val differs from the one that was asked for. Documents go to one split as a whole, so a few long ones
decide.
> Cut long documents into parts, or take another seed.

W308 empty-val
The split val is empty: there are too few distinct texts.
> Add documents, or evaluate on another cache.

W309 empty-replies
Some chats have an empty reply of the assistant and are kept. A model learns from them to end its turn at once.
> Remove them from the source, or list their ids in a file for `--exclude`.

W310 unknown-roles
Chats with a message of another role than system, user and assistant were left out.
> Give these messages one of the three roles, or remove them from the chats.

W401 lossy-tokenizer
Encoding and decoding changes some texts, so the cache does not hold them exactly.
> Take a tokenizer with the default normalization, identity: one trained here loses nothing.

W402 unknown-ids
Some characters have no piece in the tokenizer, and became the unknown id.
> Take a tokenizer with byte fallback: one trained here has it.

W403 tokenizer-made-again
The installed tokenizer could not be used, so it is made again.
> Nothing. Caches that were built with another one are refused until they are built again.

W404 tokenizer-replaced
Another tokenizer is about to replace the one of this folder. Readers refuse its caches until they are built again
with the new one.
> Run the build command in the message, or the other one to return to the old tokenizer.

W405 little-text
The tokenizer was trained on little text, and every cache of the folder is encoded with it.
> Give the first build more sources, or name a model with `--tokenizer-model`.

W406 fewer-sources
The tokenizer was trained without some of the sources, because they cannot be read here. It differs from one that is
trained on all.
> Complete the sources, remove the tokenizer and build again; or keep it, and use it everywhere.

W407 user-tokenizer
The tokenizer was trained on user-defined sources only, and is used for a built-in one.
> Remove the tokenizer to train one on all sources.

W408 small-vocabulary
The texts allow fewer pieces than were asked for, so the vocabulary is smaller.
> Nothing, or train on more text.

W409 unproven-template
The chat template could not be tried before the build, or failed in the trial. A chat that shows it ends the run.
> Name a file with another template if the run ends: `--chat-template FILE`.

W501 little-room
The build may not fit on the disk. A full disk loses nothing: the build stops and can be resumed.
> Make room, or name another `--cache-dir`.

W502 no-progress
Earlier runs of this build ended before their next checkpoint, so each one starts from the same place.
> Give one run more time.

W503 worker-retried
A worker process died. Its batches are encoded once more, each alone.
> Nothing. If it happens again, give the machine more memory or use fewer workers.

W601 hub-retry
A request to the Hugging Face hub failed and is repeated after a pause.
> Nothing: after the last attempt the command ends with E601.

W701 plan-rewritten
The plan of an EAGLE-3 cache was missing or damaged, and was written again from the options.
> Nothing.

W702 shard-made-again
A shard of an EAGLE-3 cache was damaged, and was produced again.
> Nothing. If it happens again, look at the disk's health.

W703 few-positions
The EAGLE-3 cache has few supervised positions for a draft to learn from.
> Add chats, or take a larger `--seq-length`.

W801 active-dropout
Dropout or other noise is active. A token that several samples share gets one draw when folded, and one for each
sample when unfolded.
> Call `model.eval()` or set the rates to 0 to compare folded and unfolded values.
""")
"""Every warning."""
