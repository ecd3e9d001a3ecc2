"""What each rank of train_llama.py does: build, shard, compile, train, evaluate, sample."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoints import Checkpoints, facts_of, newest, step_of
from progress import LossLog, Progress
from text_data import Text, TextError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecisionPolicy
from fsdp_compile.local_ranks import UsageError
from fsdp_compile.models import SIZES, Llama, LlamaConfig, shard_llama

WARMUP = 40  # steps of rising learning rate
EVAL_BATCHES = 8
SAMPLE_BYTES = 300
TEMPERATURE = 0.8


def check(args: argparse.Namespace, world: int) -> None:
    """Find what can be found wrong before any rank starts.

    Raises:
        UsageError: one line for the user.
    """
    if args.size not in SIZES:
        raise UsageError(f"unknown size {args.size!r}; choose from {', '.join(SIZES)}")
    config = config_of(args)
    if args.seq > config.max_seq:
        raise UsageError(f"--seq {args.seq} is longer than the {config.max_seq} that size {args.size} allows")
    try:
        Text(args.text, args.seq)
    except TextError as error:
        raise UsageError(error) from None
    for directory in (args.checkpoint_dir, args.log_losses and args.log_losses.parent):
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make directory {directory}: {error.strerror}") from None
    if args.log_losses and args.log_losses.is_dir():
        raise UsageError(f"--log-losses {args.log_losses} is a directory")
    if args.resume:
        check_resume(args, world)


def check_resume(args: argparse.Namespace, world: int) -> None:
    checkpoint = newest(args.checkpoint_dir)
    if checkpoint is None:
        raise UsageError(f"--resume: no complete checkpoint in {args.checkpoint_dir}")
    saved = facts_of(checkpoint)
    for name, value in run_facts(config_of(args), world).items():
        if saved.get(name) != value:
            raise UsageError(f"--resume: {checkpoint} was made with {name} {saved.get(name)}, not {value}")
    if step_of(checkpoint) >= args.steps:
        raise UsageError(f"--resume: {checkpoint} is already at step {step_of(checkpoint)}; raise --steps")


def config_of(args: argparse.Namespace) -> LlamaConfig:
    return SIZES[args.size].with_head(args.tied)


def run_facts(config: LlamaConfig, world: int) -> dict[str, Any]:
    """What a run and the checkpoint that it resumes from must agree on."""
    return {**asdict(config), "ranks": world}


def train_rank(rank: int, world: int, args: argparse.Namespace, rendezvous: str) -> None:
    """The whole job of one rank."""
    run = Run(join(rank, world, rendezvous), args)
    say(run.describe())
    if args.resume:
        run.resume()
    say(f"held-out loss before: {run.held_out_loss():.4f} nats a byte")
    say(run.train())
    say(f"held-out loss after: {run.held_out_loss():.4f} nats a byte")
    if args.sample:
        say(f"sample:\n{run.sample()}")
    dist.destroy_process_group()


def join(rank: int, world: int, rendezvous: str) -> torch.device:
    """Join the other ranks: over NCCL where torchrun gave this rank a GPU, else over gloo."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if rendezvous == "env://" and torch.cuda.device_count() >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rendezvous, rank=rank, world_size=world, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world)
    return device


