"""Turn topics into English sentences and paragraphs, by templates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from tools.sample.topics import (
    ADJECTIVES,
    GIVEN_NAMES,
    NOUNS,
    NUMBERS,
    SEASONS,
    SURNAMES,
    TOPICS,
    TOWNS,
    VERBS,
    Topic,
)

T = TypeVar("T")

SENTENCES = (
    "In {town}, {person} has kept {tool} beside the {things} for {number} years.",
    "Visitors to {place} usually ask about the {things} first.",
    "{name} once wrote that {subject} reward {adjective} attention more than talent.",
    "During {season}, {number} volunteers counted the {things} near {town}.",
    "The {adjective} part is not the {things} but the {others}.",
    "Without {tool}, nobody at {place} would notice a {adjective} change.",
    "A {adjective} record of the {things} was found in a drawer in {town}.",
    "{name} and {friend} disagreed about the {things}, and both were partly right.",
    "By the end of {season} the {others} had become {adjective}.",
    "Teachers use {subject} to explain why {adjective} methods need patience.",
    "It took {number} attempts before the {things} matched the {others}.",
    "At {place}, {person} explained how the {others} depend on the {things}.",
    "This is why {person} looks at the {things} before touching the {others}.",
    "Nobody had measured the {things} so often, or with such {adjective} instruments.",
    "The council of {town} paid for {tool} and {number} notebooks.",
    "{name} sold {number} sketches of the {things} to a collector from {town}.",
    "Rumours about {adjective} {others} reached {town} before {season}.",
    "Apprentices learn to sharpen, repair and label {tool} before they handle the {things}.",
    "A newspaper in {town} called the experiment {adjective}; {name} framed the article.",
    "Children drew the {others} with chalk, laughing whenever {friend} pretended to be {adjective}.",
    "Professor {name} compares {subject} with a {adjective} conversation between neighbours.",
    "The museum borrowed {number} photographs, showing {things}, {others} and {place} under snow.",
    "According to {friend}, {adjective} funding ended when {town} flooded.",
    "Behind {place} somebody had {verb} a {noun}, a {object} and {number} {things}.",
    "The {object} was {verb} in {town}; the {noun} arrived {number} days later.",
    "{name} traded a {adjective} {noun} for {tool}, which {friend} had {verb} twice.",
    "What looks {adjective} from far away is often {contrast} up close.",
)
QUESTIONS = (
    "What should a beginner know about {subject}?",
    "Why do the {things} matter at {place}?",
    "How would {person} describe {tool} to a child?",
    "Give me three short facts about {subject}.",
    "Is it true that the {others} depend on the {things}?",
    "Write a short paragraph about {subject} for a visitor from {town}.",
    "Which mistakes do people make with {things}?",
    "When is the best time to see the {things} near {town}?",
)
REQUESTS = (
    "Summarize the text in one sentence.",
    "According to the text, what is said about {subject}?",
    "Who or what is mentioned in this passage about {subject}?",
    "Extract one fact about {subject} from the context.",
)


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Choose one item through random(), whose sequence Python promises to keep for a seed, as it does for no other."""
    return items[int(rng.random() * len(items))]


def some(rng: random.Random, items: Sequence[T], number: int) -> list[T]:
    """Choose `number` different items, in random order."""
    order = sorted(range(len(items)), key=lambda _: rng.random())
    return [items[index] for index in order[:number]]


def fill(rng: random.Random, template: str, topic: Topic) -> str:
    """Fill one template and start it with a capital."""
    things, others = some(rng, topic.things, 2)
    adjective, contrast = some(rng, ADJECTIVES, 2)
    noun, other_noun = some(rng, NOUNS, 2)
    name, friend = (f"{given} {pick(rng, SURNAMES)}" for given in some(rng, GIVEN_NAMES, 2))
    text = template.format(
        subject=topic.name,
        person=topic.person,
        place=topic.place,
        tool=topic.tool,
        things=things,
        others=others,
        adjective=adjective,
        contrast=contrast,
        name=name,
        friend=friend,
        town=pick(rng, TOWNS),
        noun=noun,
        object=other_noun,
        verb=pick(rng, VERBS),
        season=pick(rng, SEASONS),
        number=pick(rng, NUMBERS),
    )
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}")
    return text[0].upper() + text[1:]


def paragraph(rng: random.Random, topic: Topic, *, sentences: int) -> str:
    """Write a paragraph in which facts and templates alternate."""
    facts = some(rng, topic.facts, (sentences + 1) // 2)
    others = [fill(rng, template, topic) for template in some(rng, SENTENCES, sentences // 2)]
    mixed = [text for pair in zip(facts, others, strict=False) for text in pair]
    return " ".join(mixed + facts[len(others) :])


def question(rng: random.Random, topic: Topic) -> str:
    """Write a question or a task about a topic."""
    return fill(rng, pick(rng, QUESTIONS), topic)


def topic_at(index: int) -> Topic:
    """Go round the topics in order, so that every part of the corpus covers them all."""
    return TOPICS[index % len(TOPICS)]
