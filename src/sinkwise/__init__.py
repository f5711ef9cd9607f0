"""sinkwise: find attention sinks, tell which mechanism each one is, and what answers it.

Names are imported when they are first used: `import sinkwise` itself loads no torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load": "mitigations.loading",
    "text": "data.text",
    "images": "data.images",
    "scan": "scanning",
    "scan_share": "scanning",
    "Scan": "results",
    "capture": "capturing",
    "attention_sites": "hosts.sites",
    "token_layout": "hosts.layouts",
    "AttentionMask": "records",
    "AttentionRecord": "records",
    "AttentionSite": "records",
    "TokenLayout": "layout",
    "Rules": "rules",
    "RelaxedRule": "rules",
    "MeanRule": "rules",
    "LiteralRule": "rules",
    "MechanismRule": "rules",
    "HeadRule": "rules",
    "ModelRule": "rules",
    "Screen": "attention.screen",
    "Steps": "ragged",
    "mitigate": "mitigations.applying",
    "mitigated": "mitigations.applying",
    "Mitigated": "mitigations.applying",
    "Gate": "mitigations.gate",
    "SinkLogits": "mitigations.sink_logits",
    "Registers": "mitigations.registers",
    "RegisterNeurons": "mitigations.neurons",
    "find_register_neurons": "mitigations.finding",
    "check_model": "conformance",
    "Retention": "retention",
    "SinkCache": "streaming.cache",
    "stream": "streaming.loop",
    "StreamedToken": "streaming.loop",
    "Verdict": "verdict",
    "GatedAttention": "nn.attention",
    "OutputGate": "nn.gate",
    "SoftmaxOne": "nn.softmax_one",
    "GlobalPathway": "nn.global_pathway",
    "common_mode_penalty": "nn.global_pathway",
    "sink_attention": "nn.sink_logit",
    "SinkwiseError": "errors",
    "InputError": "errors",
    "CaptureError": "errors",
}

__all__ = sorted([*_EXPORTS, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'sinkwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sinkwise.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
