"""When parameters move: before and after a module's forward, before and after its backward.

        forward of a module          backward of a module
        ───────────────────          ────────────────────
        pre_forward                  pre_backward     (gradient of an output arrives)
          cast inputs, unshard         unshard; start the unshard of the module that ran before it
        forward                      backward
        post_forward                 post_backward    (gradients of all inputs are done)
          reshard, cast outputs        reshard, reduce-scatter

Under ``torch.compile`` only the left column is traced. Its gathers carry their own backward, and a pass on the graph
does what ``pre_backward`` does here.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn

from . import torch_compat
from .execution_order import CallPrediction, ForwardOrder
from .fsdp_param_group import FSDPParamGroup
from .last_run import IN_GRAPH, SPLIT, LastRun
from .nested import cast_floating_point, map_tensors, tensors_requiring_grad
from .policies import MixedPrecisionPolicy
from .reduction import Reduction
from .streams import Lanes
from .tracing import graph_number, trace_token

UNTRACED = (
    "fsdp_compile: this module's transitions run eagerly, fsdp_compile.explain(model) says why; set_all_reduce_hook "
    "and custom communication have no traced form"
)


class TrainingState(Enum):
    """Where a module is in its iteration; eager executor only."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class FSDPContext:
    """What the states of one tree share. ``states`` are in the order of the tree's modules, the root first."""

    def __init__(self, root: FSDPState) -> None:
        self.root = root
        self.states = [root]
        self.forward_order = ForwardOrder()
        self.prediction = CallPrediction()
        self.reductions_in_flight = 1
        self.reductions: deque[Reduction] = deque()
        self.all_reduces: deque[Reduction] = deque()
        self.is_last_backward = True
        self.post_optim_event: torch.Event | None = None
        self.callback_queued = False

    @cached_property
    def lanes(self) -> Lanes:
        """Where this tree communicates; made when needed, as states are merged into larger trees at first."""
        return Lanes(self.root.device)

    def settle_reductions(self, in_flight: int) -> None:
        """Move on until at most ``in_flight`` reduce-scatters, and as many all-reduces, are under way."""
        while len(self.reductions) > in_flight:
            reduction = self.reductions.popleft()
            if not reduction.advance():
                self.all_reduces.append(reduction)
        while len(self.all_reduces) > in_flight:
            self.all_reduces.popleft().finish()


