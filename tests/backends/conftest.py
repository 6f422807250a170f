import pytest

pytest.register_assert_rewrite("backend_conformance")
