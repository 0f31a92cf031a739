"""octet's operators over DTensors: each process runs them on its own part of the batch or of the heads.

An element of the batch and a head (with the head of k and v that it meets) depend on no others, so a part needs nothing
from other processes. q, k and v say on each dimension of the mesh what is sharded: nothing, the batch, or heads; all
other tensors follow. What is replicated is sliced, which sends nothing. Whatever would be sent, tokens that every query
reads above all, is rejected with what to do instead, but for the gradients of o and lse, which autograd hands over as
it has them.

DTensor's own propagation is not asked, as its cache disregards strings, and the layout is part of one.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from octet._operands import KINDS, RESULTS, Operands, dims_of, label
from octet._options import Options
from octet._results import Result, results
from octet._views import dense_strides
from octet.errors import InvalidArgument, Unsupported
from octet.torch._adapter import adapter, is_dtensor
from octet.torch._text import options_from

_MODULE = "torch.distributed.tensor"
_ROLES = "batch", "heads"
_AXES = *_ROLES, "tokens", "head dim"  # what dims_of gives
_LEADING = "q", "k", "v"
_FOLLOWING = "do_", "dlse"  # autograd brings them, in whatever placements
_OWN_NAMES = {"do": "do_", "r": "o_residual"}  # of octet_arguments, where the operator has another
_registered = False


def names_of(operator: Any) -> tuple[str, ...]:
    """The names of an operator's arguments in octet_arguments."""
    return tuple([_OWN_NAMES.get(x.name, x.name) for x in operator._schema.arguments])


def register(library: torch.library.Library) -> bool:
    """Registers what the operators do with DTensors once somebody has imported them; returns whether it has."""
    global _registered
    if _registered or _MODULE not in sys.modules:
        return _registered
    _registered = True
    for name in RESULTS:
        rule = torch.library.register_torch_dispatch
        rule(f"octet::{name}", sys.modules[_MODULE].DTensor, _run, lib=library)
    return True


