"""The weights of each head, measured: the Jacobian of the captured queries, keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from sinkwise.capturing.capture import capture
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.hosts.blocks import clean
from sinkwise.hosts.inputs import call as run
from sinkwise.interception.callers import callers
from sinkwise.interception.flex import is_flex

MAX_ADDED_KEYS = 2
"""Keys that a module may add to those of its tokens (a learned one, and one of zeros)."""


@dataclass(eq=False)
class _Observed:
    """One attention module's input, and what was computed from it."""

    x: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    y: Tensor | None = None


def measured_sites(model: nn.Module, names: list[str], batch: Any) -> dict[str, AttentionSite]:
    """Sites of the named attention modules from one forward pass with gradients over `batch`.

    q[h] is the Jacobian of head h's captured query at the first token with respect to the module's
    input there: W_Q where the query is linear in it (at rotary position 0 the rotation is the
    identity), the local linearisation where it is not (query norms, latent projections). k and v
    likewise. The output projection is the Jacobian of the module's output with respect to the head
    outputs. It is None where the module's output is not their linear image, or is the heads
    themselves, concatenated (another module projects them, as in BERT).
    """
    wanted = set(names)
    observed: dict[str, _Observed] = {}
    handles = []

    def enter(name: str):
        def hook(module: nn.Module, given: tuple, named: dict):
            source = next((t for t in (*given, *named.values()) if _is_input(t)), None)
            if source is None or name in observed:
                return None
            leaf = source.detach().requires_grad_()
            observed[name] = _Observed(leaf)
            # Self-attention may be given the same tensor as query, key and value.
            given = tuple(leaf if value is source else value for value in given)
            return given, {n: leaf if value is source else value for n, value in named.items()}

        return hook

    def record(call: AttentionRecord) -> None:
        entry = observed.get(call.name)
        if entry is not None and call.call == 0:
            entry.q, entry.k, entry.v, entry.out = call.q, call.k, call.v, call.out

    def leave(name: str):
        def hook(module: nn.Module, given: tuple, named: dict, result: object) -> None:
            first = result[0] if isinstance(result, tuple) else result
            entry = observed.get(name)
            if entry is not None and entry.y is None and isinstance(first, Tensor):
                entry.y = first

        return hook

    training = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        model.requires_grad_(False)
        for name, module in model.named_modules():
            if clean(name) in wanted:
                handles.append(
                    module.register_forward_pre_hook(enter(clean(name)), with_kwargs=True)
                )
                handles.append(module.register_forward_hook(leave(clean(name)), with_kwargs=True))
        with torch.enable_grad(), _FlexWithoutGradients(), capture(model, record, check=False):
            run(model, batch)
        return {
            name: AttentionSite(
                name=name,
                q=_rows(entry.q, entry.x),
                k=_rows(entry.k, entry.x),
                v=_rows(entry.v, entry.x),
                o=_output(entry.out, entry.y),
                source="jacobian",
            )
            for name, entry in observed.items()
        }
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(training[name])


class _FlexWithoutGradients(TorchFunctionMode):
    """Detaches FlexAttention, which has no gradients on a CPU, from the graph: those from the
    module's input to q, k and v, and from the heads to the module's output, are all that is needed.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func == _REQUIRES_GRAD and _called_from(flex_attention.__name__):
            return False  # else its wrapper would raise
        if not is_flex(func):
            return func(*args, **(kwargs or {}))
        with torch.no_grad():
            detached = (t.detach() if isinstance(t, Tensor) else t for t in args)
            out, *more = func(*detached, **(kwargs or {}))
        return (out.requires_grad_(), *more)


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _called_from(module: str) -> bool:
    """Whether a function of that module is running."""
    return any(frame.f_globals.get("__name__") == module for frame in callers())


def _is_input(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def _rows(captured: Tensor | None, x: Tensor) -> Tensor | None:
    """[head, width, dim]: the Jacobian of the first sample's first token."""
    if captured is None or captured.grad_fn is None or captured.shape[0] != x.shape[0]:
        return None
    if not 0 <= captured.shape[2] - x.shape[1] <= MAX_ADDED_KEYS:
        return None  # its rows are not the tokens but channels, or another sequence
    target = captured[0, :, 0]
    basis = torch.eye(target.numel(), dtype=x.dtype, device=x.device)
    basis = basis.reshape(-1, *target.shape)
    rows = []
    for g in basis:
        (grad,) = torch.autograd.grad(target, x, g, retain_graph=True, allow_unused=True)
        if grad is None:
            return None
        rows.append(grad[0, 0])
    return torch.stack(rows).reshape(*target.shape, -1).detach()


def _output(out: Tensor | None, y: Tensor | None) -> Tensor | None:
    """[head, out_dim, value_dim] where y_t - y_0 = sum_h O_h (out_t - out_0), else None."""
    if out is None or y is None or not out.requires_grad or y.grad_fn is None or y.dim() != 3:
        return None
    if out.dim() != 4 or y.shape[:2] != (out.shape[0], out.shape[2]) or y.shape[1] < 2:
        return None
    basis = torch.eye(y.shape[2], dtype=y.dtype, device=y.device)
    # A record's `out` may be a view of the tensor that the model continues with.
    base = out._base
    whole = base is not None and base.numel() == out.numel() and out.is_contiguous()
    source = base if base is not None and whole else out
    rows = []
    for g in basis:
        (grad,) = torch.autograd.grad(y[0, 0], source, g, retain_graph=True, allow_unused=True)
        if grad is None:
            return None
        rows.append(grad.reshape(out.shape)[0, :, 0])
    weight = torch.stack(rows, dim=1).detach()
    if torch.equal(weight.transpose(0, 1).flatten(1), torch.eye(len(basis)).to(weight)):
        return None
    with torch.no_grad():
        change = torch.einsum("hov,htv->to", weight, out[0] - out[0, :, :1])
        error = (change - (y[0] - y[0, :1])).abs().max()
        return weight if error <= 1e-4 * y.abs().max() else None
