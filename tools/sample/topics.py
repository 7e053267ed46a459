"""What the sample corpus talks about: invented people and towns, plain facts, and words to fill its templates with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """Hold one subject: `things` are plural nouns, `person`, `place` and `tool` carry their article."""

    name: str
    person: str
    place: str
    tool: str
    things: tuple[str, ...]
    facts: tuple[str, ...]


# A line "name | person | place | tool | things", then its facts as indented sentences.
TOPIC_TEXT = """\
tides | a harbour pilot | the estuary | a tide table | currents, mudflats, moorings, sandbanks |
    The moon pulls the ocean into two broad bulges. Most coasts see high water twice a day. Spring tides come
    with the full moon and the new moon. A narrow bay can double the height of the water. Neap tides are weak
    because the sun and the moon pull at right angles. Pilots wait for slack water before they turn a ship.
bread | a village baker | the bakehouse | a proofing basket | loaves, crusts, starters, flours |
    Yeast eats sugar and leaves gas behind. Gluten holds the gas in small elastic pockets. A wet dough makes
    an open crumb. Salt slows the yeast and tightens the dough. Steam keeps the crust soft until the loaf has
    risen. Rye needs more water than wheat. A cool night gives the sourdough its sharp flavour.
beekeeping | a patient beekeeper | the apiary | a smoker | hives, combs, swarms, drones |
    A colony keeps its brood at the warmth of a human body. Workers dance to tell where the nectar is. The
    queen may lay a thousand eggs on a summer day. Drones do not gather food. Honey lasts because it holds so
    little water. In winter the bees form a tight cluster and shiver.
bridges | a structural engineer | the river crossing | a strain gauge | arches, cables, girders, piers |
    An arch turns weight into a push along its curve. Steel cables are strong in tension and useless in
    compression. Every long bridge has joints that let it grow in the heat. Wind can set a light deck
    swinging. Engineers load a new bridge with lorries before anyone may cross. Rust is the slow enemy of
    every girder.
volcanoes | a field geologist | the crater rim | a seismograph | vents, ashes, lavas, craters |
    Molten rock rises because it is lighter than the stone around it. Sticky magma traps gas and explodes.
    Thin magma runs away in glowing rivers. Ash makes fertile soil after a few seasons of rain. Small
    earthquakes often warn of an eruption. Islands have been born within a single year.
libraries | a night librarian | the reading room | a card catalogue | shelves, folios, margins, indexes |
    A book on the wrong shelf is as good as lost. Old paper turns brown because of the acid in it. Catalogues
    were once written on cards by hand. Dry, cool air keeps leather bindings from cracking. A good index
    answers questions its author never asked. Many readers come for the silence alone.
railways | a signal operator | the junction | a block token | sleepers, couplings, platforms, timetables |
    A steel wheel on a steel rail rolls with very little friction. Signals keep one train in each block of
    track. A loaded goods train needs a mile to stop. Timetables forced whole countries to agree on the time.
    Gravel lets the track drain and keeps it from creeping. Electric engines return power when they brake
    downhill.
gardens | a retired gardener | the walled garden | a dibber | seedlings, borders, perennials, hedges |
    Compost feeds the soil rather than the plant. Beans fix nitrogen with the help of bacteria. Slugs come out
    after rain and hide before noon. A south wall stores the heat of the day. Roots follow water and stop
    where the ground is packed. Mulch keeps moisture in and weeds down.
glaciers | a polar surveyor | the ice field | an ice corer | crevasses, moraines, meltwaters, icebergs |
    Ice flows like very stiff honey. Snow turns to ice under the weight of later winters. Bubbles in the ice
    hold air from thousands of years ago. A glacier polishes the rock beneath it. Boulders left in a field
    mark where the ice once ended. Blue ice has lost nearly all of its bubbles.
clocks | a watch repairer | the workshop | a loupe | springs, escapements, pendulums, dials |
    A pendulum keeps time by its length and not by its weight. The escapement lets one tooth pass at each
    swing. Brass expands in summer and makes a clock run slow. Quartz crystals tremble many thousand times a
    second. Sailors needed exact clocks to find their longitude. Old oil turns sticky and stops the finest
    movement.
