"""Bars for work that takes long, on standard error, so that tables can be piped."""

from collections.abc import Callable

from tqdm import tqdm

# progress("weft, run 1 of 2", 16) begins a stage of 16 requests; the function that it returns is called as each ends.
Progress = Callable[[str, int], Callable[[], None]]


def show_bars(stage: str, total: int) -> Callable[[], None]:
    """A bar for one stage, left standing when it is full."""
    bar = tqdm(total=total, desc=stage, dynamic_ncols=True)

    def advance() -> None:
        bar.update()
        if bar.n >= total:
            bar.close()

    return advance


def show_nothing(stage: str, total: int) -> Callable[[], None]:
    return lambda: None
