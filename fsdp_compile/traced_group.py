"""A group of parameters in the graphs that Dynamo traces: unsharded before their module's forward, freed after it.

What Dynamo reads here, it guards, at each call of the compiled function. So what a graph depends on lies flat: a few
lists, and a tuple of settings that one guard compares as a whole. When anything changes, ``update`` and ``renew`` write
them anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn as nn

from . import traced_ops
from .recipes import write_recipes
from .tracing import (
    frees_are_restored,
    guarded_settings,
    install_passes,
    numbered,
    own_settings,
    own_tags,
    tagged,
    trace_token,
    warn_once,
    write_tag,
)
from .unsharding import pre_all_gather, without_padding

if TYPE_CHECKING:
    from .fsdp_param import FSDPParam
    from .fsdp_param_group import FSDPParamGroup


class Settings(NamedTuple):
    """What graphs depend on beside tensors.

    Attributes:
        recipes: of the parameters, as one text.
        names: for each module that holds a parameter, under which name, and which of the group's it is.
        extends: which have an all-gather extension.
        distributed: which are a ``DTensor`` when unsharded.
        owned: where among the tensors of the unsharded parameters each has memory that may be freed after use.
        slices: whether fewer ranks keep a slice after forward.
        shown: whether the modules hold the sharded parameters, and not unsharded ones or others.
        trains: which require grad.
    """

    recipes: str
    names: tuple[tuple[str, int], ...]
    extends: tuple[bool, ...]
    distributed: tuple[bool, ...]
    owned: tuple[tuple[int, ...], ...]
    slices: bool
    shown: bool
    trains: tuple[bool, ...]


class Written(NamedTuple):
    """What is written for graphs to read.

    Attributes:
        settings: as if no parameter required grad; that and what modules hold is read each time.
        inputs: tensors that graphs take; recipes say which is what.
        owners: modules that hold the parameters.
        sharded_params: all parameters.
        special: what they belong to, if graphs need more of some than tensors.
    """

    settings: Settings
    inputs: list[torch.Tensor]
    owners: list[nn.Module]
    sharded_params: list[nn.Parameter]
    special: list[FSDPParam]


class Open(NamedTuple):
    """What modules hold that a graph made.

    Attributes:
        token: of that graph.
        made: the unsharded parameters, and all else that may be freed after use.
        owned: where among them each parameter has what may be freed.
        hidden: what the modules held before.
        outer: what was open before: nothing, as it was found.
    """

    token: str
    made: list[torch.Tensor]
    owned: tuple[tuple[int, ...], ...]
    hidden: list[Any]
    outer: Open | None


class TracedGroup:
    """What graphs read of ``group``, and what they do with it.

    Attributes:
        why_untraced: what is set that has no traced form; or empty.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self.why_untraced = ""
        # In a dict: what goes back there as it came is no change for Dynamo, which writes nothing when a graph ends.
        self._now: dict[str, Open | None] = {"open": None}
        self._known: dict[Hashable, Written] = {}
        self.renew()

    @property
    def is_open(self) -> bool:
        """Whether the modules hold tensors that a graph made."""
        return self._now["open"] is not None

    # -- between graphs -----------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Follow changes of tensors."""
        self._known = {}
        self.update()

    def update(self) -> None:
        """Follow changes of settings. What is written for each is kept, as accumulation alternates between two."""
        group = self._group
        key = (repr(group.reduction), group.post_forward_mesh_info is None)
        if key not in self._known:
            self._known[key] = self._write()
        self._settings, self._inputs, self._owners, self._sharded_params, self._special = self._known[key]
        self.why_untraced = group.why_untraced

    def _write(self) -> Written:
        group, params = self._group, self._group.params
        fewer, inputs = group.post_forward_mesh_info, _Inputs()
        recipes = [param.traced.recipe(inputs.position, fewer) for param in params]
        owners = [(module, name, index) for index, param in enumerate(params) for module, name in param.owners]
        extends = tuple(param.has_extension for param in params)
        distributed = tuple(param.layout.unsharded_spec is not None for param in params)
        names = tuple((name, index) for _, name, index in owners)
        owned = traced_ops.memory_to_free(recipes)
        return Written(
            Settings(write_recipes(recipes), names, extends, distributed, owned, fewer is not None, True, ()),
            inputs.tensors,
            [module for module, _, _ in owners],
            [param.sharded_param for param in params],
            params if any((*extends, *distributed)) else [],
        )

    def forget(self) -> None:
        """Forget what a graph made: the modules hold it no more, or will not."""
        self._now["open"] = None

    def settings(self) -> Settings:
        """As they are now. What users change without a call of ours is read each time."""
        held = zip(self._owners, self._settings.names, strict=True)
        shown = all([module._parameters[name] is self._sharded_params[index] for module, (name, index) in held])
        trains = tuple([param.requires_grad for param in self._sharded_params])
        return self._settings._replace(shown=shown, trains=trains)

    def follow_replacements(self) -> None:
        """Take parameters that someone assigned to the modules."""
        self._group.follow_replacements()

    def tags(self, number: int) -> list[str]:
        """What graph nodes carry, for each parameter; the group has this ``number`` in the graph."""
        name, params = self._group.name, enumerate(self._group.params)
        return [write_tag(group=number, name=name, params=[param.name], index=[index]) for index, param in params]

    # -- in graphs ----------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Emit the all-gathers of all parameters, unless the graph holds them already, and give them to the modules."""
        token, opened = trace_token(), self._now["open"]
        if opened is None or opened.token != token:
            if torch.compiler.is_compiling():
                install_passes()
                self._unshard(token, guarded_settings(), own_tags())
            else:  # Dynamo has given up in the middle of the transition; operators are run instead of recorded
                self._unshard(token, tuple(self.settings()), self.tags(0))

    def _unshard(self, token: str, settings: tuple[Any, ...], tags: list[str]) -> None:
        recipes, names, extends, distributed, owned, _, shown, trains = settings
        if any(extends):
            full, made, owned = self._unshard_one_by_one(settings, tags)
        else:
            full = made = traced_ops.unshard(recipes, tags, self._inputs, tuple(range(len(tags))), trains)
        if any(distributed):
            full = [self._special[index].traced.as_distributed(full[index]) for index in range(len(tags))]
        # What comes from a module's dict and goes back there is no change for Dynamo, and it need not look at it.
        owners = list(zip(self._owners, names, strict=True))
        if shown:
            hidden = [module._parameters[name] for module, (name, _) in owners]
        else:
            hidden = [self._sharded_params[index] for _, (_, index) in owners]
        for module, (name, index) in owners:
            module._parameters[name] = full[index]  # type: ignore[assignment]
        if self.is_open:  # by another graph
            self.forget()
        self._now["open"] = Open(token, made, owned, hidden, self._now["open"])

    def _unshard_one_by_one(
        self, settings: tuple[Any, ...], tags: list[str]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[tuple[int, ...], ...]]:
        full: list[torch.Tensor] = []
        made: list[torch.Tensor] = []
        owned: list[tuple[int, ...]] = []
        for index in range(len(tags)):
            first, own = self._unshard_one(index, settings, tags)
            full.append(first)
            owned.append(tuple(range(len(made), len(made) + len(own))))
            made.extend(own)
        return full, made, tuple(owned)

    def _unshard_one(
        self, index: int, settings: tuple[Any, ...], tags: list[str]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The unsharded parameter and the memory to free; what the user's tensor class does, Dynamo traces."""
        recipes, _, extends, _, owned, _, _, trains = settings
        if not extends[index]:
            made = traced_ops.unshard(recipes, tags, self._inputs, (index,), trains)
            return made[0], made[-1:] if owned[index] else []
        param, tag = self._special[index], tags[index]
        shard = param.traced.data.detach()
        with tagged(tag, "unshard"):
            inputs, metadata = pre_all_gather(shard, param.device, param.traced.extension_arguments)
            outputs = [
                traced_ops.gather(recipes, index, numbered(tag, number), source) for number, source in enumerate(inputs)
            ]
            made, inner = shard.fsdp_post_all_gather(tuple(outputs), metadata, param.compute_dtype)  # type: ignore[attr-defined]
            full = without_padding(made, param.layout)
        if trains[index]:
            full = traced_ops.with_reduction(recipes, index, tags, self._inputs, full)
        return full, [*outputs, *inner]

    def reshard(self, free: bool, to_fewer: bool) -> bool:
        """Give the sharded parameters back to the modules; whether a graph break has come in between.

        With ``free`` the graph also records that the unsharded tensors hold no data from here on. Not if a graph
        break came in between: this graph would free what an earlier one has saved for its backward. Not either if
        the compiler does not run the pass that gathers again in the backward.

        Args:
            to_fewer: keep a slice, if fewer ranks are set that do.
        """
        opened = self._now["open"]
        if opened is None:
            return False
        self._now["open"] = opened.outer
        if not torch.compiler.is_compiling():
            self._group.show_sharded()
        else:
            recipes, names, _, _, _, slices, _, _ = own_settings()
            for module, (name, _), before in zip(self._owners, names, opened.hidden, strict=True):
                module._parameters[name] = before
            if opened.token == trace_token():
                if free and frees_are_restored():
                    self._free(recipes, opened, slices and to_fewer)
                return False
        warn_once(
            f"fsdp_compile: a graph break inside {self._group.label} splits its forward over several graphs; "
            "its unsharded parameters are kept until the backward."
        )
        return True

    def _free(self, recipes: str, opened: Open, keep_slices: bool) -> None:
        tags = own_tags()
        if keep_slices:
            traced_ops.keep_slices(recipes, tags, self._inputs, opened.made, opened.owned)
        traced_ops.free(tags, opened.made, opened.owned)


class _Inputs:
    """The tensors that graphs take of a group, each once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def position(self, tensor: torch.Tensor | None) -> int | None:
        """Of ``tensor``, which is added if it is new."""
        if tensor is None:
            return None
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        self.tensors.append(tensor)
        return len(self.tensors) - 1
