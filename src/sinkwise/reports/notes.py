"""Notes on how the numbers of a scan were measured, one line each."""

from typing import Any


def notes(meta: dict[str, Any]) -> list[str]:
    """Notes on estimates, raw value ratios and omissions; empty if there are none."""
    lines = []
    screen = meta.get("screen")
    if screen is not None:
        calls = screen["calls"]
        lines.append(
            f"Of {sum(calls.values())} attention calls, {calls['exact']} were measured in full and "
            f"{calls['screened']} were screened with {screen['rows']} sampled queries (causal "
            f"calls: {screen['stratum_rows']} per stratum). Every reported sink is exact; "
            f"the probability of missing a given sink is at most {screen['miss']:g}."
        )
    sentences = {
        "sites_measured": "Unknown weight layout in {}: weights per head come from the Jacobian.",
        "output_unknown": "Unknown output projection in {}: its value ratios are raw.",
        "blocks_without_softmax_attention": "No softmax attention in {}: not measured.",
        "calls_skipped": "Calls that are not attention over tokens in {}: left out.",
    }
    lines += [
        sentence.format(_summary(meta[key])) for key, sentence in sentences.items() if meta.get(key)
    ]
    return lines


def _summary(names: list[str]) -> str:
    first = names[0] or "the model itself"
    return first if len(names) == 1 else f"{len(names)} modules ({first}, ...)"