owls | a forest ranger | the pine wood | a nest camera | feathers, pellets, talons, roosts |
    An owl hears a mouse under a foot of snow. Soft fringes on the feathers make its flight silent. The eyes
    cannot turn, so the head must. Pellets show exactly what was eaten. Young owls climb branches before they
    can fly. Some kinds nest in burrows in open grassland.
pottery | a studio potter | the kiln yard | a turning wheel | glazes, bowls, shards, clays |
    Clay shrinks as it dries and again as it is fired. Iron in a glaze can turn green, brown or black. A pot
    that dries too fast will crack at the rim. Ash from the fire may melt on the shoulders of a jar. Porcelain
    needs a hotter kiln than earthenware. Broken pots tell historians what people cooked.
weather | a storm forecaster | the observatory | a barometer | fronts, clouds, gusts, droughts |
    Warm air rises and cools until its water condenses. A falling barometer warns of wind. Hail grows while it
    is tossed up and down inside a cloud. Sea breezes turn round after sunset. Forecasts begin with millions
    of measurements. A halo round the moon often comes before rain.
chess | a school chess coach | the club room | a chess clock | pawns, openings, endgames, sacrifices |
    Control of the centre gives every piece more room. A knight on the edge guards half as many squares. Rooks
    belong on open files. Pawns never move backward. A small advantage grows when pieces are exchanged. Many
    games are lost by hurrying in a won position.
satellites | an orbit analyst | the ground station | a dish antenna | orbits, sensors, thrusters, signals |
    A satellite falls all the time and keeps missing the ground. Low orbits take about ninety minutes. Solar
    panels feed batteries for the dark half of each lap. Radio delay shows how far away a craft is. Old parts
    burn up when they meet thick air. Maps of forests are updated from space each week.
medicine | a country doctor | the small clinic | a stethoscope | vaccines, symptoms, fevers, bandages |
    Clean hands prevent more illness than most drugs. A vaccine teaches the body without the disease. Fever is
    part of the defence and not the enemy. Trials compare a treatment with a placebo. Antibiotics do nothing
    against a virus. Sleep helps wounds to heal.
music | a cello teacher | the rehearsal hall | a tuning fork | melodies, chords, rhythms, bows |
    A string sounds higher when it is shorter, tighter or thinner. Two close notes beat against each other.
    Wood ages and changes the voice of an instrument. An octave is a doubling of frequency. Slow practice
    finds the mistakes that speed conceals. Audiences breathe together without noticing.
cheese | a mountain dairy farmer | the ripening cellar | a curd knife | curds, rinds, cultures, wheels |
    Rennet turns milk into curds and whey. Small curds lose more water and make a harder cheese. Moulds need
    air to draw their blue veins. Each cellar has its own company of microbes. Salt forms the rind and keeps
    pests away. Goats give milk with smaller drops of fat.
maps | a young cartographer | the survey office | a theodolite | contours, legends, meridians, borders |
    No flat map keeps every distance true. Contour lines that crowd together mean a steep slope. North on a
    compass is not quite the north of the map. Triangles let surveyors measure mountains from afar. A legend
    explains each symbol. Old maps filled empty seas with monsters.
computers | a systems programmer | the machine room | a debugger | processors, caches, queues, pointers |
    A cache keeps near at hand what was used a moment ago. A program is a text that a machine obeys literally.
    Sorting a list first makes every later search quick. Memory that nobody frees is lost until the restart.
    Errors hide where two modules disagree about a unit. Checksums reveal a single flipped bit.
whales | a marine biologist | the northern sound | a hydrophone | pods, flukes, songs, migrations |
    Whales breathe through the top of the head. Baleen strains krill out of mouthfuls of sea. A song may
    travel across half an ocean. Calves drink milk as thick as paste. Scars on the tail tell one animal from
    another. Dead whales feed the deep floor for decades.
economics | a market historian | the old exchange | a ledger | prices, wages, harvests, tariffs |
    A price carries news about scarcity. Inflation helps borrowers and hurts savers. Trade lets each village
    do what it does best. Taxes on windows once made houses dark. Banks lend most of what they are given to
    keep. A bad harvest was felt in every shop.