class FSDPState:
    """The state of the module, or modules, of one ``fully_shard`` call.

    Attributes:
        modules: forward of any of them unshards the groups; they reshard when all have run.
        groups: the parameters, one group a mesh.
        reshard_after_forward: ``None`` means what is best for most: reshard, except at the root.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules = modules
        self.device = device
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.groups: list[FSDPParamGroup] = []
        self.context = FSDPContext(self)
        self.last_run = LastRun()
        self.training_state = TrainingState.IDLE
        self.unshard_in_backward = True
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []  # empty: the module that ran before this one
        self.max_reductions_in_flight = 1  # each holds a buffer of the size of its group's gradients
        self._token = ""  # without parameters: of the graph in which the last traced forward began
        self._not_run: list[nn.Module] = []  # of `modules`, in the forward pass under way
        self._aliases: list[tuple[torch.Tensor, Any]] = []  # that stand for its inputs, as they were made

    @property
    def reshards_after_forward(self) -> bool:
        if self.reshard_after_forward is None:
            return self.context.root is not self
        return self.reshard_after_forward

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        args, kwargs = self._cast_inputs(*self._move_inputs(args, kwargs))
        if torch.compiler.is_compiling() and not self.why_untraced:
            torch_compat.with_side_effects(self.unshard_traced)
            return args, kwargs
        return self._pre_forward_eager(args, kwargs)

    @torch.compiler.disable(reason=UNTRACED)
    @torch_compat.hidden_from_checkpoint_policies()
    def _pre_forward_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.last_run.note_eager(self)
        if self.is_open:
            self._reshard_eager()  # a graph has unsharded it, and no graph resharded it
        if self.context.callback_queued and not torch_compat.in_backward():
            self.reset()  # an exception ended the last backward
        if self.training_state is TrainingState.PRE_BACKWARD:  # activation checkpointing recomputes this forward
            self._unshard()
            return args, kwargs
        first = self._enter_forward()
        self._unshard()
        if first:
            expected = self._expected_next()
            self.start_unshard(self.forward_prefetch or expected)
        return self._watch_inputs(args, kwargs) if first else (args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.is_open or (torch.compiler.is_compiling() and not self.why_untraced):
            torch_compat.with_side_effects(self._leave_forward_traced, module)
        else:
            self._post_forward_eager(module, output)
        return self._cast_output(output)

    @torch.compiler.disable(reason=UNTRACED)
    @torch_compat.hidden_from_checkpoint_policies()
    def _post_forward_eager(self, module: nn.Module, output: Any) -> None:
        if self.training_state is not TrainingState.PRE_BACKWARD and self._leave_forward(module):
            self._complete_forward(output)
            if self.context.root is self:
                self._end_root_forward(output)

    def _complete_forward(self, output: Any) -> None:
        if not torch_compat.in_backward():
            self._reshard_after_forward()
            if torch.is_grad_enabled():
                self.context.forward_order.record(self)
        self._watch_outputs(output)
        self._not_run = []
        self.training_state = TrainingState.IDLE

    def _enter_forward(self) -> bool:
        """Whether this call begins a pass through the modules of this state."""
        first = self.training_state is not TrainingState.FORWARD
        if first:
            self._not_run = list(self.modules)
            if self.context.root is self:
                self._begin_root_forward()
            elif self.context.root.training_state is not TrainingState.FORWARD:
                self.context.lanes.after_writes(None)  # called by itself, perhaps after an optimizer step
        self.training_state = TrainingState.FORWARD
        return first

    def _begin_root_forward(self) -> None:
        context = self.context
        if context.forward_order.awaits_backward(self) and self.reshard_after_forward is None:
            self.reshard()  # kept for the backward of a forward before; weights may have been written since, unnoticed
        context.lanes.after_writes(context.post_optim_event)
        context.post_optim_event = None
        context.prediction.begin()

    def _end_root_forward(self, output: Any) -> None:
        context = self.context
        for state in reversed(context.states):
            if state._not_run and state is not self:  # some of its modules ran, but not all
                state._complete_forward(output)
        context.lanes.release_retired()
        for state in context.prediction.gathered_in_vain:
            for group in state.groups:
                group.drop_unused_gather()

    def _expected_next(self) -> list[FSDPState]:
        """The module that ran after this one in the root's last forward, as long as this forward goes the same way.

        Only on CPU: in streams an all-gather starts before earlier compute is done, without being issued ahead of time.
        """
        context = self.context
        if context.lanes.in_streams or context.root.training_state is not TrainingState.FORWARD:
            return []
        following = context.prediction.next_after(self)
        context.prediction.note_gathered_ahead(
            [state for state in following if not any(group.is_gathering for group in state.groups)]  # by the user
        )
        return following

    def _leave_forward(self, module: nn.Module) -> bool:
        """Whether all modules of this state have now run."""
        self._not_run = [other for other in self._not_run if other is not module]
        return not self._not_run

    def _unshard(self) -> None:
        self.start_unshard([self])
        for group in self.groups:
            group.wait_for_unshard()

    def start_unshard(self, states: list[FSDPState]) -> None:
        """Start the all-gathers of ``states`` without waiting, to overlap with compute."""
        for state in states:
            for group in state.groups:
                group.unshard(self.context.lanes)

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        if torch.compiler.is_compiling() and self.is_open:
            torch_compat.with_side_effects(self.reshard_traced, True)
        elif any(group.may_hold_data for group in self.groups):
            self._reshard_eager()

    @torch.compiler.disable(reason=UNTRACED)
    def _reshard_eager(self) -> None:
        for group in self.groups:
            group.reshard()

    def refresh(self) -> None:
        """Follow changes that others made to the sharded parameters."""
        for group in self.groups:
            group.refresh()

    def _reshard_after_forward(self) -> None:
        no_backward_follows = not torch.is_grad_enabled()
        for group in self.groups:
            if no_backward_follows and self.reshard_after_forward is not False:
                group.reshard()
            elif self.reshards_after_forward:
                group.reshard_after_forward(self.context.lanes)
            else:
                group.show_sharded()

    def _move_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Move the root's inputs to the device, as users of an accelerator expect."""
        device = self.device
        if device.type == "cpu" or self.context.root is not self:
            return args, kwargs
        args, kwargs = map_tensors(lambda t: t if t.device == device else t.to(device), (args, kwargs))
        return args, kwargs

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        args, kwargs = cast_floating_point(dtype, (args, kwargs))
        return args, kwargs

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floating_point(dtype, output)

    @torch.compiler.disable
    def abandon_forward(self) -> None:
        """An exception has left the forward: show sharded parameters again; at the root, those of all modules."""
        if torch_compat.in_backward():
            return  # activation checkpointing ends a recomputation so
        for state in self.context.states if self.context.root is self else [self]:
            if state.is_open:  # what one graph began, none has ended
                state.last_run.how = SPLIT
            for group in state.groups:
                group.hide_unsharded()

    # -- forward, traced ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Of the module from the root; empty for the root."""
        return next((group.name for group in self.groups), "")

    @property
    def why_untraced(self) -> str:
        """What is set that has no traced form, so that the eager executor runs, untraced; or empty."""
        for group in self.groups:
            if group.traced.why_untraced:
                return group.traced.why_untraced
        return ""

    @property
    def is_open(self) -> bool:
        """Whether modules hold tensors that a graph made."""
        for group in self.groups:
            if group.traced.is_open:
                return True
        return False

    def _leave_forward_traced(self, module: nn.Module) -> None:
        if len(self.modules) > 1:
            self._not_run = [other for other in self._not_run or self.modules if other is not module]
            if self._not_run:
                return
        self._end_forward_traced()
        if self.context.root is self:
            for state in self.context.states:
                if state.is_open:  # only some of its modules ran, or it was unsharded by the user
                    state._not_run = []
                    state._end_forward_traced()

    def _end_forward_traced(self) -> None:
        self.reshard_traced(free=self.reshards_after_forward or not torch.is_grad_enabled())

    def unshard_traced(self) -> None:
        """Emit the all-gathers into the graph being traced, as far as it does not hold them."""
        self.last_run.how = IN_GRAPH
        if not self.groups:
            self._token = trace_token()
        for group in self.groups:
            group.traced.unshard()
        if torch.compiler.is_compiling():
            self.last_run.graph = graph_number()

    def reshard_traced(self, free: bool) -> None:
        """Give the sharded parameters back to the modules; with ``free``, record that the unsharded hold no data."""
        to_fewer = torch.is_grad_enabled()
        split = [group.traced.reshard(free, to_fewer) for group in self.groups] or [self._token != trace_token()]
        if any(split):
            self.last_run.note_split(self)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Have ``post_backward`` run once the gradients of all inputs are done.

        Each input is replaced by an alias: the alias has no uses outside the module, and unlike the result of a
        custom autograd function it may be modified in place.
        """
        if not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, (args, kwargs))
        aliases = tensors_requiring_grad((args, kwargs))
        self._aliases = [(alias, alias.grad_fn) for alias in aliases]
        if len(aliases) == 1:
            aliases[0].register_hook(lambda _: self.post_backward())
        elif aliases:
            torch.autograd.graph.register_multi_grad_hook(aliases, lambda _: self.post_backward())
        return args, kwargs

    def _watch_outputs(self, output: Any) -> None:
        """Have ``pre_backward`` run before any gradient flows into the module."""
        aliases, self._aliases = self._aliases, []
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_requiring_grad(output):
            if any(tensor is alias and tensor.grad_fn is made for alias, made in aliases):
                continue  # an input passed on: its gradient does not flow into the module
            tensor.register_hook(self._pre_backward_hook)
            base = torch_compat.base_of_view(tensor)
            if base is not None and base.grad_fn is not None:
                # If the user modifies this view in place, autograd routes around the hook above but not around this.
                base.grad_fn.register_prehook(self._pre_backward_hook)

    def _pre_backward_hook(self, *_: Any) -> None:
        self.pre_backward()

    def pre_backward(self) -> None:
        if self.training_state is TrainingState.PRE_BACKWARD:
            return
        self.training_state = TrainingState.PRE_BACKWARD
        self._queue_final_callback()
        if self.unshard_in_backward:
            self._unshard()
        ran_before = self.context.forward_order.begin_backward(self)  # its backward is likely the next
        ahead = self.backward_prefetch or ran_before
        self.start_unshard([state for state in ahead if state.unshard_in_backward])

    def post_backward(self) -> None:
        """Reduce the gradients.

        Of a module that ran several times, autograd hands out the gradients only when it is through with all calls in
        its graph. So calls are still to come if there is no gradient yet, and what was set aside waits for them; after
        the last one, this rank takes part in the reduction even without any, as others may have some.
        """
        more_to_come = self.context.forward_order.awaits_backward(self)
        now = [group for group in self.groups if not more_to_come or group.has_new_gradients]
        for group in self.groups:
            if group not in now:
                group.leave_backward()
        self._reduce(now, used=not more_to_come)

    def _reduce(self, groups: list[FSDPParamGroup], used: bool) -> None:
        self.training_state = TrainingState.POST_BACKWARD
        context = self.context
        for group in groups:
            context.settle_reductions(context.reductions_in_flight - 1)  # before the next takes a buffer
            context.reductions.extend(group.reduce(context.lanes, used))

    def _queue_final_callback(self) -> None:
        if not self.context.callback_queued:
            self.context.callback_queued = True
            self.context.reductions_in_flight = max(state.max_reductions_in_flight for state in self.context.states)
            torch_compat.after_backward(self._finish_backward)

    def _finish_backward(self) -> None:
        """Runs after the whole backward: do what no gradient hook did, and leave nothing behind."""
        context = self.context
        for state in reversed(context.states):
            if state.training_state is not TrainingState.POST_BACKWARD:
                # Its inputs required no gradient, or it was not used.
                state._reduce(state.groups, used=state.training_state is TrainingState.PRE_BACKWARD)
            else:
                late = [group for group in state.groups if group.awaits_reduction]
                state._reduce(late, used=False)  # calls were to come that did not, or a weight was used beside them
            state.training_state = TrainingState.IDLE
            state._not_run = []
            for group in state.groups:
                group.drop_unused_gather()
        context.settle_reductions(in_flight=0)
        context.lanes.release_retired()
        if any(group.copies_late for state in context.states for group in state.groups):
            torch.accelerator.current_stream().synchronize()  # the optimizer reads gradients on the host
        if context.is_last_backward:
            context.forward_order.forget()
        context.callback_queued = False

    def reset(self) -> None:
        """Forget an iteration that failed half way: see ``FSDPModule.reset_iter_state``."""
        context = self.context
        for reduction in (*context.reductions, *context.all_reduces):
            reduction.finish() if context.lanes.in_streams else reduction.wait()  # in streams all steps are issued
        context.reductions.clear()
        context.all_reduces.clear()
        for state in context.states:
            state.training_state = TrainingState.IDLE
            state._not_run, state._aliases = [], []
            for group in state.groups:
                group.drop_iteration()
        context.forward_order.forget()
        context.prediction.forget()
        context.callback_queued = False
