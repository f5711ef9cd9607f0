"""sinkwise: find attention sinks, tell which mechanism causes each one, and fix them.

Names are imported on first use: `import sinkwise` itself does not load torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load": "mitigations.loading",
    "text": "data.text",
    "images": "data.images",
    "scan": "scanning.scan",
    "scan_share": "scanning.scan",
    "Scan": "scanning.result",
    "capture": "capturing.capture",
    "attention_sites": "hosts.sites",
    "token_layout": "hosts.layouts",
    "AttentionMask": "core.records",
    "AttentionRecord": "core.records",
    "AttentionSite": "core.records",
    "TokenLayout": "core.layout",
    "Rules": "diagnosis.rules",
    "RelaxedRule": "diagnosis.rules",
    "MeanRule": "diagnosis.rules",
    "LiteralRule": "diagnosis.rules",
    "MechanismRule": "diagnosis.rules",
    "HeadRule": "diagnosis.rules",
    "ModelRule": "diagnosis.rules",
    "Screen": "attention.screen",
    "Steps": "capturing.generation",
    "mitigate": "mitigations.applying",
    "mitigated": "mitigations.applying",
    "Mitigated": "mitigations.applying",
    "Gate": "mitigations.gate",
    "SinkLogits": "mitigations.sink_logits",
    "Registers": "mitigations.registers",
    "RegisterNeurons": "mitigations.register_neurons",
    "find_register_neurons": "mitigations.neuron_search",
    "check_model": "conformance",
    "Retention": "core.retention",
    "SinkCache": "streaming.cache",
    "stream": "streaming.loop",
    "StreamedToken": "streaming.loop",
    "Verdict": "diagnosis.verdict",
    "GatedAttention": "nn.attention",
    "OutputGate": "nn.gate",
    "SoftmaxOne": "nn.softmax",
    "GlobalPathway": "nn.global_pathway",
    "common_mode_penalty": "nn.global_pathway",
    "RegisterTokens": "nn.registers",
    "SinkLogitAttention": "nn.sink_logit",
    "sink_attention": "nn.sink_logit",
    "SinkToken": "nn.sink_token",
    "sink_mask": "nn.masks",
    "SinkwiseError": "errors",
    "InputError": "errors",
    "CaptureError": "errors",
}

__all__ = sorted([*_EXPORTS, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "nn":  # so that `sinkwise.nn.from_timm` needs no import of its own
        return importlib.import_module("sinkwise.nn")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'sinkwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sinkwise.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
