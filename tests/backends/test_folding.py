"""Pickles whose large tensors lie beside them."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from trawl.extras.clusters.network.folding import fold


def test_large_tensors_lie_beside_and_nothing_of_them_is_copied():
    large, small = torch.arange(2000.0), torch.arange(3)
    batch = TensorDict(
        {"large": large, "small": small, ("next", "word"): NonTensorData("word")}, []
    )
    data, beside = fold(batch)
    assert [array.ctypes.data for array in beside] == [large.data_ptr()]
    assert len(data) < large.numel()
    again = pickle.loads(data, buffers=beside)
    assert again["large"].data_ptr() == large.data_ptr()
    assert again["small"].data_ptr() != small.data_ptr()
    assert (again == batch).all()
    assert again["next", "word"] == "word"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100, 90).T,
        torch.randn(3000, dtype=torch.complex64).conj(),
        torch.zeros(0, 5),
        torch.eye(80).to_sparse(),
        torch.randn(3000).bfloat16(),
        torch.ones(5000, dtype=torch.bool),
        torch.nn.Parameter(torch.randn(3000)),
    ],
    ids=["strided", "conjugate", "empty", "sparse", "bfloat16", "bool", "parameter"],
)
def test_any_tensor_comes_back(tensor):
    data, beside = fold({"tensor": tensor, "array": np.arange(5000)})
    again = pickle.loads(data, buffers=beside)
    assert type(again["tensor"]) is type(tensor)
    assert again["tensor"].dtype == tensor.dtype
    assert torch.equal(again["tensor"].to_dense(), tensor.to_dense())
    assert again["tensor"].requires_grad == tensor.requires_grad
    assert (again["array"] == np.arange(5000)).all()


def test_what_can_be_found_nowhere_else_is_packed_whole():
    class Here:
        number = 3

    data, beside = fold(Here())
    assert pickle.loads(data, buffers=beside).number == 3
