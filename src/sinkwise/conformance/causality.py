"""The check of causal order: which calls are causal, and are their maps lower triangular?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sinkwise.conformance.comparing import largest, location, require, sees_a_key
from sinkwise.conformance.errors import Skip
from sinkwise.conformance.observation import Observation, observe
from sinkwise.core.records import AttentionRecord

MAX_CHANGE = 1e-6
"""Relative change of an output that counts as none."""


def check_causality(observed: Observation) -> str:
    """In causal calls, no weight is above the diagonal.

    A call is causal if it has as many queries as keys and if, with the last token of a sequence
    changed, its last key changes and its earlier outputs do not. The last token of each input
    sequence is changed in turn.
    """
    causal: set[int] = set()
    tried = False
    for inputs in _with_another_last_token(observed.inputs):
        tried = True
        other = observe(observed.model, inputs)
        pairs = enumerate(zip(observed.records, other.records, strict=True))
        causal |= {index for index, (one, two) in pairs if _is_causal(observed, one, two)}
    if not tried:
        raise Skip("the inputs contain no sequence of tokens")
    for index in sorted(causal):
        record = observed.records[index]
        again = observed.recomputed(record).weights
        for weights in (record.weights, again if record.faithful else None):
            if weights is None:
                continue
            # A padded query may see no key, and then its weights mean nothing.
            top = largest(weights.double().triu(1)[sees_a_key(record, again)].abs())
            require(top == 0, f"{location(record)}: a weight above the diagonal is {top:.3g}")
    return f"{len(causal)} of {len(observed.records)} calls are causal"


def _is_causal(observed: Observation, one: AttentionRecord, two: AttentionRecord) -> bool:
    if one.q.shape != two.q.shape or one.k.shape != two.k.shape or one.q.shape[2] < 2:
        return False
    if one.q.shape[2] != one.k.shape[2]:
        return False
    changed = (one.k != two.k).any(dim=-1).any(dim=1)  # batch key
    last = changed[:, -1] & ~changed[:, :-1].any(dim=-1)
    again = observed.recomputed(one).weights
    weights = again if one.weights is None else one.weights
    last &= (weights[:, :, -1, -1] > 0).all(dim=1)  # no evidence if the last key is padding
    sees = sees_a_key(one, again)[last][:, :, :-1]  # nor from padded queries
    before, after = (record.out[last][:, :, :-1].double()[sees] for record in (one, two))
    if not before.numel():
        return False
    return largest((before - after).abs()) <= MAX_CHANGE * largest(before.abs())


def _with_another_last_token(inputs: Any) -> Iterator[Any]:
    """The inputs with the last token of one sequence changed, for each sequence in turn."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    items = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    seen: set[int] = set()
    for name, value in items:
        if not isinstance(value, Tensor) or id(value) in seen or "mask" in str(name):
            continue
        seen.add(id(value))
        other = _changed(value)
        if other is None:
            continue
        if isinstance(inputs, dict):
            yield {key: other if given is value else given for key, given in inputs.items()}
        else:
            yield tuple(other if given is value else given for given in inputs)


def _changed(value: Tensor) -> Tensor | None:
    """Token ids or embeddings with a different last token; None for anything else."""
    if value.dim() == 2 and value.dtype == torch.int64 and int(value.max()) > 1:
        ids = value.clone()
        ids[:, -1] = torch.where(ids[:, -1] == 5, 6, 5)
        return ids
    if value.dim() == 3 and value.is_floating_point():
        tokens = value.clone()
        tokens[:, -1] = tokens[:, -1].flip(-1) + 0.5
        return tokens
    return None