class Run:
    """One rank's part of a run: a sharded model, its optimizer, the text and the checkpoints."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        self.device, self.args = device, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.done = 0  # steps
        self.text = Text(args.text, args.seq)
        self.policy = policy_of(args)
        self.model = build(config_of(args), args.seed, self.policy, device)
        self.forward = self.model if args.compile == "none" else torch.compile(self.model, backend=args.compile)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.communicated = bytes_per_step(self.model, self.policy)
        self.checkpoints = Checkpoints(args.checkpoint_dir, run_facts(self.model.config, self.world))

    def describe(self) -> str:
        return (
            f"{self.args.size}: {sum(param.numel() for param in self.model.parameters()):,} parameters over "
            f"{self.world} {self.device.type} ranks, {len(self.text.train) / 1e6:.1f} MB of text, "
            f"compile: {self.args.compile}"
        )

    def resume(self) -> None:
        """Load model, optimizer and step. All else that a step depends on, its text and rate, follows from the step."""
        checkpoint = newest(self.args.checkpoint_dir)
        assert checkpoint is not None  # as checked before
        self.done = self.checkpoints.load(checkpoint, self.model, self.optimizer)
        say(f"resumed from {checkpoint}")

    def train(self) -> str:
        """Take the steps that remain; returns the rates."""
        args = self.args
        tokens = self.world * args.batch * args.seq
        progress = Progress(self.done, args.steps, tokens, self.communicated, shown=self.rank == 0)
        log = LossLog(args.log_losses if self.rank == 0 else None, self.done)
        for step in progress:
            loss = self.step(step)
            log.write(step, loss)
            progress.step_done(loss)
            if step % args.checkpoint_every == 0 or step == args.steps:
                self.checkpoints.save(step, self.model, self.optimizer)
        return progress.rates()

    def step(self, step: int) -> float:
        """One optimizer step; returns the loss, averaged over all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.args.lr, step)
        windows = self.text.train_windows(self.args.seed, step, self.world * self.args.batch)
        loss = self.loss(self.forward, windows[self.rank :: self.world])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss.detach())

    def loss(self, forward: Callable[[Tensor], Tensor], windows: np.ndarray) -> Tensor:
        """Mean cross entropy in nats of ``windows``, (B, T + 1) uint8, each byte predicted from those before it."""
        tokens = torch.from_numpy(windows).to(self.device, torch.int64)
        logits = forward(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Loss on text that training never sees. Runs uncompiled, as does ``sample``: not worth a graph of its own."""
        windows = self.text.held_out_windows(EVAL_BATCHES * self.args.batch * self.world)[self.rank :: self.world]
        losses = [self.loss(self.model, part) for part in np.split(windows, EVAL_BATCHES)]
        return mean_over_ranks(torch.stack(losses).mean())

    @torch.no_grad()
    def sample(self) -> str:
        """A prompt and what the model says next. All ranks do this together, as each forward gathers parameters."""
        prompt = self.text.held_out_line() if self.args.prompt is None else self.args.prompt.encode()
        text = bytearray(prompt or b"\n")
        generator = torch.Generator(self.device).manual_seed(self.args.seed)
        for _ in range(SAMPLE_BYTES):
            context = torch.tensor([list(text[-self.args.seq :])], device=self.device)
            probabilities = self.model(context)[0, -1, :256].float().div(TEMPERATURE).softmax(dim=0)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return text.decode(errors="replace")


def policy_of(args: argparse.Namespace) -> MixedPrecisionPolicy:
    if args.dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(config: LlamaConfig, seed: int, policy: MixedPrecisionPolicy, device: torch.device) -> Llama:
    """A sharded model with initial weights. No rank ever holds all of it: it has no data until it is sharded."""
    with torch.device("meta"):
        model = Llama(config)
    shard_llama(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)), mp_policy=policy)
    model.to_empty(device=device)
    model.reset_parameters(seed)
    return model


def learning_rate(peak: float, step: int) -> float:
    """Linear warmup, then the inverse square root: it does not ask where the run ends, so a longer run starts equal."""
    return peak * min(step / WARMUP, (WARMUP / step) ** 0.5)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def bytes_per_step(model: Llama, policy: MixedPrecisionPolicy) -> float:
    """Bytes that collectives of parameters and gradients bring to each rank in one step.

    A gather or a reduce-scatter of n bytes over W ranks brings (W - 1) / W * n of them to each rank. Every parameter
    is gathered in the forward and its gradient reduced in the backward; those of the blocks, which reshard after their
    forward, are gathered once more in the backward. Scalars, such as the gradient norm, are left out, and so is what a
    backend sends beyond the least that is needed.
    """
    total = 0.0
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        world = param.device_mesh.size()
        padded = -(-param.size(0) // world) * world * param[0].numel()
        gathers = 2 if name.startswith("blocks.") else 1
        gathered = policy.param_dtype or param.dtype
        reduced = policy.reduce_dtype or gathered
        total += padded * (gathers * gathered.itemsize + reduced.itemsize) * (world - 1) / world
    return total


def say(message: str) -> None:
    """Print, once for all ranks."""
    if dist.get_rank() == 0:
        print(message, flush=True)
