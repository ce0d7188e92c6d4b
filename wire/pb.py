"""The generated modules under short names: ``pb.store.GrantRequest``, ``pb.store_rpc.StoreStub``."""

from moonpool.wire.generated import admin_pb2 as admin
from moonpool.wire.generated import admin_pb2_grpc as admin_rpc
from moonpool.wire.generated import conductor_pb2 as conductor
from moonpool.wire.generated import conductor_pb2_grpc as conductor_rpc
from moonpool.wire.generated import decode_pb2 as decode
from moonpool.wire.generated import decode_pb2_grpc as decode_rpc
from moonpool.wire.generated import prefill_pb2 as prefill
from moonpool.wire.generated import prefill_pb2_grpc as prefill_rpc
from moonpool.wire.generated import registry_pb2 as registry
from moonpool.wire.generated import registry_pb2_grpc as registry_rpc
from moonpool.wire.generated import store_admin_pb2 as store_admin
from moonpool.wire.generated import store_admin_pb2_grpc as store_admin_rpc
from moonpool.wire.generated import store_pb2 as store
from moonpool.wire.generated import store_pb2_grpc as store_rpc
from moonpool.wire.generated import types_pb2 as types

__all__ = [
    "admin",
    "admin_rpc",
    "conductor",
    "conductor_rpc",
    "decode",
    "decode_rpc",
    "prefill",
    "prefill_rpc",
    "registry",
    "registry_rpc",
    "store",
    "store_admin",
    "store_admin_rpc",
    "store_rpc",
    "types",
]
