"""Runs scripts, each in a session of its own, as ``python script.py`` would, but at once.

All that is imported here is there already. A request is the script; its answer is the process,
and another the status with which that ended.
"""

import os
import pickle
import signal
import socket
import sys


def host(fd: int) -> str:
    """Serves requests; in a process that is to run a script, returns that."""
    control = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not data:
            os._exit(0)
        request = pickle.loads(data)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            control.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
            continue
        # The script is interrupted, not what comes before it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid:
            control.send(pickle.dumps(pid))
            for one in fds:
                os.close(one)
            continue
        control.close()
        os.setsid()
        for one, place in zip(fds, (1, 2), strict=True):
            os.dup2(one, place)
            os.close(one)
        os.chdir(request["folder"])
        os.environ["TMPDIR"] = request["folder"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return request["script"]


if __name__ == "__main__":
    import chaos_parts  # noqa: F401
    import gymnasium  # noqa: F401

    import trawl.collectors.worker  # noqa: F401

    exec(compile(host(int(sys.argv[1])), "script.py", "exec"))
