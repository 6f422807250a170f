"""Settings that all tests share."""

import os
import signal

from hypothesis import HealthCheck, settings

# Examples are searched for anew on a developer's machine, and always the same ones elsewhere.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=20, **_common)
settings.register_profile("ci", max_examples=20, derandomize=True, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "local")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So begins what a shell runs in the background, and what tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
