"""The event rules as loops over every key and every query.

Each rule returns a list of (sample, head, key): samples and heads in order and, within a head, the
keys by falling received attention. Every key that satisfies the rule is an event.
"""

import numpy as np

from .arrays import array
from .received import received as received_attention


def _events(weights, visible, counted, counted_key, holds, least):
    """Keys for which `holds(column, received)`, past the guards that all rules share.

    `column` lists A_is over the counted queries that see s. `least` gives, from the number of
    counted queries of the sample, how many of them must see s.
    """
    weights, visible = array(weights), array(visible)
    B, H, Q, K = weights.shape
    counted = np.ones((B, Q), dtype=bool) if counted is None else array(counted)
    if counted_key is None:
        # Padding is no key either; the two axes are the same tokens only when they are as long.
        counted_key = counted if Q == K else np.ones((B, K), dtype=bool)
    counted_key = array(counted_key)
    statistics = received_attention(weights, visible, counted)
    events = []
    for b in range(B):
        queries = sum(1 for i in range(Q) if counted[b, i])
        for h in range(H):
            found = []
            for s in range(K):
                column = []
                for i in range(Q):
                    if counted[b, i] and visible[b, h, i, s]:
                        column.append(weights[b, h, i, s])
                if not counted_key[b, s] or not column or len(column) < least(queries):
                    continue
                value = statistics.received[b, h, s]
                if value < 2 * statistics.uniform[b, h, s]:
                    continue
                if holds(column, value):
                    found.append((value, s))
            found.sort(key=lambda pair: (-pair[0], pair[1]))
            events += [(b, h, s) for _, s in found]
    return events


def relaxed(weights, visible, counted=None, *, share=0.9, attention=0.5, counted_key=None):
    """At least `share` of the counted queries that see s give it at least `attention`."""

    def holds(column, _):
        return sum(1 for a in column if a >= attention) / len(column) >= share

    return _events(weights, visible, counted, counted_key, holds, lambda n: min(32, n))


def mean(weights, visible, counted=None, *, threshold=0.3, min_queries=32, counted_key=None):
    """Received attention at least `threshold`, at a key that `min_queries` counted queries see."""

    def holds(_, value):
        return value >= threshold

    return _events(weights, visible, counted, counted_key, holds, lambda _: min_queries)


def literal(weights, visible, counted=None, *, epsilon, counted_key=None):
    """Every counted query that sees s gives it at least 1 - epsilon."""

    def holds(column, _):
        return all(a >= 1 - epsilon for a in column)

    return _events(weights, visible, counted, counted_key, holds, lambda n: min(32, n))
