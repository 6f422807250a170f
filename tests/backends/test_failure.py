"""Exceptions that happened elsewhere."""

import dataclasses
import pickle
import threading
import traceback

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


class ByKeyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")


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
        (WorkerDied("text"), WorkerDied),
    ],
)
def test_an_error_is_of_both_types(error, kind):
    raised = travelled(error)
    assert isinstance(raised, kind)
    assert type(raised).__name__ == type(error).__name__
    assert isinstance(raised.original, kind)
    assert str(raised).startswith(f"in worker 3: {caught(error).summary}")
    assert "text" in str(raised)
    assert "in caught" in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        ByKeyword(code="text"),
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
    # A generator that raises it would seem to have ended.
    assert not isinstance(raised, StopIteration | KeyboardInterrupt | SystemExit)


def test_an_error_has_what_handlers_ask_for():
    assert travelled(Coded(7)).code == 7
    assert travelled(FileNotFoundError(2, "No such file", "name")).errno == 2
    assert travelled(FileNotFoundError(2, "No such file", "name")).filename == "name"


def test_a_local_class():
    class Local(ValueError):
        pass

    raised = travelled(Local("text"))
    assert isinstance(raised, ValueError)
    assert type(raised).__name__ == "Local"


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


class Two(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")
        self.first = first


class OnlyNamed(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class Holding(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()
        self.number = 3


@pytest.mark.parametrize(
    "error", [Two(1, 2), OnlyNamed(code=5), Holding()], ids=["2", "kw", "lock"]
)
def test_an_error_that_pickle_can_not_take_keeps_its_type(error):
    told = Failure.of(error).error("worker 0")
    assert isinstance(told, type(error))
    assert type(told.original) is type(error)
    assert told.original.args == error.args
    kept = {name: value for name, value in vars(error).items() if name != "lock"}
    assert vars(told.original) == kept


@pytest.mark.parametrize("error", [ValueError("no"), pickle.PicklingError("no")])
def test_tracebacks_name_the_original_class(error):
    found = Failure.of(error).error("worker 3")
    (first, *_) = traceback.format_exception_only(found)
    own = type(error).__qualname__
    module = type(error).__module__
    expected = own if module == "builtins" else f"{module}.{own}"
    assert first.startswith(f"{expected}: in worker 3: ")


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
