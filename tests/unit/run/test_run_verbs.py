"""Finding the program, endpoints, ports, and the parts of launching that need no wrapper process."""

from __future__ import annotations

import json
import socket
import types
from pathlib import Path

import pytest
from run_world import World

from llamafork.build import store
from llamafork.errors import EnvironmentFault, ModelError, UnhealthyError, UsageError
from llamafork.run import health, launch, verbs
from llamafork.run.args import Known
from llamafork.run.health import Endpoint


def test_a_build_of_the_store_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def resolve(paths: object, wanted: object) -> object:
        asked.append(wanted)
        return types.SimpleNamespace(
            key="k9", kind="stock", info={"backends": ["cpu"]}, program=lambda name: world.programs / name
        )

    monkeypatch.setattr(store, "resolve", resolve)
    monkeypatch.delenv("LLAMAFORK_PROGRAM_DIR", raising=False)
    assert verbs.find_program(world.paths, None, "llama-server") == (world.programs / "llama-server", "k9")
    monkeypatch.setenv("LLAMAFORK_PROGRAM_DIR", "/elsewhere")
    assert verbs.find_program(world.paths, None, "llama-server")[0] == Path("/elsewhere/llama-server")
    assert verbs.find_program(world.paths, "k", "llama-server")[1] == "k9"
    assert asked == [None, "k"]


def test_an_empty_model_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFORK_PROGRAM_DIR", str(world.programs))
    with pytest.raises(ModelError, match="empty"):
        verbs.serve(["-m", ""], world.paths)


def test_where_a_download_goes_is_not_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFORK_PROGRAM_DIR", str(world.programs))
    assert verbs.serve(["-mu", "https://x/y.gguf", "-m", "not-yet.gguf", "--dry-run"], world.paths) == 0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:99"),
        ("::", "http://[::1]:99"),
        ("::1", "http://[::1]:99"),
        ("10.1.2.3, 127.0.0.1", "http://10.1.2.3:99"),
        ("localhost", "http://localhost:99"),
    ],
)
def test_where_to_probe(host: str, url: str) -> None:
    assert health.endpoint({"host": Known(host, "user"), "port": Known("99", "user")}).url == url


@pytest.mark.parametrize("port", ["x", "70000", "-1", ""])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(UsageError, match="0 to 65535"):
        health.endpoint({"port": Known(port, "user")})


def test_an_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentFault, match=r"cannot listen on 203\.0\.113\.7"):
        health.check_free(Endpoint(("203.0.113.7",), 18080))


def test_an_unresolvable_host() -> None:
    with pytest.raises(EnvironmentFault, match="cannot listen on"):
        health.check_free(Endpoint(("no.such.host.invalid",), 18080))


def test_a_socket_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.sock").touch()
    with pytest.raises(EnvironmentFault, match="already a file"):
        health.check_free(Endpoint((str(tmp_path / "a.sock"),), 1))
    health.check_free(Endpoint((str(tmp_path / "b.sock"),), 1))


def test_a_port_only_in_use_elsewhere_is_free(world: World) -> None:
    health.check_free(Endpoint(("127.0.0.1",), world.port))
    with socket.create_server(("127.0.0.1", world.port)), pytest.raises(EnvironmentFault) as caught:
        health.check_free(Endpoint(("0.0.0.0",), world.port))
    assert caught.value.do.startswith("use --port ")


class Silent:
    """A server that says nothing for ever-longer, for a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.quiet = steps, 0.0

    def step(self) -> bool:
        self.steps -= 1
        self.quiet += 1.0
        return self.steps >= 0

    def quiet_for(self) -> float:
        return self.quiet


def test_silence_is_said_every_stall_period(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(health, "tell", said.append)
    monkeypatch.setattr(health, "POLL_SECONDS", 0.0)
    assert health.wait_ready(Endpoint(("127.0.0.1",), world.port), Silent(10), stall=4.0) is None
    assert [line.partition("silent for ")[2] for line in said] == ["4 s", "8 s"]


def test_the_cap_is_an_unhealthy_error(world: World) -> None:
    with pytest.raises(UnhealthyError, match="not ready within 0 s"):
        health.wait_ready(Endpoint(("127.0.0.1",), world.port), Silent(10), timeout=0.0)


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    program = tmp_path / "x"
    program.write_text("no shebang, not executable")
    with pytest.raises(EnvironmentFault, match="cannot start"), launch.running([str(program)], logs=tmp_path, grace=1):
        pass


def test_json_of_bench_is_its_own_and_cli_has_none(world: World) -> None:
    code, out, _ = world.start("bench", "--json", "--dry-run", "-m", world.model).end()
    assert code == 0
    assert json.loads(out)["args"][1:] == ["-m", str(world.model), "-o", "json"]
    code, out, _ = world.start("cli", "--json", "-m", world.model).end()
    assert code == 2
    assert "llama-cli has no JSON output" in json.loads(out)["error"]
