from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmitReply(_message.Message):
    __slots__ = ["before", "failure", "present"]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    before: _containers.RepeatedScalarFieldContainer[int]
    failure: Failure
    present: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., present: _Optional[_Iterable[int]] = ..., before: _Optional[_Iterable[int]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ["candidates", "incarnation", "rank", "timeout_s"]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedScalarFieldContainer[int]
    incarnation: str
    rank: int
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., candidates: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ["codec", "dtype", "kind", "names", "nbytes", "occasional", "priority", "replaces", "table", "update"]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    OCCASIONAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    codec: str
    dtype: str
    kind: str
    names: _containers.RepeatedScalarFieldContainer[str]
    nbytes: int
    occasional: bool
    priority: int
    replaces: int
    table: str
    update: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., kind: _Optional[str] = ..., nbytes: _Optional[int] = ..., dtype: _Optional[str] = ..., priority: _Optional[int] = ..., occasional: bool = ..., codec: _Optional[str] = ..., update: _Optional[str] = ..., table: _Optional[str] = ..., replaces: _Optional[int] = ...) -> None: ...

class BucketDecision(_message.Message):
    __slots__ = ["folder", "giver", "last", "latest", "step", "unrecoverable"]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    GIVER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNRECOVERABLE_FIELD_NUMBER: _ClassVar[int]
    folder: str
    giver: int
    last: _containers.RepeatedScalarFieldContainer[int]
    latest: int
    step: int
    unrecoverable: bool
    def __init__(self, step: _Optional[int] = ..., giver: _Optional[int] = ..., last: _Optional[_Iterable[int]] = ..., unrecoverable: bool = ..., latest: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class BucketReport(_message.Message):
    __slots__ = ["last", "latest", "snapshots", "step"]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    last: _containers.RepeatedScalarFieldContainer[int]
    latest: Latest
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    step: int
    def __init__(self, step: _Optional[int] = ..., last: _Optional[_Iterable[int]] = ..., snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ..., latest: _Optional[_Union[Latest, _Mapping]] = ...) -> None: ...

class BusyReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class BusyRequest(_message.Message):
    __slots__ = ["incarnation", "rank", "what"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    rank: int
    what: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., what: _Optional[int] = ...) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ["failure", "time_ns", "wall_ns"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    time_ns: int
    wall_ns: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., time_ns: _Optional[int] = ..., wall_ns: _Optional[int] = ...) -> None: ...

class ClockRequest(_message.Message):
    __slots__ = ["incarnation"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ["failure", "records"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    records: Records
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ["incarnation", "number", "rank", "timeout_s"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    number: int
    rank: int
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., number: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ["buckets", "declarations", "expected", "generation", "pservers", "ranks", "reason"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DECLARATIONS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PSERVERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketDecision]
    declarations: int
    expected: _containers.RepeatedScalarFieldContainer[int]
    generation: int
    pservers: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., pservers: _Optional[_Iterable[str]] = ..., declarations: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketDecision, _Mapping]]] = ..., reason: _Optional[str] = ..., expected: _Optional[_Iterable[int]] = ...) -> None: ...

class DeclareReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ["buckets", "details", "incarnation", "number", "rank", "steps", "timeout_s"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    details: _containers.RepeatedScalarFieldContainer[str]
    incarnation: str
    number: int
    rank: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., number: _Optional[int] = ..., details: _Optional[_Iterable[str]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

class DeclaredReply(_message.Message):
    __slots__ = ["buckets", "declarations", "failure", "layouts", "lines", "steps"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DECLARATIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    declarations: int
    failure: Failure
    layouts: _containers.RepeatedCompositeFieldContainer[Layout]
    lines: _containers.RepeatedScalarFieldContainer[str]
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., declarations: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., lines: _Optional[_Iterable[str]] = ..., layouts: _Optional[_Iterable[_Union[Layout, _Mapping]]] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

class DeclaredRequest(_message.Message):
    __slots__ = ["incarnation", "rank"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class ErrorCount(_message.Message):
    __slots__ = ["count", "error", "where"]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    count: int
    error: str
    where: str
    def __init__(self, where: _Optional[str] = ..., error: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ["code", "text"]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ["failure", "values"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    values: bytes
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ["begin", "bucket", "incarnation", "nbytes", "number", "rank", "slice"]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    begin: int
    bucket: int
    incarnation: str
    nbytes: int
    number: int
    rank: int
    slice: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., slice: _Optional[int] = ..., number: _Optional[int] = ..., begin: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ["candidate", "data_port", "failure", "first_incarnation", "generation", "incarnation", "present", "protocol_version", "rank", "shared_memory", "workers"]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    candidate: bool
    data_port: int
    failure: Failure
    first_incarnation: str
    generation: int
    incarnation: str
    present: _containers.RepeatedScalarFieldContainer[int]
    protocol_version: int
    rank: int
    shared_memory: bool
    workers: int
    def __init__(self, protocol_version: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., rank: _Optional[int] = ..., workers: _Optional[int] = ..., incarnation: _Optional[str] = ..., shared_memory: bool = ..., data_port: _Optional[int] = ..., candidate: bool = ..., present: _Optional[_Iterable[int]] = ..., first_incarnation: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ["host", "incarnation", "job", "memory", "pid", "protocol_version", "pserver_index", "pservers", "rank", "resumed", "settings", "uid", "workers"]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PSERVERS_FIELD_NUMBER: _ClassVar[int]
    PSERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    host: str
    incarnation: str
    job: str
    memory: SharedMemory
    pid: int
    protocol_version: int
    pserver_index: int
    pservers: int
    rank: int
    resumed: Resumed
    settings: Settings
    uid: str
    workers: int
    def __init__(self, protocol_version: _Optional[int] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., workers: _Optional[int] = ..., uid: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., pserver_index: _Optional[int] = ..., pservers: _Optional[int] = ..., incarnation: _Optional[str] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ..., memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ...) -> None: ...

class Latest(_message.Message):
    __slots__ = ["assigned", "folder", "ranks", "reads", "saved", "slots", "snapshot_assigned"]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    assigned: int
    folder: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reads: int
    saved: int
    slots: bool
    snapshot_assigned: int
    def __init__(self, assigned: _Optional[int] = ..., slots: bool = ..., ranks: _Optional[_Iterable[int]] = ..., snapshot_assigned: _Optional[int] = ..., reads: _Optional[int] = ..., folder: _Optional[str] = ..., saved: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ["buckets", "slice_bytes", "steps", "window_bytes"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SLICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    slice_bytes: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    window_bytes: int
    def __init__(self, slice_bytes: _Optional[int] = ..., window_bytes: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ["failure", "incarnation", "rank", "reason"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    incarnation: str
    rank: int
    reason: str
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ["awaited_slices", "busy_bytes", "busy_s", "host", "in_flight_bytes", "pid", "queued_slices", "rank", "received_bytes", "received_slices", "sent_bytes", "sent_slices", "shared_memory", "state", "step", "wait_s", "window_bytes"]
    AWAITED_SLICES_FIELD_NUMBER: _ClassVar[int]
    BUSY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SLICES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SLICES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_SLICES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    awaited_slices: int
    busy_bytes: int
    busy_s: float
    host: str
    in_flight_bytes: int
    pid: int
    queued_slices: int
    rank: int
    received_bytes: int
    received_slices: int
    sent_bytes: int
    sent_slices: int
    shared_memory: bool
    state: str
    step: int
    wait_s: float
    window_bytes: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., received_bytes: _Optional[int] = ..., received_slices: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., sent_slices: _Optional[int] = ..., queued_slices: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., window_bytes: _Optional[int] = ..., wait_s: _Optional[float] = ..., awaited_slices: _Optional[int] = ..., shared_memory: bool = ..., busy_bytes: _Optional[int] = ..., busy_s: _Optional[float] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ["address", "workers"]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    address: str
    workers: int
    def __init__(self, address: _Optional[str] = ..., workers: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ["data_port", "failure", "job", "protocol_version", "same_host", "shared_memory", "version", "workers"]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    data_port: int
    failure: Failure
    job: str
    protocol_version: int
    same_host: bool
    shared_memory: bool
    version: str
    workers: int
    def __init__(self, protocol_version: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., version: _Optional[str] = ..., workers: _Optional[int] = ..., job: _Optional[str] = ..., data_port: _Optional[int] = ..., same_host: bool = ..., shared_memory: bool = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ["memory", "pid"]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    memory: SharedMemory
    pid: int
    def __init__(self, pid: _Optional[int] = ..., memory: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ["begin", "bucket", "incarnation", "number", "rank", "slice", "values"]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    begin: int
    bucket: int
    incarnation: str
    number: int
    rank: int
    slice: int
    values: bytes
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., slice: _Optional[int] = ..., number: _Optional[int] = ..., begin: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class PutRowsReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class PutRowsRequest(_message.Message):
    __slots__ = ["bucket", "id", "ids", "incarnation", "rank", "step", "timeout_s", "values"]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    id: str
    ids: bytes
    incarnation: str
    rank: int
    step: int
    timeout_s: float
    values: bytes
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., step: _Optional[int] = ..., ids: _Optional[bytes] = ..., values: _Optional[bytes] = ..., id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ReadyReply(_message.Message):
    __slots__ = ["candidates", "failure", "training"]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedScalarFieldContainer[int]
    failure: Failure
    training: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., candidates: _Optional[_Iterable[int]] = ..., training: _Optional[int] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ["incarnation", "rank", "training"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    rank: int
    training: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., training: _Optional[int] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ["clock_error_ns", "clock_offset_ns", "full", "host", "last", "number", "pserver", "records"]
    CLOCK_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PSERVER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    clock_error_ns: int
    clock_offset_ns: int
    full: bool
    host: str
    last: bool
    number: int
    pserver: bool
    records: bytes
    def __init__(self, pserver: bool = ..., number: _Optional[int] = ..., host: _Optional[str] = ..., clock_offset_ns: _Optional[int] = ..., clock_error_ns: _Optional[int] = ..., records: _Optional[bytes] = ..., full: bool = ..., last: bool = ...) -> None: ...

class RegroupReply(_message.Message):
    __slots__ = ["busy", "decision", "failure", "known", "moving", "pservers", "workers"]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    PSERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    busy: bool
    decision: Decision
    failure: Failure
    known: bool
    moving: bool
    pservers: _containers.RepeatedScalarFieldContainer[str]
    workers: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., known: bool = ..., busy: bool = ..., workers: _Optional[int] = ..., moving: bool = ..., pservers: _Optional[_Iterable[str]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class RegroupRequest(_message.Message):
    __slots__ = ["asks", "incarnation", "rank", "report", "timeout_s"]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    asks: bool
    incarnation: str
    rank: int
    report: Report
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., asks: bool = ..., report: _Optional[_Union[Report, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ["buckets", "declarations", "generation", "lost", "ranks", "reached", "reason", "refused", "silent", "unreached"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DECLARATIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketReport]
    declarations: int
    generation: int
    lost: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reached: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    refused: _containers.RepeatedScalarFieldContainer[str]
    silent: _containers.RepeatedScalarFieldContainer[int]
    unreached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ..., silent: _Optional[_Iterable[int]] = ..., reached: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[str]] = ..., unreached: _Optional[_Iterable[str]] = ..., declarations: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketReport, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class RestReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class RestRequest(_message.Message):
    __slots__ = ["incarnation", "rank"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class RestoreRowsReply(_message.Message):
    __slots__ = ["failure", "nbytes", "rows", "slots", "step"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    nbytes: int
    rows: int
    slots: bool
    step: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., step: _Optional[int] = ..., rows: _Optional[int] = ..., nbytes: _Optional[int] = ..., slots: bool = ...) -> None: ...

class RestoreRowsRequest(_message.Message):
    __slots__ = ["alone", "bucket", "folders", "id", "incarnation", "name", "rank", "seed", "step", "timeout_s"]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    alone: bool
    bucket: int
    folders: _containers.RepeatedScalarFieldContainer[str]
    id: str
    incarnation: str
    name: str
    rank: int
    seed: str
    step: int
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., step: _Optional[int] = ..., folders: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., alone: bool = ..., seed: _Optional[str] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ["generation", "incarnation", "pservers", "ranks", "reason"]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PSERVERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incarnation: str
    pservers: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, incarnation: _Optional[str] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., pservers: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class SaveRowsReply(_message.Message):
    __slots__ = ["failure", "full", "nbytes", "rows", "step"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    full: bool
    nbytes: int
    rows: int
    step: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., step: _Optional[int] = ..., rows: _Optional[int] = ..., nbytes: _Optional[int] = ..., full: bool = ...) -> None: ...

class SaveRowsRequest(_message.Message):
    __slots__ = ["before", "bucket", "folder", "incarnation", "name", "rank", "remove", "since", "step", "timeout_s"]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    before: str
    bucket: int
    folder: str
    incarnation: str
    name: str
    rank: int
    remove: _containers.RepeatedScalarFieldContainer[str]
    since: int
    step: int
    timeout_s: float
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., step: _Optional[int] = ..., folder: _Optional[str] = ..., name: _Optional[str] = ..., since: _Optional[int] = ..., timeout_s: _Optional[float] = ..., before: _Optional[str] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ["compression", "delay_compensation", "deterministic", "fragments", "grace_s", "inner_steps", "max_workers", "min_workers", "mode", "outer_learning_rate", "outer_momentum", "overlap_steps", "own_share", "placement", "policy", "quorum", "rejoin_timeout_s", "slice_bytes", "snapshot_folder", "snapshot_steps", "staleness", "update", "window_bytes"]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    DELAY_COMPENSATION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OUTER_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    OWN_SHARE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    REJOIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SLICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FOLDER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_STEPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    compression: str
    delay_compensation: float
    deterministic: bool
    fragments: int
    grace_s: float
    inner_steps: int
    max_workers: int
    min_workers: int
    mode: str
    outer_learning_rate: float
    outer_momentum: float
    overlap_steps: int
    own_share: float
    placement: str
    policy: str
    quorum: float
    rejoin_timeout_s: float
    slice_bytes: int
    snapshot_folder: str
    snapshot_steps: int
    staleness: int
    update: str
    window_bytes: int
    def __init__(self, slice_bytes: _Optional[int] = ..., window_bytes: _Optional[int] = ..., policy: _Optional[str] = ..., placement: _Optional[str] = ..., deterministic: bool = ..., compression: _Optional[str] = ..., update: _Optional[str] = ..., mode: _Optional[str] = ..., staleness: _Optional[int] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., snapshot_steps: _Optional[int] = ..., snapshot_folder: _Optional[str] = ..., rejoin_timeout_s: _Optional[float] = ..., delay_compensation: _Optional[float] = ..., inner_steps: _Optional[int] = ..., fragments: _Optional[int] = ..., overlap_steps: _Optional[int] = ..., own_share: _Optional[float] = ..., outer_learning_rate: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., quorum: _Optional[float] = ..., grace_s: _Optional[float] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ["fd", "host", "secret"]
    FD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    fd: int
    host: str
    secret: bytes
    def __init__(self, host: _Optional[str] = ..., fd: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ["assigned", "folder", "part", "ranks", "step"]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    assigned: int
    folder: str
    part: bool
    ranks: _containers.RepeatedScalarFieldContainer[int]
    step: int
    def __init__(self, step: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., part: bool = ..., folder: _Optional[str] = ..., assigned: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ["buckets", "changes", "cpu_s", "errors", "failure", "generation", "job", "jobs", "joined_workers", "lost_workers", "members", "memory_bytes", "open_slices", "present", "reason", "shard_bytes", "slices", "state", "tables", "uptime_s", "version", "workers"]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOINED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOST_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_SLICES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    buckets: int
    changes: _containers.RepeatedScalarFieldContainer[str]
    cpu_s: float
    errors: _containers.RepeatedCompositeFieldContainer[ErrorCount]
    failure: Failure
    generation: int
    job: str
    jobs: int
    joined_workers: int
    lost_workers: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    memory_bytes: int
    open_slices: int
    present: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    shard_bytes: int
    slices: int
    state: str
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    uptime_s: float
    version: str
    workers: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., cpu_s: _Optional[float] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., jobs: _Optional[int] = ..., job: _Optional[str] = ..., workers: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., buckets: _Optional[int] = ..., slices: _Optional[int] = ..., shard_bytes: _Optional[int] = ..., open_slices: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[ErrorCount, _Mapping]]] = ..., generation: _Optional[int] = ..., present: _Optional[_Iterable[int]] = ..., changes: _Optional[_Iterable[str]] = ..., lost_workers: _Optional[int] = ..., joined_workers: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ["details", "incarnation"]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    details: bool
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ..., details: bool = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ["asked_rows", "bucket", "early_rows", "evicted_rows", "expired_rows", "gradient_rows", "made_rows", "memory_bytes", "name", "refused_rows", "rows", "updated_rows", "updates"]
    ASKED_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    EARLY_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_ROWS_FIELD_NUMBER: _ClassVar[int]
    MADE_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_ROWS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    asked_rows: int
    bucket: int
    early_rows: int
    evicted_rows: int
    expired_rows: int
    gradient_rows: int
    made_rows: int
    memory_bytes: int
    name: str
    refused_rows: int
    rows: int
    updated_rows: int
    updates: int
    def __init__(self, bucket: _Optional[int] = ..., name: _Optional[str] = ..., rows: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., updates: _Optional[int] = ..., asked_rows: _Optional[int] = ..., early_rows: _Optional[int] = ..., gradient_rows: _Optional[int] = ..., updated_rows: _Optional[int] = ..., made_rows: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., expired_rows: _Optional[int] = ..., refused_rows: _Optional[int] = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ["failure", "number"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    number: int
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ["counter", "follows", "incarnation", "rank"]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    counter: str
    follows: int
    incarnation: str
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., counter: _Optional[str] = ..., follows: _Optional[int] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ["incarnation", "number", "on", "rank"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    number: int
    on: bool
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., number: _Optional[int] = ..., on: bool = ...) -> None: ...

class TuneReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class TuneRequest(_message.Message):
    __slots__ = ["incarnation", "layout", "rank"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    layout: Layout
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ["failure"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ["incarnation", "number", "rank", "records"]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    number: int
    rank: int
    records: Records
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., number: _Optional[int] = ..., records: _Optional[_Union[Records, _Mapping]] = ...) -> None: ...

class WaitingReply(_message.Message):
    __slots__ = ["failure", "missing"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class WaitingRequest(_message.Message):
    __slots__ = ["bucket", "declaration", "incarnation", "rank"]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    declaration: bool
    incarnation: str
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., bucket: _Optional[int] = ..., declaration: bool = ...) -> None: ...
