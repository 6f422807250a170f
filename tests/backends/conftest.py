import threading

import pytest
import scripted_service

pytest.register_assert_rewrite("backend_conformance")


@pytest.fixture(scope="class", autouse=True)
def no_thread_left():
    """Ends the workers that are threads, even those that were killed while they worked."""
    yield
    scripted_service.ABANDONED.set()
    for thread in threading.enumerate():
        if thread.name.startswith("trawl worker"):
            thread.join()
    scripted_service.ABANDONED.clear()
