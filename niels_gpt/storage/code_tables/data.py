"""Errors of what was asked and of data: E1xx usage, E2xx caches, E3xx sources, E4xx tokenizers."""

from __future__ import annotations

from niels_gpt.storage.code_tables.row import rows

DATA_ERRORS = rows("""
E101 usage
The command line asks for something that does not exist, or for two things that exclude each other. Nothing was read
or written.
> Compare the command with its help: add `--help` to it.
= No such command 'stat'. Did you mean 'stats'?

E102 bad-value
An argument or a setting has a value of the wrong type or outside of its limits. The message names the argument, its
value and what is accepted.
> Correct the value. `niels-gpt build --help` lists every setting with its default and unit.
= sft_val_frac (--sft-val-frac) is 2.0, expected 0 to 1

E103 unknown-source
No source has this name. There are the built-in sources, and those that you name with `--pretrain`, `--sft` or in
sources.toml.
> Take one of the names in the message, or define the source first.
= no source is called 'pile', expected some of fineweb_edu, wikitext, roam, gutenberg, dolly15k, oasst1, or --pretrain
or --sft

E104 source-definition
An entry that defines a source, its licence or its files cannot be parsed. Such entries are NAME=VALUE on the command
line, and tables in sources.toml.
> Correct the entry. `docs/own_data.md` shows each form.
= --pretrain notes: expected NAME=GLOB[:FIELD]

E105 no-such-path
There is no file or folder of this name, or it is not the kind of folder that the command takes.
> Check the spelling and the current folder. `niels-gpt list cache` lists the caches below the folder cache.
= none: no such folder. Name the folder of the caches, such as cache

E106 no-such-position
A token, an example, a sample or a slot with this number does not exist. Numbers start at 0.
> Take a number below the total that the message names; `niels-gpt stats CACHE` prints the totals.
= position 27: cache/pretrain/notes/train has 27 tokens, expected 0 to 26

E107 sequence-length
No window or example of this length can be read: T is longer than the shards, or every example is longer than T.
> Take another T, or build the cache from more text.
= cache/pretrain/notes/train: the longest shard has 26 tokens, expected T + 1 = 27. Take a smaller T

E108 stream-state
The state does not fit the stream: it is of another cache, seed, batch size or release, or it was edited. Continuing
would repeat or omit samples.
> Open the stream with the settings of the state, or start without a state.
= state: sources[0]: tokens is 6, expected 14 as in this stream. Open the version that was read, or continue in this
text with allow_other_content=True

E109 stream-use
A stream is used in a way that would repeat or lose samples, for instance after it ended, or with DataLoader workers
that have copies of it.
> Follow the message. `docs/reading.md` shows how to save and load a state with and without workers.
= this EpochStream has no end and no length. Count steps instead

E201 damaged-file
The content of a file differs from what the cache's meta.json or format says. The file was changed after the build, or
the disk returned other bytes.
> Run `niels-gpt verify CACHE --deep` to see all damage, then build the cache again with the command in the message.
= cache/sft/chats/train_idx.npy: offsets do not ascend at entry 2. Build it again: niels-gpt build chats --restart

E202 damaged-meta
A meta.json cannot be used: it is not JSON, lacks a key, has a value of the wrong type, or does not have the checksum
of its content.
> Build the cache again with the command in the message. Do not edit meta.json.
= cache/sft/oasst1/meta.json: not JSON (Expecting value: line 1 column 1 (char 0)), expected a cache's meta.json.
Build it again: niels-gpt build oasst1 --restart

E203 wrong-size
A file is shorter or longer than its meta.json says, or has holes. Usually a copy was interrupted.
> Copy the cache again, or build it again with the command in the message.
= cache/sft/chats/train_idx.npy: no example in this split, or it was truncated. Build it again: niels-gpt build chats
--restart

E204 missing-file
A file or folder that belongs to the cache does not exist. It was removed, or not copied.
> Copy the cache again, or build it again with the command in the message.
= cache/pretrain/roam/train: no such folder. Build it again: niels-gpt build roam --restart

E205 not-a-regular-file
A symbolic link, a pipe, a device or a folder stands where a file of the cache is expected. Links are not followed,
since they could lead out of the cache.
> Replace the link by a copy of its target (`cp -rL`). For EAGLE-3 caches in a snapshot of the Hugging Face hub use
`--follow-links`.
= cache/pretrain/roam/train/shard_00000.bin: not a regular file. Build it again: niels-gpt build roam --restart

E206 over-limit
A file is larger, or holds more values, than any file of its kind that this project writes. It was refused before it
was read into memory.
> Do not use the file: it is damaged, or was made to harm. Build the cache again.
= cache/pretrain/roam/meta.json: 33,554,434 bytes, expected at most 33,554,432. Build it again: niels-gpt build roam
--restart

E207 not-built
The folder describes a cache that was not built: a stub, or a build without data. There is nothing to read.
> Build it with the command in the message.
= cache/pretrain/gutenberg/meta.json: built is false, so there is nothing to show

E208 foreign-cache
The cache is of another kind or another format version than the reader, or the command has no use for caches of this
kind.
> Use the reader or the command for this kind, or build the cache again with this release.
= cache/tokenizer/meta.json: kind is 'tokenizer', expected pretrain or sft

E209 wrong-part
The path is part of a cache, or a whole cache, where another part is expected; or two files are of different splits or
caches.
> Pass the part that the message names.
= cache/pretrain/roam: a whole cache, expected the folder of a split of a pretrain cache in it

E210 changed-file
A file was changed or removed while it was open. What was read from it is not reliable.
> Open the cache again. Do not write into a cache by hand: builds replace it as a whole.
= cache/pretrain/roam/train/shard_00001.bin: another file than when it was opened: the cache was replaced. Open it
again

E211 failed-checks
The cache was built, and a check of the result failed. The cache should not be used for training.
> Read the checks in the message, correct the source or the setting, and build again.

E212 unfinished-build
The folder is a build that is running or was interrupted, not a finished cache.
> Run the build command again to finish it, and open the cache at its public path.
= cache/pretrain/.versions/roam/building-0123456789ab: a build in progress or unfinished, not a cache. Its cache is
cache/pretrain/roam

E213 other-cache
The cache is not the one that was asked for by `expect`: it was built again from other text, or with other settings.
> Open the cache that the run started with. Old versions of a cache can be named by their own path.
= cache/pretrain/roam: tokens is 19, expected 18: not the data that was used before. Open the version of that time, or
build it again with its settings

E220 cannot-export
The cache cannot be written in the format of this tool, which has no place for something that the cache has.
> Export to one of the formats that the message names.
= cache/sft/oasst1: an sft cache, and nanogpt has no place for which tokens carry loss. Export it to one of: olmo, hf

E221 not-this-format
The folder or file is not of the format that `--from` names, or it is damaged: a header, a size or an index is wrong.
> Name the format that wrote it, or copy the files again.
= data/train.idx: begins with b'PK', expected the header of an index of Megatron-LM

E222 id-outside
A file that is imported has an id that the tokenizer does not have. Either the tokenizer is another one, or the ids have
another width than was assumed.
> Name the tokenizer that made the ids with `--tokenizer`.
= train_000001.bin: token 17 is id 50257, expected ids below 16,000, of the tokenizer's vocabulary

E223 import-tokenizer
Which tokenizer made the ids is not known, or it is not the one that the folder of caches has: all caches of
`pretrain/` and `sft/` share one.
> Name it with `--tokenizer`, and let the cache be `imported/NAME`, which has its own; or name another `--cache-dir`.
= cache/pretrain/wiki: ids of tokenizer 8b1a9953c461, expected tokenizer 2cf24dba5fb0, that of the other caches

E301 source-missing
The files of a source do not exist where they are expected, or no file matches the pattern.
> Put the files there, correct the pattern, or name another place with `--source-root`.
= source root 'mirror': no folder at /data/mirror; expected "hub", "sample" or an existing mirror folder: pass
--source-root MIRROR or --source-root sample

E302 source-damaged
A file of a source cannot be read to its end: it is truncated, not of the format that its name says, or not utf-8.
> Copy or download the file again, or repair it. Rows before the damage are not used without those behind it.
= chats/a.json.gz, item 2: expected a JSON object, found '[3]'

E303 nothing-usable
The source was read, and nothing of it can be used: everything was empty, dropped, or in val. The message counts why.
> Follow the counts in the message: most often a field has another name, or the source is too small.
= exclude.txt: no entry in it, expected ids or sha256 of texts, one a line

E304 source-form
A row or text does not have the form that is expected: a field is missing, or has another type.
> Name the right field, or convert the rows. `docs/own_data.md` shows the forms that are read.
= text 1, character 0: lone surrogate '\\ud83d', which utf-8 cannot hold. Replace it first, for instance by U+FFFD

E305 reserved-text
A text contains the literal of a special token, and the settings ask to stop there. Encoded, it could not be told from
the real token.
> Remove it from the source, or leave `--on-special` at drop: such texts are then left out and counted.
= a message of chat 'chat 1' holds the special token <|im_end|>. Remove it from the source, or have such chats dropped

E306 source-changed
The source changed while it was read, or after a build of it was interrupted. A resumed build would mix two states of
the text.
> Restore the source and run the command again, or build from scratch with `--restart`.
= cache/sft/chats: its source has changed at 'chat 7', since a build of it was interrupted. Restore the source and run
the same command again

E307 snapshot
The folder of a snapshot is unfinished, damaged, or was made with other settings.
> Run the same snapshot command again, or choose another folder.
= --tokens 5000: wikitext is small and kept whole; leave --tokens out

E401 tokenizer-missing
There is no tokenizer at the path, and none beside the cache.
> Name one with `--tokenizer`. A build without a tokenizer trains one.
= cache/tokenizer/spm.model: there is no tokenizer model. Train one: niels-gpt train-tokenizer --input-glob
'FOLDER/**/*.txt'

E402 tokenizer-mismatch
The ids of the cache were made by another tokenizer than the one that is used. The same ids would mean other text.
> Use the tokenizer of the cache, or build the cache again with the new one.
= cache/sft/oasst1/meta.json: ids of tokenizer 0f4ae32778cc, expected tokenizer 9162af266a0a. Build it again:
niels-gpt build oasst1 --restart

E403 tokenizer-damaged
The file is neither a SentencePiece model nor a tokenizer.json that can be opened, its ids contradict each other, or it
is not the one that was installed.
> Copy the tokenizer again, or train one: `niels-gpt train-tokenizer --help`.
= spm.model: is empty, expected a SentencePiece model (spm.model). Train one: niels-gpt train-tokenizer
--input-glob 'FOLDER/**/*.txt'

E404 sentinels
The tokenizer, or the cache, does not have the four special tokens that mark the turns of a chat, each as one id.
> Take a tokenizer that has them, as those trained by this project, or give yours them: `niels-gpt add-sentinels MODEL
OUT`. Chats need none in the tokenizer's own chat template: `niels-gpt build --chat-template tokenizer`.
= cache/sft/chats/meta.json: the eot sentinel has id 4, but eot_id=5 was given

E405 sample-tokenizer
The tokenizer was trained on the bundled sample, which is a few kilobytes. Real text would become far too many tokens.
> Name another one with `--tokenizer`, or leave that out to train one on the real text.
= spm.model: this tokenizer was trained on the bundled sample, expected one that may encode real text. Name another
one with --tokenizer, or leave that out

E406 tokenizer-training
No tokenizer could be trained: there is no text, or the settings ask for a vocabulary that the text does not allow.
> Add text, or take a smaller `--vocab-size`.
= nothing to train a tokenizer on: 0 documents of 0 bytes, 0 of them left out for a reserved literal. Give it more
text

E407 chat-template
The chat template of a model, or of `--chat-template`, cannot be used: it fails, depends on the date, or does not tell
which tokens are the assistant's.
> Name a file with another template: `--chat-template FILE`. `docs/chat_templates.md` says what a template must do.
= my-model: its chat template is no jinja, line 1: Expected an expression, got 'end of statement block'

E408 tokenizer-unusable
The tokenizer of a model cannot be used here: it cannot be opened, does not say which characters a token covers, or has
no id for a character of a text.
> Take a fast tokenizer, with a tokenizer.json; for the last case one with a token for each byte.
= /nowhere: no tokenizer can be opened there (there is no such folder). Expected a folder with tokenizer.json or
spm.model, or the id of a model on the hub

E409 id-out-of-range
A token id lies outside of the vocabulary, or is no integer. It would have no row in a model's embeddings.
> Use the tokenizer that the ids were made with. In a finished cache this is damage: build it again.
= id 389: expected 0 <= id < vocab_size=389 of cache/tokenizer/spm.model

E410 engine-difference
The fast engine gave other ids for a text than the library that the tokenizer was made for. The build stopped before it
used them.
> Build with `--engine reference`, which is slower. Finished documents of the interrupted build are kept.

E411 engine-unusable
The fast engine was asked for, and it does not know this tokenizer or gives other ids in the test at its opening.
> Leave `--engine` out: a build then takes the fast engine where it can.
""")
