"""gRPC alone, the limit of what is built on it: the same bytes there and back, in 1 MiB messages, nothing else done.

Nothing is signed, hashed, checked or computed, and the bytes that came in are those that go back. As with a stage call,
the answer begins when the request is complete.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio

from scripts.baselines.swarm.stage_call import activation, session_cpu_s, timed_calls
from scripts.baselines.trainer.serving import serve
from trainer.network.rpc import RpcConfig
from trainer.network.rpc.channels import channel_options
from trainer.network.rpc.identity import CERTIFICATE_NAME, make_certificate
from trainer.run.node.loop_thread import LoopThread

_SERVICE, _METHOD = "limit.Echo", "Echo"
_MESSAGE_BYTES = 1 << 20
_START_S = 20.0
_CALL_S = 60.0


class GrpcMember:
    """One process: an echo, or who asks it."""

    def __init__(self) -> None:
        self._loop = LoopThread("bench")
        self._loop.start()
        self._options = channel_options(RpcConfig())
        self._kept: list[Any] = []
        self._calls: dict[str, aio.StreamStreamMultiCallable] = {}

    def serve(self, name: str, tls: bool) -> dict[str, Any]:
        """Starts an echo; how to reach it."""
        return self._loop.run(self._serve(tls), _START_S)

    def connect(self, name: str, port: int, certificate: str) -> dict[str, Any]:
        """Gets ready to ask it."""
        self._loop.run(self._connect(name, port, certificate), _START_S)
        return {}

    def call(self, name: str, rows: int, count: int, in_flight: int) -> dict[str, Any]:
        """There and back."""
        data = activation(rows).numpy().tobytes()
        messages = [data[start : start + _MESSAGE_BYTES] for start in range(0, len(data), _MESSAGE_BYTES)]

        def once() -> list[bytes]:
            return self._loop.run(self._echo(name, messages), _CALL_S)

        if once() != messages:
            raise SystemExit("expected what was sent, found something else")
        return timed_calls(once, count, in_flight)

    def cpu(self) -> dict[str, Any]:
        """Processor time so far."""
        return {"session_cpu_s": session_cpu_s()}

    async def _serve(self, tls: bool) -> dict[str, Any]:
        server = aio.server(options=self._options)
        handler = grpc.stream_stream_rpc_method_handler(_echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        certificate = ""
        if tls:
            certificate_pem, key_pem = make_certificate()
            certificate = certificate_pem.decode()
            credentials = grpc.ssl_server_credentials([(key_pem, certificate_pem)])
            port = server.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._kept.append(server)
        return {"port": port, "certificate": certificate}

    async def _connect(self, name: str, port: int, certificate: str) -> None:
        address = f"127.0.0.1:{port}"
        if certificate:
            options = [*self._options, ("grpc.ssl_target_name_override", CERTIFICATE_NAME)]
            credentials = grpc.ssl_channel_credentials(certificate.encode())
            channel = aio.secure_channel(address, credentials, options=options)
        else:
            channel = aio.insecure_channel(address, options=self._options)
        self._kept.append(channel)
        self._calls[name] = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")

    async def _echo(self, name: str, messages: list[bytes]) -> list[bytes]:
        call = self._calls[name]()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        answer = []
        while (message := await call.read()) is not aio.EOF:
            answer.append(message)
        return answer


async def _echo(_requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
    async with asyncio.timeout(_CALL_S):
        messages = []
        while (message := await context.read()) is not aio.EOF:
            messages.append(message)
        for message in messages:
            await context.write(message)


if __name__ == "__main__":
    member = GrpcMember()
    serve({"serve": member.serve, "connect": member.connect, "call": member.call, "cpu": member.cpu})
