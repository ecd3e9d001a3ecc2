"""A device that holds no data and runs nothing: tensors on it are fake, so that graphs that use it can be traced.

A process can have one such device, for good, and from then on torch takes it for this machine's accelerator. So what
uses it runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from fake_world import fake_world
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "accel"


class DeviceProcess:
    """Runs module-level functions, one after another, in a process that has the device."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _setup_privateuseone_for_python_backend, (DEVICE,))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function(*args)`` returns or raises there."""
        return self._pool.submit(function, *args).result()

    def stop(self) -> None:
        self._pool.shutdown()


@contextmanager
def device_world(size: int, **meshes: int) -> Iterator[DeviceMesh]:
    """Inside, this process is one of ``size`` ranks, new tensors are fake; gives a mesh of all ranks.

    Args:
        meshes: names and sizes of the mesh's dimensions; default: one.
    """
    with fake_world(size):
        mesh = init_device_mesh(DEVICE, tuple(meshes.values()) or (size,), mesh_dim_names=tuple(meshes) or None)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
