"""Starting and stopping the interface's thread."""

import asyncio
import contextlib
import socket
import threading

import httpx
import pytest

from genesis.serve import ServeLimits
from trainer.errors import TrainerUsageError
from trainer.monitor import ApiConfig, ApiServer, create_app


def server_of(node, **options):
    return ApiServer(create_app(node.tracker, node.metrics), ApiConfig(port=0, **options))


def test_a_port_in_use_is_one_clear_error(node):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ApiServer(create_app(node.tracker, node.metrics), ApiConfig(port=port))
        with pytest.raises(TrainerUsageError, match=rf"port {port} .*--api-port \(0: any free one\) or --no-api"):
            server.start()
        server.stop()


def test_an_address_of_another_machine_is_one_clear_error(node):
    for host in ("192.0.2.1", "a..b"):
        with pytest.raises(TrainerUsageError, match="--api-host"):
            server_of(node, host=host).start()


def test_port_0_takes_a_free_one_and_tells_it(node):
    first, second = server_of(node), server_of(node)
    assert first.port == 0
    with first, second:
        assert first.port != second.port
        assert first.url == f"http://127.0.0.1:{first.port}"
        assert httpx.get(f"{second.url}/healthz", trust_env=False).status_code == 200


def test_by_default_only_this_machine_is_served():
    assert (ApiConfig().host, ApiConfig().port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"port": -1}, "api.port"),
        ({"port": 70_000}, "api.port"),
        ({"host": ""}, "api.host"),
        ({"allowed_hosts": ("a b",)}, "api.allowed_hosts"),
        ({"allowed_hosts": ("host:80",)}, "api.allowed_hosts"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(options, named):
    with pytest.raises(TrainerUsageError, match=f"{named}: expected .*found"):
        ApiConfig(**options)


def test_it_stops_with_clients_connected_and_frees_its_port(node):
    server = server_of(node).start()
    port = server.port
    with (
        httpx.Client(base_url=server.url, trust_env=False) as kept,
        socket.create_connection(("127.0.0.1", port)) as half,
    ):
        kept.get("/healthz")
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")  # Never goes on.
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "training-api"]
    again = ApiServer(create_app(node.tracker, node.metrics), ApiConfig(port=port))
    with again:
        assert httpx.get(f"{again.url}/healthz", trust_env=False).status_code == 200
    server.stop()


@pytest.mark.slow
def test_an_answer_that_hangs_is_cut(node):
    begun = threading.Event()

    async def hanging(scope, receive, send):
        begun.set()
        await receive()
        await receive()  # What comes next is the end of the connection.

    server = ApiServer(hanging, ApiConfig(port=0)).start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(30)
        server.stop()
        client.settimeout(30)
        assert b"200" not in client.recv(100)
    assert not [thread for thread in threading.enumerate() if thread.name == "training-api"]


def test_half_requests_keep_nobody_out(node):
    """More than the server takes, from one host: a newcomer gets the place of the one that has waited for longest."""
    with server_of(node) as server, contextlib.ExitStack() as stack:
        for _ in range(90):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            half.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            assert httpx.get(f"{server.url}/healthz", trust_env=False, timeout=30).status_code == 200


@pytest.mark.slow
def test_a_head_that_comes_drop_by_drop_is_cut(node, monkeypatch):
    monkeypatch.setattr("trainer.monitor.server._LIMITS", ServeLimits(idle_timeout_s=0.5, stall_timeout_s=0.5))
    with server_of(node) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n")
        client.settimeout(0.1)
        for _ in range(300):
            try:
                client.sendall(b"X: y\r\n")
                if not client.recv(100):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it was never cut")


def test_one_connection_too_many_is_told_so(node, monkeypatch):
    monkeypatch.setattr("trainer.monitor.server._LIMITS", ServeLimits(max_connections=2))
    release = threading.Event()

    async def slow(scope, receive, send):
        await asyncio.get_running_loop().run_in_executor(None, release.wait, 30)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with ApiServer(slow, ApiConfig(port=0)) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(2)]
        for client in busy:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = _first_refusal(server.url)
        assert answer.headers["retry-after"] == "1"
        release.set()
        for client in busy:
            client.settimeout(30)
            assert client.recv(100).startswith(b"HTTP/1.1 204")


def _first_refusal(url):
    """An idle newcomer gives way until both requests are being answered."""
    for _ in range(300):
        answer = httpx.get(url, trust_env=False, timeout=30)
        if answer.status_code == 503:
            return answer
    pytest.fail("never told")


def test_the_process_s_signals_stay_its_own(node):
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with server_of(node):
        assert {number: signal.getsignal(number) for number in before} == before


def test_ipv6_is_written_in_brackets(node):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = server_of(node, host="::1").start()
    except TrainerUsageError:
        pytest.skip("no ::1 here")
    try:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/healthz", trust_env=False).status_code == 200
    finally:
        server.stop()


@pytest.mark.slow
def test_training_goes_on_while_it_is_asked(node):
    """Many clients at once; the one that writes is not held up for longer than a lock is held."""
    with server_of(node) as server:
        answers = []

        def ask():
            with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
                answers.extend(client.get("/api/training/global").status_code for _ in range(10))

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        from tests.support.observing import Step

        for index in range(2_000):
            node.observer.step(Step(step=index))
        for client in clients:
            client.join(60)
        assert answers == [200] * 40
        assert node.tracker.num_steps == 2_000
