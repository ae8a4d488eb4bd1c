"""The layer table: JSON, text in full and in short, and the plain table under it."""

from kv8.engine.counters import StoreCounts
from kv8.engine.layer_report import LayerReport
from kv8.engine.layer_table import layer_summary, layer_table
from kv8.engine.table import format_table
from kv8.scales.scale import Origin, OriginKind, Scale

DEFAULT = Scale((1.0,), Origin(OriginKind.DEFAULT))


def from_checkpoint(*values: float, tensor: str = "k_scale") -> Scale:
    return Scale(values, Origin(OriginKind.CHECKPOINT, tensor))


def layer(number: int, **fields) -> LayerReport:
    values = {
        "type": "full_attention",
        "dtype": "fp8_e4m3",
        "skipped_by": None,
        "reads_layer": None,
        "bytes_per_token": 1024,
        "k": DEFAULT,
        "v": DEFAULT,
    }
    return LayerReport(layer=number, **(values | fields))


PLAIN = {"dtype": "bfloat16", "k": None, "v": None}


def test_sides_alike_share_a_line() -> None:
    lines = layer_table([layer(0), layer(1, skipped_by="0-3", **PLAIN)]).splitlines()
    assert [line.split() for line in lines] == [
        ["layer", "type", "dtype", "bytes/token", "scale", "origin"],
        ["0", "full_attention", "fp8_e4m3", "1,024", "k", "v", "1", "default"],
        ["1", "full_attention", "bfloat16", "1,024", "skipped", "by", "0-3"],
    ]


def test_each_side_shows_its_own_tensor() -> None:
    scales = {side: from_checkpoint(0.25, tensor=f"l.0.{side}_scale") for side in "qkv"}
    text = layer_table([layer(0, **scales)])
    for side in "qkv":
        assert f"{side}   0.25  checkpoint: l.0.{side}_scale" in text


def test_counts_are_shares_of_what_was_stored() -> None:
    counts = {
        "k_counts": StoreCounts(1000, 5, 0, 0),
        "v_counts": StoreCounts(1000, 0, 250, 0),
    }
    text = layer_table([layer(0, **counts)])
    assert "0.5 %" in text
    assert "25 %" in text
    entry = layer(0, **counts).as_json()
    assert entry["k"]["saturated_share"] == 0.005
    assert entry["v"]["underflowed"] == 250
    assert "stored" not in entry["q"]


def test_shares_are_written_without_an_exponent() -> None:
    counts = {"k_counts": StoreCounts(1000, 0, 1000, 0), "v_counts": StoreCounts(1000, 126, 996, 0)}
    for text in (layer_table([layer(0, **counts)]), layer_summary([layer(0, **counts)])):
        assert "100 %" in text
        assert "13 %" in text
        assert "e+" not in text


def test_per_head_scales_are_a_span_in_text_and_a_list_in_json() -> None:
    report = layer(0, k=from_checkpoint(0.5, 0.25, 1.0))
    assert "0.25..1 (3 heads)" in layer_table([report])
    assert report.as_json()["k"] == {"scale": [0.5, 0.25, 1.0], "origin": "checkpoint: k_scale"}
    assert report.as_json()["v"]["scale"] == 1.0


def test_a_layer_that_reads_another_says_so() -> None:
    text = layer_table([layer(3, reads_layer=1, bytes_per_token=0)])
    assert "reads layer 1" in text
    assert layer(3, reads_layer=1).as_json()["reads_layer"] == 1


def test_the_summary_joins_layers_that_are_alike() -> None:
    layers = [
        layer(0, k=from_checkpoint(0.1), v=from_checkpoint(0.2)),
        layer(1, k=from_checkpoint(0.3), v=from_checkpoint(0.2)),
        layer(2, skipped_by="2", **PLAIN),
        layer(3, k_counts=StoreCounts(100, 1, 0, 0), v_counts=StoreCounts(100, 0, 2, 0)),
    ]
    assert layer_summary(layers).splitlines() == [
        "layers 0-1: fp8_e4m3; k scale 0.1..0.3 (checkpoint); v scale 0.2 (checkpoint)",
        "layer 2: bfloat16; skipped by 2",
        "layer 3: fp8_e4m3; k scale 1 (default); v scale 1 (default); "
        "saturated at most k 1 %, v 0; underflowed at most k 0, v 2 %",
    ]


def test_a_table_drops_empty_columns_and_aligns_numbers() -> None:
    assert format_table(["a", "bb", "c"], [["1", "", "x"], ["200", "", "yy"]]) == (
        "  a  c\n  1  x\n200  yy"
    )
