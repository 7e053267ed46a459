"""A tiny Llama with its tokenizer, as save_pretrained writes them."""

import torch

from niels_gpt.eagle3 import models
from support import chat_tokenizers as kinds

CHAT = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The otter swam."}]


def write_model(folder, *, seed, template=kinds.CHATML, **how):
    """Write the model and its tokenizer to a folder; how: of save_pretrained."""
    import transformers

    kinds.write_tokenizer(folder, template=template)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=400,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder, **how)
    return folder


def begin_texts_with(folder, single="<|begin|> $A"):
    """Let the post-processor of a model's tokenizer write the tokens before $A before each text; returns the folder."""
    from tokenizers import Tokenizer, processors

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    special = [(token, tokenizer.token_to_id(token)) for token in single.split() if token != "$A"]
    template = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=special)
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, template])  # as in the files of Llama 3
    tokenizer.save(path)
    return folder


def target_facts(name, *, revision=None):
    """Return what is recorded of a target, by its folder or its id on the hub: no weights are read."""
    return models.target_facts(name, revision=revision)
