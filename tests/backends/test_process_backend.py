"""What is special about workers that are processes.

Interrupts are tested with whole programs in ``tests/chaos``.
"""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
from forked import Forked
from killing import watched
from open_files import check_no_named_memory
from scripted_service import ScriptedService

from trawl.backends import Death, Message, ProcessBackend
from trawl.backends.processes import handle as server_handle
from trawl.backends.processes.handle import ServerHandle

METHODS = ["forkserver", "spawn"]
# Seconds after which a test fails. None takes longer for it.
PATIENCE = 300

# Programs begin with this. What they print is what is checked.
PARTS = """
import os, select, signal, subprocess, sys, threading, time
from trawl.backends import Death, Failed, Message, ProcessBackend
from trawl.backends.processes import server as _server_module
from trawl.backends.processes.handle import ServerHandle, _Fork

# A fresh process that workers come from would take seconds to import what most need.
_server_module.PRELOADED = ()

class Service:
    busy = False
    def __init__(self, port):
        self.port = port
    def handle(self, content):
        self.port.send(eval(content, {"self": self, "os": os, "sys": sys, "subprocess": subprocess,
                                      "signal": signal}))
    def work(self):
        pass
    def close(self):
        pass

def ask(backend, worker, code):
    worker.send(code)
    for event in backend.wait():
        assert isinstance(event, Message), event
        return event.content

def server(method):
    return ServerHandle._known[os.getpid(), method]._process

def say(*words):
    print(*words, flush=True)
"""


class Program(Forked):
    """A program whose lines are read, and which tells nothing else."""

    def __init__(self, code, *arguments, **options):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "warn": ["error"]}
        super().__init__(PARTS + textwrap.dedent(code), *arguments, **options)

    def rest(self):
        """All that it says until its end, which is no error."""
        out, errors = self.stdout.read(), self.stderr.read()
        assert (self.wait(PATIENCE), errors) == (0, "")
        return out

    def close(self):
        self.kill()
        super().close()


def run(code, *arguments, **options):
    with Program(code, *arguments, **options) as program:
        return program.rest()


@pytest.fixture
def backend(request):
    backend = ProcessBackend(getattr(request, "param", "forkserver"))
    yield backend
    backend.close()


def events_of(backend, count):
    events = []
    while len(events) < count:
        new = backend.wait(PATIENCE)
        assert new
        events += new
    return events


# --- where workers come from


def test_importing_it_imports_little():
    """The process that fresh workers are started from has to be small."""
    code = "import sys, trawl.backends; print({'torch', 'tensordict'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


JAX = """
import types
sys.modules["jax"] = types.ModuleType("jax")  # its threads would outlive this test
"""
THREAD = """
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
end = lambda: (done.set(), thread.join())
"""
NATIVE = """
import torch
torch.set_num_threads(2)
x = torch.ones(2000, 2000)
x @ x + x.exp()
assert len(os.listdir("/proc/self/task")) > 1
"""
LAUNCH = """
backend = ProcessBackend()
worker = backend.launch(0, Service)
say(type(server("forkserver")) is _Fork, ask(backend, worker, "'torch' in sys.modules"))
backend.close()
end()
"""


@pytest.mark.parametrize("beside", ["", JAX, THREAD, NATIVE], ids=["", "jax", "thread", "native"])
def test_forked_unless_there_are_threads(beside):
    forked = not beside
    assert run(f"end = lambda: None\n{beside}{LAUNCH}") == f"{forked} {forked}\n"


def test_a_backend_has_one_of_the_methods():
    with pytest.raises(ValueError, match=r"start_method='fork'.*'forkserver'"):
        ProcessBackend("fork")


# --- programs of all sorts

SHORT = """
from trawl.backends import ProcessBackend
from trawl.backends.processes import server
server.PRELOADED = ()
class Service:
    busy = False
    def __init__(self, port):
        port.send(Service.__name__)
    def handle(self, content):
        pass
    def close(self):
        pass
backend = ProcessBackend("METHOD")
backend.launch(0, lambda port: Service(port))
print([event.content for event in backend.wait()])
"""


