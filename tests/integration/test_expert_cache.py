"""Change expert-cache: the output is that of the CPU, whatever is where, and a cache that does not work says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from real_builds import find, rpc, tests_of
from test_models_real import CASES, SMALL, WANTED, Case

from llamafork import cli
from llamafork.build.store import Build
from llamafork.run import client

ONE = "mem=256M,lat=5us,threads=1"
TWO = "mem=256M,lat=5us,threads=1;mem=64M,h2d=2G,threads=1"
MODES = {"none", "swap", "half", "torn", "late", "all"}
TRAINED = "the trained one"


@dataclass(frozen=True)
class Ran:
    code: int
    log: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def of(self, mode: str) -> list[dict[str, Any]]:
        return [line["cache"] for line in self.lines if line["mode"] == mode]

    def total(self, name: str) -> int:
        return sum(line["cache"][name] for line in self.lines)


def run(build: Build, case: str, model: Path, *words: str, devices: str = ONE, **env: str) -> Ran:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "LLAMA_"))}
    command = [build.program("test-expert-cache"), case, "-m", model, "-ngl", "99", "-cmoe", "-nr", "-t", "1",
               "-np", "4", *words]  # fmt: skip
    checks = {"GGML_SIM_DEVICES": devices, "GGML_SIM_CHECK": "1", "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=plain | checks | env)
    return Ran(done.returncode, done.stderr, [json.loads(line) for line in done.stdout.splitlines()])


def equal(ran: Ran, modes: set[str] = MODES) -> None:
    assert ran.code == 0, ran.log[-4000:]
    assert {line["mode"] for line in ran.lines} == modes
    assert all(line["max_diff"] == 0 for line in ran.lines)
    assert {line["cache"]["status"] for line in ran.lines} == {"active"}


@pytest.fixture(scope="module")
def build() -> Build:
    return tests_of("release")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[Case | str], Path]:
    files: dict[Case | str, Path] = {TRAINED: model}

    def found(case: Case | str) -> Path:
        if isinstance(case, Case) and case not in files:
            folder = tmp_path_factory.mktemp("expert-cache")
            words = ("--arch", case.arch, *SMALL, *WANTED.get(case.arch, ()), *case.words)
            assert cli.main(["--quiet", "make-model", str(folder / "m.gguf"), *words]) == 0
            files[case] = [*folder.glob("m-00001-of-*.gguf"), folder / "m.gguf"][0]
        return files[case]

    return found


class TestByValue:
    """Against the CPU alone, with 1 to 64 tokens in a batch, for each kind of residency (modes of the program)."""

    @pytest.mark.parametrize("case", [TRAINED, *CASES], ids=str)
    def test_one_device(self, build: Build, made: Callable[[Case | str], Path], case: Case | str) -> None:
        ran = run(build, "logits", made(case))
        equal(ran)
        sizes = {line["tokens"] for line in ran.lines}
        assert sizes == {1, 2, 7, 8, 9, 16, 31, 32, 33, 64}
        assert not any(cache["hits"] for cache in ran.of("none"))
        assert sum(cache["uploads_failed"] for cache in ran.of("none")) > 0
        for mode in ("swap", "half", "all"):
            assert sum(cache["hits"] for cache in ran.of(mode)) > 30
        for line in ran.lines:  # larger batches are upstream's
            assert (line["cache"]["steps"] > 0) == (line["tokens"] <= 31)
        one, all_ = (
            next(line["cache"] for line in ran.lines if (line["mode"], line["tokens"]) == (mode, 1))
            for mode in ("swap", "all")
        )
        assert one["misses"] > 0
        assert one["uploads"] > all_["uploads"] > 0  # other experts in each step, and each expert once

    @pytest.mark.parametrize("case", [TRAINED, CASES[0], CASES[3], CASES[8], CASES[9]], ids=str)
    def test_two_unequal_devices(self, build: Build, made: Callable[[Case | str], Path], case: Case | str) -> None:
        ran = run(build, "mixed", made(case), "-ts", "1,1", devices=TWO)
        equal(ran)
        assert len(ran.lines[0]["cache"]["devices"]) == 2

    @pytest.mark.parametrize("skips", ["0", "1"])
    @pytest.mark.parametrize("case", [TRAINED, CASES[8]], ids=str)
    def test_two_remote_devices(
        self, build: Build, made: Callable[[Case | str], Path], case: Case | str, skips: str
    ) -> None:
        with remote(build) as servers:
            ran = run(build, "mixed", made(case), "--rpc", servers, devices="", GGML_RPC_SKIP_IDS=skips)
        equal(ran)
        assert [device["skips"] for device in ran.lines[0]["cache"]["devices"]] == [skips == "1"] * 2

    @pytest.mark.parametrize("case", [TRAINED, CASES[10], CASES[17]], ids=str)
    def test_a_device_that_does_not_know_minus_one_reads_zeros(
        self, build: Build, made: Callable[[Case | str], Path], case: Case | str
    ) -> None:
        ran = run(build, "logits", made(case), GGML_SIM_SKIP_IDS="0")
        equal(ran)
        for line in ran.lines:
            assert not line["cache"]["devices"][0]["skips"]
            assert (line["cache"]["steps"] > 0) == (line["tokens"] <= 8)

    @pytest.mark.parametrize("case", ["mixed", "sequences", "state", "abort"])
    def test_as_servers_use_it(self, build: Build, model: Path, case: str) -> None:
        equal(run(build, case, model))

    def test_two_threads_of_the_host(self, build: Build, model: Path) -> None:
        equal(run(build, "mixed", model, "-t", "2"))

    @pytest.mark.parametrize("case", [TRAINED, CASES[2], CASES[3], CASES[5]], ids=str)
    def test_the_shared_expert_beside_the_misses_or_behind_them(
        self, build: Build, made: Callable[[Case | str], Path], case: Case | str
    ) -> None:
        """The other order of nodes; the cases above have it in the device's branch."""
        equal(run(build, "mixed", made(case), LLAMA_MOE_CACHE_SHARED="0"))

    def test_some_layers_on_the_device_or_on_the_host(self, build: Build, model: Path) -> None:
        plain = run(build, "mixed", model).lines[0]["cache"]
        some = run(build, "mixed", model, "-ncmoe", "3")
        equal(some)
        assert plain["devices"][0]["layers"] == "1-5"
        assert some.lines[0]["cache"]["devices"][0]["layers"] == "1-2"
        assert some.lines[0]["cache"]["not_served"] == "layers 3-5: its experts are on a device"


