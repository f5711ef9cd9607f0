"""Two small models with the module layouts of facebookresearch/dinov2 and dinov3, reimplemented."""

dependencies = ["torch"]


def dinov2_tiny(pretrained=True, **given):
    """DINOv2's layout at random weights."""
    from dinov2.models import DinoVisionTransformer

    return DinoVisionTransformer(**given)


def dinov3_tiny(pretrained=True, **given):
    """DINOv3's layout; its key biases are masked by NaN until weights are loaded."""
    from dinov3.models import DinoVisionTransformer

    model = DinoVisionTransformer(**given)
    if pretrained:
        model.load_masks()
    return model


def no_module(pretrained=True):
    """An entry point that returns no module."""
    return {"weights": 3}


def broken(pretrained=True):
    """An entry point that fails."""
    raise OSError("weights are nowhere")