@pytest.mark.parametrize(
    ("method", "how"),
    [("forkserver", "command"), ("spawn", "script"), ("forkserver", "lines"), ("spawn", "frozen")],
)
def test_programs_of_all_sorts(method, how, tmp_path):
    code, text = SHORT.replace("METHOD", method), ""
    if how == "command":
        command = ["-c", code]
    elif how == "script":
        (tmp_path / "script.py").write_text(code)
        command = [str(tmp_path / "script.py")]
    elif how == "lines":
        command, text = ["-i"], code.replace("\nbackend", "\n\nbackend", 1)
    else:
        # In a module that is run by its name, and that no other process could import.
        (tmp_path / "frozen.py").write_text(code)
        command = ["-m", "frozen"]
    done = subprocess.run(
        [sys.executable, *command], input=text, capture_output=True, text=True, cwd=tmp_path
    )
    assert "['Service']" in done.stdout, done.stderr
    assert done.returncode == 0
    assert "rror" not in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_workers_are_where_their_parent_is(method, tmp_path):
    """Environment, folder, path and arguments are those of the launch; the folder may be gone."""
    (tmp_path / "only_here.py").write_text("value = 5")
    out = run(
        f"""
        backend = ProcessBackend("{method}")
        backend.launch(0, Service)
        os.chdir("{tmp_path}")
        sys.path.insert(0, "{tmp_path}")
        os.environ["TRAWL_NEW"] = "new"
        os.environ.pop("TRAWL_OLD")
        worker = backend.launch(0, Service)
        for code in (
            "os.getcwd() == '{tmp_path}'",
            "__import__('only_here').value",
            "os.environ['TRAWL_NEW']",
            "os.environ.get('TRAWL_OLD')",
            "subprocess.getoutput('echo $TRAWL_NEW$TRAWL_OLD')",
            "sys.argv[1:]",
        ):
            say(ask(backend, worker, code))
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        say(ask(backend, backend.launch(1, Service), "1"))
        backend.close()
        """,
        "one",
        "two",
        env={"TRAWL_OLD": "old"},
    )
    assert out.splitlines() == ["True", "5", "new", "None", "new", "['one', 'two']", "1"]


@pytest.mark.parametrize("method", METHODS)
def test_what_workers_print_arrives_once(method):
    out = run(f"""
        import io
        sys.stdout.write("of the parent, ")
        backend = ProcessBackend("{method}")
        workers = [backend.launch(i, Service) for i in range(2)]
        for worker in workers:
            ask(backend, worker, "sys.stdout.write('of a worker, ')")
        for worker in workers:
            worker.stop()
        deaths = 0
        while deaths < 2:
            deaths += len(backend.wait())
        backend.close()
        print("end")
    """)
    assert out.count("of the parent, ") == 1
    assert out.count("of a worker, ") == 2
    assert out.endswith("end\n")


# --- ends


@pytest.mark.parametrize(
    ("method", "doing"), [("forkserver", "idle"), ("forkserver", "loop"), ("spawn", "native")]
)
def test_nothing_is_left_of_a_parent_that_is_killed(method, doing):
    what = {
        "idle": "1",
        "loop": "self.port.send(1) or all(i == 0 for i in iter(int, 1))",
        "native": "self.port.send(1) or sum(range(10 ** 15))",
    }[doing]
    with Program(f"""
        backend = ProcessBackend("{method}")
        memory = backend.allocate(1 << 20)
        workers = [backend.launch(i, Service) for i in range(3)]
        for worker in workers:
            worker.share(1, memory)
            worker.send({what!r})
        seen = 0
        while seen < 3:
            seen += len(backend.wait())
        say(server("{method}").pid, *[worker.pid for worker in workers])
        backend.wait()
    """) as program:
        pids = [*map(int, program.hears().split())]
        check_no_named_memory([program.pid, *pids])
        with watched(*pids) as wait:
            program.kill()
            wait()


