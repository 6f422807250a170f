import io

from rich.console import Console

from trawl import Collector
from trawl.observe import CollectionProgress
from trawl.observe.progress import short


def shown(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with (
        Collector("CartPole-v1", frames_per_batch=25, total_frames=1000) as collector,
        CollectionProgress(collector, "a title", console) as progress,
    ):
        for batch in collector:
            progress.update(batch)
    return output.getvalue(), progress


def test_without_a_terminal_there_are_few_plain_lines():
    text, _ = shown(False)
    lines = text.splitlines()
    # 40 batches, but a line for each tenth only.
    assert len(lines) == 10
    assert "\x1b" not in text
    assert lines[-1].startswith("1,000/1,000 frames  ")
    for words in ("frames/s", "env ", "policy ", "episodes", "return ", "length "):
        assert words in lines[-1]


def test_on_a_terminal_a_bar_shows_the_same():
    text, _ = shown(True)
    for words in ("a title", "1,000/1,000 frames", "100%", "frames/s", "episodes", "return "):
        assert words in text
    assert "\x1b" in text


def test_it_gathers_the_episodes():
    _, progress = shown(False)
    assert progress.episodes.frames == 1000
    assert progress.episodes.count > 10
    assert progress.seconds > 0
    assert progress.rate > 0


def test_an_endless_collection_shows_no_total():
    output = io.StringIO()
    with Collector("CartPole-v1", frames_per_batch=25) as collector:
        progress = CollectionProgress(collector, console=Console(file=output, force_terminal=True))
        with progress:
            progress.update(next(iter(collector)))
    assert "25 frames" in output.getvalue()
    assert "/" not in output.getvalue().split(" frames ")[0]


def test_numbers_are_short():
    assert short(123456.7) == "123,457"
    assert short(float("inf")) == "inf"
