"""The methods that a comparison runs on a text, and how long the text must be for them."""

from dataclasses import dataclass

from sinkwise.errors import InputError

TIMED_STEPS = 16
"""Tokens at the end of a text that are not scored but used to time single steps."""


@dataclass(frozen=True)
class Method:
    """A way to keep the past of an endless text."""

    kind: str
    """`dense`, `window`, `recompute` or `sinks`."""
    cache_length: int
    """Number of keys that a token sees, itself included; no limit for `dense`."""
    num_sink_tokens: int = 0
    """How many of them are the first tokens of the text."""
    restart_every: int = 0
    """Number of tokens after which it restarts with an empty cache; 0: never. Only tokens at least
    2 · `cache_length` after a restart are scored then."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.kind == "sinks":
            window = self.cache_length - self.num_sink_tokens
            restarted = ", restarted" if self.restart_every else ""
            return f"{self.num_sink_tokens} + {window}{restarted}"
        return {"window": f"0 + {self.cache_length}"}.get(self.kind, self.kind)


def methods(cache_length: int, sinks: list[int], restart_every: int = 0) -> list[Method]:
    """Dense, window, recomputation, and a sink cache per number of sinks, with the same number of
    keys. With `restart_every`, the one with the most sinks is added once more, restarted: a cache
    that does not get worse over time is as good as that.

    Raises InputError for a number of sinks that leaves no window, and for restarts so frequent
    that they leave nothing to score.
    """
    for count in sinks:
        if not 0 <= count < cache_length:
            raise InputError(
                f"num_sink_tokens={count} must be from 0 to {cache_length - 1}, to leave a window "
                f"in a cache of {cache_length} keys"
            )
    if restart_every and restart_every <= 2 * cache_length:
        raise InputError(
            f"restart_every={restart_every} must be 0 (never) or more than {2 * cache_length}, "
            f"twice the {cache_length} keys of a cache"
        )
    if restart_every and not any(sinks):
        raise InputError(
            f"restart_every={restart_every} must be 0 (never) if no number of sinks is above 0: it "
            "restarts a sink cache"
        )
    out = [Method(kind, cache_length) for kind in ("dense", "window", "recompute")]
    out += [Method("sinks", cache_length, count) for count in sinks if count]
    if restart_every:
        out.append(Method("sinks", cache_length, max(sinks), restart_every))
    return out


def check_length(count: int, method: Method) -> None:
    """Raise InputError if a text of `count` tokens is too short for the method."""
    if count <= method.cache_length + TIMED_STEPS:
        raise InputError(
            f"the text has {count} tokens; it must have more than "
            f"{method.cache_length + TIMED_STEPS}: the cache's {method.cache_length} and "
            f"{TIMED_STEPS} that are timed"
        )
    if method.restart_every and count <= method.restart_every + TIMED_STEPS:
        raise InputError(
            f"restart_every={method.restart_every} must be less than "
            f"{count - TIMED_STEPS}, or a text of {count} tokens has no restart"
        )
