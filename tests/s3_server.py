"""A real S3 server on loopback: SeaweedFS from its package, with credentials that it checks.

`python -m tests.s3_server FOLDER` runs one until Ctrl-C and prints the environment to use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

START_SECONDS = 60.0
STOP_SECONDS = 1.0
BUCKET = "bucket"


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server: where it answers, and the key and secret of its only identity."""

    endpoint: str
    key: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which any AWS client finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server that keeps its data in `folder`, wait until it answers, stop it by pid."""
    for _ in range(3):
        server, command = new_server(folder, "127.0.0.1")
        with (folder / "weed.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if answers(server, partial(_runs, process)):
                yield server
                return
        finally:
            _stop(process)
    raise RuntimeError(f"the S3 server did not start; its log is {folder / 'weed.log'}")


def new_server(folder: Path, address: str) -> tuple[S3Server, list[str]]:
    """A server of its own identity on free ports of an address, and the command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    identities = folder / "identities.json"
    identities.write_text(json.dumps({"identities": [_identity(key, secret)]}))
    ports = _free_ports(address, 8)
    server = S3Server(endpoint=f"http://{address}:{ports[6]}", key=key, secret=secret)
    return server, _command(folder, identities, address, ports)


def _identity(key: str, secret: str) -> dict[str, object]:
    return {
        "name": "tests",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }


def _command(folder: Path, identities: Path, address: str, ports: list[int]) -> list[str]:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    return [
        # Beside this interpreter, whose link is not resolved: the package puts it there.
        str(Path(sys.executable).parent / "weed"),
        "-logtostderr",
        "server",
        f"-dir={data}",
        f"-ip={address}",
        f"-ip.bind={address}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=0",
        "-volume.preStopSeconds=0",
        f"-master.port={ports[0]}",
        f"-master.port.grpc={ports[1]}",
        f"-volume.port={ports[2]}",
        f"-volume.port.grpc={ports[3]}",
        "-filer",
        f"-filer.port={ports[4]}",
        f"-filer.port.grpc={ports[5]}",
        "-s3",
        f"-s3.port={ports[6]}",
        f"-s3.port.grpc={ports[7]}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
        f"-s3.config={identities}",
    ]


def _free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def answers(server: S3Server, runs: Callable[[], bool]) -> bool:
    """Wait until the bucket can be made, which needs every part of the server to be up."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and runs():
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=2).close()
            _make_bucket(server)
            return True
        time.sleep(0.2)
    return False


def _make_bucket(server: S3Server) -> None:
    code = f"import s3fs; s3fs.S3FileSystem().mkdir({BUCKET!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **server.environment},
        check=True,
        timeout=60,
    )


def _runs(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Run a server until it is interrupted."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    with s3_server(folder) as server:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print(f"# --store s3://{BUCKET}/run", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
