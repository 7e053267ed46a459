"""Tokenizers by hand, with a few hundred ids, whose files begin a text as known models do.

start_tokenizer(folder, name)   writes tokenizer.json and tokenizer_config.json of FORMS; returns the folder
"""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

FORMS = {
    "llama3": "<|begin_of_text|>",
    "gemma": "<bos>",
    "mistral": "<s>",
    "qwen": None,
    "gpt2": None,
}
"""The token that the post-processor of each writes before a text; None for none."""
_ENDS = {
    "llama3": "<|end_of_text|>",
    "gemma": "<eos>",
    "mistral": "</s>",
    "qwen": "<|im_end|>",
    "gpt2": "<|endoftext|>",
}


def start_tokenizer(folder, name, single=""):
    """Write a tokenizer. single: the template of one text, in place of "TOKEN $A"; "": the usual one of the form."""
    start, end = FORMS[name], _ENDS[name]
    tokenizer = _sentencepiece_like(name, start, end) if name in ("gemma", "mistral") else _byte_level(name)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (start, end) if each])
    byte_level = processors.ByteLevel(trim_offsets=False)
    if start:
        ids = [(each, tokenizer.token_to_id(each)) for each in (start, end)]
        template = processors.TemplateProcessing(single=single or f"{start} $A", pair="$A $B", special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([byte_level, template]) if name == "llama3" else template
    else:
        tokenizer.post_processor = byte_level
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def _byte_level(name):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "th", "the", "\u0120a"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e"), ("\u0120", "a")]))
    tokenizer.normalizer = normalizers.NFC() if name == "qwen" else None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_like(name, start, end):
    first = ["<pad>", end, start, "<unk>"] if name == "gemma" else ["<unk>", start, end]
    pieces = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlnortuw", "th", "the", "\u2581a"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = space if name == "gemma" else normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(spaces + [decoders.Strip(" ", 1, 0)] * (name == "mistral"))
    return tokenizer
