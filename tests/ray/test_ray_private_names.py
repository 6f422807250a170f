"""What Trawl takes from Ray under private names, and what breaks without it."""

import pytest

from trawl.foreign import ray as names


def test_the_address_of_a_cluster_on_this_machine_is_in_a_file(tmp_path, monkeypatch):
    """A collector would otherwise start a second cluster beside that of ``ray start``."""
    from ray._private import utils

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert names.running_address() is None
    (tmp_path / "ray").mkdir()
    utils.write_ray_address("127.0.0.1:6379")
    assert names.running_address() == "127.0.0.1:6379"


def test_a_new_cluster_can_be_kept_from_other_machines():
    """Anyone in the network could otherwise run code as this user."""
    import ray
    from ray._private import ray_constants, services

    if ray.is_initialized():
        pytest.skip("a cluster in use says its own address")
    assert isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool)
    before = names.set_reachable(False)
    try:
        assert names.set_reachable(False) is False
        assert services.get_node_ip_address() in ("127.0.0.1", "::1")
    finally:
        names.set_reachable(before)


@pytest.mark.usefixtures("cluster")
def test_the_free_resources_of_each_node_are_known():
    """An actor for which no node has room would otherwise be waited for without a reason."""
    import ray

    free = names.free_resources()
    (node,) = [one for one in ray.nodes() if one["Alive"]]
    assert 0 < free[node["NodeID"]]["memory"] <= node["Resources"]["memory"]
