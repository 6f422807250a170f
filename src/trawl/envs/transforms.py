"""The counter of policy versions, at the module path of TorchRL 0.15."""

from trawl.collectors.policy_version import PolicyVersion

__all__ = ["PolicyVersion"]
