"""The authors' forms of both tasks, with the settings of their code."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.paper_models import PositionalAttention, PreNormTransformer
from sinkwise.synthetic.task import Task, TaskBatch


@dataclass(frozen=True, kw_only=True)
class ActiveDamping(Task):
    r"""The base of the authors' two forms: active tokens are damped, all others stay as they are.

    $$y_i = \gamma x_i \text{ if } \langle x_i, v \rangle > \lambda, \text{ else } x_i$$

    with $x_i \sim N(0, I)$ and a fixed unit vector $v$; $\lambda$ is `threshold`, $\gamma$ is
    `gamma`. The head must cancel part of an active token's residual. Position 0 has no content and
    no loss.
    """

    summary: ClassVar[str] = (
        "A token is active if ⟨x, v⟩ exceeds a threshold, for a fixed unit vector v. An active "
        "token must become γx, so the head must cancel part of its residual; all other tokens must "
        "stay as they are, so for them the head must do nothing."
    )

    dim: int = 64
    length: int = 32
    batch: int = 1024
    steps: int = 2000
    decay: bool = False
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    threshold: float = 0.0
    """Tokens with a larger ⟨x, v⟩ are active; at 4 or more almost none is."""
    gamma: float = 0.0
    """Factor on an active token; at 1 there is nothing to do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self)

    @property
    def num_unscored(self) -> int:
        return 1

    @property
    def nop_share(self) -> float:
        """Expected share of queries whose update must be zero: P(⟨x, v⟩ ≤ threshold)."""
        return 0.5 * (1 + math.erf(self.threshold / math.sqrt(2)))

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The unit vector `direction`, v in the formula."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        return {"direction": F.normalize(torch.randn(self.dim, generator=generator), dim=0)}

    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """Inputs, targets, and which tokens must stay as they are (never position 0)."""
        fixed = self.fixed() if fixed is None else fixed
        content = torch.randn(count, self.length, self.dim, generator=generator)
        nop = content @ fixed["direction"] <= self.threshold
        targets = torch.where(nop[..., None], content, self.gamma * content)
        inputs, targets = (F.pad(x, (0, 0, 1, 0)) for x in (content, targets))
        return TaskBatch(inputs, targets, F.pad(nop, (1, 0)))


@dataclass(frozen=True, kw_only=True)
class CausalDamping(ActiveDamping):
    r"""The authors' form for causal interventions, with a plain residual: $y = x + W_O A V$.

    Their result: the null token receives 0.993 of the NOP queries' attention and 0.012 of the
    active queries', its projected value has norm 0.063 against 7.87, and the error is 0.0187.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105, and its authors' code.
    """

    def model(self, generator: torch.Generator) -> PositionalAttention:
        """The untrained model: one head on x + learned positions, added to x."""
        return PositionalAttention(self.dim, self.length + 1, gate=self.gate, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SweepDamping(ActiveDamping):
    r"""The authors' form for sweeps over `threshold` and `gamma`: the residual is normalised.

    $$y = h + W_O A V, \quad h = \text{LayerNorm}(x + \text{position})$$

    Their result: at threshold 0 and gamma 0, position 0 receives 0.514 of the attention, the share
    of NOP queries; with nothing to damp (threshold 10) it receives 1/32.

    Reference: as for `CausalDamping`.
    """

    def model(self, generator: torch.Generator) -> PositionalAttention:
        """The untrained model: one head on h = LayerNorm(x + positions), added to h."""
        return PositionalAttention(
            self.dim, self.length + 1, gate=self.gate, normed=True, generator=generator
        )


@dataclass(frozen=True, kw_only=True)
class PreNormBroadcast(Task):
    r"""The authors' form: two pre-norm blocks with MLPs, and no marker.

    $$y_i = x_i + R x_p, \quad p = \arg\max_j \langle x_j, u \rangle$$

    with $x_i \sim N(0, I)$, a fixed unit vector $u$ and a fixed orthogonal matrix $R$. Nothing
    marks $p$: the queries must find a maximum. Their result at seed 0: error 0.048; $p$ is the
    most attended token in 95 % (layer 0) and 98 % (layer 1) of the samples; the projected value
    ratios are 0.98 and 1.04. Over seeds the error ranges from 0.05 to 0.3.

    Reference: as for `Broadcast`, and its authors' code.
    """

    summary: ClassVar[str] = (
        "The token p with the largest ⟨x, u⟩, for a fixed unit vector u, must send its payload to "
        "every token: yᵢ = xᵢ + R xₚ. Nothing marks p, so the queries must find a maximum."
    )

    dim: int = 64
    length: int = 32
    batch: int = 1024
    steps: int = 6000
    decay: bool = False
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    num_layers: int = 2
    """Layers of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self)

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The unit vector `direction`, u in the formula, and the orthogonal matrix `mix`, R."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        direction = F.normalize(torch.randn(self.dim, generator=generator), dim=0)
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        return {"direction": direction, "mix": mix}

    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """Inputs, targets, and the position p of each sample's largest ⟨x, u⟩."""
        fixed = self.fixed() if fixed is None else fixed
        inputs = torch.randn(count, self.length, self.dim, generator=generator)
        source = (inputs @ fixed["direction"]).argmax(1)
        payload = inputs[torch.arange(count), source] @ fixed["mix"].T
        return TaskBatch(inputs, inputs + payload[:, None], source)

    def sink(self, batch: TaskBatch) -> Int[Tensor, " batch"]:
        """Position p."""
        return batch.marks

    def idle(self, batch: TaskBatch) -> Bool[Tensor, "batch token"]:
        """No query: every token needs the payload."""
        return torch.zeros(batch.inputs.shape[:2], dtype=torch.bool)

    def model(self, generator: torch.Generator) -> PreNormTransformer:
        """The untrained model: `num_layers` pre-norm blocks of one head."""
        return PreNormTransformer(self.dim, self.num_layers, gate=self.gate, generator=generator)


def _check_options(task: Task) -> None:
    """Raises InputError for options that the authors' forms do not have."""
    if task.num_registers:
        raise InputError(f"num_registers={task.num_registers} must be 0 in the authors' forms")
    if task.softmax != "vanilla" or task.pathway:
        raise InputError(
            f"softmax={task.softmax!r} and pathway={task.pathway} must be 'vanilla' and False in "
            "the authors' forms"
        )
