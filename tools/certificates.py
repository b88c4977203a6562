"""Certificates for tests and benchmarks, made by the command `openssl` (3.0 or newer)."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Certificate:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates; its files are in `folder`.

    Attributes:
        file: its own certificate.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._own = self._make(name, "basicConstraints=critical,CA:TRUE")
        self.file = self._own.cert

    def sign(self, name: str, of: str = "IP:127.0.0.1,DNS:localhost") -> Certificate:
        """A new certificate for the hosts `of`; replaces an earlier one of this `name`."""
        return self._make(
            f"{self._name}-{name}", f"subjectAltName={of}", "-CA", self._own.cert, "-CAkey", self._own.key
        )

    def _make(self, name: str, extension: str, *more: str) -> Certificate:
        made = Certificate(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        command = [*_NEW, "-subj", f"/CN={name}", "-addext", extension, "-keyout", made.key, "-out", made.cert, *more]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return made
