"""The warnings by code, with the hundreds of the errors: W1xx use of streams, W2xx caches, W3xx sources and so on."""

from __future__ import annotations

from niels_gpt.storage.code_tables.row import rows

WARNINGS = rows("""
W101 short-last-batch
The last batch has fewer rows than the others, so some ranks get fewer rows or none. A mean over their rows is then
wrong.
> Pass `drop_last=True`, or sum the losses and divide by the number of all targets.
= the last batch has 4 of 6 rows, so some of 3 ranks get 1 rows and others 2; a mean over 0 rows is nan, and an
average of the ranks' means is wrong

W102 fixed-windows
`random_offset` moves none of some windows, because the length of their shard leaves no room.
> Take another T, such as the one that the message names.
= cache/pretrain/notes: random_offset moves none of 4 of 9 windows: their shards have n tokens with (n - 1) % T == 0.
Take another T, such as 4

W103 changed-mixture
A mixture continues a run with other sources, or with other arguments of them. A source that begins a new epoch serves
samples that the run has had.
> Nothing, if the changes in the message are those that you made.
= the sources differ from those of the state, at sample 1,000: resumed: fineweb_edu, train; new: roam, train; removed,
after 250 samples: 'train', 12022 tokens

W201 failed-check
The cache was built, and a check that does not block its use failed.
> Read the check in the message. If it is expected, raise the limit, for instance `--max-dropped-share`.
= sft/dolly15k: cache/sft/dolly15k/meta.json: 1 of 199 examples were dropped (0.50%), expected at most 0.00%:
sentinel_in_text 1

W202 short-shards
Some shards are shorter than T + 1 tokens. No window fits into them, so their tokens are not read.
> Take a smaller T, or build with larger shards.

W203 long-examples
Some examples are longer than T. They are truncated or left out, as `over_length` says.
> Take a larger T, or pass `over_length` to choose.
= cache/sft/chats/train_tokens.bin: T=1 loses 13 of 15 supervised tokens (86.7%). T=1 or more keeps 99 % of them, T=1
or more all

W205 other-tokenizer
Text that imported ids decode to gives other ids when it is encoded. Ids of another tokenizer do that, and ids that
were cut where no token ends.
> Look at `niels-gpt show CACHE`: where the text is no language, name the right tokenizer with `--tokenizer`.
= cache/imported/wiki: 96 % of the ids of 100 documents change when they are decoded and encoded again

W301 partial-source
The place that the source is read from has only some of its splits, so the cache is marked partial. Or its files are a
snapshot that is cut short.
> Complete the mirror, make the snapshot longer, or build from the hub.

W302 other-files
The folder holds files of kinds that are not read. They are not part of the cache.
> Name their suffixes with `--as-text` if they are text; otherwise nothing is to be done.
= notes: 2 files of kinds that are not read: 1 without a suffix, 1 .png. --as-text .SUFFIX,... reads more kinds as
text

W303 skipped-link
Symbolic links in a source are not followed. Their targets are not part of the cache.
> Pass `--follow-links` if they may be followed.
= mirror/gutenberg/loop: a symbolic link, which is not followed; --follow-links reads its target. Counted as
links_not_followed: 3

W304 skipped-file
A file or folder of a source cannot be read, or is a pipe, a device or a broken link. It was skipped.
> Change its permissions or remove it, and build again.
= notes/gone.md: a pipe, a device or a broken link, expected a file; skipped

W305 dropped-rows
A row or document cannot be used and was left out. The first one is named; the others are counted in meta.json.
> Correct the rows if there are many: `niels-gpt stats CACHE` prints the counts by reason.
= roam/old encoding.md: not UTF-8 at byte 30; kept, with U+FFFD in place of what cannot be decoded. Counted as
repaired_utf8; more like it are counted only

W306 budget-not-reached
The source ended before the number of tokens that was asked for. The cache holds all of the source. In partitions, one
of them may have ended first: what it leaves of its part of the budget is not given to others.
> Nothing, or add text, or ask for fewer tokens.
= cache/pretrain/fineweb_edu: train has 14,225 of 200,000,000 tokens: the source ended first

W307 val-share
The share of val differs from the one that was asked for. Documents go to one split as a whole, so a few long ones
decide.
> Cut long documents into parts, or take another seed.
= cache/pretrain/gutenberg: val has 6,322 of 7,223 tokens, 87.5 %, and 2.4 % were asked for. Documents are split
whole, so a few long ones decide the share: cut them into parts, or use another seed

W308 empty-val
The split val is empty: there are too few distinct texts.
> Add documents, or evaluate on another cache.
= cache/pretrain/notes: val is empty: too few distinct texts (1)

W309 empty-replies
Some chats have an empty reply of the assistant and are kept. A model learns from them to end its turn at once.
> Remove them from the source, or list their ids in a file for `--exclude`.
= cache/sft/chats: 4 of 300 examples have an empty reply of the assistant, and are kept: a model learns from them to
end its turn at once

W310 unknown-roles
Chats with a message of another role than system, user and assistant were left out.
> Give these messages one of the three roles, or remove them from the chats.
= cache/sft/workshop: chats are left out, for a message of another role than system, user and assistant: 'moderator'
1

W401 lossy-tokenizer
Encoding and decoding changes some texts, so the cache does not hold them exactly.
> Take a tokenizer with the default normalization, identity: one trained here loses nothing.

W402 unknown-ids
Some characters have no piece in the tokenizer, and became the unknown id.
> Take a tokenizer with byte fallback: one trained here has it.
= cache/pretrain/notes: 615 ids are the unknown id: the tokenizer has no piece for a character, such as '\\xe9', and no
bytes to spell it

W403 tokenizer-made-again
The installed tokenizer could not be used, so it is made again.
> Nothing. Caches that were built with another one are refused until they are built again.

W404 tokenizer-replaced
Another tokenizer is about to replace the one of this folder. Readers refuse its caches until they are built again
with the new one.
> Run the build command in the message, or the other one to return to the old tokenizer.

W405 little-text
The tokenizer was trained on little text, and every cache of the folder is encoded with it.
> Give the first build more sources, or name a model with `--tokenizer`.
= tokenizer: trained on little text, 26,382 bytes of fineweb_edu, for 400 ids; every cache of this folder is encoded
with it

W406 fewer-sources
The tokenizer was trained without some of the sources, because they cannot be read here. It differs from one that is
trained on all.
> Complete the sources, remove the tokenizer and build again; or keep it, and use it everywhere.
= tokenizer: trained without gutenberg: gutenberg is a stub here

W407 user-tokenizer
The tokenizer was trained on user-defined sources only, and is used for a built-in one.
> Remove the tokenizer to train one on all sources.
= cache/tokenizer: trained on user-defined sources only, and used for roam. Remove it to train one on all sources

W408 small-vocabulary
The texts allow fewer pieces than were asked for, so the vocabulary is smaller.
> Nothing, or train on more text.
= the texts allow a vocabulary of 2061 ids only, 16000 were asked for

W409 unproven-template
The chat template could not be tried before the build, or failed in the trial. A chat that shows it ends the run.
> Name a file with another template if the run ends: `--chat-template FILE`.
= my-model: its chat template could not be tried. It raises an error for a probe chat of two turns: say hello

W410 engine-refused
The fast engine opened the tokenizer, but gives other ids than the reference for a test text. The reference encodes.
> Nothing: the ids are right, and the build is slower.

W411 chats-left-out
A build of all caches left out those of chats, because the tokenizer does not have the sentinels that mark their turns.
The sample's eagle3/targets is left out too, for its small target has this tokenizer.
> Add the sentinels, as the message says, and build with that tokenizer: the ids of all other tokens stay. Or have the
chats written in the tokenizer's own chat template: `--chat-template tokenizer`.
= sft/dolly15k left out: gpt2: the tokenizer has no sentinels, expected one that has them: sft/dolly15k marks the turns
of its chats by them. Add them: niels-gpt add-sentinels gpt2 tokenizer_with_sentinels && niels-gpt build dolly15k
--tokenizer tokenizer_with_sentinels

W412 template-marks
The chat template in a file writes marks of turns that the tokenizer does not have as tokens. Each becomes several ids,
and a message that holds one cannot be told from the mark.
> Take the template that belongs to the tokenizer, or a tokenizer that has these tokens.
= cache/sft/dolly15k: the chat template writes <|im_start|>, <|im_end|>, which are no token of the tokenizer: each
becomes several ids

W501 little-room
The build may not fit on the disk. A full disk loses nothing: the build stops and can be resumed.
> Make room, or name another `--cache-dir`.

W502 no-progress
Earlier runs of this build ended before their next checkpoint, so each one starts from the same place.
> Give one run more time.
= cache/pretrain/notes: this run made no progress: 0 documents are done, as before

W503 worker-retried
A worker process died. Its batches are encoded once more, each alone.
> Nothing. If it happens again, give the machine more memory or use fewer workers.
= a worker died while 2 batches were in work, from documents 0 to 8 on (A child process terminated abruptly); each of
them is tried once more, alone

W504 locks-of-one-machine
The file system of the caches keeps locks on one machine, or is not known to pass them on. Two machines could build the
same cache at once.
> Nothing if one machine alone uses the folder. If several do, build with `--lock lease`.
= /shared/cache: nfs is mounted with nolock, so flock does not leave the machine: two machines could build the same
cache at once. If several use this folder: --lock lease

W505 built-whole
These caches are built whole, although the settings have partitions. Only a pretrain cache that holds text has them:
the split of chats needs all chats, and trees need all messages.
> Nothing: the same command builds all of it on this machine.
= sft/oasst1: built whole, without partitions: only pretrain caches that hold text have partitions

W506 partition-elsewhere
A worker of Dask died while it built a partition. Another worker resumes the partition where it stopped.
> Nothing. If it happens often, give the workers more memory.
= pretrain/notes: worker tcp://10.0.0.7:41355 died while it built partition 3; another one resumes it (death 1 of at
most 3)

W507 other-plan
Partitions of the same cache are there that belong to another plan: of other settings, or of other text. Nothing of
them is used.
> Nothing, if the change was meant: `niels-gpt gc` removes the old plan. Else run the command in the message.

W508 worker-left-out
A worker of Dask that came later cannot build this cache: it runs another version of the program, or does not see the
same folders. The other workers build.
> Correct what the message names, and start that worker again.
= tcp://10.0.0.5:8786: left out: worker tcp://10.0.0.9:38211: it does not see the current folder /shared/project

W509 plan-stays
A cache is sealed, and the folder of its partitions is still there, because a process builds one of them again. The
cache does not need them.
> The command in the message, when that build has ended.

W513 eagle3-left-out
A build of all caches left out eagle3/draft_vocab and eagle3/targets: no target model is named, or what runs one is not
installed. With `--strict` this counts only where a target is named.
> Name a target, `--eagle3-target FOLDER_OR_ID`, or install the extra, as the message says. Nothing, where you want no
EAGLE-3 cache.

W601 hub-retry
A request to the Hugging Face hub failed and is repeated after a pause.
> Nothing: after the last attempt the command ends with E601.

W610 bucket-retry
A request to a bucket failed and is repeated after a pause.
> Nothing: after the last attempt the command ends with E612, and the same command resumes.

W701 plan-rewritten
The plan of an EAGLE-3 cache was missing or damaged, and was written again from the options.
> Nothing.
= targets/sidecar/plan.json: is missing; it is written again

W702 shard-made-again
A shard of an EAGLE-3 cache was damaged, and was produced again.
> Nothing. If it happens again, look at the disk's health.

W703 few-positions
The EAGLE-3 cache has few supervised positions for a draft to learn from.
> Add chats, or take a larger `--seq-length`.

W704 left-folders
A run of `eagle3 redraft`, `join`, `convert`, `import` or `export` was stopped, and left an unfinished folder beside
the place of the new one. Files that are linked there take room even when their cache is removed.
> Remove the folders that the message names, unless a run, perhaps on another machine, still writes them.

W801 active-dropout
Dropout or other noise is active. A token that several samples share gets one draw when folded, and one for each
sample when unfolded.
> Call `model.eval()` or set the rates to 0 to compare folded and unfolded values.
= dropout or other noise is active (attention_dropout): a token that several samples share gets one draw, but one for
each sample when unfolded
""")
"""Every warning."""
