from megatron.config import Config
from megatron.config.schema.data import split_shares
from tests.support.errors import assert_rejected


def test_split_shares():
    assert split_shares("949,50,1") == [949.0, 50.0, 1.0]
    assert split_shares("1") == [1.0, 0.0, 0.0]
    for split in ("", "1,2,3,4", "0,0", "-1,2", "1 2", "inf,1", "1,nan"):
        assert_rejected("TRAIN,VALID,TEST", split_shares, split)


def test_a_data_path_beside_a_list_is_a_notice(flat):
    config = Config.from_flat({**flat, "data-path": "a", "valid-data-paths": ["b"]})
    assert config.notices == ("data_path has no effect, because valid_data_paths is set",)
