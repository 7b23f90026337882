"""Positional methods: one file each, registered under their `pos-emb` names, usable in any PyTorch model.

Every module of this folder is imported here, so a new file with a `@register`ed class is all it takes to add a method.
"""

import importlib
import pkgutil

from kerple.positional.base import ModelShape, PositionalMethod, PositionsExceeded, TableJacobian, outermost
from kerple.positional.registry import (
    build,
    load_plugin,
    method_class,
    primary_names,
    register,
    registered_names,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from kerple.positional.absolute import Learned, Sinusoidal  # noqa: E402
from kerple.positional.alibi import Alibi, KerplePowerOriginal  # noqa: E402
from kerple.positional.cope import Cope  # noqa: E402
from kerple.positional.dape import Dape, DapeAlibi, DapeFire, DapeKerple  # noqa: E402
from kerple.positional.dape_v2 import DapeV2, DapeV2Alibi, DapeV2Fire, DapeV2Kerple  # noqa: E402
from kerple.positional.fire import Fire  # noqa: E402
from kerple.positional.kernels import is_cpd, lemma_constant  # noqa: E402
from kerple.positional.kerple import (  # noqa: E402
    KerpleBiasWeight,
    KerpleGaussian,
    KerpleGaussian3,
    KerpleLog,
    KerpleLog3,
    KerplePower,
    KerpleSquareWeight,
    KerpleSum,
    KerpleWeight,
)
from kerple.positional.none import NoPositions  # noqa: E402
from kerple.positional.rotary import Rotary  # noqa: E402
from kerple.positional.sandwich import Sandwich  # noqa: E402
from kerple.positional.t5 import T5  # noqa: E402
from kerple.positional.transformer_xl import TransformerXL  # noqa: E402
from kerple.positional.xpos import XPos  # noqa: E402

__all__ = [
    "T5",
    "Alibi",
    "Cope",
    "Dape",
    "DapeAlibi",
    "DapeFire",
    "DapeKerple",
    "DapeV2",
    "DapeV2Alibi",
    "DapeV2Fire",
    "DapeV2Kerple",
    "Fire",
    "KerpleBiasWeight",
    "KerpleGaussian",
    "KerpleGaussian3",
    "KerpleLog",
    "KerpleLog3",
    "KerplePower",
    "KerplePowerOriginal",
    "KerpleSquareWeight",
    "KerpleSum",
    "KerpleWeight",
    "Learned",
    "ModelShape",
    "NoPositions",
    "PositionalMethod",
    "PositionsExceeded",
    "Rotary",
    "Sandwich",
    "Sinusoidal",
    "TableJacobian",
    "TransformerXL",
    "XPos",
    "build",
    "is_cpd",
    "lemma_constant",
    "load_plugin",
    "method_class",
    "outermost",
    "primary_names",
    "register",
    "registered_names",
]
