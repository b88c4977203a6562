"""What a status says of a job's members and tables.

Tested in tests/pserver/test_metrics.py and tests/pserver/test_table_status.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from tfps.membership.members import Member
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.shard import OwnedBucket
from tfps.pserver.table_slice import TableSlice
from tfps.wire.send_queue import Load


def member_status(
    member: Member, load: Load, awaited: Iterable[Container[int]], *, shared_memory: bool
) -> pb.MemberStatus:
    """`awaited`: of each slice for which some ranks wait, the ranks that they wait for."""
    return pb.MemberStatus(
        rank=member.rank,
        host=member.applicant.host,
        pid=member.applicant.pid,
        state=member.state.value,
        step=member.step,
        wait_s=member.wait_s,
        awaited_slices=sum(member.rank in ranks for ranks in awaited),
        shared_memory=shared_memory,
        **load._asdict(),
    )


def table_statuses(buckets: Iterable[OwnedBucket]) -> list[pb.TableStatus]:
    """Of each table that is declared in `buckets`, as the last one that has its rows."""
    tables = {
        item: (number, bucket.spec.name)
        for number, bucket in enumerate(buckets)
        for item in bucket.slices.values()
        if isinstance(item, TableSlice)
    }
    return [pb.TableStatus(bucket=number, name=name, **item.totals()) for item, (number, name) in tables.items()]
