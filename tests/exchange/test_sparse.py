"""How sparse gradients are packed."""

from __future__ import annotations

import numpy as np

from tfps.exchange.sparse import pack_sparse, unpack_sparse


def test_sparse_parts_come_back_joined_in_rank_order() -> None:
    parts = []
    for rank in range(3):
        indices, data = np.full(rank, rank, np.int64), np.full(2 * rank, rank, np.float32)
        parts.append(pack_sparse(indices.tobytes(), data.tobytes()))
    indices, data = unpack_sparse(parts)
    assert indices.view(np.int64).tolist() == [1, 2, 2]
    assert data.view(np.float32).tolist() == [1, 1, 2, 2, 2, 2]


def test_a_rank_without_a_part_contributes_no_rows() -> None:
    one = pack_sparse(np.array([5], np.int64).tobytes(), b"\x01\x02\x03\x04")
    indices, data = unpack_sparse([b"", one])
    assert indices.view(np.int64).tolist() == [5]
    assert data.tolist() == [1, 2, 3, 4]
    assert [array.size for array in unpack_sparse([b"", b""])] == [0, 0]
