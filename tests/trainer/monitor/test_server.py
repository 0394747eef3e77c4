"""Starting and stopping the interface's thread."""

import contextlib
import signal
import socket
import threading

import httpx
import pytest

from trainer.errors import TrainerUsageError
from trainer.monitor import ApiConfig, ApiServer, create_app

HALF = b"GET /healthz HTTP/1.1\r\nHost: loc"


def server_of(node, port=0, **options):
    return ApiServer(create_app(node.tracker, node.metrics), ApiConfig(port=port, **options))


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port))


def health(server):
    return httpx.get(f"{server.url}/healthz", trust_env=False, timeout=30).status_code


def is_running():
    return any(thread.name == "training-api" for thread in threading.enumerate())


def test_what_cannot_be_listened_at_is_one_clear_error(node):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = server_of(node, port)
        with pytest.raises(TrainerUsageError, match=rf"port {port} .*--api-port \(0: any free one\) or --no-api"):
            server.start()
        server.stop()
    for host in ("192.0.2.1", "a..b"):
        with pytest.raises(TrainerUsageError, match="--api-host"):
            server_of(node, host=host).start()


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_port_0_takes_a_free_one_and_the_process_s_signals_stay_its_own(node, host, shown):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    first, second = server_of(node, host=host), server_of(node, host=host)
    assert first.port == 0
    try:
        first.start()
    except TrainerUsageError:
        pytest.skip(f"no {host} here")
    with second:
        assert first.port != second.port
        assert first.url == f"http://{shown}:{first.port}"
        assert health(second) == 200
        assert {number: signal.getsignal(number) for number in before} == before
    first.stop()


def test_by_default_only_this_machine_is_served_and_what_makes_no_sense_is_refused():
    assert (ApiConfig().host, ApiConfig().port) == ("127.0.0.1", 8000)
    for name, value in (
        *(("port", -1), ("port", 70_000), ("host", "")),
        *(("allowed_hosts", ("a b",)), ("allowed_hosts", ("host:80",))),
    ):
        with pytest.raises(TrainerUsageError, match=f"api.{name}: expected .*found"):
            ApiConfig(**{name: value})


def test_it_stops_with_clients_connected_and_frees_its_port(node):
    server = server_of(node).start()
    with httpx.Client(base_url=server.url, trust_env=False) as kept, connect(server) as half:
        kept.get("/healthz")
        half.sendall(HALF)  # Never goes on.
        port = server.port
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
    assert not is_running()
    with server_of(node, port) as again:
        assert health(again) == 200
    server.stop()


@pytest.mark.slow
def test_an_answer_that_hangs_is_cut(caplog):
    begun = threading.Event()

    async def hanging(scope, receive, send):
        begun.set()
        await receive()
        await receive()  # What comes next is the end of the connection.

    server = ApiServer(hanging, ApiConfig(port=0)).start()
    with connect(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(30)
        server.stop()
        client.settimeout(30)
        assert b"200" not in client.recv(100)
    assert not is_running()
    assert [it.name for it in caplog.records if it.levelname == "ERROR"] == []


def test_half_requests_keep_nobody_out(node):
    """More than the server takes, from one host: a newcomer gets the place of the one that has waited for longest."""
    with server_of(node) as server, contextlib.ExitStack() as stack:
        for _ in range(90):
            stack.enter_context(connect(server)).sendall(HALF)
        assert [health(server) for _ in range(3)] == [200] * 3
