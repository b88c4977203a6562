"""A pserver that benchmarks fill and ask: pserver.py HOST WORKERS PLACE PSERVERS.

Says where it listens, then answers each line of its stdin with a line of JSON: `fill JSON` puts all rows of a `Work`
that this pserver owns into its only table, `figures` has totals since it began, once the table is declared.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from tfps.config import Security
from tfps.malloc import tune_malloc
from tfps.pserver.server import ParameterServer
from tfps.pserver.table_slice import TableSlice
from tfps.tables.table import Chunk
from tfps.types import Json
from tfps.wire.shared_memory import resident_bytes
from tools.tables.work import Work, say

_FILLED = 2**18  # rows at a time


def main() -> None:
    """The program."""
    host, workers, place, count = sys.argv[1], *map(int, sys.argv[2:5])
    tune_malloc(one_arena=True)  # as `tfps_pserver` does
    insecure = Security(insecure=True) if host != "127.0.0.1" else Security()
    server = ParameterServer(host, 0, workers=workers, security=insecure)
    print(server.address, flush=True)
    for line in sys.stdin:
        what, _, argument = line.strip().partition(" ")
        own = _table(server)
        if what == "fill" and own is not None:
            say(_fill(own, Work.from_json(argument), place, count))
        else:
            say({} if own is None else _figures(own, server))
    server.stop()


def _table(server: ParameterServer) -> TableSlice | None:
    """The only table of the job, once it is declared."""
    return next((item for _, item in server._job._state.shard.slices() if isinstance(item, TableSlice)), None)


def _fill(own: TableSlice, work: Work, place: int, count: int) -> dict[str, Json]:
    """Rows that a restore puts there: no copy of them goes over the wire, and none is made by its initial values."""
    began_s, spec = time.monotonic(), own.table.spec
    slots = [value for _, value in spec.update.slots]
    with own.lock:
        for begin in range(0, work.rows, _FILLED):
            ids = work.ids(np.arange(begin, min(begin + _FILLED, work.rows), dtype=np.int64))
            ids = ids[spec.owners(ids, count) == place]
            arrays = [np.full((len(ids), work.dim), value, np.float32) for value in (0.01, *slots)]
            own.table.restore(Chunk(ids, np.zeros(len(ids), np.int32), arrays))
    return {"fill_s": time.monotonic() - began_s, **_of_table(own)}


def _of_table(own: TableSlice) -> dict[str, Json]:
    stats = own.table.stats()
    return {"rows": stats.rows, "table_bytes": stats.memory_bytes, "resident_bytes": resident_bytes()}


def _figures(own: TableSlice, server: ParameterServer) -> dict[str, Json]:
    members = server.status().members
    return {
        "asked": own.rounds.traffic.asked_rows,
        "early": own.rounds.traffic.early_rows,
        "pushed": own.rounds.traffic.gradient_rows,
        **_of_table(own),
        "received_bytes": sum(each.received_bytes for each in members),
        "sent_bytes": sum(each.sent_bytes for each in members),
    }


if __name__ == "__main__":
    main()
