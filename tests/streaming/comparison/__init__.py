"""The text that these tests compare methods on."""

from sinkwise.streaming.comparison.methods import TIMED_STEPS

LENGTH, CACHE = 60, 9
SCORED = LENGTH - TIMED_STEPS
