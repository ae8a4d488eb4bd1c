"""The statistics' names and settings, checked; apart, so that a command line needs no torch."""

from typing import Final, Literal, get_args

from kv8.errors import RequestError
from kv8.scales.validity import Strategy

StatisticName = Literal["absmax", "percentile", "mse", "llmcompressor"]

DEFAULT_PERCENTILE: Final = 99.99


def check_statistic(statistic: str, strategy: str, percentile: float = DEFAULT_PERCENTILE) -> None:
    """Raise `RequestError` unless the three can be used; says what can."""
    if statistic not in get_args(StatisticName):
        raise RequestError(
            f"statistic={statistic!r} is not known. Allowed: {', '.join(get_args(StatisticName))}."
        )
    if strategy not in get_args(Strategy):
        raise RequestError(
            f"strategy={strategy!r} is not known. Allowed: {', '.join(get_args(Strategy))}."
        )
    number = isinstance(percentile, int | float) and not isinstance(percentile, bool)
    if not (number and 0 < percentile <= 100):
        raise RequestError(
            f"percentile must be a number of more than 0 and at most 100, got {percentile!r}."
        )
    if percentile != DEFAULT_PERCENTILE and statistic != "percentile":
        raise RequestError(
            f"percentile={percentile} was given, but the statistic {statistic!r} has none. Leave "
            f"it out, or use statistic=percentile."
        )


def describe_statistic(statistic: str, percentile: float = DEFAULT_PERCENTILE) -> str:
    """Return the statistic in a word or two (``absmax``, ``percentile 99.99``)."""
    return f"percentile {percentile:g}" if statistic == "percentile" else statistic
