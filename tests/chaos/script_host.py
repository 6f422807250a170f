"""Runs scripts as ``python script.py`` would, each in its own session, but without start-up time.

The modules that this process imports are ready for each script. A request to start a script is
answered with the script's process id. A request with this id is answered with the exit status, as
soon as the process has ended.
"""

import os
import pickle
import signal
import socket
import sys


def host(fd: int) -> str:
    """Serves requests; in a forked process that is to run a script, returns the script."""
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
        # An interrupt must reach the script, not the code that prepares it.
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
