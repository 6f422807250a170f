"""Backends: the places where workers run, such as this process or other processes."""

from trawl.backends.base import Backend, Death, Event, Failed, Message, Port, Service, Worker
from trawl.backends.inline import InlineBackend
from trawl.backends.places import Place
from trawl.backends.processes.backend import ProcessBackend
from trawl.lazy import public_dir

__all__ = [
    "Backend",
    "Death",
    "Event",
    "Failed",
    "InlineBackend",
    "Message",
    "Place",
    "Port",
    "ProcessBackend",
    "Service",
    "Worker",
]

__dir__ = public_dir(__name__)
