"""What a worker imports in its first steps, so that it is there before workers are forked.

Some libraries import others only when they are first used: tensordict asks at a module's first
call whether what it got is one of pandas'. That would take each worker a quarter of a second.
"""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

TensorDictModule(torch.nn.Identity(), in_keys=["given"], out_keys=["taken"])(
    TensorDict({"given": torch.zeros(1)})
)