@pytest.mark.parametrize(
    ("method", "how"), [("forkserver", "end"), ("spawn", "exit"), ("forkserver", "raise")]
)
def test_nothing_is_left_of_a_parent_that_ends(method, how):
    code = {"end": "", "exit": "os._exit(0)", "raise": "raise SystemExit"}[how]
    program = f"""
        backend = ProcessBackend("{method}")
        worker = backend.launch(0, Service)
        start = "os.spawnvp(os.P_NOWAIT, 'sleep', ['sleep', '1000'])"
        child = ask(backend, worker, start)
        say(server("{method}").pid, worker.pid, child)
        sys.stdin.read()
        {code}
    """
    with Program(program, finalize=True) as program:
        with watched(*map(int, program.hears().split())) as wait:
            wait()
        assert program.rest() == ""


@pytest.mark.parametrize("method", METHODS)
def test_the_process_that_workers_come_from_may_die(method):
    """Its workers die with it; the next one comes from another."""
    out = run(f"""
        backend = ProcessBackend("{method}")
        worker = backend.launch(0, Service)
        ask(backend, worker, "1")
        old = server("{method}").pid
        os.kill(old, signal.SIGKILL)
        (death,) = backend.wait()
        say(isinstance(death, Death), death.expected, death.reason)
        for i in range(2):
            say(ask(backend, backend.launch(0, Service), "2"))
        say(server("{method}").pid != old)
        backend.close()
    """)
    assert out.splitlines() == [
        "True False ended together with the process that started it",
        "2",
        "2",
        "True",
    ]


@pytest.mark.parametrize("backend", METHODS, indirect=True)
def test_a_process_that_workers_come_from_may_die_again_and_again(backend, monkeypatch):
    """That is an error, and nothing is left of the attempt."""
    backend.launch(0, ScriptedService)
    backend.close()
    again = ProcessBackend(backend._method)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(ServerHandle, "_known", {})
        patch.setattr(server_handle, "_forked", lambda fd: None)
        patch.setattr(server_handle, "interpreter_command", lambda code: [sys.executable, "-c", ""])
        with pytest.raises(RuntimeError, match="died 5 times in a row"):
            again.launch(0, ScriptedService)
    # Each of the five attempts has descriptors; threads of other libraries may open one or two.
    assert len(os.listdir("/proc/self/fd")) < before + 5
    again.launch(0, ScriptedService)
    again.close()


@pytest.mark.parametrize(
    ("backend", "how"),
    [("forkserver", "stop"), ("spawn", "kill"), ("forkserver", "close")],
    indirect=["backend"],
)
def test_what_a_worker_started_ends_with_it(backend, how):
    """Also what that started, and what was left behind by what it started; of no other worker."""
    worker, other = backend.launch(0, make_parent), backend.launch(1, make_parent)
    contents = {e.worker: e.content for e in events_of(backend, 2)}
    with watched(*contents[worker]) as wait, watched(*contents[other]) as wait_others:
        if how == "close":
            backend.close()
            wait()
        else:
            getattr(worker, how)()
            while not any(isinstance(event, Death) for event in events_of(backend, 1)):
                pass
            wait()
            # The other worker's are not taken for those of the one that died.
            assert all(psutil.pid_exists(pid) for pid in contents[other])
            backend.close()
        wait_others()


def make_parent(port):
    child = subprocess.Popen(["sleep", "1000"])
    grandchild = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    # Its parent is gone at once.
    orphan = subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], text=True)
    port.send([child.pid, grandchild.pid, int(grandchild.stdout.readline()), int(orphan)])
    return ScriptedService(port)


@pytest.mark.parametrize(("method", "how"), [("forkserver", "stop"), ("spawn", "kill")])
def test_names_that_a_worker_gave_go_with_it(method, how):
    """Of semaphores, and of shared memory: its resource tracker is left to remove them."""
    out = run(f"""
        from multiprocessing import get_context, resource_tracker, shared_memory

        def make(port):
            service = Service(port)
            service.lock = get_context("spawn").Lock()
            service.memory = shared_memory.SharedMemory(create=True, size=8)
            names = "sem." + service.lock._semlock.name[1:], service.memory.name
            port.send((resource_tracker._resource_tracker._pid, names))
            return service

        def left():
            return [os.path.exists("/dev/shm/" + name) for name in names]

        backend = ProcessBackend("{method}")
        worker = backend.launch(0, make)
        (event,) = backend.wait()
        tracker, names = event.content
        handle = os.pidfd_open(tracker)
        say(left())
        worker.{how}()
        say(*[type(event).__name__ for event in backend.wait()])
        select.select([handle], [], [], {PATIENCE})
        say(left())
    """)
    assert out.splitlines() == ["[True, True]", "Death", "[False, False]"]


