"""What a reader of a scan must know beside its numbers, a line each."""

from typing import Any


def notes(meta: dict[str, Any]) -> list[str]:
    """What was estimated, what is raw, and what was left out; empty where nothing was."""
    found = []
    screen = meta.get("screen")
    if screen is not None:
        calls = screen["calls"]
        found.append(
            f"Screened: {calls['screened']} of {sum(calls.values())} attention calls by "
            f"{screen['rows']} queries (causal: {screen['stratum_rows']} a stratum), "
            f"{calls['exact']} exactly. Every reported sink is exact; a sink is missed with "
            f"probability <= {screen['miss']:g}."
        )
    told = {
        "sites_measured": "Weights of {} were measured, as no layout knows them.",
        "output_unknown": "The output projection of {} is unknown: only raw value ratios there.",
        "blocks_without_softmax_attention": "No softmax attention in {}: nothing measured there.",
        "calls_skipped": "Calls of {} are no attention over tokens: left out.",
    }
    found += [words.format(_some(meta[key])) for key, words in told.items() if meta.get(key)]
    return found


def _some(names: list[str]) -> str:
    first = names[0] or "the model itself"
    return first if len(names) == 1 else f"{len(names)} modules ({first}, ...)"
