"""A PostgreSQL server on loopback for one test: its own folder, port, user and password; nothing of it is left.

Debian's package `postgresql` has the programs. Its own cluster and service are not used.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

USER = DATABASE = "dagster"


@dataclass(frozen=True)
class Server:
    """A server that listens on 127.0.0.1, with an empty database."""

    port: int
    password: str

    @property
    def environment(self):
        """The variables that the dagster.yaml of docs/deployment.md reads."""
        return {"DAGSTER_PG_HOST": "127.0.0.1", "DAGSTER_PG_PORT": str(self.port), "DAGSTER_PG_PASSWORD": self.password}

    def rows(self, query):
        """Return what a query finds in the database."""
        import psycopg2

        where = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": self.password}
        connection = psycopg2.connect(dbname=DATABASE, **where)
        try:
            with connection.cursor() as cursor:
                cursor.execute(query)
                return list(cursor.fetchall())
        finally:
            connection.close()


def programs():
    """Return the folder of initdb and pg_ctl, the newest version's; None where there is no PostgreSQL."""
    found = shutil.which("initdb")
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return Path(found).parent if found else versions[-1].parent if versions else None


@contextmanager
def server():
    """Start a server, and stop and remove it at the end. Raises: CalledProcessError if a program of it fails."""
    binaries = programs()
    assert binaries, "no PostgreSQL: apt-get install postgresql"
    is_root = os.geteuid() == 0
    user = "postgres" if is_root else pwd.getpwuid(os.geteuid()).pw_name  # the server refuses root
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        secret = folder / "password"
        secret.write_text(password := secrets.token_hex(16))
        for path in (folder, secret):
            shutil.chown(path, user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def call(program, *arguments):
            how = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
            with open(folder / "output", "ab") as log:  # not a pipe: the server would hold it
                output = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
                subprocess.run([binaries / program, *arguments], cwd=folder, check=True, **output, **how)

        data = str(folder / "data")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -F"  # -F: no fsync
        call("initdb", "-D", data, "-U", USER, "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
        call("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            create_database(port, password)
            yield Server(port, password)
        finally:
            call("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")


def create_database(port, password):
    """Make the empty database."""
    import psycopg2

    connection = psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=password, dbname="postgres")
    connection.autocommit = True  # CREATE DATABASE refuses a transaction
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    connection.close()