def test_what_came_while_this_process_was_suspended_is_found():
    """Also if the time of the wait is over when it goes on."""
    out = run("""
        class Suspending(Service):
            def handle(self, parent):
                now = time.monotonic()
                os.kill(parent, signal.SIGSTOP)
                self.port.send(now)
                time.sleep(1)
                os.kill(parent, signal.SIGCONT)

        backend = ProcessBackend("forkserver")
        worker = backend.launch(0, Suspending)
        worker.send(os.getpid())
        end = time.monotonic() + 0.5
        found = backend.wait(0.5)
        # On a slow machine, the wait may have been over before.
        say(bool(found) or backend.wait()[0].content > end)
    """)
    assert out == "True\n"


def test_an_interrupted_launch_confuses_nothing(backend, monkeypatch):
    """An answer that nobody waited for is not taken for another."""
    first = backend.launch(0, ScriptedService)
    source = first._source
    receive = source._control.receive

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(source._control, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.launch(1, ScriptedService)
    assert source._control.receive == receive
    second = backend.launch(2, ScriptedService)
    assert second.pid != first.pid
    second.send(("echo", 5))
    assert events_of(backend, 1) == [Message(second, 5)]
    first.kill()
    assert events_of(backend, 1) == [Death(first, "was killed by SIGKILL")]


def test_events_that_an_interruption_left(backend, monkeypatch):
    """What was received before Ctrl-C is there afterwards."""
    workers = [backend.launch(i, ScriptedService) for i in range(2)]
    for worker in workers:
        worker.send(("echo", worker.index))
    for worker in workers:
        assert select.select([worker.connection], [], [], PATIENCE)[0]
    receive, received = backend._receive, []

    def interrupted(worker):
        if received:
            raise KeyboardInterrupt
        received.append(worker)
        return receive(worker)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.wait()
    assert {event.content for event in events_of(backend, 2)} == {0, 1}


# --- what is used up


@pytest.mark.parametrize("backend", METHODS, indirect=True)
def test_descriptors_are_given_back(backend):
    def use(count):
        memory = backend.allocate(100)
        for i in range(count):
            worker = backend.launch(i, ScriptedService)
            worker.share(1, memory)
            worker.send(("echo", bytes(100_000)))
            (message,) = events_of(backend, 1)
            assert len(message.content) == 100_000
            worker.stop() if i % 2 else worker.kill()
            *_, death = events_of(backend, 1 + i % 2)
            assert isinstance(death, Death)

    def here():
        gc.collect()
        return os.listdir("/proc/self/fd")

    def there():
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    use(1)
    server = ServerHandle._known[os.getpid(), backend._method]._process
    before = len(here()), there()
    use(6)
    # The server reaps a worker, and closes what it had for it, a little after the worker's end.
    _, left = psutil.wait_procs(psutil.Process(server.pid).children(), timeout=60)
    assert left == []
    # It would be five at least; other libraries, and what ends there, have some for a moment.
    assert len(here()) < before[0] + 5
    deadline = time.monotonic() + 60
    while there() >= before[1] + 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there() < before[1] + 5


def test_workers_have_no_files_of_their_parent(tmp_path):
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        for method in METHODS:
            backend = ProcessBackend(method)
            worker = backend.launch(0, ScriptedService)
            worker.send(("echo", 1))
            events_of(backend, 1)
            links = [os.readlink(f) for f in Path(f"/proc/{worker.pid}/fd").iterdir()]
            assert str(tmp_path / "file") not in links
            backend.close()


def test_a_backend_that_is_dropped_ends_its_workers():
    backend = ProcessBackend()
    worker = backend.launch(0, ScriptedService)
    with watched(worker.pid) as wait:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del backend, worker
            gc.collect()
        wait()


# --- copies of the parent

OWN = "own = ProcessBackend(); say(ask(own, own.launch(0, Service), '1')); own.close(); sys.exit()"


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("forkserver", "os._exit(0)"),
        ("forkserver", OWN),
        ("spawn", "del backend, worker; gc.collect()"),
    ],
    ids=["exit", "own workers", "garbage"],
)
def test_a_copy_of_the_parent_does_no_harm(method, end):
    """``os.fork``, as a ``DataLoader`` does it; the copy uses the objects, and ends somehow.

    It may also have workers of its own.
    """
    out = run(
        f"""
        import gc
        backend = ProcessBackend("{method}")
        worker = backend.launch(0, Service)
        ask(backend, worker, "1")
        child = os.fork()
        if child == 0:
            worker.send("3")
            worker.stop()
            worker.kill()
            backend.close()
            {end}
            os._exit(0)
        os.waitpid(child, 0)
        say(ask(backend, worker, "2"), ask(backend, backend.launch(1, Service), "4"))
        backend.close()
    """,
        finalize=end == OWN,
    )
    assert out == ("1\n2 4\n" if end == OWN else "2 4\n")


