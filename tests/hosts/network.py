"""Simulated hosts: network namespaces, each with its own address, joined by a switch.

A namespace has no name, and exists as long as a process runs in it. Each namespace has a process
that ends when its input ends, so nothing is left behind, however the tests end::

    with network(nursery, 2) as (one, other):
        program = other.python("print('ready', flush=True)")
        program.hears()
        other.cut()     # from now on, packets are lost without an error
        other.mend()
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import Forked

_KEEP = "echo $$; exec cat"
_NEEDED = ("ip", "mount", "nsenter", "unshare")


class Namespace:
    """Network namespace with its own mounts.

    Args:
        within: namespace with the rights to make this one; None if this process has the rights.
    """

    def __init__(self, within=None):
        root = os.geteuid() == 0
        #: Kinds of namespaces that a process enters, in this order.
        self.kinds = ["net", "mnt"] if root else ["user", "net", "mnt"]
        self._command = within.entered() if within is not None else []
        rights = ["--map-root-user"] if within is None and not root else []
        self._keeper = subprocess.Popen(
            [*self._command, "unshare", *rights, "--net", "--mount", "sh", "-c", _KEEP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = self._keeper.stdout.readline()
        if not said:
            raise OSError(self._keeper.communicate()[1].strip())
        self.pid = int(said)
        self._inode = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    def entered(self):
        """Returns the words that begin a command to run in this namespace."""
        options = {"mnt": "mount"}
        kinds = [f"--{options.get(kind, kind)}" for kind in self.kinds]
        return ["nsenter", "--preserve-credentials", "--target", str(self.pid), *kinds, "--"]

    def ip(self, *lines):
        """Runs commands of ``ip``, one per line."""
        subprocess.run(
            [*self.entered(), "ip", "-batch", "-"],
            input="\n".join(lines),
            text=True,
            check=True,
            capture_output=True,
        )

    def processes(self):
        """Returns the commands of all processes in this namespace, by process id."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == self._inode and int(pid) != self.pid:
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        # A process that has ended, but was not waited for, has no command.
        return {pid: command for pid, command in found.items() if command}

    def left(self, timeout, pids=None):
        """Returns the commands of the processes that do not end by themselves in time.

        Args:
            timeout: seconds that all processes together have.
            pids: ids of the processes; None for all processes in this namespace.
        """
        deadline = time.monotonic() + timeout
        for pid in self.processes() if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
                os.close(handle)
        living = self.processes().items()
        return [command for pid, command in living if pids is None or pid in pids]

    def close(self):
        """Kills all processes in this namespace."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._keeper.communicate()


class Host(Namespace):
    """Simulated machine with an address, linked to a switch."""

    def __init__(self, nursery, switch, number):
        super().__init__(switch)
        self.address = f"10.77.0.{number}"
        self._nursery, self._programs = nursery, []
        self._switch = switch
        self._port = f"port{number}"
        switch.ip(
            f"link add {self._port} type veth peer name eth0 netns {self.pid}",
            f"link set {self._port} master switch up",
        )
        self.ip(
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
        )

    def python(self, code, **environment):
        """Starts a Python program on this host."""
        namespaces = [f"/proc/{self.pid}/ns/{kind}" for kind in self.kinds]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options = {"namespaces": namespaces, "env": environment, **pipes}
        self._programs.append(Forked(code, within=self._nursery, **options))
        return self._programs[-1]

    def close(self):
        """Kills all processes on this host, and closes its programs."""
        super().close()
        for program in self._programs:
            program.close()

    def own(self, folder):
        """Mounts an empty folder, which only this host sees, over a folder that all hosts see."""
        command = [*self.entered(), "mount", "-t", "tmpfs", "tmpfs", folder]
        subprocess.run(command, check=True)

    def cut(self):
        """Cuts the host's link, so that everything sent to it or by it is lost."""
        self._switch.ip(f"link set {self._port} down")

    def mend(self):
        """Mends the host's link."""
        self._switch.ip(f"link set {self._port} up")


@contextmanager
def network(nursery, count):
    """Yields ``count`` hosts on one switch; their programs are forked from the nursery."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"hosts can't be simulated: there is no {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        try:
            switch = Namespace()
            stack.callback(switch.close)
            switch.ip("link add switch type bridge", "link set switch up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"hosts can't be simulated: network namespaces are refused ({reason})")
        hosts = []
        for number in range(1, count + 1):
            hosts.append(Host(nursery, switch, number))
            stack.callback(hosts[-1].close)
        yield hosts
