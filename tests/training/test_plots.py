from __future__ import annotations

import math

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cyberslm.training import plots
from cyberslm.training.plots import curves


def train(step: int, loss: float | str = 3.0, **more: object) -> dict:
    base = {"type": "train", "step": step, "loss": loss, "lr": 1e-3, "tokens": 100 * step, "seconds": 2.0}
    return base | {"tokens_per_second": 50.0} | more


def validation(step: int, loss: float = 2.5, **more: object) -> dict:
    return {"type": "validation", "step": step, "loss": loss, "bits_per_byte": loss / 2, "seconds": 1.0} | more


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are made."""
    figures: list[Figure] = []
    real = Figure.__init__

    def keep(self: Figure, *args: object, **kwargs: object) -> None:
        real(self, *args, **kwargs)
        figures.append(self)

    monkeypatch.setattr(Figure, "__init__", keep)
    return figures


def labels(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.get_legend().get_texts()]


def line(panel: Axes, label: str) -> tuple[list[float], list[float]]:
    (found,) = [each for each in panel.lines if str(each.get_label()).startswith(label)]
    return list(found.get_xdata()), list(found.get_ydata())


RECORDS = [
    {"type": "run", "step": 0},
    train(1, 4.0),
    train(2, 3.0),
    validation(2, 2.5),
    train(3, 2.0),
    validation(3, 2.2),
]


def test_one_run_shows_training_and_validation_rate_and_throughput(drawn: list[Figure]) -> None:
    assert curves({"mine": RECORDS}).startswith(b"\x89PNG")
    losses, rates, speeds = drawn[0].axes
    assert losses.get_title() == "mine"
    assert line(losses, "train, each step") == ([1, 2, 3], [4.0, 3.0, 2.0])
    assert line(losses, "validation, best 2.200 (1.100 bits/byte) at step 3") == ([2, 3], [2.5, 2.2])
    assert list(rates.lines[0].get_ydata()) == [1e-3] * 3
    assert list(speeds.lines[0].get_ydata()) == [50.0] * 3
    assert losses.get_ylabel() == "loss, nats per token"


@pytest.mark.parametrize(
    ("x", "places", "name"),
    [("step", [2, 3], "optimizer step"), ("tokens", [200, 300], "tokens trained on"), ("time", [5, 8], "seconds")],
)
def test_validations_lie_where_their_step_does(drawn: list[Figure], x: str, places: list, name: str) -> None:
    curves({"mine": RECORDS}, x=x)
    assert line(drawn[0].axes[0], "validation")[0] == places
    assert drawn[0].axes[-1].get_xlabel() == name


def test_long_times_are_in_minutes_and_hours(drawn: list[Figure]) -> None:
    for seconds in (50.0, 900.0):
        curves({"mine": [train(step, seconds=seconds) for step in range(1, 11)]}, x="time")
    assert [figure.axes[2].get_xlabel() for figure in drawn] == ["minutes", "hours"]
    assert line(drawn[1].axes[0], "train, each step")[0][-1] == 2.5


def test_several_runs_have_a_colour_and_a_label_each(drawn: list[Figure]) -> None:
    curves({"a": RECORDS, "b": [*RECORDS, train(4, 1.5)]})
    panel = drawn[0].axes[0]
    assert labels(panel) == [f"{name}, best 2.200 (1.100 bits/byte) at step 3" for name in "ab"]
    assert len({each.get_color() for each in panel.lines}) == 2
    assert panel.get_xlim()[1] >= 4


def test_bits_per_byte_show_validation_alone(drawn: list[Figure]) -> None:
    curves({"mine": RECORDS}, bits_per_byte=True)
    panel = drawn[0].axes[0]
    assert [list(each.get_ydata()) for each in panel.lines] == [[1.25, 1.1]]
    assert panel.get_ylabel() == "validation, bits per byte"


def test_sources_of_validation_have_lines(drawn: list[Figure]) -> None:
    parts = {"loss/data.sources[0]": 2.0, "loss/data.sources[1]": 3.0, "bits_per_byte/data.sources[0]": 1.0}
    curves({"mine": [train(1), validation(1, **parts)]})
    assert labels(drawn[0].axes[0])[-2:] == ["  of data.sources[0]", "  of data.sources[1]"]
    curves({"mine": [train(1), validation(1, **parts)]}, bits_per_byte=True)
    assert line(drawn[1].axes[0], "  of data.sources[0]") == ([1], [1.0])


def test_loss_that_is_not_finite_leaves_a_gap(drawn: list[Figure]) -> None:
    curves({"mine": [train(1, 2.0), train(2, "nan"), train(3, 1.0), validation(3, math.nan)]})
    panel = drawn[0].axes[0]
    for name in ("train, each step", "train, smoothed"):
        assert [math.isnan(value) for value in line(panel, name)[1]] == [False, True, False]
    assert labels(panel)[-1] == "validation"


def test_smoothed_curve_is_the_mean_around_each_point_and_doesnt_lag_at_the_start() -> None:
    values = [float(10 - step) for step in range(10)]
    assert plots._smooth(values)[:8] == values[:8]  # a straight line stays one
    assert plots._smooth([0.0, 0.0, 5.0, 0.0, 0.0])[2] == 1.0
    assert plots._smooth([]) == []
    assert plots._smooth([1.0]) == [1.0]


def test_later_part_is_shown_larger_only_where_there_is_room(drawn: list[Figure]) -> None:
    falling = [train(step, 2 + 8 / step) for step in range(1, 100)]
    curves({"falls": falling})
    (inset,) = drawn[0].axes[0].child_axes
    low, high = inset.get_ylim()
    assert low < min(r["loss"] for r in falling[40:])
    assert high > max(r["loss"] for r in falling[40:])
    curves({"rises": [train(step, 2 + step) for step in range(1, 100)]})
    assert drawn[1].axes[0].child_axes == []


@pytest.mark.parametrize("records", [[], [{"type": "run", "step": 0}], [train(1)], [validation(5)]])
def test_little_to_draw_is_drawn(records: list[dict]) -> None:
    assert curves({"mine": records}).startswith(b"\x89PNG")
