"""Compares collectors with the oracle in random cases, until the time is over::

    python tests/oracle/fuzz.py --seconds 300 --seed 1

The first case that differs is made as simple as possible, and is printed.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.oracle.test_delivered import chosen_values, test_any_values_may_meet

EXAMPLES = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(",")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "little"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    plain = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    check = test_any_values_may_meet.hypothesis.inner_test
    begun, rounds = time.monotonic(), 0
    while time.monotonic() - begun < arguments.seconds:
        seed(arguments.seed + rounds)(plain(given(chosen_values())(check)))()
        rounds += 1
    print(f"{rounds * EXAMPLES} cases, seeds {arguments.seed} to {arguments.seed + rounds - 1}")


if __name__ == "__main__":
    main()
