"""loss_mask.svg and folded_mask.svg: which tokens carry loss, and who sees whom in a folded row."""

from pathlib import Path

import numpy as np

from niels_gpt.cache.formats import target_mask
from niels_gpt.cache.meta import read_meta
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.tokenizer import load_tokenizer
from tools.pictures.sample import sample_caches
from tools.pictures.svg import BLUE, GREEN, INK, LINE, MUTED, ORANGE, PALE, Picture

LETTER = 7.4  # pixels of a letter of the fixed width font at size 12, at most
PROMPT = ["Name", "a", "small", "prime", ":"]
COMPLETIONS = [["It", "is", "2", "."], ["It", "is", "3", "."], ["Seven", "."]]


def draw_loss(target: Path) -> None:
    """Write loss_mask.svg: the first example of the val split of the sample's oasst1."""
    with sample_caches("sft/oasst1") as caches:
        cache = caches / "sft" / "oasst1"
        special = read_meta(str(cache / "meta.json"))["special_token_ids"]
        starts = np.load(cache / "val_idx.npy")
        ids = np.split(np.fromfile(cache / "val_tokens.bin", dtype="<u2"), starts[1:])[0]
        tokenizer = load_tokenizer(str(caches / "tokenizer"))
    mask = target_mask(ids[None], np.array([len(ids)]), asst_id=special["asst"], eot_id=special["eot"])[0]
    names = {number: f"<|{name}|>" for name, number in special.items()}
    words = [names.get(token) or tokenizer.decode([token]) for token in ids.tolist()]
    words = ["␣" if word == " " else word.replace(" ", "␣") for word in words]
    picture = Picture(
        800, 10, "The tokens of one chat: the reply of the assistant carries loss, the question does not."
    )
    bottom = chips(picture, words, mask.tolist(), [token in names for token in ids.tolist()])
    picture.box(24, bottom + 14, 16, 16, fill=PALE[GREEN], stroke=GREEN, radius=3)
    with_loss = (
        f"carries loss: {int(mask.sum())} of {len(ids)} tokens; the end-of-text too, so the model learns to stop"
    )
    picture.text(48, bottom + 27, with_loss, size=12.5)
    picture.box(24, bottom + 38, 16, 16, fill=PALE[MUTED], stroke=LINE, radius=3)
    picture.text(48, bottom + 51, "is read, and carries no loss: -100 in y_masked", size=12.5)
    picture.height = int(bottom + 72)
    picture.write(target / "loss_mask.svg")


def chips(picture: Picture, words: list[str], mask: list[bool], special: list[bool]) -> float:
    """Draw each token as a small box, in lines; return the lower edge of the last line."""
    left, top = 24.0, 22.0
    for word, is_target, is_special in zip(words, mask, special, strict=True):
        width = len(word) * LETTER + 10
        if left + width > 776:
            left, top = 24.0, top + 30
        colour = GREEN if is_target else MUTED
        picture.box(left, top, width, 23, fill=PALE[colour], stroke=GREEN if is_target else LINE, radius=3)
        ink = BLUE if is_special else INK
        picture.text(left + width / 2, top + 16, word, size=12, anchor="middle", mono=True, fill=ink, bold=is_special)
        left += width + 3
    return top + 23


def draw_folded(target: Path) -> None:
    """Write folded_mask.svg: three completions of one prompt as a tree, its mask, positions and loss."""
    vocabulary = list(dict.fromkeys([*PROMPT, *(word for completion in COMPLETIONS for word in completion)]))
    forest = PrefixForest.from_rollout_group(
        [vocabulary.index(word) for word in PROMPT],
        [[vocabulary.index(word) for word in completion] for completion in COMPLETIONS],
    )
    edges = LossEdges.from_forest(forest)
    words = [vocabulary[token] for token in forest.input_ids.tolist()]
    picture = Picture(800, 418, "Three completions of one prompt as a tree, and as one row with its mask.")
    tree(picture, forest, words)
    matrix(picture, forest, edges, words)
    before = int(forest.sample_offsets[-1])
    picture.text(24, 330, f"{before} tokens one by one, {len(words)} in the row.", size=12.5)
    weights = edges.weight.tolist()
    branch = len(PROMPT) - 1
    targets = [
        f"{vocabulary[token]} (weight {weight:g})"
        for row, token, weight in zip(edges.row.tolist(), edges.target.tolist(), weights, strict=True)
        if row == branch
    ]
    picture.text(24, 352, f"The row of “:” predicts {' and '.join(targets)}:", size=12.5)
    picture.text(24, 371, "loss edges, not one label per row.", size=12.5)
    picture.write(target / "folded_mask.svg")


def tree(picture: Picture, forest: PrefixForest, words: list[str]) -> None:
    """Draw the nodes from left to right by depth, with the positions below their tokens."""
    picture.text(24, 32, "The tree; below each token its position", size=13, bold=True, fill=MUTED)
    starts, lengths = forest.node_starts.tolist(), forest.node_lengths.tolist()
    parents, positions = forest.node_parents.tolist(), forest.position_ids.tolist()
    lefts, tops = (24, 232, 320, 320, 232), (140, 190, 150, 230, 80)  # of the nodes, by depth
    rights: list[float] = []
    for node, start in enumerate(starts):
        left, top = float(lefts[node]), tops[node]
        node_words = words[start : start + lengths[node]]
        widths = [max(22, len(word) * LETTER + 10) for word in node_words]
        rights.append(left + sum(widths))
        if (parent := parents[node]) >= 0:
            bend = (rights[parent] + left) / 2
            picture.path(f"M{rights[parent] + 2:g} {tops[parent] + 12}H{bend:g}V{top + 12}H{left - 3:g}", head=True)
        colour = BLUE if node == 0 else GREEN
        for number, (word, width) in enumerate(zip(node_words, widths, strict=True)):
            picture.box(left, top, width - 2, 24, fill=PALE[colour], stroke=colour, radius=3)
            picture.text(left + width / 2 - 1, top + 16, word, size=12, anchor="middle", mono=True)
            position = str(positions[start + number])
            picture.text(left + width / 2 - 1, top + 37, position, size=10.5, anchor="middle", fill=MUTED)
            left += width


def matrix(picture: Picture, forest: PrefixForest, edges: LossEdges, words: list[str]) -> None:
    """Draw which token (row) sees which (column)."""
    side, left, top, total = 24, 460, 92, len(words)
    picture.text(left - 62, 32, "The row's mask: a token sees the green ones", size=13, bold=True, fill=MUTED)
    loss_rows = set(edges.row.tolist())
    for query in range(total):
        y = top + query * side
        picture.text(left - 10, y + 16, words[query], size=11.5, anchor="end", mono=True)
        if query in loss_rows:
            picture.dot(left - 60, y + 12, 3.5, ORANGE)
        for key in range(total):
            seen = key <= query < int(forest.subtree_end[key])
            fill = GREEN if seen else PALE[MUTED]
            picture.box(left + key * side, y, side - 2, side - 2, fill=fill, stroke="none", radius=3)
    for key, word in enumerate(words):
        x = left + key * side + 14
        picture.parts.append(
            f'<text transform="translate({x} {top - 8}) rotate(-60)" font-size="11.5" fill="{INK}" '
            f'font-family="monospace">{word}</text>'
        )
    picture.dot(24 + 4, 391, 3.5, ORANGE)
    picture.text(40, 395, "a row that predicts a target", size=12.5)
