"""The thresholds of the mechanism rule, as charts show them."""

from sinkwise.diagnosis.rules import MechanismRule


def value_ratio_thresholds(rule: MechanismRule) -> dict[str, float]:
    """Named thresholds for a chart of value ratios."""
    return {"NOP": rule.nop_ratio, "broadcast": rule.broadcast_ratio}
