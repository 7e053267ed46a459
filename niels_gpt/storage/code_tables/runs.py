"""Errors of runs: E5xx disk, locks and builds, E6xx hub and buckets, E7xx EAGLE-3, E8xx prefix trees.

E9xx are what is not installed and what nobody expected.
"""

from __future__ import annotations

from niels_gpt.storage.code_tables.row import rows

RUN_ERRORS = rows("""
E501 no-room
The disk is full, or what would be written does not fit. Finished caches were not touched.
> Make room, name another folder, or ask for less. Run the same command again: a build resumes.
= [Errno 28] No space left on device. 1 of 3 shards are done and kept. Solve this, then run again with --resume:
'shard-000001.safetensors'

E502 no-permission
The system does not allow to read or write this file or folder.
> Change its permissions, or name a folder that you may write to.

E503 locked
Another process builds this cache, or removes its old versions. Two would overwrite each other.
> Wait for it, or stop the process that the message names.
= cache/pretrain/roam: is being built by user root, host box, pid 4696. Wait for it, or stop that process
(cache/pretrain/.versions/roam/lock)

E504 in-the-way
A file, folder or link that no build made stands where a cache is to be written. It is never overwritten.
> Move it away, then run the command again.
= cache/pretrain/roam: is a file, expected a cache folder or nothing. Move it away, then build again

E505 unfinished-damaged
An interrupted build cannot be resumed: its journal or its files are damaged or were made by another build.
> Build from scratch with the command in the message. The finished cache, if there is one, was not touched.

E506 worker-died
A worker process ended in the middle of its work, most often because the system ran out of memory.
> Give it more memory or fewer workers, and run the same command again: finished work is kept.
= worker process 7511 died (killed by SIGKILL; is there too little memory?). Finished shards stay: run the same
command with --resume

E507 memory-maps
The system refused to map a file into memory: a limit of address space or of the number of maps was reached.
> Raise the limit that the message names, or read with `io='pread'`.

E508 forked-build
A process that was forked from a building process reached the build's code. Two writers would damage the files.
> Let a forked child end with `os._exit`, or start workers by spawn.

E509 disk-error
The system reported an error of a file or folder that has no code of its own here.
> Read the system's words in the message. After an input or output error look at the disk's health.

E510 partitions-not-finished
A cache of several partitions cannot be sealed: some of them are missing, unfinished, damaged or of another plan.
> Run the commands in the message: they build these partitions, and seal. The other partitions are kept.

E511 another-plan
The partitions of this cache were planned by another version of the program, or from another source.
> Use the same version of the program and the same source on all machines, or build from scratch with `--restart`.

E512 shared-locks
The folder cannot be shared in this way: it is locked in another way than was asked, a process lost its lease while it
was stopped, or its file system lacks what builds need.
> Follow the message. A process that lost its lease has kept what was durable: the same command resumes it, or waits for
the process that took over.
= cache/pretrain/notes: this process lost its lease to user ada, host node7, pid 4711. It was stopped for longer than a
lease lasts. Run the same command again

E513 dask-workers
A build on Dask has no scheduler or no worker, a worker does not see what the command sees, or too many workers died
with the same partition. Finished partitions stay.
> Start workers, or correct what the message names, and run the same command again. Workers may need more memory.
= tcp://10.0.0.5:8786: no worker for 60 s. Start some, and run the same command again: dask worker tcp://10.0.0.5:8786

E601 hub-unreachable
The Hugging Face hub could not be reached, or did not answer after several attempts.
> Run the command again later: it resumes. Without network use `--source-root MIRROR` or `--source-root sample`.

E602 hub-refused
The hub does not have the dataset, model or revision, or you may not read it.
> Check the id. For gated data accept its terms on the site and log in: `hf auth login`.

E603 hub-incomplete
The repository on the hub lacks files that are needed, or holds what cannot be read.
> Choose another revision, or another repository.

E610 url-taken
The URL holds another cache, another push or files that are not of a cache, or it was changed in the meantime. Nothing
of it was removed.
> Push to another URL. To replace a cache there: `niels-gpt push CACHE URL --replace`.
= s3://team/caches/wiki: holds another cache (0f4ae32778cc), expected 9162af266a0a. Push to another URL, or replace what
is there: --replace

E611 transfer-damaged
A file that was to be sent, or that arrived, is not the one that meta.json describes. Nothing was published or
committed.
> Of a cache on this disk: build it again. Of one at a URL: push it again from a good copy.
= s3://team/caches/wiki/train/shard_00000.bin: damaged: its sha256 is 0f4ae32778cc, expected 9162af266a0a by its
meta.json. Have the cache pushed again, or take another copy

E612 bucket-unusable
The bucket could not be reached, refused the request, or has no cache at this URL.
> Check the URL and the credentials: `docs/buckets.md`. A transfer that was stopped is resumed by the same command.
= s3://team/caches/wiki: a cache is being pushed there, or a push was killed. Wait for it, or push the cache again: that
resumes

E701 eagle3-damaged
A file of an EAGLE-3 cache differs from its format, its manifest, its plan or its checksums.
> Run `niels-gpt eagle3 verify CACHE` to see all damage. Remove the damaged shard and produce it again with `niels-gpt
eagle3 precompute ... --resume`.

E702 eagle3-incomplete
Production of an EAGLE-3 cache has not finished, or some of its files were removed.
> Run the same `niels-gpt eagle3 precompute` command with `--resume`.
= EAGLE-3 cache manifest not found at targets/manifest.json. Was the cache fully written?

E703 eagle3-resume
`--resume` was asked for with other options than those that the cache was started with. The message names the fields
that differ.
> Use the options of the first run, or name a fresh folder.
= targets: --resume was requested, but its manifest is missing, so the shards in it cannot be compared with this run.
Name a fresh folder, or remove this one

E704 eagle3-folder
The output folder already holds a cache or other files, or lies in a cache that it is made from. Nothing is overwritten.
> Pass `--resume` to continue the cache, or name a fresh folder.
= targets: already has shards. Pass --resume to continue it, or name a fresh folder

E705 target-unusable
The target model cannot be loaded or run: files are missing, its structure is not known here, or it has too few layers
or positions.
> Name another model, or pass the option that the message names.
= my-model: it gives 48 hidden states and 39 logits a token, expected 48 and 40 by its config. Nothing was written

E706 target-mismatch
The target gives other values than the cache holds. The cache was made from another model or another revision, or was
damaged.
> Name the target that the cache was made from, or produce the cache again.

E707 draft-vocabulary
The choice of tokens that the draft knows does not fit: an id is repeated or outside of the target's vocabulary, or
the number differs.
> Name another file of tokens, or leave it out to count the tokens of the samples.
= selected_token_ids: ids of torch.float32 and shape (1,), expected integers in one dimension

E708 not-finite
The target gave values that are not finite numbers. They would spoil a draft that is trained on them.
> Take another dtype: fp16 overflows where bf16 and fp32 do not.
= sample 'chat 1', slot 0, block 4: nan, expected a finite number; 48 such places in 1 of 2 samples of the batch

E709 eagle3-input
The chats or rows of ids for the target cannot be used: a field is missing, lengths differ, or no reply is left within
the sequence length.
> Correct the rows, or take a larger `--seq-length`. `docs/eagle3.md` shows both forms.
= not one chat is left for the target; none was read. Expected at least one with a token of an assistant's reply among
its first 512

E710 eagle3-conversion
The cache cannot be converted to this form, or given another draft vocabulary: it does not hold what that needs.
> Convert a copy of a committed version. A cache with top-k probabilities, and a native one from version 1 or 2, has
to be produced again.

E711 eagle3-import
A file of another tool that `eagle3 import` reads is missing, damaged, not of the form that the tool writes, or does not
fit its row or the target.
> Write the file again with its tool, or leave such samples out: `--drop-bad` counts them.
= features: rows_0-2000/data_7.ckpt is not finite: NaN or infinity in the last states of token 3. Write it again with
the tool that made it, or leave such samples out: --drop-bad

E712 eagle3-parts
A part of an EAGLE-3 cache does not fit the folder that it is to be made in, or the parts in a folder cannot be sealed
yet: the plan or the code differs, or shards are missing or damaged.
> Run the parts that the message names, with the options of the others, and then `niels-gpt eagle3 seal DIR`.
= targets: 1 shard cannot be sealed; missing: 5. Run these parts again, on any machine, and seal again:
niels-gpt eagle3 precompute --target-model MODEL --input-data chats.jsonl --output-dir targets --part 2/4

E801 tree-input
The sequences, masks, paths or weights that a prefix tree is made from do not have the expected shape or values.
> Correct the argument that the message names.

E802 attention-route
This model, or this attention implementation, cannot run a folded row correctly. A wrong mask would change the loss
without an error, so it is refused.
> Follow the message, or run the samples unfolded.
= MptForCausalLM cannot be folded: its forward takes no position_ids. Run its samples unfolded

E803 fold-check
What a forward function or a batch gives does not fit the folded samples.
> Correct the function or batch that the message names, and run the check again.
= there are 7 input_ids, 7 position_ids, 7 labels; expected 8 of each, the sum of node_lengths, or equally many more
of each as padding

E804 rollouts-file
A file of rollouts cannot be read: a line is not JSON, or lacks its ids.
> Repair the line that the message names. `docs/prefix_tree.md` shows the forms.
= rollouts.jsonl:3: ids[1] is 2.0. Expected an integer from 0 to 2147483647

E901 not-installed
A package that this command needs is not installed, or is too old.
> Run the pip command in the message. `niels-gpt doctor` lists what is missing and what it is for.
= the model of the demo needs transformers: pip install 'niels-gpt[eagle3]'

E902 unexpected
An error that has no code of its own. It may be a defect of this project.
> Run the command again with the same arguments. If it happens again, report it with its full output.
""")
