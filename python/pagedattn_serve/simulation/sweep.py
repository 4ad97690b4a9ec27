"""The highest rate that a deployment sustains."""

from collections.abc import Callable

from pagedattn_serve.simulation.metrics import Summary

NUM_HALVINGS = 6  # of the last factor of two: to 1.1%


def sustainable_rate(
    run: Callable[[float], Summary], max_latency: float, min_rate: float, max_rate: float
) -> tuple[float, Summary] | None:
    """The highest rate, to about 1%, at which the mean normalised latency is at most `max_latency`, and what happens at
    this rate. None if the latency is higher at min_rate. run: of a rate in requests per second."""

    def try_at(rate: float) -> Summary | None:
        summary = run(rate)
        latency = summary.normalized_latency
        return summary if latency is not None and latency.mean <= max_latency else None

    best = try_at(min_rate)
    if best is None:
        return None
    low = min_rate
    while low < max_rate and (summary := try_at(min(2 * low, max_rate))) is not None:
        low, best = min(2 * low, max_rate), summary
    high = min(2 * low, max_rate)
    for _ in range(NUM_HALVINGS):
        if high <= low:
            break
        middle = (low * high) ** 0.5
        summary = try_at(middle)
        if summary is None:
            high = middle
        else:
            low, best = middle, summary
    return low, best
