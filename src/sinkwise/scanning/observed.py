"""What a scan keeps of some of its batches."""

from dataclasses import dataclass, field

from sinkwise.core.records import AttentionRecord
from sinkwise.measure.sums import SampleSums

MIN_QUERIES = 2
"""A call with fewer queries (a pooling head, one generated token) is not attention over tokens."""


@dataclass(eq=False)
class Observed:
    """Statistics of consecutive batches, and facts about their calls; appended in batch order."""

    sums: SampleSums = field(default_factory=SampleSums)
    attending: dict[str, None] = field(default_factory=dict)
    """Modules that attended over tokens, in the order of their calls."""
    skipped: set[str] = field(default_factory=set)
    """Modules with calls that are not attention over tokens."""
    silent: dict[str, None] = field(default_factory=dict)
    """Blocks that ran without softmax attention."""
    unfaithful: set[str] = field(default_factory=set)
    """Modules with a record whose fields do not give the whole score."""
    key_lengths: set[int] = field(default_factory=set)
    """Numbers of keys of the calls."""
    layout_length: int | None = None
    """Tokens per sample in the user's own layout."""
    layout_fits: bool = False
    """Whether some call had as many keys as its layout has tokens."""
    calls: dict[str, int] = field(default_factory=lambda: {"screened": 0, "exact": 0})
    """Number of calls by how their candidates were found."""

    def append(self, later: "Observed") -> None:
        """Add the batches that follow."""
        self.sums.append(later.sums)
        self.attending |= later.attending
        self.silent |= later.silent
        self.skipped |= later.skipped
        self.unfaithful |= later.unfaithful
        self.key_lengths |= later.key_lengths
        if later.layout_length is not None:
            self.layout_length = later.layout_length
        self.layout_fits |= later.layout_fits
        for name, count in later.calls.items():
            self.calls[name] += count

    def attends(self, record: AttentionRecord) -> bool:
        """Whether a call is attention over the tokens of the batch."""
        rows, _, queries, _ = record.q.shape
        return queries >= MIN_QUERIES and rows % self.sums.samples == 0

    def note(self, record: AttentionRecord) -> None:
        """Note the module that called."""
        if not self.attends(record):
            self.skipped.add(record.name)
            return
        self.attending.setdefault(record.name)
        if not record.faithful:
            self.unfaithful.add(record.name)
