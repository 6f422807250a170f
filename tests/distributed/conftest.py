import pytest

pytest.register_assert_rewrite("trawl.testing.backends")
