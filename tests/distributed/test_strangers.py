"""Another user of this machine reaches all ports: nothing of what that one does is carried out."""

import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import stranger
import torch
from distributed_parts import CLASSES, make
from forked import Forked

from trawl.extras.clusters.launching.authentication import AuthenticationError
from trawl.extras.clusters.network.link import Address, hosted_store
from trawl.extras.clusters.network.rank import run_rank_at
from trawl.extras.clusters.network.sockets import LOOPBACK, listening
from trawl.extras.clusters.network.weights import joined
from trawl.weight_update import DistributedWeightSyncScheme

NOBODY = 65534
KEY = os.urandom(32)
POISONED = 3
TEXT = "a text that only those know who are to be ranks"
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.timeout(600),
]


class Actor:
    """The program of a stranger."""

    def __init__(self, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        code = "import stranger, sys; stranger.main(*sys.argv[1:])"
        self._process = Forked(code, *arguments, **pipes)
        self.uid = self._said()

    def __getattr__(self, name):
        return lambda *given: self._does(name, *given)

    def _does(self, *what):
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._said()

    def _said(self):
        line = self._process.stdout.readline()
        assert line, "the stranger has ended"
        return json.loads(line)

    def close(self):
        with self._process:
            self._process.kill()


@pytest.fixture
def crater(tmp_path):
    """A file that the stranger can't write, and nobody else may."""
    found = tmp_path / "private" / "crater"
    found.parent.mkdir(mode=0o700)
    yield found
    assert not found.exists(), "something of the stranger's was unpickled"


@contextmanager
def another_user(port, crater, prefix="trawl"):
    actor = Actor(NOBODY, LOOPBACK, port, prefix, crater)
    try:
        assert actor.uid == NOBODY
        yield actor
    finally:
        actor.close()


def test_a_bomb_is_one(tmp_path):
    """What the tests below look for does happen where something is unpickled."""
    found = tmp_path / "crater"
    stranger.pickle.loads(stranger.pickle.dumps(stranger.Bomb(found)))
    assert found.exists()


def test_another_user_beside_a_collector(crater):
    """That one learns no secret, keeps no worker out, ends none, and has nothing run."""
    with make(CLASSES[0], sync=True) as collector:
        collector.next()
        backend = collector._pool.backend
        with another_user(backend.port, crater) as other:
            found = other.reads_the_store()
            keys = [member.worker.address.key for member in collector._pool.slots]
            assert len({"trawl/1/0/rendezvous", "trawl/2/0/rendezvous"} & found.keys()) == 2
            for name, value in found.items():
                data = bytes.fromhex(value)
                assert not any(key in data for key in (*keys, backend._secret)), name
                assert b"trawl." not in data, f"{name} is a pickle"
            other.poisons_the_store(POISONED)
            assert set(other.gets_requests()) == {"ConnectionRefusedError"}
            other.resets_connections()
            assert other.crowds(240) == 240
            before = collector.stats()["frames"]
            frames = sum(collector.next().numel() for _ in range(3))
            assert collector.stats()["restarts"] == 0
            # One that has to join now gets through them.
            os.kill(collector._pool.slots[0].worker.process._worker.pid, signal.SIGKILL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                while not collector.stats()["restarts"]:
                    frames += collector.next().numel()
                frames += collector.next().numel()
            assert collector.stats()["frames"] == before + frames
            # As many can be kept from joining as have poison in their place, and no more.
            assert 1 <= collector.stats()["restarts"] <= 1 + POISONED


def test_a_worker_takes_no_orders_from_another_user(crater):
    """Whatever the store says about where they are."""
    _, port = hosted_store(LOOPBACK, 0, 100.0)
    with another_user(port, crater) as other:
        other.plays_the_driver("trawl/1/0")
        with pytest.raises(AuthenticationError, match="have different keys"):
            run_rank_at(Address(LOOPBACK, port, 100.0, "trawl/1/0", KEY))


def test_another_user_neither_sends_nor_receives_weights(crater):
    """Of a scheme between processes of one's own: nobody unpickles what a stranger sends."""
    store, port = hosted_store(LOOPBACK, 0, 100.0)
    scheme, learner = DistributedWeightSyncScheme(), torch.nn.Linear(2, 1)
    scheme.init_on_sender(model=learner)
    scheme.connect(weights=learner)
    (address,) = scheme._addresses.values()
    with another_user(port, crater) as other:
        assert other.receives_weights(address.port, address.name) == "AuthenticationError"
        # The receiver can still come.
        receiver, actor = pickle.loads(ForkingPickler.dumps(scheme)), torch.nn.Linear(2, 1)
        receiver.init_on_receiver(model=actor)
        receiver.connect()
        receiver.receive()
        assert actor.weight.equal(learner.weight)
        misled = replace(address, port=other.serves_bombs())
        with pytest.raises(AuthenticationError, match="have different keys"):
            joined(misled)
    scheme.shutdown()
    del store


def test_another_user_is_no_rank(crater, monkeypatch):
    """Nor one without the key that the ranks of ``torchrun`` have from their environment."""
    with listening(LOOPBACK, 0) as found:
        port = found.getsockname()[1]
    ours = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    for name, value in {**ours, "TRAWL_KEY": TEXT}.items():
        monkeypatch.setenv(name, value)
    store, _ = hosted_store(LOOPBACK, port, 100.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    command = [sys.executable, "-m", "trawl.collectors.distributed.rank"]
    with another_user(port, crater, "trawl0") as other:
        # A stranger comes first.
        theirs = []
        waiting = stranger.threading.Thread(
            target=lambda: theirs.append(other.comes_as_a_rank("x" * 32))
        )
        waiting.start()
        ranks = []

        def rank_once_refused():
            waiting.join()
            ranks.append(subprocess.Popen(command, env={**os.environ, "RANK": "1"}))

        starting = stranger.threading.Thread(target=rank_once_refused)
        starting.start()
        with make(CLASSES[0], launcher="env", num_workers=1, sync=True) as collector:
            assert collector.next().numel() == 40
        starting.join()
        assert ranks[0].wait(100) == 0
        assert theirs[0].startswith("AuthenticationError"), theirs
    del store


def test_the_key_of_a_user_is_nobody_elses(tmp_path, monkeypatch):
    """Without the variable, ranks of one machine find a key in a file of their user's."""
    from trawl.extras.clusters.launching.outside import environment_key

    monkeypatch.delenv("TRAWL_KEY", raising=False)
    key = environment_key(LOOPBACK, 1)
    (file,) = Path(os.environ["XDG_STATE_HOME"], "trawl").iterdir()
    assert file.name == "key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert environment_key(LOOPBACK, 1) == key == file.read_bytes()
    assert len(key) == 32
    # A file that others can read, or have put there, is not believed.
    file.chmod(0o644)
    with pytest.raises(PermissionError, match=r"has mode 0644: delete it"):
        environment_key(LOOPBACK, 1)
    file.chmod(0o600)
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"is owned by uid {NOBODY}"):
        environment_key(LOOPBACK, 1)


def test_files_of_jobs_tell_others_nothing(tmp_path):
    """What submitit writes for a job, others may read: there is no key and no task in it."""
    submitit = pytest.importorskip("submitit")
    assert submitit
    jobs = {"cluster": "local", "folder": str(tmp_path), "timeout_min": 5}
    with make(CLASSES[0], launcher="submitit", slurm_kwargs=jobs, num_workers=1) as collector:
        collector.next()
        (member,) = collector._pool.slots
        key = member.worker.address.key
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        holders = [path for path in files if key in path.read_bytes()]
        assert len(holders) == 1
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in holders)
    assert not any(key in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
