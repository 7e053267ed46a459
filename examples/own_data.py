"""Your own text and chats: the Python of docs/tutorials/own_data.md, which explains it.

python examples/own_data.py
"""

import torch

from niels_gpt.cache import SFTExampleDataset
from niels_gpt.sampling import EpochStream
from niels_gpt.tokenizer import load_tokenizer

tokenizer = load_tokenizer("cache/tokenizer")
notes = EpochStream("cache/pretrain/notes/train", T=24, global_batch_size=2, seed=0, epochs=1)
print(len(notes), "batches in an epoch")
for x, _ in notes:  # int64 [2, 24]; the second one is x one token later
    print([tokenizer.decode(row.tolist()) for row in x[:, :8]])


chats = SFTExampleDataset.open("cache/sft/workshop", "train", T=80)
x, y, y_masked = chats.get_batch(B=2, generator=torch.Generator().manual_seed(0))  # int64 [2, 80] each
print(int((y_masked != -100).sum()), "of", y.numel(), "targets carry loss")
print(chats[0])
