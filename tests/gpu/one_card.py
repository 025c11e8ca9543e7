"""Collectives of several ranks that share one card: NCCL refuses them, so gloo exchanges copies on the host."""

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.engine.comm.communicator import Communicator


class HostCommunicator(Communicator):
    """A `Communicator` whose tensors are on a device, and whose process group is gloo's."""

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> None:
        own = shard.cpu()
        on_host = own.new_empty(full.numel())
        with self._collective("all_gather", of):
            dist.all_gather(list(on_host.view(self.world_size, -1)), own, group=self.group)
        full.copy_(on_host.view_as(full))

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor, of: str = "") -> None:
        on_host = full.float().cpu()
        with self._collective("reduce_scatter", of):
            dist.all_reduce(on_host, group=self.group)
        shard.copy_(on_host.view(self.world_size, -1)[self.rank] / self.world_size)

    def all_reduce_mean(self, full: Tensor, of: str = "") -> None:
        on_host = full.float().cpu()
        with self._collective("all_reduce", of):
            dist.all_reduce(on_host, group=self.group)
        full.copy_(on_host / self.world_size)

    def broadcast(self, tensor: Tensor, of: str = "") -> None:
        on_host = tensor.cpu()
        with self._collective("broadcast", of):
            dist.broadcast(on_host, group=self.group, group_src=0)
        tensor.copy_(on_host)

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        on_host = numbers.cpu()
        with self._collective("sum", of):
            dist.all_reduce(on_host, group=self.group)
        return numbers.copy_(on_host)


def join(rank: int, world: int, port: int, devices: int) -> Communicator:
    """Initialise the process group of a rank; return its communicator: NCCL if every rank has its own GPU, else gloo."""
    own_card = world <= devices
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    if world > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("nccl" if own_card else "gloo", init_method=address, rank=rank, world_size=world)
    return Communicator(device) if own_card else HostCommunicator(device)