photography | a portrait photographer | the darkroom | a light meter | lenses, shutters, negatives, shadows |
    A small opening keeps both near and far in focus. Slow shutters turn waterfalls into silk. Film stores
    light in grains of silver. Soft light comes from a large source close by. Red lamps do not spoil the
    paper. The best lens is worthless in a trembling hand.
bicycles | a bicycle courier | the repair stand | a spoke key | gears, brakes, tyres, spokes |
    A turning wheel resists being tipped over. Low gears trade speed for force. Most of the effort on a flat
    road goes into moving air. Spokes pull, they do not push. A loose chain wears the teeth of the sprocket.
    Wet rims double the distance needed to stop.
"""


def _topics(text: str) -> tuple[Topic, ...]:
    topics: list[Topic] = []
    for block in text.replace("\n    ", " ").splitlines():
        name, person, place, tool, words, facts = block.split(" | ")
        sentences = tuple(f"{fact}." for fact in facts.rstrip(".").split(". "))
        topics.append(Topic(name, person, place, tool, tuple(words.split(", ")), sentences))
    return tuple(topics)


TOPICS = _topics(TOPIC_TEXT)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _joined(first: str, second: str) -> tuple[str, ...]:
    """Join every first part with every second part; many invented names give the tokenizer something to learn."""
    return tuple(head + tail for head in first.split() for tail in second.split())


GIVEN_NAMES = _words(
    "Amélie Tomás Søren Zoë Łukasz Minh Priya Kofi Hana Björn Ruth Omar Ines Edith Jarvis Wilhelm Beatrix Yusuf "
    "Clementine Dmitri Florence Gwendolyn Hugo Ximena Percival Quentin Rosalind Sebastian Theodora Ursula"
)
SURNAMES = _joined(
    "Ash Bram Cald Dunn Ever Fair Gold Hart Ibber Kell Lang Marl Nether Ost Pem Quill Rav Sten Thorn Under Whit Yar",
    "wood by cote er field gate hurst ing lock man ridge stone worth",
)
TOWNS = (
    *("Port Vellan", "Grauhafen", "Saint-Éloi", "Ærøby", "Quinta Alta", "Nørre Vang", "Castle Tarn", "Old Ferring"),
    *_joined(
        "Hollow Mill East Black Copper Silver Winter Otter Raven Salt Bright Cold Deep Heron Juniper Lark Moss Red",
        "dale brook mere bridge cliff ford ham haven moor pool shore ton wick",
    ),
)
ADJECTIVES = _words(
    "careful curious gradual unexpected practical ancient modern ordinary delicate reliable quiet remarkable stubborn "
    "simple expensive generous awkward brilliant cautious dangerous elegant fragile graceful harmless ingenious jagged "
    "lively modest narrow obvious peculiar rigid shallow tedious urgent vivid wasteful accurate bitter complicated "
    "dusty efficient familiar genuine honest invisible lucrative mysterious natural original polished random sensible "
    "temporary unusual valuable weary"
)
NOUNS = _words(
    "ladder lantern blanket violin anchor kettle compass envelope hammer umbrella parcel telescope basket mirror "
    "carpet bottle trumpet window saddle cushion teapot wagon bucket ribbon candle scissors helmet puzzle statue "
    "pencil tunnel engine cabinet staircase chimney fountain orchard meadow canal quarry market chapel windmill "
    "passport recipe photograph dictionary newspaper contract invoice portrait melody rumour proverb lottery festival"
)
VERBS = _words(
    "borrowed painted repaired measured forgotten delivered collected exchanged translated inspected buried assembled "
    "rescued catalogued auctioned polished photographed smuggled weighed abandoned restored disguised labelled donated "
    "confiscated duplicated engraved flattened hoisted insulated knotted launched magnetized numbered packaged quoted"
)
SEASONS = (
    *("spring", "early summer", "late autumn", "a mild winter", "the dry season", "the week of the harvest"),
    *("the long frost", "an August heatwave", "the festival in October", "the floods of January", "Easter week"),
)
NUMBERS = (
    *("two", "three", "five", "seven", "eleven", "a dozen", "twenty", "thirty-six", "forty", "fifty-eight", "1,250"),
    *("almost a hundred", "several hundred", "147", "93", "nine thousand"),
)
