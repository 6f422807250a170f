import pytest
from cli_parts import working_in


@pytest.fixture(autouse=True)
def _here(tmp_path):
    """Each test runs in a folder of its own."""
    with working_in(tmp_path):
        yield