def _run(_: Any, func: Any, __: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> tuple:
    """An operator whose arguments are DTensors."""
    given = dict(zip(names_of(func), args, strict=False)) | dict(kwargs or {})
    kind = func._schema.name.removeprefix("octet::")
    options = options_from(given["options"])
    call = _Call(options, {name: x for name, x in given.items() if isinstance(x, torch.Tensor)})
    names = {_OWN_NAMES.get(x.name, x.name): x.name for x in func._schema.arguments}
    found = func(**{names[name]: call.local(name) if name in call.tensors else x for name, x in given.items()})
    extra = bool(given.get("residual") or given.get("extra") or given.get("dmask"))
    made = {x.name: x for x in results(adapter, kind, options, call.tensors, extra)}
    named = zip(RESULTS[kind], found, strict=True)
    return tuple([call.whole(x, made.get(name)) for name, x in named])


class _Call:
    """The tensors of a call by their names, on one mesh."""

    def __init__(self, options: Options, tensors: Operands) -> None:
        self.tensors = tensors
        self.layout = options.layout
        self._kinds = sys.modules[_MODULE]
        if "dropout_seed" in tensors:
            raise Unsupported(
                "dropout_seed: given with DTensors, allowed: None; each process would drop what a batch drops that "
                "begins with its own part; use torch.Tensor"
            )
        if "seqused_k" in tensors:
            raise Unsupported("seqused_k: given with DTensors, allowed: torch.Tensor; pass x.to_local() of each")
        first = next(iter(tensors))
        for name, x in tensors.items():
            own = label(name)
            if not is_dtensor(x):
                raise InvalidArgument(
                    f"{own}: found a tensor that is no DTensor beside others, allowed: all tensors of a call are; "
                    f"use torch.distributed.tensor.distribute_tensor({own}, mesh, placements)"
                )
            if x.device_mesh != (mesh := tensors[first].device_mesh):
                raise InvalidArgument(f"{own}: on {x.device_mesh}, but {label(first)} is on {mesh}; allowed: one mesh")
        self._mesh = tensors[first].device_mesh
        self._roles = [self._role(m) for m in range(self._mesh.ndim)]
        self._expect_even()

    def _axes(self, name: str, x: Any) -> tuple[int, ...]:
        """The axes of a tensor that are batch, heads, tokens and head dim; -1: none is."""
        return tuple(dims_of(name, x, self.layout))

    def _is_shard(self, placement: Any) -> bool:
        return type(placement) is self._kinds.Shard

    def _role(self, m: int) -> str | None:
        """What is sharded over dimension m of the mesh; None: nothing."""
        role, whose = None, ""
        for name in _LEADING:
            x = self.tensors[name]
            placement = x.placements[m]
            if placement.is_replicate():
                continue
            axes = self._axes(name, x)
            axis = placement.dim % x.ndim if self._is_shard(placement) else None
            found = _AXES[axes.index(axis)] if axis in axes else ""
            if found not in _ROLES:
                self._reject(name, m, f", which shards the {found}" if found else "")
            if role not in (None, found):
                raise Unsupported(
                    f"{name}: {placement} shards the {found} over {self._of(m)}, but {whose} the {role}; allowed: "
                    f"the same; redistribute {name}"
                )
            role, whose = found, name
        return role

    def _of(self, m: int) -> str:
        names = self._mesh.mesh_dim_names
        return f"dimension {m} of the mesh" + (f" ({names[m]!r})" if names else "")

    def _reject(self, name: str, m: int, why: str) -> NoReturn:
        axes = self._axes(name, self.tensors[name])
        shards = [f"Shard({axis}) ({role})" for role, axis in zip(_ROLES, axes[:2], strict=True) if axis >= 0]
        advice = f"use {name}.redistribute(placements=...)"
        if "tokens" in why:
            advice += (
                ", which sends all tokens to a part of the heads as Ulysses does, or a context parallelism that merges "
                "o by lse, as diffusers' ring attention"
            )
        raise Unsupported(
            f"{name}: {self.tensors[name].placements[m]} over {self._of(m)}{why}, allowed: "
            f"{', '.join([*shards, 'Replicate()'])}; octet sends nothing between processes, {advice}"
        )

    def _expect_even(self) -> None:
        """Rejects heads that do not lie where the heads of k and v lie that they meet."""
        over = [m for m, role in enumerate(self._roles) if role == "heads"]
        parts = math.prod([self._mesh.size(m) for m in over])
        for name in _LEADING:
            x = self.tensors[name]
            heads = x.shape[self._axes(name, x)[1]]
            whole = heads == 1 and name != "q" and all(x.placements[m].is_replicate() for m in over)
            if heads % parts and not whole:
                least = "" if name == "q" else " (or a single head that is replicated)"
                raise Unsupported(
                    f"{name}: {heads} heads over {parts} processes, allowed: a multiple of {parts}{least}; repeat heads"
                    " of k and v (repeat_interleave), or shard the batch"
                )

    def _shard(self, name: str, x: Any, m: int, found: Any = None) -> Any:
        """Shard(axis) as the call needs it over dimension m of the mesh, or None: the whole."""
        role = self._roles[m]
        axis = self._axes(name, x)[_ROLES.index(role)] if role and tuple(x.shape) != (0,) else -1
        if axis < 0:
            return None
        shard = self._kinds.Shard(axis)
        broadcast = x.shape[axis] == 1 and (role == "heads" or KINDS[name] in ("logits", "head"))
        return None if broadcast and found != shard else shard

    def local(self, name: str) -> torch.Tensor:
        """The part of this process."""
        x = self.tensors[name]
        wanted = [self._shard(name, x, m, p) or self._kinds.Replicate() for m, p in enumerate(x.placements)]
        for m, (found, want) in enumerate(zip(x.placements, wanted, strict=True)):
            if found != want and not found.is_replicate() and name not in _FOLLOWING:
                self._reject(name, m, f", but q, k and v shard {self._roles[m] or 'nothing'}")
        # torch 2.11 detaches in place what it redistributes of a tensor with a gradient, and has no strategy for that.
        return (x if list(x.placements) == wanted else x.detach().redistribute(placements=wanted)).to_local()

    def whole(self, part: torch.Tensor, result: Result | None) -> Any:
        """The DTensor of which a result is a part; None: an empty tensor, in the place of one that there is not."""
        shape: tuple[int, ...] = result.shape if result else (0,)
        order = result.order if result else (0,)
        placements: list[Any] = []
        for m, role in enumerate(self._roles):
            name = result.name if result else ""
            of = name.removeprefix("d")  # its placement decides about a gradient's
            like = self.tensors.get(of) if name.startswith("d") else None
            found = None if like is None else like.placements[m]
            shard = self._shard(name, result, m, found) if result else None
            partial = like is not None and role is not None
            placements.append(shard or (self._kinds.Partial() if partial else self._kinds.Replicate()))
        strides = dense_strides(shape, order)
        from_local: Callable = self._kinds.DTensor.from_local
        return from_local(part, self._mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
