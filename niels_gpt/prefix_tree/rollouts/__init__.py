"""The rollout cache: groups of sampled sequences as token ids with their fields, on disk and as an epoch of forests.

docs/formats.md has the bytes. Nothing here is tokenized: ids are stored as they were sampled.

records.py    public: Rollout and RolloutGroup; which samples are dropped; names and dtypes of the files
build.py      public: writes groups to a cache, commits it; resumable
joining.py    joins partitions into one cache
reader.py     public: RolloutDataset: a group as samples or as a forest with its fields; checks the index
kind.py       the kind rollouts: checks, figures, groups and tokens for people
stream.py     public: RolloutStream: bins of several groups by epochs, for ranks and workers, resumable
"""
