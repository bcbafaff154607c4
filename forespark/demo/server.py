"""One `vllm serve` as a child process: start, wait until it answers, stop, show what went wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
LOG_LINES = 15

# One gibibyte of KV cache is plenty for one chat; idle OpenMP threads must not spin on few cores.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with its last log lines."""


def free_port() -> int:
    """A port that is free now on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def vllm_command() -> list[str]:
    """The `vllm` command of this environment."""
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


class Server:
    """A running `vllm serve`; use as a context manager."""

    def __init__(self, model: Path, options: Sequence[str], log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._command = [*vllm_command(), "serve", str(model), "--served-model-name", "model"]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base address of the HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment: Mapping[str, str] = {**CPU_ENVIRONMENT, **os.environ}
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return self

    def wait_ready(self, waiting: Callable[[float], None] = lambda _: None) -> float:
        """Seconds until the server answered; `waiting(seconds)` is called while it does not."""
        assert self._process is not None, "enter the context first"
        started = time.monotonic()
        while True:
            seconds = time.monotonic() - started
            waiting(seconds)
            if self._process.poll() is not None:
                raise ServerError(f"vllm serve ended while starting\n{self.last_lines()}")
            if seconds > START_TIMEOUT_S:
                raise ServerError(
                    f"vllm serve not ready after {seconds:.0f} s\n{self.last_lines()}"
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return seconds
            except httpx.TransportError:
                pass
            time.sleep(0.25)

    def last_lines(self) -> str:
        """The end of the server's log, for error messages."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join([*text.splitlines()[-LOG_LINES:], f"(whole log: {self.log})"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The child leads its own session, so this reaches only the server's processes.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
