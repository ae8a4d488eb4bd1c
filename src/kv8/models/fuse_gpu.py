"""Lets Triton kernels compute what lies between the products of a model on a GPU, proven first.

As `kv8.models.fuse` does on a CPU: decoder layers of the usual structure are replaced whole, each
kind after a float32 copy of one gave the same through its own code and through the kernels; norms
elsewhere one by one. All else stays transformers' own code.
"""

import logging
import sys

from torch import nn

from kv8.attention.checks import FLOAT_DTYPES
from kv8.models.decoder_parts import read_norm
from kv8.models.fuse import find_candidates, proven_layers
from kv8.models.fusion import Fusion
from kv8.models.fusion_proof import MakeForward
from kv8.models.hook import HookedModel
from kv8.models.interface import BINDING

logger = logging.getLogger(__name__)

_PROBE_ROWS = 5  # the kernels do the same for any number


def fuse_gpu_model(model: HookedModel) -> None:
    """Replace what can be replaced in ``model``, and say in the log what was.

    Does nothing where Triton is not installed.
    """
    if model.dtype not in FLOAT_DTYPES:
        return
    try:
        from kv8.models.fused_gpu_layer import FusedGpuLayer, FusedGpuNorm
    except ImportError as error:
        logger.debug("The model computes as transformers wrote it: %s", error)
        return
    fusion = Fusion()
    fusion.most_native = sys.maxsize  # torch makes the products: no number is better
    taken: set[nn.Module] = set()
    candidates = find_candidates(model)
    make_forward: MakeForward = lambda parts, binding, call, rotates: (  # noqa: E731
        FusedGpuLayer(parts, binding, call, rotates=rotates).forward
    )
    for candidate, probe, rotates in proven_layers(model, candidates, make_forward, (_PROBE_ROWS,)):
        binding = getattr(candidate.parts.attention, BINDING)
        layer = FusedGpuLayer(candidate.parts, binding, probe.call, rotates=rotates)
        fusion.replace(candidate.layer, layer.forward)
        taken.update(candidate.layer.modules())
    num_layers, num_norms = len({c.layer for c in candidates} & taken), 0
    for module in model.module.modules():
        norm = None if module in taken else read_norm(module)
        if norm is not None:
            fusion.replace(module, FusedGpuNorm(norm).forward)
            num_norms += 1
    fusion.enable()
    model.fusion = fusion
    logger.info(
        "Triton kernels compute what lies between the products of %d of %d decoder layers, and %d "
        "other norms",
        num_layers,
        len(model.attention_modules),
        num_norms,
    )
