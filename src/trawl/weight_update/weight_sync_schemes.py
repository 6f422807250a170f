"""The weight-sync schemes, under the module path of TorchRL."""

from typing import TYPE_CHECKING

from trawl import weight_update

if TYPE_CHECKING:
    from trawl.weight_update import *  # noqa: F403

__all__ = weight_update.__all__  # type: ignore[attr-defined]
__getattr__ = weight_update.__getattr__
__dir__ = weight_update.__dir__
