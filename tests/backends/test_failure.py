"""Exceptions that happened elsewhere."""

import dataclasses
import pickle
import sys
import threading
import traceback

import numpy as np
import pytest

from trawl.backends.failure import Failure
from trawl.errors import WorkerDied, WorkerError, add_note


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return Failure.of(raised)


def travelled(error):
    failure = pickle.loads(pickle.dumps(caught(error)))
    with pytest.raises(WorkerError) as found:
        raise failure.error("worker 3")
    return found.value


class Coded(RuntimeError):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class OnlyNamed(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class Two(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")
        self.first = first


class Holding(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.number = 3


class WithMessage(ValueError):
    @property
    def message(self):
        return "a property"


class New(Exception):
    def __new__(cls, one, two):
        return super().__new__(cls, one, two)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Registered(Exception):
    def __init_subclass__(cls):
        raise LookupError("no subclass of this")


def of_a_local_class(text):
    class Local(ValueError):
        pass

    return Local(text)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("text"), ValueError),
        (KeyError("text"), KeyError),
        (IndexError("text"), LookupError),
        (AssertionError("text"), AssertionError),
        (FileNotFoundError(2, "text", "file"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "text"), UnicodeDecodeError),
        (ImportError("text", name="x"), ImportError),
        (SystemError("text"), SystemError),
        (WithMessage("text"), WithMessage),
        (Coded("text"), Coded),
        (pytest.importorskip("torch").OutOfMemoryError("text"), RuntimeError),
        (pickle.PicklingError("text"), pickle.PicklingError),
        (of_a_local_class("text"), ValueError),
        # Pickle can't take these as they are.
        (Two("text", 2), Two),
        (OnlyNamed(code="text"), OnlyNamed),
        (Holding("text"), Holding),
    ],
)
def test_an_error_is_of_both_types(error, kind):
    raised = travelled(error)
    assert isinstance(raised, kind)
    assert isinstance(raised.original, kind)
    # Pickle calls the class again, which adds to the text of this one.
    assert raised.original.args == error.args or kind is Coded
    assert str(raised).startswith(f"in worker 3: {caught(error).summary}")
    assert "text" in str(raised)
    assert "in caught" in str(raised)
    # Tracebacks name its class, and it has what handlers ask for.
    name = "".join(traceback.format_exception_only(error)).partition(":")[0]
    assert type(raised).__name__ == type(error).__name__
    assert traceback.format_exception_only(raised)[0].startswith(f"{name}: in worker 3: ")
    told = [name for name in (*vars(error), "errno", "filename") if hasattr(error, name)]
    for name in set(told) - {"lock"}:
        assert getattr(raised, name) == getattr(error, name) == getattr(raised.original, name)


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("text"),
        New("text", 2),
        Frozen("text"),
        Registered("text"),
        StopIteration("text"),
        KeyboardInterrupt("text"),
        SystemExit("text"),
        ValueError("text", threading.Lock()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_told_whatever_its_type(error):
    raised = travelled(error)
    assert type(error).__name__ in str(raised)
    assert "text" in str(raised)
    assert "in caught" in str(raised)
    assert isinstance(raised, WorkerDied) == isinstance(error, WorkerDied)
    # A generator that raises it would seem to have ended.
    assert not isinstance(raised, StopIteration | KeyboardInterrupt | SystemExit)


def test_memory_errors_of_numpy_and_groups_stay_what_they_are():
    with pytest.raises(MemoryError) as found:
        np.empty(1 << 50)
    raised = travelled(found.value)
    assert isinstance(raised, MemoryError)
    assert "Unable to allocate" in str(raised)
    if sys.version_info >= (3, 11):
        several = [ValueError("one"), KeyError("two")]
        raised = travelled(ExceptionGroup("several", several))  # noqa: F821
        assert [type(error) for error in raised.exceptions] == [ValueError, KeyError]


def test_causes_are_in_the_text():
    try:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error
    except ValueError as error:
        text = Failure.of(error).text
    assert "KeyError: 'the cause'" in text
    assert "direct cause" in text


def test_notes_are_kept():
    error = ValueError("text")
    add_note(error, "step 5 of environment 2")
    failure = caught(error)
    assert str(travelled(error)).count("step 5 of environment 2") == 1
    assert "\n" not in failure.summary


def test_an_error_of_an_error():
    """Workers may have workers."""
    inner = caught(ValueError("text")).error("worker 1")
    outer = travelled(inner)
    assert isinstance(outer, ValueError)
    assert "in worker 3" in str(outer)
    assert "in worker 1" in str(outer)


def test_an_error_can_be_sent_on():
    raised = pickle.loads(pickle.dumps(travelled(Coded(7))))
    assert isinstance(raised, Coded)
    assert isinstance(raised, WorkerError)
    assert raised.code == 7
    assert "in worker 3" in str(raised)


def test_errors_that_fail_to_be_told():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    assert "Mute" in str(travelled(Mute()))
    odd = ValueError("text")
    odd.__notes__ = 5
    assert "text" in str(travelled(odd))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("first line\n" + "x" * 5_000_000 + "the end"),
        ValueError("a line of " + "x" * 5_000_000 + "the end"),
        ValueError(["x" * 5_000_000], "the end"),
        OSError(2, "x" * 5_000_000, "the end"),
    ],
    ids=["lines", "a line", "an object", "OSError"],
)
def test_very_long_texts_are_cut(error):
    try:
        raise error
    except Exception as caught:
        failure = Failure.of(caught)
    assert len(pickle.dumps(failure)) < 1_000_000
    found = failure.error("worker 0")
    assert isinstance(found, type(error))
    text = str(found)
    assert len(text) < 1_000_000
    assert "characters left out ...]" in text
    assert "the end" in text
    assert len(text.splitlines()[0]) < 3000
