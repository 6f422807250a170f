"""Programs that start at once: they are forked from a process that has imported all they need.

That process is run by :func:`serve`. To start a program it is sent its code and descriptors: of
its input, output and errors, and of the namespaces that it is to be in. It tells of its end.
"""

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.resource_tracker
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import traceback
import types
import warnings

_PR_SET_PDEATHSIG = 1
_STREAMS = 3
_MOST = 1 << 16
# Seconds that a program has.
_PATIENCE = 300.0
# The variable with the place of the nursery that processes of tests come from.
_OF_TESTS = "TRAWL_NURSERY_OF_TESTS"


def run(code, *arguments, namespaces=(), within=None, **options):
    """Runs a program to its end, as ``subprocess.run([sys.executable, "-c", code, ...])`` does.

    It takes what it needs of PyTorch, Gymnasium and Trawl from a process that has imported them.
    Tests of what only a fresh interpreter shows can't use it.

    Args:
        code: the program, which may be indented.
        *arguments: what it finds in ``sys.argv``.
        namespaces: paths of the namespaces that it is to be in.
        within: the nursery that it comes from; None for the one that most share.
        **options: of :meth:`Nursery.fork`.

    Returns:
        A ``CompletedProcess`` with its status, and what it printed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        opened = [os.open(path, os.O_RDONLY) for path in (os.devnull, *namespaces)]
        fds = [opened[0], output.fileno(), errors.fileno(), *opened[1:]]
        try:
            pid = (within or shared()).fork(code, fds, arguments=arguments, **options)
        finally:
            for fd in opened:
                os.close(fd)
        status = (within or shared()).status(pid, _PATIENCE)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(code, _PATIENCE)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(code, status, output.read(), errors.read())


@functools.cache
def shared():
    """The nursery of the programs that need no other. It ends with this process."""
    modules = [
        "trawl.extras.cli.collect",
        "trawl.extras.cli.show",
        "tyro",
        "trawl.collectors.workers.service",
    ]
    modules += ["trawl.data", "pyarrow.dataset", "torch.distributed"]
    found = Nursery(*modules, place=os.path.join(_folder(), "nursery"))
    atexit.register(found.close)
    return found


@functools.cache
def tested():
    """The nursery of programs that need what tests import, if there is one; else the shared one.

    The processes of pytest-xdist come from it.
    """
    place = os.environ.get(_OF_TESTS)
    return shared() if place is None else Nursery(place=place)


@functools.cache
def bare():
    """The nursery of programs that import Trawl and tensordict themselves. It ends with this."""
    found = Nursery("torch", "gymnasium", "rich", "cloudpickle", "multiprocessing.forkserver")
    atexit.register(found.close)
    return found


@functools.cache
def python(within=shared):
    """The path of a program that runs modules, scripts, and what these start, as Python does.

    Its processes are forked from a nursery, by default the one that most share.
    """
    # The last of these is known by the id of its process.
    is_known = f"({IS_MODULE} or {IS_SCRIPT} or {IS_SERVER} or {IS_SPAWNED})"
    is_known += ' and "submitit.local._local" not in arguments'
    return write_python(_folder(), within().place, is_known, PYTHON)


def _folder():
    """A new folder, which is removed at the end."""
    found = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, found)
    return found


@functools.cache
def interpreter(*modules, **environment):
    """The path of a program that runs ``-c`` code as Python does, in processes that are forked.

    Args:
        *modules: what these processes have imported.
        **environment: what they have in their environment.
    """
    folder = _folder()
    found = Nursery(*modules, place=os.path.join(folder, "nursery"), **environment)
    atexit.register(found.close)
    os.environ[_OF_TESTS] = found.place
    return write_python(folder, found.place, '"-c" in arguments', _CODE)


# What is run is the last of the arguments.
_CODE = """
import sys

code = sys.argv[-1]
sys.argv[:] = ["-c"]
exec(code)
"""

# What a command runs: a module, a script, the server that forks Trawl's workers, or a process that
# multiprocessing spawns.
IS_MODULE = '"-m" in arguments[:2]'
IS_SCRIPT = '(arguments[0] == "-u" or arguments[0].endswith(".py"))'
IS_SPAWNED = 'arguments[-1] == "--multiprocessing-fork"'
IS_SERVER = '"from trawl.backends.processes.server import serve; " in arguments[-1]'

# The processes that it starts may be forked as well. The server looks for its parent.
PYTHON = """
import multiprocessing.process, os, re, runpy, sys

