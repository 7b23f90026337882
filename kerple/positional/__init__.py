"""Positional methods: one file each, registered under their `pos-emb` names, usable in any PyTorch
model.

All modules in this folder are imported here, and the classes they register are exported. To add a
method, add a file with a class decorated by `@register`. The explicit imports below are only for
type checkers and editors.
"""

import importlib
import pkgutil

from kerple.positional.absolute import Learned, NoPositions, Sinusoidal
from kerple.positional.alibi import Alibi, KerplePowerOriginal
from kerple.positional.base import (
    Bias,
    Chunk,
    ModelShape,
    PositionalMethod,
    PositionsExceeded,
    ScoreModifier,
    TableJacobian,
)
from kerple.positional.cope import Cope
from kerple.positional.dape import (
    Dape,
    DapeAlibi,
    DapeFire,
    DapeKerple,
    DapeRotary,
    DapeV2,
    DapeV2Alibi,
    DapeV2Fire,
    DapeV2Kerple,
    DapeV2Rotary,
)
from kerple.positional.decay import Cable, Forgetting, append_decay, decay_sums
from kerple.positional.fire import Fire
from kerple.positional.kernels import is_cpd
from kerple.positional.kerple import (
    KerpleBiasWeight,
    KerpleGaussian,
    KerpleGaussian3,
    KerpleLog,
    KerpleLog3,
    KerpleLogRotary,
    KerplePower,
    KerpleSquareWeight,
    KerpleSum,
    KerpleWeight,
)
from kerple.positional.modules import outermost, project
from kerple.positional.registry import (
    PluginError,
    build,
    build_layers,
    load_plugin,
    method_class,
    primary_names,
    register,
    registered_names,
)
from kerple.positional.rotary import PRope, Rotary, Rotation, XPos
from kerple.positional.sandwich import Sandwich
from kerple.positional.stick_breaking import StickBreaking
from kerple.positional.t5 import T5
from kerple.positional.transformer_xl import TransformerXL
from kerple.positional.wrappers import OPTIONS as RANDOM_OPTIONS
from kerple.positional.wrappers import PerLayer

__all__ = [
    "RANDOM_OPTIONS",
    "T5",
    "Alibi",
    "Bias",
    "Cable",
    "Chunk",
    "Cope",
    "Dape",
    "DapeAlibi",
    "DapeFire",
    "DapeKerple",
    "DapeRotary",
    "DapeV2",
    "DapeV2Alibi",
    "DapeV2Fire",
    "DapeV2Kerple",
    "DapeV2Rotary",
    "Fire",
    "Forgetting",
    "KerpleBiasWeight",
    "KerpleGaussian",
    "KerpleGaussian3",
    "KerpleLog",
    "KerpleLog3",
    "KerpleLogRotary",
    "KerplePower",
    "KerplePowerOriginal",
    "KerpleSquareWeight",
    "KerpleSum",
    "KerpleWeight",
    "Learned",
    "ModelShape",
    "NoPositions",
    "PRope",
    "PerLayer",
    "PluginError",
    "PositionalMethod",
    "PositionsExceeded",
    "Rotary",
    "Rotation",
    "Sandwich",
    "ScoreModifier",
    "Sinusoidal",
    "StickBreaking",
    "TableJacobian",
    "TransformerXL",
    "XPos",
    "append_decay",
    "build",
    "build_layers",
    "decay_sums",
    "is_cpd",
    "load_plugin",
    "method_class",
    "outermost",
    "primary_names",
    "project",
    "register",
    "registered_names",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _name in primary_names():
    _method = method_class(_name)
    if _method.__name__ not in __all__:
        globals()[_method.__name__] = _method
        __all__.append(_method.__name__)
