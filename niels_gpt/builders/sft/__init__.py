"""Builds sft caches: chats -> one token file a split, offsets, source ids, meta.json.

sentinels.py  by the project's own template: roles are sentinels, from which readers find the tokens that carry loss
templates.py  by any other chat template: a bit for each token says whether it carries loss
examples.py   the buffer of all kept examples; which ones go to val; the files and counts that both kinds have
"""

from niels_gpt.builders.sft.examples import SPLIT_RULE
from niels_gpt.builders.sft.sentinels import build_sft
from niels_gpt.builders.sft.templates import build_templated_sft

__all__ = ["SPLIT_RULE", "build_sft", "build_templated_sft"]
