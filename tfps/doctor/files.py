"""The job token, certificates and settings of a worker that would be started here."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from tfps.config import Config, Security, unknown_variables
from tfps.doctor.report import Check
from tfps.errors import ConfigError
from tfps.wire.control import Pserver
from tfps.wire.job_token import JobToken, is_open_to_others

_NOWHERE = "127.0.0.1:1"  # a channel connects when it is used, which this one is not


def settings(environment: Mapping[str, str]) -> tuple[Config, Check]:
    """The settings in `TFPS_...` variables; the defaults if they are malformed."""
    try:
        config = Config.from_environment(environment)
    except ConfigError as error:
        return Config(), Check("settings", "failed", "malformed", str(error), "malformed")
    if unknown := unknown_variables(environment):
        text = f"{len(unknown)} unknown variable{'s' * (len(unknown) > 1)}"
        return config, Check("settings", "warning", text, "; ".join(unknown), "unknown")
    return config, Check("settings", "ok", "as a worker would take them")


def token(security: Security) -> Check:
    """The file with the job token: whether it can be used, and who else may read it."""
    path = security.token_file
    if not path:
        return Check("token", "ok", "none", values={"path": None})
    values = {"path": path}
    try:
        status = Path(path).stat()
        JobToken.read(path)
    except (ConfigError, OSError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"token_file '{path}' cannot be read: {error.strerror}"
        return Check("token", "failed", "cannot be used", text, "unusable", values)
    if is_open_to_others(status):
        text = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may use it"
        return Check("token", "warning", text, f"chmod 600 '{path}', the job token", "readable", values)
    return Check("token", "ok", path, values=values)


def tls(security: Security) -> Check:
    """Whether TLS is on, and its files can be used."""
    if not security.tls_ca:
        return Check("tls", "ok", "off", values={"on": False})
    try:
        Pserver(
            _NOWHERE, Security(tls_ca=security.tls_ca, tls_cert=security.tls_cert, tls_key=security.tls_key)
        ).close()
    except ConfigError as error:
        return Check("tls", "failed", "files cannot be used", str(error), "unusable", {"on": True})
    own = "with a certificate" if security.tls_cert else "without a certificate"
    return Check("tls", "ok", f"on, {own} of this host: slices go through gRPC", values={"on": True})
