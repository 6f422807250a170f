import numpy as np
import pytest

from trawl.extras.monitors.plots import plot_returns, running_mean
from trawl.observe import Episodes


def episodes(count):
    number = np.arange(count)
    return Episodes(number, np.sin(number / 9.0), number + 1, (number + 1) * 10)


@pytest.mark.parametrize("count", [1, 2, 50, 30_000])
def test_a_picture_is_drawn_in_the_format_of_its_ending(count, tmp_path):
    plot_returns(episodes(count), tmp_path / "a.png", title="A title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    if count == 2:
        plot_returns(episodes(count), tmp_path / "a.svg")
        assert "<svg" in (tmp_path / "a.svg").read_text()


def test_the_running_mean_is_over_a_window():
    values = np.random.default_rng(0).normal(size=20)
    expected = [values[i : i + 4].mean() for i in range(17)]
    assert np.allclose(running_mean(values, 4), expected)
