"""The names by which torch functions reach a torch function mode, grouped by what they compute."""

from typing import Any

ADD = {"add", "add_", "__add__", "__radd__", "__iadd__"}
SUB = {"sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__"}
MUL = {"mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__"}
DIV = {
    "div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__div__", "__idiv__",
    "__truediv__", "__itruediv__",
}  # fmt: skip
EXP = {"exp", "exp_"}
SIGMOID = {"sigmoid", "sigmoid_", "special_expit"}
TANH = {"tanh", "tanh_"}
CLAMP = {"max", "min", "maximum", "minimum", "clamp", "clamp_", "clip", "clip_"}
FILL = {"masked_fill", "masked_fill_"}
SOFTMAX = {"softmax", "special_softmax"}
LOGSUMEXP = {"logsumexp", "special_logsumexp"}
CAT = {"cat", "concat", "concatenate"}
NORM = {"layer_norm", "rms_norm"}
DROPOUT = {"dropout", "dropout_", "alpha_dropout"}
COPY = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach",
    "detach_", "requires_grad_",
}  # fmt: skip
"""The same values, in another dtype, memory or graph."""
RESHAPE = {
    "view", "view_as", "reshape", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten",
    "expand", "expand_as",
}  # fmt: skip
SWAP = {"transpose", "transpose_", "swapaxes", "swapaxes_", "swapdims", "swapdims_"}
SLICE = {"__getitem__", "narrow"}
PROPERTY = "__get__"
"""Reading an attribute of a tensor: `mT`, `T`, `data`."""


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the function writes into one of its arguments."""
    dunder = name.startswith("__") and name.endswith("__")
    if dunder:
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_") or "out" in kwargs
