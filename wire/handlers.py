"""A gRPC handler that does something else than the one it stands for."""

from __future__ import annotations

from typing import Any

import grpc

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def with_behaviour(handler: Any, behaviour: Any) -> Any:
    """As ``handler``, of any of the four kinds, but doing ``behaviour``: (request, context) -> reply, or replies."""
    return _KINDS[handler.request_streaming, handler.response_streaming](
        behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
