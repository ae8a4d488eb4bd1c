"""What a reader of a calibration's report must not miss, and when it is said."""

from collections.abc import Callable, Sequence
from typing import Final

from kv8.calibration.observations import MEASURED, Observations
from kv8.calibration.report_side import SideReport
from kv8.scales.validity import Strategy
from kv8.scales.wording import layer_list

# Two halves of enough data give nearly the same scales. A step between neighbouring codes is
# 12.5 % in e4m3 and 25 % in e5m2: a scale that differs by less costs no more than rounding does.
UNSTABLE_CHANGE: Final = 0.25
# Held-out values are like those a server will see; more than one in a thousand clipped is no longer
# a rare extreme. The default percentile clips a tenth of that on purpose.
MUCH_SATURATION: Final = 1e-3
# Rounding alone costs 2.6 % in e4m3 and 5.2 % in e5m2, relative to values of all sizes. Double that
# means that a scale does not fit its head.
MUCH_ERROR: Final = 0.1


def find_warnings(
    rows: Sequence[SideReport], observations: Observations, strategy: Strategy
) -> tuple[str, ...]:
    """Return a sentence or two for each thing that is not as it should be."""
    by_head = " or one scale a head (strategy attn_head)" if strategy == "tensor" else ""
    found = [
        _about(
            rows,
            lambda row: row.change,
            UNSTABLE_CHANGE,
            "the two halves of the data give scales that differ by up to {worst}, more than "
            f"{100 * UNSTABLE_CHANGE:.0f} %. The scales are unstable: use more text, or more varied text.",
        ),
        _about(
            rows,
            lambda row: row.saturated_share,
            MUCH_SATURATION,
            "up to {worst} of the held-out values saturate, more than "
            f"{100 * MUCH_SATURATION:.1f} %. Use more text, or the statistic absmax.",
        ),
        _about(
            rows,
            lambda row: row.error,
            MUCH_ERROR,
            "storing changes held-out values of a head by up to {worst}, more than "
            f"{100 * MUCH_ERROR:.0f} %. Use fp8_e4m3 if this is fp8_e5m2{by_head}, or keep these layers "
            "unquantized (--kv-cache-dtype-skip-layers).",
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
            "No text was held out: what the scales do to text they were not made on is not known. "
            "Use four samples or more."
        )
    return tuple(text for text in found if text)


def _about(
    rows: Sequence[SideReport],
    figure: Callable[[SideReport], float | None],
    limit: float,
    text: str,
) -> str:
    """Return ``text`` with the places where ``figure`` exceeds ``limit``, or nothing."""
    above = [(value, row) for row in rows if (value := figure(row)) is not None and value > limit]
    if not above:
        return ""
    worst, row = max(above, key=lambda pair: pair[0])
    share = f"{worst:.2g}x" if worst >= 10 else f"{100 * worst:.2g} %"
    where = f"{share} (layer {row.layer}, {row.side})"
    return f"{_places([row for _, row in above])}: {text.format(worst=where)}"


def _places(rows: Sequence[SideReport]) -> str:
    """Return "Layers 0-3 (k), layer 2 (v)" for rows."""
    sides = dict.fromkeys(row.side for row in rows)
    text = ", ".join(
        f"{layer_list(row.layer for row in rows if row.side == side)} ({side})" for side in sides
    )
    return text[:1].upper() + text[1:]
