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

logger = logging.getLogger("tfps")
_TLS_ONLY_THERE = (
    "uses TLS, this worker does not: set TFPS_TLS_CA (or tls_ca, --tls-ca) to the file of the authority that "
    "signed its certificate"
)
# What OpenSSL says of an answer that is not TLS.
_NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
}


def channel_credentials(security: Security) -> grpc.ChannelCredentials:
    """A worker's credentials; the files are read once.

    Raises:
        ConfigError: a file cannot be read or does not contain what it should.
    """
    _client_context(security)
    certificate = (_content("tls_key", security.tls_key), _content("tls_cert", security.tls_cert))
    key, chain = certificate if security.tls_cert else (None, None)
    return grpc.ssl_channel_credentials(_content("tls_ca", security.tls_ca), key, chain)


def server_credentials(security: Security) -> grpc.ServerCredentials:
    """A pserver's credentials. Files that change are read anew by the next connection.

    Raises:
        ConfigError: a file cannot be read or does not contain what it should.
    """
    certificates = _Certificates(security)
    return grpc.dynamic_ssl_server_credentials(
        certificates.read(), certificates.changed, require_client_authentication=bool(security.tls_ca)
    )


class _Certificates:
    """A pserver's files. `changed` is called by gRPC for every connection, on any thread."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._paths = [path for path in (security.tls_cert, security.tls_key, security.tls_ca) if path]
        self._seen = self._stamps()

    def read(self) -> grpc.ServerCertificateConfiguration:
        security = self._security
        _load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
        if security.tls_ca:
            _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security)
        pair = _content("tls_key", security.tls_key), _content("tls_cert", security.tls_cert)
        authorities = _content("tls_ca", security.tls_ca) if security.tls_ca else None
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates, if there are any that are complete."""
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        self._seen = stamps
        try:
            found = self.read()
        except ConfigError as error:  # maybe half of the files have been replaced
            logger.warning("tfps: certificates have changed, but the earlier ones stay in use: %s", error)
            return None
        logger.info("tfps: certificates have changed and were read anew")
        return found

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                found = Path(path).stat()
                stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return stamps


def diagnose(address: str, security: Security, timeout_s: float = 2.0) -> str | None:
    """What keeps a worker with `security` and the pserver at `address` from understanding each other, for a message.

    "": nothing does. None: unknown, as nothing answers.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = _client_context(security)
    try:
        with (
            socket.create_connection((host, int(port)), timeout_s) as connected,
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
            return _not_tls(security)
        if error.reason is None or isinstance(error, ssl.SSLEOFError):
            return None
        return _refused(security, error.reason)
    except OSError:
        return None


def _not_tls(security: Security) -> str:
    if not security.tls_ca:
        return ""
    return (
        "does not use TLS, this worker does: start the pserver with --tls-cert and --tls-key, or unset TFPS_TLS_CA "
        "(tls_ca) here"
    )


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
        _load_authorities(context, security)
    else:  # only asks whether there is TLS
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if security.tls_cert and security.tls_ca:
        _load_certificate(context, security)
    return context


def _load_certificate(context: ssl.SSLContext, security: Security) -> None:
    try:
        # The password keeps OpenSSL from asking for one on the terminal.
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


def _load_authorities(context: ssl.SSLContext, security: Security) -> None:
    try:
        context.load_verify_locations(security.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_ca must be a file of certificates (PEM), got '{security.tls_ca}': {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(f"tls_ca '{security.tls_ca}' cannot be read: {error.strerror}") from None


def _content(name: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} '{path}' cannot be read: {error.strerror}") from None
