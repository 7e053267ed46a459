"""Code, and the errors: E1xx usage, E2xx caches, E3xx sources, E4xx tokenizers, E5xx disk, locks and builds, E6xx hub.

E7xx are EAGLE-3, E8xx prefix trees, E9xx what is not installed and what nobody expected. A code is one situation with
one remedy, not one place in the code. A code keeps its number: that of a removed one is not used again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One situation in which an error or a warning is printed."""

    code: str
    """E or W, the hundred of its subject, and two digits."""
    name: str
    """A few words, joined by hyphens."""
    meaning: str
    """What happened, in two or three sentences."""
    remedy: str
    """What to do."""
    example: str
    """A message with this code, without `error[CODE]: `."""


def rows(table: str) -> tuple[Code, ...]:
    """Return the rows of a table: code and name, then what it means, "> " what to do, "= " an example."""
    found = []
    for block in table.strip().split("\n\n"):
        head, _, text = block.partition("\n")
        meaning, _, rest = text.partition("\n> ")
        remedy, _, example = rest.partition("\n= ")
        found.append(Code(*head.split(), *(" ".join(part.split("\n")) for part in (meaning, remedy, example))))
    return tuple(found)


ERRORS = rows("""
E101 usage
The command line asks for something that does not exist, or for two things that exclude each other. Nothing was read
or written.
> Compare the command with its help: add `--help` to it.

E102 bad-value
An argument or a setting has a value of the wrong type or outside of its limits. The message names the argument, its
value and what is accepted.
> Correct the value. `niels-gpt build --help` lists every setting with its default and unit.

E103 unknown-source
No source has this name. There are the built-in sources, and those that you name with `--pretrain`, `--sft` or in
sources.toml.
> Take one of the names in the message, or define the source first.

E104 source-definition
An entry that defines a source, its licence or its files cannot be parsed. Such entries are NAME=VALUE on the command
line, and tables in sources.toml.
> Correct the entry. `docs/own_data.md` shows each form.

E105 no-such-path
There is no file or folder of this name, or it is not the kind of folder that the command takes.
> Check the spelling and the current folder. `niels-gpt list cache` lists the caches below the folder cache.

E106 no-such-position
A token, an example, a sample or a slot with this number does not exist. Numbers start at 0.
> Take a number below the total that the message names; `niels-gpt stats CACHE` prints the totals.

E107 sequence-length
No window or example of this length can be read: T is longer than the shards, or every example is longer than T.
> Take another T, or build the cache from more text.

E108 stream-state
The state does not fit the stream: it is of another cache, seed, batch size or release, or it was edited. Continuing
would repeat or omit samples.
> Open the stream with the settings of the state, or start without a state.

E109 stream-use
A stream is used in a way that would repeat or lose samples, for instance after it ended, or with DataLoader workers
that have copies of it.
> Follow the message. `docs/reading.md` shows how to save and load a state with and without workers.

E201 damaged-file
The content of a file differs from what the cache's meta.json or format says. The file was changed after the build, or
the disk returned other bytes.
> Run `niels-gpt verify CACHE --deep` to see all damage, then build the cache again with the command in the message.

E202 damaged-meta
A meta.json cannot be used: it is not JSON, lacks a key, has a value of the wrong type, or does not have the checksum
of its content.
> Build the cache again with the command in the message. Do not edit meta.json.

E203 wrong-size
A file is shorter or longer than its meta.json says, or has holes. Usually a copy was interrupted.
> Copy the cache again, or build it again with the command in the message.

E204 missing-file
A file or folder that belongs to the cache does not exist. It was removed, or not copied.
> Copy the cache again, or build it again with the command in the message.

E205 not-a-regular-file
A symbolic link, a pipe, a device or a folder stands where a file of the cache is expected. Links are not followed,
since they could lead out of the cache.
> Replace the link by a copy of its target (`cp -rL`). For EAGLE-3 caches in a snapshot of the Hugging Face hub use
`--follow-links`.

E206 over-limit
A file is larger, or holds more values, than any file of its kind that this project writes. It was refused before it
was read into memory.
> Do not use the file: it is damaged, or was made to harm. Build the cache again.

E207 not-built
The folder describes a cache that was not built: a stub, or a build without data. There is nothing to read.
> Build it with the command in the message.

E208 foreign-cache
The cache is of another kind or another format version than the reader, or the command has no use for caches of this
kind.
> Use the reader or the command for this kind, or build the cache again with this release.

E209 wrong-part
The path is part of a cache, or a whole cache, where another part is expected; or two files are of different splits or
caches.
> Pass the part that the message names.

E210 changed-file
A file was changed or removed while it was open. What was read from it is not reliable.
> Open the cache again. Do not write into a cache by hand: builds replace it as a whole.

E211 failed-checks
The cache was built, and a check of the result failed. The cache should not be used for training.
> Read the checks in the message, correct the source or the setting, and build again.

E212 unfinished-build
The folder is a build that is running or was interrupted, not a finished cache.
> Run the build command again to finish it, and open the cache at its public path.

E213 other-cache
The cache is not the one that was asked for by `expect`: it was built again from other text, or with other settings.
> Open the cache that the run started with. Old versions of a cache can be named by their own path.

E301 source-missing
The files of a source do not exist where they are expected, or no file matches the pattern.
> Put the files there, correct the pattern, or name another place with `--source-root`.

E302 source-damaged
A file of a source cannot be read to its end: it is truncated, not of the format that its name says, or not utf-8.
> Copy or download the file again, or repair it. Rows before the damage are not used without those behind it.

E303 nothing-usable
The source was read, and nothing of it can be used: everything was empty, dropped, or in val. The message counts why.
> Follow the counts in the message: most often a field has another name, or the source is too small.

E304 source-form
A row or text does not have the form that is expected: a field is missing, or has another type.
> Name the right field, or convert the rows. `docs/own_data.md` shows the forms that are read.

E305 reserved-text
A text contains the literal of a special token, and the settings ask to stop there. Encoded, it could not be told from
the real token.
> Remove it from the source, or leave `--on-special` at drop: such texts are then left out and counted.

E306 source-changed
The source changed while it was read, or after a build of it was interrupted. A resumed build would mix two states of
the text.
> Restore the source and run the command again, or build from scratch with `--restart`.

E307 snapshot
The folder of a snapshot is unfinished, damaged, or was made with other settings.
> Run the same snapshot command again, or choose another folder.

E401 tokenizer-missing
There is no tokenizer at the path, and none beside the cache.
> Name one with `--tokenizer` or `--tokenizer-model`. A build without a tokenizer trains one.

E402 tokenizer-mismatch
The ids of the cache were made by another tokenizer than the one that is used. The same ids would mean other text.
> Use the tokenizer of the cache, or build the cache again with the new one.

E403 tokenizer-damaged
The file is no SentencePiece model, or is not the one that was installed.
> Copy the model again, or train one: `niels-gpt train-tokenizer --help`.

E404 sentinels
The tokenizer, or the cache, does not have the four special tokens that mark the turns of a chat, each as one id.
> Take a tokenizer that has them: those trained by this project do.

E405 sample-tokenizer
The tokenizer was trained on the bundled sample, which is a few kilobytes. Real text would become far too many tokens.
> Name another one with `--tokenizer-model`, or leave that out to train one on the real text.

E406 tokenizer-training
No tokenizer could be trained: there is no text, or the settings ask for a vocabulary that the text does not allow.
> Add text, or take a smaller `--vocab-size`.

E407 chat-template
The chat template of a model cannot be used: it fails, depends on the date, or does not tell which tokens are the
assistant's.
> Name a file with another template: `--chat-template FILE`. `docs/eagle3.md` says what a template must do.

E408 tokenizer-unusable
The tokenizer of a model cannot be used here: it cannot be opened, or does not say which characters a token covers.
> Take a fast tokenizer, with a tokenizer.json.

E409 id-out-of-range
A token id lies outside of the vocabulary. It would have no row in a model's embeddings.
> Use the tokenizer that the ids were made with. In a finished cache this is damage: build it again.

E501 no-room
The disk is full, or what would be written does not fit. Finished caches were not touched.
> Make room, name another folder, or ask for less. Run the same command again: a build resumes.

E502 no-permission
The system does not allow to read or write this file or folder.
> Change its permissions, or name a folder that you may write to.

E503 locked
Another process builds this cache, or removes its old versions. Two would overwrite each other.
> Wait for it, or stop the process that the message names.

E504 in-the-way
A file, folder or link that no build made stands where a cache is to be written. It is never overwritten.
> Move it away, then run the command again.

E505 unfinished-damaged
An interrupted build cannot be resumed: its journal or its files are damaged or were made by another build.
> Build from scratch with the command in the message. The finished cache, if there is one, was not touched.

E506 worker-died
A worker process ended in the middle of its work, most often because the system ran out of memory.
> Give it more memory or fewer workers, and run the same command again: finished work is kept.

E507 memory-maps
The system refused to map a file into memory: a limit of address space or of the number of maps was reached.
> Raise the limit that the message names, or read with `io='pread'`.

E508 forked-build
A process that was forked from a building process reached the build's code. Two writers would damage the files.
> Let a forked child end with `os._exit`, or start workers by spawn.

E509 disk-error
The system reported an error of a file or folder that has no code of its own here.
> Read the system's words in the message. After an input or output error look at the disk's health.

E601 hub-unreachable
The Hugging Face hub could not be reached, or did not answer after several attempts.
> Run the command again later: it resumes. Without network use `--source-root MIRROR` or `--source-root sample`.

E602 hub-refused
The hub does not have the dataset, model or revision, or you may not read it.
> Check the id. For gated data accept its terms on the site and log in: `hf auth login`.

E603 hub-incomplete
The repository on the hub lacks files that are needed, or holds what cannot be read.
> Choose another revision, or another repository.

E701 eagle3-damaged
A file of an EAGLE-3 cache differs from its format, its manifest, its plan or its checksums.
> Run `niels-gpt eagle3 verify CACHE` to see all damage. Remove the damaged shard and produce it again with `niels-gpt
eagle3 precompute ... --resume`.

E702 eagle3-incomplete
Production of an EAGLE-3 cache has not finished, or some of its files were removed.
> Run the same `niels-gpt eagle3 precompute` command with `--resume`.

E703 eagle3-resume
`--resume` was asked for with other options than those that the cache was started with. The message names the fields
that differ.
> Use the options of the first run, or name a fresh folder.

E704 eagle3-folder
The output folder already holds a cache or other files. Nothing is overwritten.
> Pass `--resume` to continue the cache, or name a fresh folder.

E705 target-unusable
The target model cannot be loaded or run: files are missing, its structure is not known here, or it has too few layers
or positions.
> Name another model, or pass the option that the message names.

E706 target-mismatch
The target gives other values than the cache holds. The cache was made from another model or another revision, or was
damaged.
> Name the target that the cache was made from, or produce the cache again.

E707 draft-vocabulary
The choice of tokens that the draft knows does not fit: an id is repeated or outside of the target's vocabulary, or
the number differs.
> Name another file of tokens, or leave it out to count the tokens of the samples.

E708 not-finite
The target gave values that are not finite numbers. They would spoil a draft that is trained on them.
> Take another dtype: fp16 overflows where bf16 and fp32 do not.

E709 eagle3-input
The chats or rows of ids for the target cannot be used: a field is missing, lengths differ, or no reply is left within
the sequence length.
> Correct the rows, or take a larger `--seq-length`. `docs/eagle3.md` shows both forms.

E710 eagle3-conversion
The cache cannot be converted to this version of the format.
> Convert a copy of a committed version. A cache with top-k probabilities has to be produced again.

E801 tree-input
The sequences, masks, paths or weights that a prefix tree is made from do not have the expected shape or values.
> Correct the argument that the message names.

E802 attention-route
This model, or this attention implementation, cannot run a folded row correctly. A wrong mask would change the loss
without an error, so it is refused.
> Follow the message, or run the samples unfolded.

E803 fold-check
What a forward function or a batch gives does not fit the folded samples.
> Correct the function or batch that the message names, and run the check again.

E804 rollouts-file
A file of rollouts cannot be read: a line is not JSON, or lacks its ids.
> Repair the line that the message names. `docs/prefix_tree.md` shows the forms.

E901 not-installed
A package that this command needs is not installed, or is too old.
> Run the pip command in the message. `niels-gpt doctor` lists what is missing and what it is for.

E902 unexpected
An error that has no code of its own. It may be a defect of this project.
> Run the command again with the same arguments. If it happens again, report it with its full output.
""")
"""Every error."""