def serve_for(parent):
    server, getppid = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == server else getppid()

sys.executable = {path!r}
multiprocessing.set_executable(sys.executable)
multiprocessing.process.ORIGINAL_DIR = os.getcwd()
sys.path[:] = filter(None, sys.path)
arguments = sys.argv[1:]
if "-m" in arguments[:2]:
    sys.argv[:] = arguments[arguments.index("-m") + 1 :]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
elif arguments[0] == "-u" or arguments[0].endswith(".py"):
    sys.argv[:] = arguments[arguments[0] == "-u" :]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    code, *sys.argv[1:] = arguments[arguments.index("-c") + 1 :]
    for parent in re.findall(r" serve.[0-9]+, ([0-9]+)", code):
        serve_for(int(parent))
    exec(code)
"""


class Nursery:
    """The process that programs are forked from, as the tests see it.

    Args:
        modules: what they need; those that are not installed are left out. With none, it is the
            nursery of another process.
        place: a path where other processes may ask for programs as well.
        later: what these need besides, and may be imported with their environment only.
        environment: what they have in their environment. By default they find the modules that
            this process does.
    """

    def __init__(self, *modules, place=None, later=(), **environment):
        self._ended = {}
        self.place = place
        self._process = None
        if not modules:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(place)
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno()]
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as others:
            if place is not None:
                others.bind(place)
                others.listen()
                fds.append(others.fileno())
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import nursery; nursery.serve({modules}, {later}, *{fds})",
                ],
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            )

    def fork(
        self, code, fds, arguments=(), cwd=None, env=None, warn=(), session=False, finalize=False
    ):
        """Starts a process that runs code, and returns its id.

        Args:
            code: what it runs.
            fds: its input, output and errors, and the namespaces that it is to be in.
            arguments: what it finds in ``sys.argv``.
            cwd: its folder.
            env: what it has in its environment beside what the nursery has.
            warn: what becomes of warnings there, as after ``-W``.
            session: True for a session of its own, which its input controls if that is a terminal.
            finalize: True to have the interpreter taken apart at the end, which takes a third of a
                second: what is left otherwise is garbage that nobody looks for. Threads are waited
                for, and functions called that are to be called at the end, in any case.
        """
        request = {
            "code": textwrap.dedent(code),
            "arguments": ["-c", *map(str, arguments)],
            "cwd": os.path.abspath(cwd or "."),
            "env": env or {},
            "warn": list(warn),
            "session": session,
            "finalize": finalize,
        }
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._socket.sendmsg([json.dumps(request).encode()], rights)
        self._hear_until(lambda: "begun" in self._ended)
        return self._ended.pop("begun")

    def status(self, pid, timeout):
        """What a process ended with; None if it takes longer than so many seconds."""
        self._hear_until(lambda: pid in self._ended, timeout)
        return self._ended.pop(pid, None)

    def _hear_until(self, reached, timeout=None):
        self._socket.settimeout(timeout)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while not reached():
                said = self._socket.recv(_MOST)
                assert said, "the process that programs are forked from is gone"
                key, value = json.loads(said)
                self._ended[key] = value

    def close(self):
        """Ends it, and all programs."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()


# What is run instead of Python; it runs Python for all other programs. It is a shell script first,
# as the path of an interpreter in a first line may have no blanks.
_HEADER = """#!/bin/sh
'''exec' {python} -SE "$0" "$@"
' '''
"""
_CALLER = """import json, os, socket, sys

def is_open(fd):
    try:
        return fd > 2 and os.get_inheritable(fd)
    except OSError:
        return False

arguments = sys.argv[1:]
if not ({is_known}):
    os.execv({python!r}, [{python!r}, *arguments])
request = {{
    "code": {code!r},
    "arguments": [arguments[0], *arguments],
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "warn": [],
    "session": False,
    "finalize": False,
    "bare": True,
    "niceness": os.nice(0),
}}
if "-c" in arguments:  # what is spawned knows its files by their numbers
    request["inherited"] = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
    nursery.connect({place!r})
    inherited = request.get("inherited", [])
    socket.send_fds(nursery, [json.dumps(request).encode()], [0, 1, 2, *inherited])
    for fd in inherited:
        os.close(fd)
    nursery.recv(100)
    ended = json.loads(nursery.recv(100) or "[0, 1]")
sys.exit(ended[1])
"""


