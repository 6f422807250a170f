"""TorchRL's probabilistic policies give the same without distribution objects."""

import pytest
import torch
from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule
from test_sampling import assert_same
from torch import nn

modules = pytest.importorskip("torchrl.modules")

BOUNDED = {"low": -2.0, "high": 2.0}


def actor(cls, scored=True, **fixed):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(inner, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=cls,
        distribution_kwargs=fixed,
        return_log_prob=scored,
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("fixed", [{}, BOUNDED], ids=["", "bounded"])
@pytest.mark.parametrize("exploration", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_a_squashed_gaussian_gives_the_same(exploration, fixed, scored, batched):
    def make():
        return actor(modules.TanhNormal, scored, **fixed)

    assert_same(make, "recorded", exploration, batched)


@pytest.mark.parametrize("scored", [False, True])
def test_an_independent_gaussian_gives_the_same(scored):
    assert_same(lambda: actor(modules.IndependentNormal, scored), "recorded")


def test_a_truncated_gaussian_is_used_as_it_is():
    stats = assert_same(lambda: actor(modules.TruncatedNormal, **BOUNDED), "objects")
    assert "uses a tensor's values" in stats["distribution_path_reason"]
