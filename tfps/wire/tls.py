"""TLS: gRPC's credentials from certificate files, and what is wrong where two ends do not understand each other."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from pathlib import Path

import grpc

from tfps.config import Security
from tfps.errors import ConfigError
from tfps.wire.reach import split

logger = logging.getLogger("tfps")
_FILES = "tls_ca", "tls_key", "tls_cert"
_TLS_ONLY_THERE = (
    "uses TLS, this worker does not: set TFPS_TLS_CA (or tls_ca, --tls-ca) to the file of the authority that "
    "signed its certificate"
)
_NOT_TLS = frozenset(  # what OpenSSL says of an answer that is not TLS
    ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
)


def channel_credentials(security: Security) -> grpc.ChannelCredentials:
    """A worker's credentials; the files are read once."""
    _client_context(security)
    authorities, key, certificate = (_content(security, name) for name in _FILES)
    return grpc.ssl_channel_credentials(authorities, key, certificate)


def server_credentials(security: Security) -> grpc.ServerCredentials:
    """A pserver's credentials. Files that change are read anew by the next connection."""
    seen = _stamps(security)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The new certificates, if there are any that are complete; called for every connection, on any thread."""
        nonlocal seen
        if (stamps := _stamps(security)) == seen:
            return None
        seen = stamps
        try:
            found = _server_configuration(security)
        except ConfigError as error:  # maybe half of the files have been replaced
            logger.warning("tfps: certificates have changed, but the earlier ones stay in use: %s", error)
            return None
        logger.info("tfps: certificates have changed and were read anew")
        return found

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(security), changed, require_client_authentication=bool(security.tls_ca)
    )


def _server_configuration(security: Security) -> grpc.ServerCertificateConfiguration:
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
    authorities, key, certificate = (_content(security, name) for name in _FILES)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def _stamps(security: Security) -> list[tuple[int, int, int]]:
    stamps = []
    for path in filter(None, (getattr(security, name) for name in _FILES)):
        with contextlib.suppress(OSError):
            found = Path(path).stat()
            stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return stamps


def diagnose(address: str, security: Security, timeout_s: float = 2.0) -> str | None:
    """Why a worker with `security` and the pserver do not understand each other; "": they do; None: nothing answers."""
    host, port = split(address)
    context = _client_context(security)
    try:
        with (
            socket.create_connection((host, port), timeout_s) as connected,
            context.wrap_socket(connected, server_hostname=host) as encrypted,
        ):
            if not security.tls_ca:
                return _TLS_ONLY_THERE
            # With TLS 1.3 a pserver looks at the certificate only now; gRPC ends the connection without a word.
            with contextlib.suppress(ConnectionError):
                if encrypted.recv(1):
                    return ""
            return _refused(security, "the connection was ended")
    except ssl.SSLCertVerificationError as error:
        return f"has a certificate that TFPS_TLS_CA={security.tls_ca} does not confirm: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            if not security.tls_ca:
                return ""
            return (
                "does not use TLS, this worker does: start the pserver with --tls-cert and --tls-key, or unset "
                "TFPS_TLS_CA (tls_ca) here"
            )
        if error.reason is None or isinstance(error, ssl.SSLEOFError):
            return None
        return _refused(security, error.reason)
    except OSError:
        return None


def _refused(security: Security, reason: str) -> str:
    why = reason.lower().replace("_", " ")
    if not security.tls_ca:
        return _TLS_ONLY_THERE
    if not security.tls_cert:
        return f"wants a certificate of this worker ({why}): set TFPS_TLS_CERT and TFPS_TLS_KEY (tls_cert, tls_key)"
    return (
        f"does not accept the certificate {security.tls_cert} of this worker ({why}): its --tls-ca must have signed it"
    )


def _client_context(security: Security) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if security.tls_ca:
        _load(context, security)
    else:  # only asks whether there is TLS
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _load(context: ssl.SSLContext, security: Security) -> None:
    """Loads what `security` has; raises ConfigError if a file cannot be read or does not contain what it should."""
    try:
        if security.tls_cert:  # the password keeps OpenSSL from asking for one on the terminal
            context.load_cert_chain(security.tls_cert, security.tls_key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert and tls_key must be a certificate and its key, PEM and not encrypted, got '{security.tls_cert}' "
            f"and '{security.tls_key}': {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"tls_cert '{security.tls_cert}' and tls_key '{security.tls_key}' cannot be read: {error.strerror}"
        ) from None
    try:
        if security.tls_ca:
            context.load_verify_locations(security.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_ca must be a file of certificates (PEM), got '{security.tls_ca}': {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(f"tls_ca '{security.tls_ca}' cannot be read: {error.strerror}") from None


def _content(security: Security, name: str) -> bytes | None:
    path: str = getattr(security, name)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"{name} '{path}' cannot be read: {error.strerror}") from None