def write_python(folder, place, is_known, code):
    """Writes a program that others run instead of Python, and returns its path.

    Args:
        folder: where it is written.
        place: the path where a nursery listens.
        is_known: expression that is True for ``arguments`` of which the nursery runs the program.
        code: what the nursery runs, where ``{path}`` stands for the path; in ``sys.argv``, the
            arguments follow the first of them.
    """
    path = os.path.join(folder, "python")
    code = code.format(path=path)
    with open(path, "w") as file:
        file.write(_HEADER.format(python=shlex.quote(sys.executable)))
        file.write(_CALLER.format(python=sys.executable, place=place, is_known=is_known, code=code))
    os.chmod(path, 0o700)
    return path


# --- what runs there


def serve(modules, later, fd, listening=None):
    """Forks programs, until the tests are gone.

    Args:
        modules: what programs need.
        later: what those of others need besides, who bring an environment for it.
        fd: the socket by which the tests ask for programs.
        listening: one where others call who ask for some.
    """
    _import(modules)
    tests = socket.socket(fileno=fd)
    listeners = set()
    if listening is not None:
        listeners.add(socket.socket(fileno=listening))
    if later:
        _track_semaphores()
    callers, living = {tests}, {}
    while tests in callers:
        for ready in select.select([*listeners, *callers, *living], [], [])[0]:
            if ready in listeners:
                callers.add(ready.accept()[0])
            elif ready in living:
                pid, caller = living.pop(ready)
                os.close(ready)
                _tell(caller, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif (asked := _asked(ready)) is None:
                callers.remove(ready)
                ready.close()
                for pid, caller in living.values():
                    if caller is ready:
                        os.kill(pid, signal.SIGKILL)
            else:
                request, fds = asked
                if later and ready is not tests:
                    os.environ.update(request["env"])
                    _import(later)
                    later = ()
                pid = _fork(request, fds, listeners | callers)
                living[os.pidfd_open(pid)] = pid, ready
                _tell(ready, "begun", pid)


def _import(modules):
    for module in modules:
        # If it matters in a program, that will report the error.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # What is there from the beginning is no garbage at the end: to look for it takes a second.
    gc.freeze()


def _track_semaphores():
    """Removes names of semaphores that others left in /dev/shm, when this process has ended.

    Ray kills a worker together with the process that would have done so.
    """
    sys.warnoptions.append("ignore")
    multiprocessing.resource_tracker.ensure_running()
    sys.warnoptions.pop()


def _asked(caller):
    """Receives a request and its descriptors; None if the caller is gone."""
    try:
        request, fds, _, _ = socket.recv_fds(caller, _MOST, 64)
    except ConnectionResetError:  # it left before it heard all answers
        return None
    return (json.loads(request), fds) if request else None


def _fork(request, fds, sockets):
    """Starts a program, and returns its id; sockets are this process's own."""
    pid = os.fork()
    if pid == 0:
        for one in sockets:
            one.close()
        _become(fds, **request)
    for fd in fds:
        os.close(fd)
    return pid


def _tell(caller, key, value):
    with contextlib.suppress(OSError):  # it may be gone
        caller.send(json.dumps([key, value]).encode())


def _open_streams():
    """Opens input, output and errors anew: the nursery's own streams know what it has there."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        old = getattr(sys, name)
        stream = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(line_buffering=name == "stderr" or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _become(
    fds, code, arguments, cwd, env, warn, session, finalize, bare=False, inherited=(), niceness=0
):
    """Makes this process a program, to its end.

    A bare one has no environment but what is given. The last descriptors get their old numbers.
    """
    os.nice(max(0, niceness - os.nice(0)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for namespace in fds[_STREAMS : len(fds) - len(inherited)]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "no such namespace")
    os.chdir(cwd)
    numbers = [*range(_STREAMS), *inherited]
    kept = [*fds[:_STREAMS], *fds[len(fds) - len(inherited) :]]
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in kept]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(numbers, kept, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if session:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_streams()
    if bare:
        os.environ.clear()
    os.environ.update(env)
    for action in warn:
        sys.warnoptions.append(action)
        warnings.simplefilter(action)
    sys.argv[:] = arguments
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        if finalize and isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        status = 1
    if not finalize and isinstance(status, int | None):
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit((status or 0) & 0xFF)
    sys.exit(status)
