"""The picture: one page for every shape of model, and the same report gives the same file."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.calibration.reports import make_geometry, observe, report_on

from kv8.calibration import picture
from kv8.calibration.picture import can_draw, draw_report
from kv8.calibration.report import CalibrationReport
from kv8.errors import RequestError


def _size(path: Path) -> tuple[int, int]:
    """Return width and height from a PNG's first chunk."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def _report(**geometry) -> CalibrationReport:
    model = make_geometry(**geometry)
    return report_on(observe(model), model, strategy="attn_head")


# drawn only where the extra is installed, which it is for development
drawn = pytest.mark.skipif(not can_draw(), reason="the extra kv8[report] is not installed")


@drawn
@pytest.mark.parametrize(
    ("strategy", "geometry"),
    [
        ("tensor", {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}),
        ("attn_head", {"num_layers": 40, "num_heads": 16, "num_kv_heads": 8}),
        ("tensor", {"num_layers": 6, "types": ("sliding_attention",) * 2 + ("full_attention",)}),
        ("attn_head", {"num_layers": 4, "reads": {2: 0, 3: 1}}),
    ],
)
def test_every_shape_of_model_fits_on_a_page(strategy, geometry, tmp_path):
    model = make_geometry(**geometry)
    report = report_on(observe(model), model, strategy=strategy)
    draw_report(report, tmp_path / "a.png")
    assert _size(tmp_path / "a.png") == (1800, 1590)


@drawn
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_layers_may_differ_in_their_heads(strategy, tmp_path):
    layers = (*make_geometry(1).layers, make_geometry(2, num_kv_heads=1).layers[1])
    model = replace(make_geometry(), layers=layers)
    report = report_on(observe(model), model, strategy=strategy)
    assert [len(row.amax) for row in report.rows if row.side == "k"] == [2, 1]
    draw_report(report, tmp_path / "a.png")


@drawn
def test_silent_heads_and_missing_parts_are_no_obstacle(tmp_path):
    model = make_geometry(3)
    silent = observe(model, ("first",), ranges={(0, "k"): [0.0, 1.0], (1, "v"): 0.0})
    for strategy in ("tensor", "attn_head"):
        draw_report(report_on(silent, model, strategy=strategy), tmp_path / "a.png")


@drawn
def test_the_same_report_is_the_same_file_and_another_is_not(tmp_path):
    for name, layers in (("a", 3), ("b", 3), ("c", 4)):
        draw_report(_report(num_layers=layers), tmp_path / name)
    same, other = (tmp_path / "b").read_bytes(), (tmp_path / "c").read_bytes()
    assert (tmp_path / "a").read_bytes() == same != other


@drawn
def test_what_is_drawn_is_what_the_report_says(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    model = make_geometry(3)
    observations = observe(model, ranges={(1, "v"): [2.0, 30.0]}, by_part={"second": 2.0})
    report = report_on(observations, model, strategy="attn_head")
    draw_report(report, tmp_path / "a.png")
    [figure] = figures
    keys, _, values, scales, queries, _ = figure.axes
    assert [a.get_ylabel() for a in (keys, values, queries)] == ["keys", "values", "queries"]
    assert {a.get_yscale() for a in figure.axes} == {"log"}
    rows = [row for row in report.rows if row.side == "v"]

    def lines(axes, head):
        [line] = [line for line in axes.lines if line.get_label() == str(head)]
        return list(line.get_xdata()), list(line.get_ydata())

    for head in (0, 1):
        assert lines(values, head) == ([0, 1, 2], [row.amax[head] for row in rows])
        assert lines(scales, head) == ([0, 1, 2], [row.scale[head] for row in rows])
    rings = [line for line in scales.lines if line.get_markerfacecolor() == "none"]
    assert len(rings) == 3  # the halves differ by 100 % in every layer
    assert "unstable" in " ".join(t.get_text() for t in figure.legends[0].get_texts())


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert not can_draw()
    with pytest.raises(RequestError, match=r"pip install 'kv8\[report\]'"):
        draw_report(_report(), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
