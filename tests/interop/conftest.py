import os
import sys

import pytest

pytest.importorskip("torchrl")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))
