import pytest

from megatron.config import UserError
from megatron.config.schema import split_shares


def test_split_shares():
    assert split_shares("949,50,1") == [949.0, 50.0, 1.0]
    assert split_shares("1") == [1.0, 0.0, 0.0]
    for split in ("", "1,2,3,4", "0,0", "-1,2", "1 2", "inf,1", "1,nan"):
        with pytest.raises(UserError, match="TRAIN,VALID,TEST"):
            split_shares(split)