def test_a_copy_of_the_parent_does_not_keep_workers_alive():
    """A copy has the parent's sockets, and lives longer."""
    with Program("""
        backend = ProcessBackend()
        worker = backend.launch(0, Service)
        ask(backend, worker, "1")
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            signal.pause()
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            say(server("forkserver").pid, worker.pid, file.read())
        signal.pause()
    """) as program:
        pid, worker, *children = map(int, program.hears().split())
        (copy,) = set(children) - {pid}
        with watched(pid, worker) as wait:
            try:
                program.kill()
                wait()
            finally:
                os.kill(copy, signal.SIGKILL)


class Undisturbed:
    """Is told to stop while it does what may not be broken off; another thread takes the signal."""

    def __init__(self, port):
        self.port = port
        self.busy = False
        # Python writes there when the process has the signal, whichever thread has taken it.
        self.told, bell = socket.socketpair()
        bell.setblocking(False)
        signal.set_wakeup_fd(bell.fileno())
        self.bell = bell
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def handle(self, content):
        self.busy = True

    def work(self):
        with self.port.undisturbed():
            self.port.send("begun")
            self.told.recv(1)
            self.port.send("done")
        self.port.send("went on")

    def close(self):
        self.port.send("closed")


def test_what_is_not_to_be_broken_off_is_done_though_there_are_other_threads(backend):
    worker = backend.launch(0, Undisturbed)
    worker.send("go")
    (begun,) = events_of(backend, 1)
    assert begun.content == "begun"
    worker.stop()
    *said, death = events_of(backend, 3)
    assert [event.content for event in said] == ["done", "closed"]
    assert isinstance(death, Death)
    assert death.expected


# --- names

# What the system says of the server and of the worker that is asked.
_TOLD = (
    "[__import__('pathlib').Path(f'/proc/{pid}/%s').read_text().strip(chr(0) + chr(10))"
    " for pid in (os.getppid(), os.getpid())]"
)
_NAMES, _COMMANDS = _TOLD % "comm", _TOLD % "cmdline"


@pytest.mark.skipif(sys.platform != "linux", reason="processes have such names on Linux")
@pytest.mark.parametrize("method", METHODS)
def test_processes_are_named_in_lists_of_processes(method):
    with Program(f"""
        backend = ProcessBackend("{method}")
        workers = [backend.launch(i, Service) for i in (0, 12)]
        for worker in workers:
            names, commands = ask(backend, worker, {_NAMES!r}), ask(backend, worker, {_COMMANDS!r})
            say("|".join([*names, *commands]))
        # What the program itself is called stays as it was.
        with open("/proc/self/cmdline") as file:
            command = file.read()
        say(command == chr(0).join(sys.orig_argv) + chr(0), os.getpid())
        backend.close()
    """) as program:
        lines = [program.hears() for _ in range(2)]
        own, pid = program.hears().rsplit(" ", 1)
    server = f"trawl: server|{{}}|trawl: server of process {pid}|{{}}"
    assert lines == [server.format(name, name) for name in ("trawl worker 0", "trawl worker 12")]
    assert own == "True"
