"""Helpers of the experiments' tests."""

from dataclasses import replace

from sinkwise.synthetic.forms import experiment


def shortened(kind, steps=40, **names):
    """An experiment by name with fewer training steps."""
    chosen = experiment(kind, **names)
    return replace(chosen, task=replace(chosen.task, steps=steps))
