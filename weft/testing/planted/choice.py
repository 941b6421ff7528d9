"""Which faults of a catalogue are planted: all, one, a part, or a sample that looks into every part."""

from random import Random

from weft.errors import ConfigError
from weft.testing.planted.fault import Catalogue, Fault

DEFAULT_SAMPLE = 30


def choose(catalogue: Catalogue, asked: str, seed: int) -> tuple[Fault, ...]:
    """asked: `all`, `sample`, how many, or the name of a fault or of a part.

    Raises: ConfigError for a name that nothing has, or a number below 1.
    """
    if asked == "all":
        return catalogue.faults
    if asked == "sample":
        return sample(catalogue, DEFAULT_SAMPLE, seed)
    if asked.removeprefix("-").isdecimal():
        if int(asked) < 1:
            raise ConfigError(f"{asked} planted faults cannot be drawn", hint="a number from 1 on")
        return sample(catalogue, int(asked), seed)
    return catalogue.named(asked)


def sample(catalogue: Catalogue, count: int, seed: int) -> tuple[Fault, ...]:
    """As many, the parts by turns, so that each is looked into whatever its size; in the catalogue's order."""
    random = Random(seed)
    piles = [random.sample(list(faults), len(faults)) for faults in catalogue.parts.values()]
    random.shuffle(piles)
    chosen: set[str] = set()
    while len(chosen) < count and any(piles):
        for pile in piles:
            if pile and len(chosen) < count:
                chosen.add(pile.pop().name)
    return tuple(fault for fault in catalogue.faults if fault.name in chosen)
