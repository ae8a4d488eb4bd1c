"""What a reader of a calibration's report must not miss, and when it is said."""

from collections.abc import Callable, Sequence
from typing import Final

from kv8.calibration.observations import MEASURED, Observations
from kv8.calibration.report_side import SideReport
from kv8.calibration.statistic_names import DEFAULT_PERCENTILE
from kv8.engine.layer_table import format_share
from kv8.scales.validity import Strategy
from kv8.scales.wording import layer_list

# Two halves of enough data give nearly the same scales. A step between neighbouring codes is
# 12.5 % in e4m3 and 25 % in e5m2: a scale that differs by less costs no more than rounding does.
UNSTABLE_CHANGE: Final = 0.25
# Held-out values are like those a server will see; more than one in a thousand clipped is no longer
# a rare extreme. The default percentile clips a tenth of that on purpose.
MUCH_SATURATION: Final = 1e-3
# Rounding alone costs 2.6 % in e4m3 and 5.2 % in e5m2, relative to values of all sizes. Much more
# means that a scale does not fit its head.
MUCH_ERROR: Final = 0.1


def find_warnings(
    rows: Sequence[SideReport],
    observations: Observations,
    strategy: Strategy,
    statistic: str = "absmax",
    percentile: float = DEFAULT_PERCENTILE,
) -> tuple[str, ...]:
    """Return a sentence or two for each thing that is not as it should be."""
    by_head = (
        "Use one scale a head (strategy attn_head), or keep" if strategy == "tensor" else "Keep"
    )
    less_clipping = _less_clipping(statistic, percentile)
    clipped = [
        row for row in rows if less_clipping and (row.saturated_share or 0) > MUCH_SATURATION
    ]
    changes = "storing changes the held-out values of a head by up to"
    found = [
        _about(
            rows,
            lambda row: row.change,
            UNSTABLE_CHANGE,
            "the two halves of the data give scales that differ by up to",
            "The scales are unstable: use more text, or more varied text.",
        ),
        _about(
            rows,
            lambda row: row.saturated_share,
            MUCH_SATURATION,
            "the held-out values that saturate are up to",
            less_clipping or "Use more text.",
        ),
        _about(clipped, lambda row: row.error, MUCH_ERROR, changes, less_clipping),
        _about(
            [row for row in rows if row not in clipped],
            lambda row: row.error,
            MUCH_ERROR,
            changes,
            f"{by_head} these layers unquantized (--kv-cache-dtype-skip-layers).",
        ),
    ]
    silent = [row for row in rows if min(row.amax) == 0]
    if silent:
        found.append(
            f"{_places(silent)}: a head was zero throughout. There is nothing to measure in it; "
            f"its scale is a constant."
        )
    if not all(observations.num_samples[part] for part in MEASURED):
        found.append(
            "There was one sample to measure: no two halves of the data could be compared. Whether "
            "the scales are stable is not known. Use more samples."
        )
    if not observations.num_samples["held_out"]:
        found.append(
            "No text was held out, so what the scales do to text they were not made from is not "
            "known. It takes four samples or more, and a share to hold out (held_out, --held-out)."
        )
    return tuple(text for text in found if text)


def _about(
    rows: Sequence[SideReport],
    figure: Callable[[SideReport], float | None],
    limit: float,
    finding: str,
    remedy: str,
) -> str:
    """Return where ``figure`` exceeds ``limit``, by how much and what to do, or nothing."""
    above = [(value, row) for row in rows if (value := figure(row)) is not None and value > limit]
    if not above:
        return ""
    where = _places([row for _, row in above])
    worst, row = max(above, key=lambda pair: pair[0])
    found, much = format_share(worst), format_share(limit)
    which = f" (layer {row.layer}, {row.side})" if len(above) > 1 else ""
    more = "a little more" if found == much else f"{found}{which}, more"
    return f"{where}: {finding} {more} than {much}. {remedy}"


def _less_clipping(statistic: str, percentile: float) -> str:
    """Return what to do where values saturate that the statistic leaves out; "" if it is none."""
    if statistic == "percentile":
        return (
            f"The scales leave out what is beyond percentile {percentile:g}: use a higher one, or "
            f"the statistic absmax."
        )
    if statistic == "llmcompressor":
        return "The scales are made from averages of extremes: use the statistic absmax."
    # mse clips only what costs more to keep
    return ""


def _places(rows: Sequence[SideReport]) -> str:
    """Return "Layers 0-3 (k), layer 2 (v)" for rows."""
    sides = dict.fromkeys(row.side for row in rows)
    text = ", ".join(
        f"{layer_list(row.layer for row in rows if row.side == side)} ({side})" for side in sides
    )
    return text[:1].upper() + text[1:]
