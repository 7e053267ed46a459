"""The text that the tests' tokenizer is trained on."""

TINY_TEXTS = tuple(
    f"Page {page}. The {animal} walks to the {place} and finds {page * 3} {things}.\n\nWhy? It was {mood} that day;\n"
    f'\tso the {animal} said: "{things.title()} are good, and the {place} isn\'t far."\n'
    for page, (animal, place, things, mood) in enumerate(
        (animal, place, things, mood)
        for animal in ("heron", "otter", "badger", "lynx")
        for place in ("river", "mill", "orchard")
        for things in ("apples", "pebbles", "letters")
        for mood in ("windy", "quiet")
    )
)
"""72 short documents of plain English with quotation marks, digits, tabs and line ends."""