@contextmanager
def remote(build: Build) -> Iterator[str]:
    with ExitStack() as stack:
        yield ",".join(stack.enter_context(rpc(build)) for _ in range(2))


class TestHostile:
    def test_contexts_come_and_go(self, build: Build, model: Path) -> None:
        ran = run(build, "cycles", model)
        assert ran.code == 0, ran.log[-4000:]

    def test_banks_that_get_no_memory(self, build: Build, model: Path) -> None:
        ran = run(build, "alloc", model)
        assert ran.code == 0, ran.log[-4000:]
        assert all(line["max_diff"] == 0 for line in ran.lines)
        states = {line["mode"]: line["cache"] for line in ran.lines}
        once = [cache for mode, cache in states.items() if mode.endswith("x1")]
        assert [cache["status"] for cache in once] == ["active"] * 3  # fewer slots, then
        never = states["0x1000000"]
        assert (never["status"], never["hits"]) == ("off", 0)
        assert "SIM0 gave no memory for it" in never["reason"]

    def test_the_comparison_sees_a_slot_that_is_not_what_it_should_be(self, build: Build, model: Path) -> None:
        lie = {"LLAMA_MOE_CACHE_FAULT_UPLOAD": "2", "LLAMA_MOE_CACHE_FAULT_LIE": "1", "LLAMA_MOE_CACHE_WAIT": "1"}
        words = ("--moe-expert-cache", "16")
        ran = run(build, "run", model, *words, LLAMA_MOE_CACHE_MARGIN_MB="0", **lie)
        assert ran.code == 1
        assert ran.lines[0]["max_diff"] > 0
        seen = run(build, "run", model, *words, LLAMA_MOE_CACHE_MARGIN_MB="0", LLAMA_MOE_CACHE_AUDIT="64", **lie)
        assert seen.code < 0
        assert re.search(r"expert cache: slot \d+ of .*_exps.* does not hold expert \d+", seen.log)
        told = run(build, "run", model, *words, LLAMA_MOE_CACHE_MARGIN_MB="0", LLAMA_MOE_CACHE_AUDIT="64")
        assert told.code == 0, told.log[-2000:]
        assert told.lines[0]["cache"]["hits"] > 0

    def test_banks_no_larger_than_an_allocation(self, build: Build, tmp_path: Path) -> None:
        """A device's largest allocation is a limit of its own: 1 MiB, and banks of all experts have 4.5 and more."""
        big = tmp_path / "m.gguf"
        words = (
            "--arch",
            "qwen3moe",
            "--layers",
            "2",
            "--embd",
            "256",
            "--ff",
            "512",
            "--heads",
            "2",
            "--kv-heads",
            "1",
        )
        words += ("--head-dim", "32", "--experts", "64", "--used", "4", "--vocab", "300", "--type", "Q4_0")
        assert cli.main(["--quiet", "make-model", str(big), *words]) == 0
        small = ("-c", "256", "-b", "16", "-ub", "16", "--moe-expert-cache", "-1")
        slots = []
        for more in ("", ",max_alloc=1M"):
            ran = run(build, "run", big, *small, devices=ONE + more, LLAMA_MOE_CACHE_MARGIN_MB="0")
            assert ran.code == 0, ran.log[-4000:]
            slots.append(ran.lines[0]["cache"]["devices"][0]["slots"])
        assert slots == [64, 14]

    def test_no_page_locked_memory(self, build: Build, model: Path) -> None:
        equal(run(build, "mixed", model, GGML_SIM_PIN="1K"))

    @pytest.mark.parametrize("slow", ["h2d=2M", "lat=500us"])
    def test_slow_uploads_and_hardly_any_slots(self, build: Build, model: Path, slow: str) -> None:
        env = {"MARGIN_MB": "0", "POLICY": "lru", "BUDGET": "64", "AUDIT": "64"}
        named = {f"LLAMA_MOE_CACHE_{name}": value for name, value in env.items()}
        ran = run(build, "run", model, "--moe-expert-cache", "5", devices=f"{ONE},{slow}", **named)
        assert ran.code == 0, ran.log[-4000:]
        assert ran.total("uploads") > 0

    @pytest.mark.parametrize(
        ("profile", "case"),
        [("asan", "mixed"), ("asan", "abort"), ("asan", "cycles"), ("tsan", "mixed"), ("tsan", "abort")],
    )  # tsan needs minutes for the cycles
    def test_under_a_sanitizer(self, model: Path, profile: str, case: str) -> None:
        tool = find("--profile", profile, "--backend", "sim", "--target", "test-expert-cache")
        ran = run(tool, case, model, "-ts", "1,1", devices=TWO)
        assert ran.code == 0, ran.log[-6000:]

    def test_a_run_is_reproduced(self, build: Build, model: Path) -> None:
        """Deterministic: the same experts at the same time, run after run."""
        words, env = (
            ("--moe-expert-cache", "8"),
            {"LLAMA_MOE_CACHE_DETERMINISTIC": "1", "LLAMA_MOE_CACHE_MARGIN_MB": "0"},
        )
        first, second = (run(build, "run", model, *words, **env) for _ in range(2))
        assert first.code == second.code == 0
        wanted = ("hits", "misses", "uploads", "layers")
        assert [first.lines[0]["cache"][key] for key in wanted] == [second.lines[0]["cache"][key] for key in wanted]
        assert first.lines[0]["cache"]["hits"] > 0


