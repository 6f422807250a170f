"""Base of the batch writers whose frames have a fixed layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.keys import Key
from trawl.rollout.batch_writer import BatchOptions, BatchWriter
from trawl.rollout.checks import check_same_layout
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.frame_entries import FrameEntries
from trawl.rollout.policy import Policy


class FixedLayoutWriter(BatchWriter):
    """Fills batches with frames of a fixed layout.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        masked: True if some rows of a batch hold no frame.

    Attributes:
        options: options of the batches.
        entries: the entries of frames.
    """

    def __init__(
        self, env: TensorDictEnv, policy: Policy, options: BatchOptions, masked: bool
    ) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.warnings: Sequence[str] = ()
        self.num_envs = env.batch_size.numel()
        self.sums = EpisodeSums(self.num_envs)
        self.entries = FrameEntries(env, policy, options, masked)

    @property
    @override
    def hidden(self) -> set[Key]:
        return self.entries.hidden

    @abstractmethod
    def _saved_rows(self) -> dict[str, Tensor]:
        """Returns tensors that share the memory of the entries that a state has, by name."""

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = {name: row.clone() for name, row in self._saved_rows().items()}
        episodes, sums = self.episodes.state_dict(), self.sums.state_dict()
        return {"rows": rows, "episodes": episodes, "sums": sums}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self._saved_rows()
        check_same_layout(own, state["rows"])
        for name, row in own.items():
            row.copy_(state["rows"][name])
        self.episodes.load_state_dict(state["episodes"])
        self.sums.load_state_dict(state["sums"])
