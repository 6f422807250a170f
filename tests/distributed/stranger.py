"""A program that another user runs on the same machine, or anybody on another one.

It reaches all ports that the driver listens at, and knows what everything is called. It tells what
it found, line by line, and does what it is told by lines of its input::

    python stranger.py UID HOST PORT OF_THE_STORE PREFIX CRATER
"""

import contextlib
import json
import os
import pickle
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed

from trawl.extras.clusters.launching.authentication import AuthenticationError
from trawl.extras.clusters.launching.outside import run_rank
from trawl.extras.clusters.network.control import Rendezvous
from trawl.extras.clusters.network.frames import Frame

SHORT = 60.0


class Bomb:
    """Leaves a crater where it is unpickled, as far as who does it may write there."""

    def __init__(self, crater):
        self.crater = crater

    def __reduce__(self):
        return Path.touch, (Path(self.crater),)


class Stranger:
    """What it can do."""

    def __init__(self, host, port, prefix, crater):
        self.host, self.port, self.prefix = host, int(port), prefix
        self.bomb = pickle.dumps(Bomb(crater))
        limit = timedelta(seconds=SHORT)
        self.store = torch.distributed.TCPStore(self.host, self.port, None, False, limit, False)
        self.held = []

    def reads_the_store(self):
        """All that is in it."""
        return {name: self.store.get(name).hex() for name in self.store.list_keys()}

    def control(self):
        """Where the driver waits for workers."""
        host, port = self.store.get(f"{self.prefix}/1/0/rendezvous").decode().rsplit(" ", 1)
        return host, int(port)

    def poisons_the_store(self, count):
        """Puts bombs wherever something of workers that will come may be looked for."""
        for worker in (1, 2):
            for launch in range(1, 1 + count):
                for name in (
                    "task",
                    "state",
                    "nonce/0",
                    "nonce/1",
                    "end",
                    "addrs/COLLECTOR_DRIVER",
                ):
                    self.store.set(f"{self.prefix}/{worker}/{launch}/{name}", self.bomb)

    def crowds(self, count):
        """Connects to the control port, and says nothing, garbage, or half of a greeting."""
        for number in range(count):
            end = socket.create_connection(self.control(), SHORT)
            with contextlib.suppress(OSError):
                end.sendall([b"", self.bomb, bytes(64), b"half"][number % 4])
            self.held.append(end)
        return len(self.held)

    def gets_requests(self):
        """Asks for the orders of a worker."""
        host, port = self.control()
        found = []
        for name in ("trawl/1/0", "trawl/1/1", "trawl0/1/0"):
            for key in (b"", bytes(32)):
                try:
                    Rendezvous(host, port, name, key, SHORT).connect()
                except (AuthenticationError, OSError) as error:
                    found.append(type(error).__name__)
                else:
                    found.append("admitted")
        return found

    def resets_connections(self):
        """Sends the names of workers where these connect, and resets."""
        for name in (b"trawl/1/0\n", b"trawl/2/0\n"):
            end = socket.create_connection(self.control(), SHORT)
            end.sendall(name)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def plays_the_driver(self, prefix):
        """Tells the worker that comes to an address to come here, and gives it bombs as orders."""
        self.store.set(f"{prefix}/rendezvous", f"{self.host} {self.serves_bombs()}")
        self.store.set(f"{prefix}/task", self.bomb)

    def serves_bombs(self):
        """Waits at a port, and sends a bomb to each who comes, whatever key that one has."""
        fake = socket.create_server((self.host, 0))

        def serve():
            while True:
                end, _ = fake.accept()
                with end, contextlib.suppress(OSError):
                    end.recv(64, socket.MSG_WAITALL)
                    end.sendall(b"+" + bytes(32))
                    end.sendall(end.recv(32, socket.MSG_WAITALL))
                    size = (32 + len(self.bomb)).to_bytes(8, "big")
                    end.sendall(b"\0" + size + bytes(4 + 32) + self.bomb)

        threading.Thread(target=serve, daemon=True).start()
        return fake.getsockname()[1]

    def receives_weights(self, port, name):
        """Comes for somebody's weights, and sends a bomb to whoever lets it in."""
        try:
            end = Rendezvous(self.host, port, name, bytes(32), SHORT).connect("{}")
        except (AuthenticationError, OSError) as error:
            return type(error).__name__
        end.send(Frame(0, bytes(32) + self.bomb))
        return "admitted"

    def comes_as_a_rank(self, key):
        """Is a rank that torchrun starts, with such a key."""
        os.environ |= {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "WORLD_SIZE": "3"}
        os.environ["TRAWL_KEY"] = key
        try:
            return run_rank(1, SHORT)
        except (AuthenticationError, OSError, PermissionError) as error:
            return f"{type(error).__name__}: {error}"


def main(uid, *arguments):
    # Its module is where another user may not read.
    "".encode("idna")
    if int(uid) >= 0:
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    stranger = Stranger(*arguments)
    print(json.dumps(os.geteuid()), flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(stranger, name)(*given)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
