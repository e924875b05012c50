"""Mooncake's return codes: their names, and what each says about one object."""

from kvferry.linker.store import ObjectResult, Outcome

NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
REPLICA_IS_NOT_READY = -703
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
RPC_FAIL = -900
RPC_TIMEOUT = -901

OUTAGE_CODES = frozenset({RPC_FAIL, RPC_TIMEOUT})

NAMES: dict[int, str] = {
    0: "OK",
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -100: "SHARD_INDEX_OUT_OF_RANGE",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -300: "INVALID_VERSION",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -702: "INVALID_REPLICA",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -708: "OBJECT_HAS_REPLICATION_TASK",
    -709: "OBJECT_NO_REPLICATION_TASK",
    -710: "REPLICA_NOT_FOUND",
    -711: "REPLICA_ALREADY_EXISTS",
    -712: "REPLICA_IS_GONE",
    -713: "REPLICA_NOT_IN_LOCAL_MEMORY",
    -714: "OBJECT_REPLICA_BUSY",
    -800: "TRANSFER_FAIL",
    -801: "CHECKSUM_MISMATCH",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1000: "ETCD_OPERATION_ERROR",
    -1001: "ETCD_KEY_NOT_EXIST",
    -1002: "ETCD_TRANSACTION_FAIL",
    -1003: "ETCD_CTX_CANCELLED",
    -1004: "OPLOG_ENTRY_NOT_FOUND",
    -1005: "K8S_LEASE_OPERATION_ERROR",
    -1006: "K8S_LEASE_NOT_FOUND",
    -1007: "INCOMPLETE_OPLOG_CATCH_UP",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
    -1011: "UNAVAILABLE_IN_CURRENT_MODE",
    -1012: "NOT_SUPPORTED",
    -1100: "FILE_NOT_FOUND",
    -1106: "FILE_INVALID_HANDLE",
    -1200: "BUCKET_NOT_FOUND",
    -1201: "BUCKET_ALREADY_EXISTS",
    -1202: "KEYS_EXCEED_BUCKET_LIMIT",
    -1203: "KEYS_ULTRA_LIMIT",
    -1300: "UNABLE_OFFLOAD",
    -1301: "UNABLE_OFFLOADING",
    -1400: "TASK_NOT_FOUND",
    -1401: "TASK_PENDING_LIMIT_EXCEEDED",
    -1402: "JOB_NOT_FOUND",
    -1500: "SERIALIZE_UNSUPPORTED",
    -1501: "SERIALIZE_FAIL",
    -1502: "DESERIALIZE_FAIL",
    -1503: "PERSISTENT_FAIL",
    -1600: "DFS_NETWORK_TIMEOUT",
    -1601: "DFS_SERVICE_UNAVAILABLE",
    -1602: "DFS_QUOTA_EXCEEDED",
    -1603: "DFS_PERMISSION_DENIED",
    -1604: "DFS_STALE_HANDLE",
    -1605: "DFS_PARTIAL_WRITE",
    -1700: "TENANT_QUOTA_EXCEEDED",
    -1701: "TENANT_NOT_REGISTERED",
    -1702: "TENANT_NOT_EMPTY",
}

_OUTCOMES: dict[int, Outcome] = {
    NO_AVAILABLE_HANDLE: Outcome.NO_SPACE,
    -1700: Outcome.NO_SPACE,  # TENANT_QUOTA_EXCEEDED
    # No *readable* object: absent, still being written, or its last replica is gone.
    REPLICA_IS_NOT_READY: Outcome.MISSING,
    OBJECT_NOT_FOUND: Outcome.MISSING,
    -710: Outcome.MISSING,
    -712: Outcome.MISSING,
    LEASE_EXPIRED: Outcome.LEASE_EXPIRED,
}


def code_name(code: int) -> str:
    """Return the name of a return code; `UNKNOWN_-123` for one that is not in the table."""
    return NAMES.get(code, f"UNKNOWN_{code}")


def failure(code: int) -> ObjectResult:
    """Translate a negative return code of one object; what says nothing special is FAILED."""
    return ObjectResult(_OUTCOMES.get(code, Outcome.FAILED), code_name(code))
