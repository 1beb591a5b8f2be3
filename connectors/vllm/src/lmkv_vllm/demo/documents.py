"""Documents to ask about: readable, long enough to be worth caching, and the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Subject:
    """What a document is about.

    Attributes:
        title: Its first line, which also tells it from the others in the report.
        opening: The paragraph with the facts that the questions ask for.
        actors: Who does something in an entry.
        deeds: What they do.
        remarks: How an entry ends.
        questions: Asked with the document before them.
    """

    title: str
    opening: str
    actors: tuple[str, ...]
    deeds: tuple[str, ...]
    remarks: tuple[str, ...]
    questions: tuple[str, ...]


SUBJECTS = (
    Subject(
        title="Lighthouse log",
        opening=(
            "The lighthouse at Cape Orla was built in 1874 from grey granite. Its keeper is Marta Lindqvist, and its "
            "lamp is called Old Henrietta. The supply boat comes every second Thursday."
        ),
        actors=(
            "The keeper",
            "The assistant",
            "A fisherman from the village",
            "The harbour pilot",
            "A visiting painter",
        ),
        deeds=(
            "polished the lenses until noon",
            "wrote down the height of the tide",
            "repaired a shutter that the storm had torn loose",
            "counted eleven ships on the horizon",
            "carried two barrels of oil up the stairs",
            "watched the herring gulls gather on the eastern rocks",
        ),
        remarks=(
            "The wind turned to the north in the evening.",
            "Fog lay over the bay, and the horn sounded for six hours.",
            "The night was clear, and the light could be seen from the mainland.",
            "Rain fell without a break, and nobody went outside.",
        ),
        questions=("Who is the keeper of the lighthouse?", "In which year was the lighthouse built?"),
    ),
    Subject(
        title="Garden journal",
        opening=(
            "The botanical garden of Veldhoven has seven glass houses. Its director is Professor Amadou Keita, and its "
            "oldest plant is a cycad from 1802. The garden is closed on Mondays."
        ),
        actors=("The head gardener", "A student", "The professor", "A school class", "The watchman"),
        deeds=(
            "pruned the roses along the southern wall",
            "labelled forty seedlings in the fern house",
            "measured the temperature of the water lily pond",
            "found a nest of wrens behind the tool shed",
            "sowed poppies in the two beds beside the gate",
            "drew a leaf of the giant rhubarb",
        ),
        remarks=(
            "The first orchids opened in the afternoon.",
            "A late frost damaged the magnolia, but not the camellias.",
            "Bees were busy in the lavender until sunset.",
            "The pump of the fountain had to be stopped for a day.",
        ),
        questions=("Who is the director of the garden?", "On which day is the garden closed?"),
    ),
    Subject(
        title="Railway reports",
        opening=(
            "The railway to Piz Serra climbs 1,420 metres in fifty minutes. Its engine driver is Ilse Gruber, and its "
            "locomotive is painted dark green. The last train leaves at half past five."
        ),
        actors=("The driver", "The conductor", "A track worker", "The station master", "A group of hikers"),
        deeds=(
            "checked the rack between the second and the third tunnel",
            "cleared snow from the platform of the middle station",
            "sold ninety tickets before ten o'clock",
            "waited for the goods train with milk and timber",
            "greased the points at the upper terminus",
            "saw three ibex beside the viaduct",
        ),
        remarks=(
            "The train arrived four minutes late.",
            "Clouds hid the summit all day.",
            "The evening train ran without passengers.",
            "The brakes were tested and found in order.",
        ),
        questions=("What colour is the locomotive?", "When does the last train leave?"),
    ),
)


def document(subject: Subject, tokens: int, count: Callable[[str], int]) -> str:
    """A text about the subject of at least `tokens` tokens, and at most an entry more.

    Args:
        subject: What it is about; the same subject and length give the same text.
        tokens: Wanted length.
        count: Tells how many tokens the model's tokenizer makes of a text.
    """
    chance = random.Random(subject.title)  # noqa: S311 - the same text in every run is what is wanted
    text = f"{subject.title}\n\n{subject.opening}\n"
    day = 0
    while (missing := tokens - count(text)) > 0:
        # An entry has about 40 tokens, more in a byte-level tokenizer: add some at once, then look again.
        for _ in range(max(1, missing // 320)):
            day += 1
            first, second = chance.sample(subject.actors, 2)
            deeds = chance.sample(subject.deeds, 2)
            remark = chance.choice(subject.remarks)
            text += f"\nDay {day}. {first} {deeds[0]}. Later {second[0].lower()}{second[1:]} {deeds[1]}. {remark}\n"
    return text


def prompt(text: str, question: str) -> str:
    """The user's message: the document first, so that all questions about it share their beginning."""
    return f"{text}\nAnswer in one sentence, from the text above. {question}"
