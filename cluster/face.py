"""The gRPC server of one life: admin, health, and the role's own service where it has a gRPC face."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from moonpool.cluster.admin import Admin
from moonpool.core.errors import ConfigError
from moonpool.core.membership import Service
from moonpool.wire import pb
from moonpool.wire.channels import bind, server


@runtime_checkable
class GrpcFace(Protocol):
    """A service that is spoken to by gRPC, on the process's one server."""

    def add_to(self, server: grpc.aio.Server) -> None: ...


class Face:
    """Bound when made (port 0: any free one), serving once started. ConfigError: taken, or ``host`` none of this machine's."""

    def __init__(self, host: str, port: int, admin: Admin) -> None:
        self._server = server()
        self._health = HealthServicer()
        pb.admin_rpc.add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            bound = bind(self._server, f"{host}:{port}")
        except RuntimeError as e:
            raise _cannot_listen(host, port) from e
        self.address = f"{host}:{bound}"

    async def start(self, service: Service) -> None:
        """Health says not serving until told otherwise."""
        if isinstance(service, GrpcFace):
            service.add_to(self._server)
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _cannot_listen(host: str, port: int) -> ConfigError:
    if not port:
        return ConfigError(f"cluster.host: cannot listen on {host!r}; give an address of this machine", param="cluster.host")
    return ConfigError(
        f"cluster.port: cannot listen on {host}:{port}; choose another, or 0 for any free one, and as cluster.host an address "
        "of this machine",
        param="cluster.port",
    )