class TestReasons:
    """Off, and why: one line, in the log and in /props."""

    def test_off_and_on_again(self, build: Build, model: Path) -> None:
        ran = run(build, "reasons", model)
        assert ran.code == 0, ran.log[-4000:]

    @pytest.mark.parametrize(
        ("words", "env", "why"),
        [
            (("--moe-expert-cache", "2"), {}, r"layers 1-5: 2 slots are fewer than the experts of a token and one .*"),
            ((), {"LLAMA_MOE_CACHE_MARGIN_MB": "255"}, r"layers 1-5: SIM0 has no room for 5 slots beside its margin"),
            (("-ngl", "0"), {}, r"layers 1-5: the layer is not on a device"),
            (("--n-cpu-moe", "0"), {"PLACE": "-ngl 99"}, r"layers 1-5: its experts are on a device"),
            ((), {"GGML_OP_OFFLOAD_MIN_BATCH": "1"}, r"GGML_OP_OFFLOAD_MIN_BATCH sends all batches to the device"),
            ((), {"LLAMA_MOE_CACHE_MARGIN_MB": "much"}, r"LLAMA_MOE_CACHE_MARGIN_MB=much is not a number it takes"),
            ((), {"LLAMA_MOE_CACHE_POLICY": "best"}, r"LLAMA_MOE_CACHE_POLICY=best is neither score nor lru"),
        ],
        ids=["few", "margin", "host", "device", "offload", "number", "policy"],
    )  # fmt: skip
    def test_is_said(self, build: Build, model: Path, words: tuple[str, ...], env: dict[str, str], why: str) -> None:
        place = env.pop("PLACE", "-ngl 99 -cmoe").split()
        with served(build, model, *place, "--moe-expert-cache", "-1", *words, **env) as (server, log):
            said = server.get("/props")["moe_cache"]
            assert said["status"] == "off"
            assert re.fullmatch(why, said["reason"]), said
            assert re.search(r"expert cache: off: " + why, log.read_text())

    def test_repacked_experts(self, build: Build, made: Callable[[Case | str], Path]) -> None:
        """Where no device brings page-locked memory, upstream repacks what it can for the CPU."""
        case = next(case for case in CASES if "Q4_0" in case.words)
        with rpc(build) as server:
            words = ("-ngl", "99", "-cmoe", "--repack", "--moe-expert-cache", "-1", "--rpc", server)
            with served(build, made(case), *words, devices="") as (client_, _):
                said = client_.get("/props")["moe_cache"]
        assert said["status"] == "off"
        assert "its experts are repacked for the CPU (--no-repack keeps them as they are)" in said["reason"]

    def test_fitting_comes_first(self, build: Build, model: Path) -> None:
        """The dry run of --fit makes no cache; what it leaves is the cache's."""
        words = ("-fit", "on", "--moe-expert-cache", "-1", "-cmoe", "-ngl", "99")
        with served(build, model, *words, LLAMA_MOE_CACHE_MARGIN_MB="0") as (server, log):
            assert server.get("/props")["moe_cache"]["status"] == "active"
            assert len(re.findall(r"expert cache: SIM0: ", log.read_text())) == 1

    def test_nothing_is_said_when_it_was_not_asked_for(self, build: Build, model: Path) -> None:
        with served(build, model, "-ngl", "99", "-cmoe") as (server, log):
            assert server.get("/props")["moe_cache"] == {
                "status": "off",
                "reason": "not asked for (--moe-expert-cache N)",
            }
            assert "expert cache" not in log.read_text()


