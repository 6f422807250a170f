"""The thread that a Ray cluster is started in, if the caller's may end before the process."""

import threading
import weakref

import nursery
import pytest

from trawl.extras.clusters.ray.cluster import in_lasting_thread


def test_it_outlives_the_caller():
    found = []

    def start():
        in_lasting_thread(lambda: found.append(threading.current_thread()))

    for _ in range(2):
        caller = threading.Thread(target=start)
        caller.start()
        caller.join()
        assert found[-1] is not caller
    assert found[0] is found[1]
    assert found[0].is_alive()


def test_an_error_is_the_callers_and_keeps_nothing_of_it():
    class Kept:
        pass

    raised, gone = threading.Event(), threading.Event()

    def fail():
        raise ArithmeticError("no cluster")

    def start():
        policy = Kept()
        weakref.finalize(policy, gone.set)
        with pytest.raises(ArithmeticError, match="no cluster"):
            in_lasting_thread(fail)
        raised.set()

    caller = threading.Thread(target=start)
    caller.start()
    caller.join()
    assert raised.is_set()
    assert gone.wait(60)


def test_a_child_by_fork_has_one_of_its_own():
    done = nursery.run("""
        import os
        import threading

        from trawl.extras.clusters.ray.cluster import in_lasting_thread

        def call(text):
            start = lambda: in_lasting_thread(lambda: print(text, flush=True))
            caller = threading.Thread(target=start)
            caller.start()
            caller.join(timeout=300)
            return not caller.is_alive()

        assert call("parent")
        if os.fork() == 0:
            os._exit(0 if call("child") else 1)
        assert os.wait()[1] == 0
    """)
    assert (done.returncode, done.stdout) == (0, "parent\nchild\n"), done.stderr
