"""The pieces in the bytes of a SentencePiece model: added, and given another type."""

import numpy as np
from support.made_tokenizers import sentencepiece_model

from niels_gpt.tokenizers.sentencepiece_proto import with_pieces, with_types


def test_pieces_are_changed_without_touching_another_byte(tmp_path):
    import sentencepiece

    model = sentencepiece_model(tmp_path / "m.model").read_bytes()
    assert with_types(model, {}) == model
    assert with_pieces(model, ["x"]).startswith(model)
    changed = sentencepiece.SentencePieceProcessor(model_proto=with_types(model, {3: 3, 4: 3}))
    kept = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [at for at in range(600) if changed.is_control(at)] == [1, 2, 3, 4]
    assert [changed.id_to_piece(at) for at in range(600)] == [kept.id_to_piece(at) for at in range(600)]


def test_damaged_pieces_are_refused(tmp_path):
    model = sentencepiece_model(tmp_path / "m.model").read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for cut in range(1, 200):
        damaged = bytearray(model[: len(model) - cut])
        damaged[int(random.integers(len(damaged)))] ^= 1 << int(random.integers(8))
        try:
            with_types(bytes(damaged), {3: 3})
        except ValueError:
            refused += 1
    assert refused > 100
