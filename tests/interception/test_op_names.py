"""Every spelling of an operator is recognised, on the scores and on the log-sum-exp alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinkwise.capturing.capture import capture
from sinkwise.core.records import AttentionRecord
from sinkwise.interception import op_names
from tests.capturing.test_capture import check

TABLES = {name: value for name, value in vars(op_names).items() if isinstance(value, set)}
NAMESPACES: tuple[Any, ...] = (Tensor, torch, F, torch._C._special)
BIAS = torch.linspace(-1, 1, 13)
SINK = torch.linspace(-1, 1, 3)[:, None]


def named(name: str) -> Any:
    """The torch function of that name: a method where there is one."""
    return next(getattr(space, name) for space in NAMESPACES if hasattr(space, name))


class Attend(nn.Module):
    """Eager attention; `change` gets the scores, `finish` the output and the log-sum-exp."""

    def __init__(self, change: Any = None, finish: Any = None) -> None:
        super().__init__()
        self.change, self.finish = change, finish

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT * 0.3
        if self.change is not None:
            scores = self.change(scores)
        lse = scores.logsumexp(dim=-1)
        out = scores.softmax(dim=-1) @ x
        return out if self.finish is None else self.finish(out, lse)


def record_of(model: nn.Module) -> AttentionRecord:
    """The one record of a small batch."""
    torch.manual_seed(3)
    records: list[AttentionRecord] = []
    with capture(model, records.append):
        model(torch.randn(2, 3, 13, 8))
    (record,) = records
    check(record)
    return record


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_a_torch_function(table: str) -> None:
    for name in TABLES[table]:
        assert any(hasattr(space, name) for space in NAMESPACES), name


@pytest.mark.parametrize("table", [name for name in TABLES if name not in ("COPY", "RESHAPE")])
def test_in_place_spellings_are_in_the_same_table(table: str) -> None:
    plain = [name for name in TABLES[table] if not name.endswith("_")]
    in_place = {f"{name}_" for name in plain if hasattr(Tensor, f"{name}_")}
    assert in_place <= TABLES[table]


@pytest.mark.parametrize("name", ["add_", "__iadd__", "__setitem__", "detach_"])
def test_functions_that_write(name: str) -> None:
    assert op_names.is_in_place(name, {})
    assert op_names.is_in_place("add", {"out": torch.zeros(1)})


@pytest.mark.parametrize("name", ["add", "__add__", "__getitem__", "__get__"])
def test_functions_that_do_not_write(name: str) -> None:
    assert not op_names.is_in_place(name, {"alpha": 1})


SCORES = {
    **{name: lambda s, f: f(s, BIAS) for name in op_names.ADD | op_names.SUB},
    **{name: lambda s, f: f(s, 0.5) for name in op_names.MUL | op_names.DIV},
    **{name: lambda s, f: 2.0 * f(s / 2.0) for name in op_names.TANH},
    **{name: lambda s, f: f(s, torch.arange(13) > 9, -torch.inf) for name in op_names.FILL},
    **{name: lambda s, f: f(s, torch.tensor(-1e9)) for name in ("max", "maximum")},
    **{name: lambda s, f: f(s, torch.tensor(1e9)) for name in ("min", "minimum")},
    **{name: lambda s, f: f(s, min=-1e9) for name in ("clamp", "clamp_", "clip", "clip_")},
}  # fmt: skip


def test_every_operator_on_scores_is_tried() -> None:
    tables = ("ADD", "SUB", "MUL", "DIV", "TANH", "FILL", "CLAMP")
    assert set(SCORES) == set().union(*(TABLES[table] for table in tables))


@pytest.mark.parametrize("name", sorted(SCORES))
def test_the_score_trace_knows_the_spelling(name: str) -> None:
    record = record_of(Attend(change=lambda s: SCORES[name](s, named(name))))
    assert record.faithful
    assert (record.softcap is not None) == (name in op_names.TANH)


@pytest.mark.parametrize("name", sorted(op_names.SOFTMAX))
def test_every_softmax_makes_a_map(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return named(name)(x @ x.mT, -1) @ x

    assert record_of(Model()).faithful


def share(lse: Tensor) -> Tensor:
    return torch.sigmoid(lse - SINK)


LSE = {
    **{name: lambda out, lse, f: out * torch.sigmoid(f(lse, SINK))[..., None]
       for name in op_names.SUB},
    **{f"log share {name}": lambda out, lse, f: out * f(lse, torch.logaddexp(lse, SINK)).exp()[
       ..., None] for name in op_names.SUB},
    **{name: lambda out, lse, f: f(out, share(lse)[..., None]) for name in op_names.MUL},
    **{f"number {name}": lambda out, lse, f: out * share(f(lse, 2.0) / 2.0)[..., None]
       for name in op_names.MUL},
    **{name: lambda out, lse, f: out * share(f(lse * 2.0, 2.0))[..., None]
       for name in op_names.DIV},
    **{name: lambda out, lse, f: out * f(lse - SINK)[..., None] for name in op_names.SIGMOID},
    **{name: lambda out, lse, f: out * f(lse - torch.logaddexp(lse, SINK))[..., None]
       for name in op_names.EXP},
    **{name: lambda out, lse, f: out * torch.exp(lse - torch.logsumexp(
       f([lse[..., None], SINK[..., None].expand(2, 3, 13, 1)], -1), -1))[..., None]
       for name in op_names.CAT},
    **{name: lambda out, lse, f: out * torch.exp(lse - f(
       torch.cat([lse[..., None], SINK[..., None].expand(2, 3, 13, 1)], -1), -1))[..., None]
       for name in op_names.LOGSUMEXP},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LSE))
def test_the_lse_trace_knows_the_spelling(name: str) -> None:
    function = named(name.split()[-1])
    record = record_of(Attend(finish=lambda out, lse: LSE[name](out, lse, function)))
    assert record.faithful and record.sink_logit is not None
    assert torch.equal(record.sink_logit, SINK.expand(2, 3, 13))
