"""Sink logits that a model applies behind its attention: out * sigmoid(lse - sink), followed."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from sinkwise.errors import CaptureError

_SAME = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach",
    "requires_grad_",
}  # fmt: skip
_SHAPE = {
    "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "unflatten",
    "expand", "__getitem__", "__get__",
}  # fmt: skip
_MUL = {"mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__"}
_DIV = {"div", "__truediv__", "true_divide", "divide"}
_SUB = {"sub", "__sub__", "subtract"}
_READ = {"mean", "std", "amin", "amax", "cpu"}
"""What is done to a log-sum-exp in order to print it."""


@dataclass(frozen=True, eq=False)
class _Term:
    """What a tensor is, on the way from a call's log-sum-exp to the share its keys keep.

    `lse`, `less` = lse - sink, `pair` = both in the last axis, `joint` = log(e^lse + e^sink),
    `log share` = lse - joint, `share` = e^lse / (e^lse + e^sink).
    """

    kind: str
    call: object
    strict: bool
    """Whether any other use is an error (FlexAttention's serves no other purpose)."""
    factor: float = 1.0
    """The tensor is this times what `kind` says."""
    sink: Tensor | None = None


class Scaled(NamedTuple):
    """What became of a call's output."""

    out: Tensor
    share: Tensor
    """What is left to the keys, an entry a query."""
    sink: Tensor
    """The sink logit, an entry a query."""


@dataclass(eq=False)
class _Waiting:
    call: object
    out: weakref.ref
    emit: Callable[[Scaled | None], None]


class Behind:
    """Follows log-sum-exps of attention calls, and holds a call back until its output is used."""

    def __init__(self) -> None:
        self._terms: dict[int, tuple[weakref.ref, _Term]] = {}
        self._waiting: _Waiting | None = None

    def hold(self, lse: object, call: object, *, factor: float = 1.0, strict: bool = False) -> None:
        """Follow `lse`, which is `factor` times the log-sum-exp of `call`."""
        if isinstance(lse, Tensor):
            self._set(lse, _Term("lse", call, strict, factor))

    def knows(self, call: object) -> bool:
        """Whether something that was made of the call's log-sum-exp is alive."""
        return any(ref() is not None and t.call is call for ref, t in self._terms.values())

    def wait(self, call: object, out: Tensor, emit: Callable[[Scaled | None], None]) -> None:
        """Call `emit` as soon as `out` is used: scaled by the share of its keys, or otherwise."""
        self.flush()
        self._waiting = _Waiting(call, weakref.ref(out), emit)

    def flush(self) -> None:
        """Nobody scales the output any more."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.emit(None)

    def clear(self) -> None:
        """Forget everything."""
        self._terms.clear()
        self._waiting = None

    def before(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """A function is about to run: overwriting the output, but to scale it, ends the wait."""
        if self._waiting is None:
            return
        writes = name == "__setitem__" or name.startswith("__i") or "out" in kwargs
        if writes or (name.endswith("_") and not name.endswith("__")):
            self._used(name, _flat(args, kwargs))

    def _used(self, name: str, values: list[object]) -> None:
        """End the wait if these arguments use the output for anything but its scaling."""
        waiting = self._waiting
        if waiting is None or not any(value is waiting.out() for value in values):
            return
        terms = [self._of(value) for value in values]
        shares = [t for t in terms if t and t.kind == "share" and t.call is waiting.call]
        if name not in _MUL or not shares:
            self.flush()

    def after(self, name: str, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        """A function has run. Raises CaptureError where a log-sum-exp changes an attention in a
        way that a record cannot tell.
        """
        waiting = self._waiting
        if waiting is not None and isinstance(result, Tensor):
            if name in _SAME and args and args[0] is waiting.out():
                waiting.out = weakref.ref(result)
            else:
                self._used(name, _flat(args, kwargs))
        if not self._terms:
            return
        values = _flat(args, kwargs)
        terms = [term for value in values if (term := self._of(value)) is not None]
        if not terms or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        term = terms[0]
        if name in _MUL and term.kind == "share" and abs(term.factor - 1) <= 1e-6:
            self._scale(term, values, result)
            return
        tensors = [value for value in values if isinstance(value, Tensor)]
        source = next(value for value in tensors if self._of(value) is term)
        others = [value for value in tensors if self._of(value) is None]
        # alpha, beta and their like say more than can be followed.
        known = set(kwargs) <= {"dim", "keepdim", "tensors", "dtype", "memory_format"}
        new = _next(name, args, source, others, terms, result) if known else None
        if new is not None:
            self._set(result, new)
        elif term.strict and name not in _READ:
            raise _untold(name)

    def _scale(self, term: _Term, values: list[object], result: Tensor) -> None:
        waiting = self._waiting
        mine = waiting is not None and waiting.call is term.call
        if waiting is None or not mine or not any(v is waiting.out() for v in values):
            raise _untold("mul")
        share = next(v for v in values if isinstance(v, Tensor) and self._of(v) is term)
        assert term.sink is not None
        self._waiting = None
        waiting.emit(Scaled(result, share, term.sink))

    def _of(self, value: object) -> _Term | None:
        entry = self._terms.get(id(value))
        return entry[1] if entry is not None and entry[0]() is value else None

    def _set(self, tensor: Tensor, term: _Term) -> None:
        self._terms[id(tensor)] = (weakref.ref(tensor), term)


def _next(
    name: str, args: tuple, source: Tensor, others: list[Tensor], terms: list[_Term], result: Tensor
) -> _Term | None:
    """What `result` is, or None where the operation leads nowhere known."""
    term = terms[0]
    natural = all(abs(each.factor - 1) <= 1e-6 for each in terms)
    if len(terms) > 1:
        ends = name in _SUB and [each.kind for each in terms] == ["lse", "joint"] and natural
        return replace(terms[1], kind="log share") if ends else None
    if name in _SAME | _SHAPE:
        return term if result.numel() == source.numel() else None
    numbers = [value for value in args if isinstance(value, int | float)]
    if name in _MUL | _DIV and len(numbers) == 1 and len(args) == 2:
        by = float(numbers[0])
        return replace(term, factor=term.factor * by if name in _MUL else term.factor / by)
    if not natural:
        return None
    if term.kind == "lse":
        return _joined(term, name, args, source, others, result)
    step = {
        ("less", "sigmoid"): "share",
        ("pair", "logsumexp"): "joint",
        ("log share", "exp"): "share",
    }.get((term.kind, name))
    return None if step is None else replace(term, kind=step)


def _joined(
    term: _Term, name: str, args: tuple, lse: Tensor, others: list[Tensor], result: Tensor
) -> _Term | None:
    """A log-sum-exp and its sink logit (none: a logit of 0), as one of the ways to join them."""
    if name == "sigmoid":  # softmax-one
        return replace(term, kind="share", sink=lse.new_zeros(()).expand(lse.shape))
    if name in _SUB and len(args) == 2 and args[0] is lse and result.shape == lse.shape:
        other = others[0] if others else lse.new_tensor(args[1])
        return replace(term, kind="less", sink=other.expand(lse.shape))
    if not others:
        return None
    if name == "logaddexp" and result.shape == lse.shape:
        return replace(term, kind="joint", sink=others[0].expand(lse.shape))
    if name in ("cat", "concat") and lse.shape == others[0].shape and result.shape[-1] == 2:
        return replace(term, kind="pair", sink=others[0])
    return None


def _untold(name: str) -> CaptureError:
    return CaptureError(
        "a log-sum-exp changes an attention outside of it in a way that a record cannot tell "
        f"(here by {name!r}; out * sigmoid(lse - sink), right behind the attention, can be told); "
        "call model.set_attn_implementation('eager') first, or scale that way"
    )


def _flat(args: tuple, kwargs: dict[str, Any]) -> list[object]:
    values: list[object] = []
    for value in (*args, *kwargs.values()):
        values.extend(value if isinstance(value, tuple | list) else (value,))
    return values