@contextmanager
def served(
    build: Build, model: Path, *words: str, devices: str = ONE, **env: str
) -> Iterator[tuple[client.Client, Path]]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "LLAMA_"))}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        command = [
            build.program("llama-server"),
            "-m",
            model,
            "-c",
            "1024",
            "-t",
            "1",
            "-nr",
            "-fit",
            "off",
            "--metrics",
            *words,
        ]
        with client.running(command, log, env=plain | {"GGML_SIM_DEVICES": devices} | env, timeout=60) as server:
            yield server, log


def adapter(path: Path, model: Path, tensor: str) -> Path:
    """A LoRA adapter of rank 1 for one tensor of the model's routed experts."""
    reader = gguf.GGUFReader(model)
    base = next(t for t in reader.tensors if t.name == tensor)
    columns, rows, experts = (int(n) for n in base.shape)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    random = np.random.default_rng(1)
    writer.add_tensor(f"{tensor}.lora_a", random.normal(size=(experts, 1, columns)).astype(np.float32))
    writer.add_tensor(f"{tensor}.lora_b", random.normal(size=(experts, rows, 1)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestPrograms:
    """The flags are everywhere; what a program measures says whether the cache is in it."""

    @pytest.mark.parametrize("program", ["llama-server", "llama-cli", "llama-completion", "llama-perplexity"])
    def test_have_the_flags(self, fork: Build, program: str) -> None:
        said = subprocess.run([fork.program(program), "--help"], capture_output=True, text=True, timeout=60).stdout
        assert re.search(r"--moe-expert-cache N .*\n(.*\n)*?.*LLAMA_ARG_MOE_EXPERT_CACHE", said)
        assert re.search(r"--moe-cache-window N .*\n(.*\n)*?.*LLAMA_ARG_MOE_CACHE_WINDOW", said)

    @pytest.mark.parametrize(("margin", "status"), [("0", "active"), ("4096", "off")])
    def test_bench(self, build: Build, model: Path, margin: str, status: str) -> None:
        words = ("-ngl", "99", "-ncmoe", "99", "-p", "0", "-n", "16", "-r", "1", "-t", "1", "-o", "json")
        env = os.environ | {"GGML_SIM_DEVICES": ONE, "LLAMA_MOE_CACHE_MARGIN_MB": margin}
        done = subprocess.run([build.program("llama-bench"), "-m", model, *words, "--moe-expert-cache", "8"],
                              capture_output=True, text=True, timeout=120, env=env)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0]["n_gen"] == 16
        assert f'expert cache: {{"status": "{status}"' in done.stderr


class TestServer:
    TEXT = "The expert cache keeps"

    def ask(self, server: client.Client, prompt: str, n: int = 48, **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True, **more}
        answer: dict[str, Any] = server.post("/completion", body)
        return answer

    def test_metrics_props_and_the_same_words(self, build: Build, model: Path) -> None:
        words = ("-ngl", "99", "-cmoe", "-np", "2")
        with served(build, model, *words) as (server, _):
            want = self.ask(server, self.TEXT)["tokens"]
        with served(build, model, *words, "--moe-expert-cache", "-1", LLAMA_MOE_CACHE_MARGIN_MB="0") as (server, log):
            got = self.ask(server, self.TEXT)["tokens"]
            props = server.get("/props")["moe_cache"]
            text = server.session.get(server.url + "/metrics", timeout=10).text
            metrics = dict(re.findall(r"^llamacpp:moe_cache_(\w+) (\S+)$", text, re.M))
            assert re.search(
                r"expert cache: SIM0: 32 slots in each of 5 layers \(1-5\), 100.0 % of their experts, .* margin 0 MiB",
                log.read_text(),
            )
        assert got == want
        assert props["status"] == "active"
        assert props["hits"] + props["misses"] == int(metrics["hits_total"]) + int(metrics["misses_total"])
        assert props["hits"] > 0
        assert int(metrics["steps_total"]) >= 47

    def test_an_adapter_of_experts_takes_its_layer_out(self, build: Build, model: Path, tmp_path: Path) -> None:
        """While it is on; the other layers are served, and its layer is again when it is off."""
        lora = adapter(tmp_path / "lora.gguf", model, "blk.2.ffn_down_exps.weight")
        words = ("-ngl", "99", "-cmoe", "--lora", str(lora))
        answers: dict[str, list[list[int]]] = {"0": [], "8": []}
        for slots, found in answers.items():
            cache = ("--moe-expert-cache", slots)
            with served(build, model, *words, *cache, LLAMA_MOE_CACHE_MARGIN_MB="0") as (server, _):
                for scale in (1.0, 0.0, 1.0):
                    body = [{"id": 0, "scale": scale}]
                    server.session.post(server.url + "/lora-adapters", json=body, timeout=30).raise_for_status()
                    found.append(self.ask(server, self.TEXT)["tokens"])
                assert (server.get("/props")["moe_cache"]["status"] == "active") == (slots == "8")
        assert answers["0"] == answers["8"]
        assert answers["0"][0] == answers["0"][2] != answers["0"][1]

    def test_drafts_and_their_context(self, build: Build, model: Path) -> None:
        """The MTP context on the same model has no cache and takes none away."""
        words = ("-ngl", "99", "-cmoe", "--moe-expert-cache", "8")
        drafts = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
        answers = {}
        for name, more in {"plain": (), "drafts": drafts}.items():
            with served(build, model, *words, *more, LLAMA_MOE_CACHE_MARGIN_MB="0", LLAMA_MOE_CACHE_AUDIT="16") as (
                server,
                _,
            ):
                answers[name] = self.ask(server, self.TEXT)
                assert server.get("/props")["moe_cache"]["hits"] > 0
        assert answers["drafts"]["tokens"] == answers["plain"]["tokens"]
        assert answers["drafts"]["timings"]["draft_n"] > 0

    def test_the_margin_stays_free(self, build: Build, model: Path, tmp_path: Path) -> None:
        """After a long prompt, a second request and with drafts; SIM counts its memory exactly."""

        def peak(mem: int, *words: str) -> int:
            stats = tmp_path / f"{mem}{words}"
            more = ("-ngl", "99", "-cmoe", "-c", "8192", "--override-kv", "glm4moe.context_length=int:8192",
                    "--spec-type", "draft-mtp", *words)  # fmt: skip
            env = {"LLAMA_MOE_CACHE_MARGIN_MB": str(margin >> 20), "GGML_SIM_STATS": str(stats)}
            with served(build, model, *more, devices=f"mem={mem},threads=1", **env) as (server, log):
                long = self.ask(server, " ".join(str(i) for i in range(1200)), n=8)
                assert long["tokens_evaluated"] >= 4096
                self.ask(server, self.TEXT, n=8)
                cache = server.get("/props")["moe_cache"]
                server.process.terminate()
                server.process.wait(30)
                assert "does not match expectation" not in log.read_text()
            if words:
                assert cache["status"] == "active"
                assert 5 <= cache["devices"][0]["slots"] < 32
            used: int = json.loads(stats.read_text())["sim"][0]["alloc_peak"]
            return used

        margin = 16 << 20
        mem = peak(1 << 30) + margin + (2 << 20)  # room for half of the experts
        assert mem - peak(mem, "--moe-expert-cache", "-1") >= margin
