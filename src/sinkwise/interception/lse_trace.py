"""Sink logits applied after the softmax: out * sigmoid(lse - sink), traced to its call."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sinkwise.errors import CaptureError
from sinkwise.interception import op_names as op
from sinkwise.interception.intercepted import Deferral, Rescaled
from sinkwise.interception.tensor_map import TensorMap

_SAME = op.COPY | op.RESHAPE | op.SWAP | {"permute", "__getitem__", op.PROPERTY}
_INSPECTED = {"mean", "std", "amin", "amax", "cpu"}
"""Applied to a log-sum-exp in order to print it."""


@dataclass(frozen=True, eq=False)
class _Term:
    """A tensor on the way from a call's log-sum-exp to the share that the sink leaves to its keys.

    `lse`, `difference` = lse - sink, `pair` = both in the last axis, `joint` = log(e^lse + e^sink),
    `log share` = lse - joint, `share` = e^lse / (e^lse + e^sink).
    """

    kind: str
    call: object
    strict: bool
    """Whether any other use is an error (FlexAttention's log-sum-exp has no other purpose)."""
    factor: float = 1.0
    """The tensor is this times what `kind` says."""
    sink: Tensor | None = None

    @property
    def is_natural(self) -> bool:
        """Whether the factor is 1."""
        return abs(self.factor - 1) <= 1e-6


@dataclass(eq=False)
class _Deferred:
    call: object
    out: weakref.ref
    emit: Callable[[Rescaled | None], None]


class LseTrace:
    """Traces the log-sum-exps of attention calls, and defers a call until its output is used."""

    def __init__(self) -> None:
        self._terms: TensorMap[_Term] = TensorMap()
        self._deferred: _Deferred | None = None

    def track(
        self, lse: Tensor, call: object, *, factor: float = 1.0, strict: bool = False
    ) -> None:
        """Trace `lse`, which is `factor` times the log-sum-exp of `call`."""
        self._terms[lse] = _Term("lse", call, strict, factor)

    def tracks(self, call: object) -> bool:
        """Whether anything computed from the call's log-sum-exp is alive."""
        return any(term.call is call for term in self._terms.values())

    def defer(self, deferral: Deferral, emit: Callable[[Rescaled | None], None]) -> None:
        """Call `emit` when the output is first used: with its rescaling, or else with None."""
        self.flush()
        if deferral.lse is not None:
            self.track(deferral.lse, deferral.call, factor=deferral.lse_factor, strict=True)
        self._deferred = _Deferred(deferral.call, weakref.ref(deferral.out), emit)

    def flush(self) -> None:
        """Emit the deferred call: nothing will rescale its output any more."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.emit(None)

    def clear(self) -> None:
        """Forget every tensor."""
        self._terms.clear()
        self._deferred = None

    def before(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """A function is about to run: writing into the deferred output, other than to rescale it,
        emits the call first.
        """
        if self._deferred is not None and op.is_in_place(name, kwargs):
            self._use(name, _flat(args, kwargs))

    def _use(self, name: str, values: list[object]) -> None:
        """Emit the deferred call if these arguments use its output for anything but rescaling."""
        deferred = self._deferred
        if deferred is None or not any(value is deferred.out() for value in values):
            return
        terms = [self._terms.get(value) for value in values]
        shares = [t for t in terms if t and t.kind == "share" and t.call is deferred.call]
        if name not in op.MUL or not shares:
            self.flush()

    def after(self, name: str, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        """A function has run. Raises CaptureError where a log-sum-exp changes an attention in a way
        that no record can express.
        """
        deferred = self._deferred
        if deferred is not None and isinstance(result, Tensor):
            if name in op.COPY and args and args[0] is deferred.out():
                deferred.out = weakref.ref(result)
            else:
                self._use(name, _flat(args, kwargs))
        if not self._terms:
            return
        values = _flat(args, kwargs)
        terms = [term for value in values if (term := self._terms.get(value)) is not None]
        if not terms or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        term = terms[0]
        if name in op.MUL and term.kind == "share" and term.is_natural:
            self._rescale(term, values, result)
            return
        tensors = [value for value in values if isinstance(value, Tensor)]
        source = next(value for value in tensors if self._terms.get(value) is term)
        others = [value for value in tensors if self._terms.get(value) is None]
        # Arguments such as alpha and beta change the result in ways that are not traced.
        known = set(kwargs) <= {"dim", "keepdim", "tensors", "dtype", "memory_format"}
        new = _next(name, args, source, others, terms, result) if known else None
        if new is not None:
            self._terms[result] = new
        elif term.strict and name not in _INSPECTED:
            raise _inexpressible(name)

    def _rescale(self, term: _Term, values: list[object], result: Tensor) -> None:
        deferred = self._deferred
        own = deferred is not None and deferred.call is term.call
        if deferred is None or not own or not any(v is deferred.out() for v in values):
            raise _inexpressible("mul")
        share = next(v for v in values if isinstance(v, Tensor) and self._terms.get(v) is term)
        assert term.sink is not None
        self._deferred = None
        deferred.emit(Rescaled(result, share, term.sink))


def _next(
    name: str, args: tuple, source: Tensor, others: list[Tensor], terms: list[_Term], result: Tensor
) -> _Term | None:
    """What `result` is, or None where the operation is no step towards a share."""
    term = terms[0]
    natural = all(each.is_natural for each in terms)
    if len(terms) > 1:
        ends = name in op.SUB and [each.kind for each in terms] == ["lse", "joint"] and natural
        return replace(terms[1], kind="log share") if ends else None
    if name in _SAME:
        return term if result.numel() == source.numel() else None
    numbers = [value for value in args if isinstance(value, int | float)]
    if (name in op.MUL or name in op.DIV) and len(numbers) == 1 and len(args) == 2:
        by = float(numbers[0])
        return replace(term, factor=term.factor * by if name in op.MUL else term.factor / by)
    if not natural:
        return None
    if term.kind == "lse":
        return _with_sink(term, name, args, source, others, result)
    if term.kind == "difference" and name in op.SIGMOID:
        return replace(term, kind="share")
    if term.kind == "pair" and name in op.LOGSUMEXP:
        return replace(term, kind="joint")
    if term.kind == "log share" and name in op.EXP:
        return replace(term, kind="share")
    return None


def _with_sink(
    term: _Term, name: str, args: tuple, lse: Tensor, others: list[Tensor], result: Tensor
) -> _Term | None:
    """A log-sum-exp and its sink logit (none: a logit of 0), in each of the ways to join them."""
    if name in op.SIGMOID:  # softmax-one
        return replace(term, kind="share", sink=lse.new_zeros(()).expand(lse.shape))
    if name in op.SUB and len(args) == 2 and args[0] is lse and result.shape == lse.shape:
        other = others[0] if others else lse.new_tensor(args[1])
        return replace(term, kind="difference", sink=other.expand(lse.shape))
    if not others:
        return None
    if name == "logaddexp" and result.shape == lse.shape:
        return replace(term, kind="joint", sink=others[0].expand(lse.shape))
    if name in op.CAT and lse.shape == others[0].shape and result.shape[-1] == 2:
        return replace(term, kind="pair", sink=others[0])
    return None


def _inexpressible(name: str) -> CaptureError:
    return CaptureError(
        f"{name!r} uses a log-sum-exp to change an attention's output in a way that no record can "
        "express; only out * sigmoid(lse - sink), right after the attention, is supported. Call "
        "model.set_attn_implementation('eager') first, or rescale the output that way"
    )


def _flat(args: tuple, kwargs: dict[str, Any]) -> list[object]:
    values: list[object] = []
    for value in (*args, *kwargs.values()):
        values.extend(value if isinstance(value, tuple | list) else (value,))
    return values
