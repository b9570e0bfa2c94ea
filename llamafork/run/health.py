"""Is the server ready? And before that: is its port free?"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import time
import urllib.parse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llamafork.errors import EnvironmentFault, UnhealthyError, UsageError
from llamafork.paths import show
from llamafork.run.args import Known
from llamafork.run.launch import tell

if TYPE_CHECKING:
    import requests

POLL_SECONDS, PROBE_SECONDS, STALL_SECONDS = 0.1, 2.0, 60.0
ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


class Watched(Protocol):
    def step(self) -> bool: ...
    def quiet_for(self) -> float: ...


@dataclass(frozen=True)
class Endpoint:
    """Where the server listens; ``hosts`` are addresses or paths of Unix sockets, ``prefix`` begins with a slash."""

    hosts: tuple[str, ...]
    port: int
    prefix: str = ""
    tls: bool = False

    @property
    def address(self) -> str:
        """The host to connect to from here."""
        return ANY.get(self.hosts[0], self.hosts[0])

    @property
    def socket_path(self) -> str | None:
        return self.hosts[0] if self.hosts[0].endswith(".sock") else None

    @property
    def url(self) -> str:
        if self.socket_path:
            return f"unix://{show(self.socket_path)}{self.prefix}"
        host = self.address.strip("[]")
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{self.port}{self.prefix}"


def endpoint(settings: Mapping[str, Known]) -> Endpoint:
    """The endpoint that the settings describe. Raises :class:`UsageError` for a port that is none."""
    text = settings["port"].value if "port" in settings else "8080"
    hosts = settings["host"].value if "host" in settings else "127.0.0.1"
    prefix = settings["api_prefix"].value.rstrip("/") if "api_prefix" in settings else ""
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise UsageError("--port takes a number from 0 to 65535")
    names = tuple(host.strip() for host in hosts.split(",") if host.strip())
    if not names:
        raise UsageError("--host names no address")
    return Endpoint(names, port, prefix, tls="ssl_cert" in settings)


def wait_ready(
    at: Endpoint, server: Watched, *, timeout: float | None = None, stall: float = STALL_SECONDS
) -> float | None:
    """Poll ``/health`` until it answers 200: the seconds that took. None if the server ended or is to end.

    Waits as long as the server lives, unless *timeout* (seconds) caps it: :class:`UnhealthyError`. After *stall*
    seconds without output, and every further *stall*, that is said.
    """
    import requests

    started = time.monotonic()
    told = 0.0
    with requests.Session() as session:
        session.trust_env = False
        session.verify = False
        while server.step():
            if probe(at, session) == 200:
                return time.monotonic() - started
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                raise _too_late(at, timeout)
            quiet = server.quiet_for()
            told = min(told, quiet)
            if quiet - told >= stall:
                told = quiet
                tell(f"still loading after {waited:.0f} s; the server has been silent for {quiet:.0f} s")
            time.sleep(POLL_SECONDS)
    return None


def _too_late(at: Endpoint, timeout: float) -> UnhealthyError:
    return UnhealthyError(
        f"the server was not ready within {timeout:g} s",
        why=f"{at.url}/health did not answer 200",
        do="allow more with --ready-timeout SECONDS, or leave it out to wait as long as the server lives",
    )


def probe(at: Endpoint, session: requests.Session) -> int | None:
    """The status of ``/health``, None without an answer. Proxies are never used; TLS is not verified (loopback)."""
    try:
        if at.socket_path:
            return _probe_socket(at.socket_path, f"{at.prefix}/health")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = session.get(f"{at.url}/health", timeout=PROBE_SECONDS, allow_redirects=False)
        return answer.status_code
    except (http.client.HTTPException, OSError):  # those of requests are OSErrors
        return None


def has_page(at: Endpoint) -> bool:
    """Whether the server answers with a page at its root: the web UI."""
    import requests

    if at.socket_path:
        return False
    try:
        with requests.Session() as session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session.trust_env = False
            session.verify = False
            return session.get(f"{at.url}/", timeout=PROBE_SECONDS, allow_redirects=False).status_code == 200
    except OSError:
        return False


def _probe_socket(path: str, target: str) -> int:
    connection = http.client.HTTPConnection("localhost", timeout=PROBE_SECONDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PROBE_SECONDS)
        sock.connect(path)
        connection.sock = sock
        connection.request("GET", urllib.parse.quote(target))
        return connection.getresponse().status


def check_free(at: Endpoint, *, reuse_port: bool = False) -> None:
    """Try to bind each address as the server will. Raises :class:`EnvironmentFault` that names who is there."""
    for host in at.hosts:
        if host.endswith(".sock"):
            _check_socket_file(host)
            continue
        try:
            _bind(host, at.port, reuse_port)
        except OSError as error:
            raise _cannot_listen(host, at.port, error) from error


def _bind(host: str, port: int, reuse_port: bool) -> None:
    found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, number, _, address = found[0]
    with socket.socket(family, kind, number) as sock:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port and hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)


def _check_socket_file(path: str) -> None:
    if not os.path.lexists(path):
        return
    do = "stop the server that uses it, or give another --host PATH.sock; if none does, remove the file"
    raise EnvironmentFault(f"there is already a file {show(path)}", do=do)


def _cannot_listen(host: str, port: int, error: OSError) -> EnvironmentFault:
    if error.errno == errno.EADDRINUSE:
        free = free_port(host, port)
        holder = port_holder(port)
        return EnvironmentFault(
            f"port {port} is already in use", why=holder or "who uses it cannot be seen", do=f"use --port {free}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        do = f"use --port {free_port(host, 8080)}"
        return EnvironmentFault(f"no permission to listen on port {port}", why=str(error), do=do)
    return EnvironmentFault(
        f"cannot listen on {show(host)}", why=error.strerror or str(error), do="give an address of this machine: --host"
    )


def port_holder(port: int) -> str:
    """Who listens on *port*, as far as the system tells."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and getattr(connection.laddr, "port", None) == port:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid}) listens there"
    except (psutil.Error, OSError):
        pass
    return ""


def free_port(host: str, taken: int) -> int:
    """A port near *taken* that can be bound now."""
    for port in range(max(taken, 1023) + 1, min(taken + 100, 65535) + 1):
        try:
            _bind(host, port, reuse_port=False)
        except OSError:
            continue
        return port
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
