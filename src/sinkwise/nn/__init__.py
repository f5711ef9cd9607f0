"""Modules for training code that act on sinks: gates, registers, sink logits and tokens, masks."""

from sinkwise.nn.attention import GatedAttention
from sinkwise.nn.gate import OutputGate
from sinkwise.nn.gate_formats import from_timm, join_query_gate, split_query_gate, to_timm
from sinkwise.nn.global_pathway import GlobalPathway, common_mode_penalty
from sinkwise.nn.masks import sink_mask, sink_mask_function
from sinkwise.nn.registers import RegisterTokens
from sinkwise.nn.sink_logit import SinkLogitAttention, rescale, sink_attention
from sinkwise.nn.sink_token import SinkToken
from sinkwise.nn.softmax import SoftmaxOne, softmax_one

__all__ = [
    "GatedAttention",
    "GlobalPathway",
    "OutputGate",
    "RegisterTokens",
    "SinkLogitAttention",
    "SinkToken",
    "SoftmaxOne",
    "common_mode_penalty",
    "from_timm",
    "join_query_gate",
    "rescale",
    "sink_attention",
    "sink_mask",
    "sink_mask_function",
    "softmax_one",
    "split_query_gate",
    "to_timm",
]
