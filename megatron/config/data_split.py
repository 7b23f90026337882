"""The value of the key `split`."""

import math

from megatron.utils.errors import UserError

_PARTS = 3


def split_shares(split: str) -> list[float]:
    """Shares of training, validation and test, not normalized; those not given are 0.

    Raises:
        UserError: `split` is not one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= _PARTS or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise UserError(f"split {split!r} is not of the form TRAIN,VALID,TEST, for example 949,50,1")
    return shares + [0.0] * (_PARTS - len(shares))
