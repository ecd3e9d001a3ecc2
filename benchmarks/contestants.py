"""What is compared: one model under each ``fully_shard``, fed the same data and stepped the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch_compat import gather_asynchronously

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.models import Llama, LlamaConfig

LINK_LLAMA = LlamaConfig(dim=320, layers=12, heads=5, kv_heads=5, ffn_dim=864)
STEP_LLAMA = LlamaConfig(dim=512, layers=8, heads=8, kv_heads=4, ffn_dim=1408)

Batch = tuple[Tensor, Tensor]  # inputs and targets


class Stack(nn.Module):
    """Many modules, each of hardly any work, so that what is done around a module's forward is most of a step."""

    def __init__(self, modules: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stage(width) for _ in range(modules))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Task:
    """A model, its data and its loss; whatever is made from one task starts from the same weights.

    Args:
        make_model: called with the random state set.
        make_batch: from a generator, which depends on the step and on the rank.
        loss: of the model's output and the targets.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_batch: Callable[[torch.Generator], Batch],
        loss: Callable[[Tensor, Tensor], Tensor],
        mixed_precision: bool = False,
    ) -> None:
        self.make_batch, self.loss, self.mixed_precision = make_batch, loss, mixed_precision
        self._make_model = make_model

    def make_model(self) -> Any:
        torch.manual_seed(0)
        return self._make_model()


def stack_task(modules: int) -> Task:
    def make_batch(generator: torch.Generator) -> Batch:
        return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)

    return Task(lambda: Stack(modules), make_batch, nn.functional.mse_loss)


def llama_task(config: LlamaConfig, batch: int, seq: int, mixed_precision: bool = False) -> Task:
    def make_batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(config.vocab, (batch, seq + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Task(lambda: Llama(config), make_batch, loss, mixed_precision)


class Contestant:
    """A model in training.

    Attributes:
        losses: of all its steps; contestants that shard have equal ones, or they did not do the same work.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        self.losses: list[float] = []
        self._loss: Tensor | None = None

    def batch(self) -> Batch:
        seed = 1000 * len(self.losses) + dist.get_rank()
        return self.task.make_batch(torch.Generator().manual_seed(seed))

    def forward_and_backward(self, batch: Batch) -> None:
        inputs, targets = batch
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        self._loss = loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self._loss is not None
        self.losses.append(self._loss.item())


def make_plain(task: Task) -> Contestant:
    """Not sharded: what the step costs without any state machine."""
    return Contestant(task, task.make_model())


def make_ours(task: Task) -> Contestant:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.mixed_precision else MixedPrecisionPolicy()
    return Contestant(task, _shard(task.make_model(), fully_shard, mp_policy=policy))


def make_ours_listed(task: Task) -> Contestant:
    """Ours, told the order of the blocks."""
    contestant = make_ours(task)
    list_prefetches(contestant.model)
    return contestant


def make_torch(task: Task) -> Contestant:
    policy = TorchMixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy = policy if task.mixed_precision else TorchMixedPrecisionPolicy()
    return Contestant(task, _shard(task.make_model(), torch_fully_shard, mp_policy=policy))


def make_torch_listed(task: Task) -> Contestant:
    """torch's, with the private switch that makes its gathers asynchronous on CPU, and told the order of the blocks."""
    contestant = make_torch(task)
    gather_asynchronously(contestant.model)
    list_prefetches(contestant.model)
    return contestant


MAKERS: dict[str, Callable[[Task], Contestant]] = {
    "plain": make_plain,
    "ours": make_ours,
    "torch": make_torch,
    "ours_listed": make_ours_listed,
    "torch_listed": make_torch_listed,
}


def _shard(model: Any, shard: Callable[..., Any], **kwargs: Any) -> nn.Module:
    for block in model.blocks:
        shard(block, **kwargs)
    return shard(model, **kwargs)


def list_prefetches(model: Any) -> None:
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:1])
    model.set_modules_to_backward_prefetch(blocks[-1:])
    for before, after in zip(blocks, blocks[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def check_same_work(contestants: Iterable[Contestant]) -> None:
    """Raise unless all have had the same losses, up to rounding."""
    first, *others = contestants
    for other in others:
        length = min(len(first.losses), len(other.losses))
        torch.testing.assert_close(first.losses[:length], other.losses[:length], rtol=1e-3, atol=1e-3)
