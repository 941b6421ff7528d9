"""Stop strings in a text that comes in pieces. Knows neither tokens nor requests.

The rule: the match that completes first ends the text; of those that complete at the same character the longest, which
is the one that began first. What could still become a stop string is held back, and no more. The prompt is no part of
the text, so that nothing matches inside it or across its end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _State:
    """What the text ends with: the longest beginning of a stop string.

    num_held: characters at the end of the text that could still become a stop string.
    stop: the longest stop string that ends here, if one does.
    """

    after: dict[str, "_State"] = field(default_factory=dict)
    fallback: "_State | None" = None  # None at the root
    num_held: int = 0
    stop: str | None = None


class StopStrings:
    """Finds the stop strings of one text.

    match: the stop string found; the text has ended there.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """stop: strings of at least one character.   include: the text shows the match, and ends with it."""
        self._state = self._root = _automaton(tuple(stop))
        self._include = include
        self._held = ""
        self.match: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is certain now and was not before; after a match nothing is.

        may_stop: whether this piece may complete a match; if not, one that it completes is text like any other.
        """
        if self.match is not None:
            return ""
        state, root = self._state, self._root
        for place, character in enumerate(piece, start=1):
            while (following := state.after.get(character)) is None and state.fallback is not None:
                state = state.fallback
            state = root if following is None else following
            if may_stop and state.stop is not None:
                self.match = state.stop
                text = self._held + piece[:place]
                self._held = ""
                return text if self._include else text[: len(text) - len(state.stop)]
        self._state = state
        text = self._held + piece
        shown = len(text) - state.num_held
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that no more text follows."""
        text, self._held = self._held, ""
        return text


@lru_cache(maxsize=64)
def _automaton(stop: tuple[str, ...]) -> _State:
    """Aho and Corasick's: one look-up or two for each character, however many strings. Read only, once it is built."""
    root = _State()
    for string in stop:
        state = root
        for character in string:
            state = state.after.setdefault(character, _State())
        state.stop = string
    queue = deque([(root, 0)])
    while queue:
        state, depth = queue.popleft()
        shorter = state.fallback
        if shorter is not None:
            state.stop = state.stop or shorter.stop
            state.num_held = depth if state.after else shorter.num_held
        for character, following in state.after.items():
            target = shorter
            while target is not None and character not in target.after:
                target = target.fallback
            following.fallback = root if target is None else target.after[character]
            queue.append((following, depth + 1))
    return root
