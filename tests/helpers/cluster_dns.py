"""The DNS server of a cluster: cluster_dns.py ADDRESS FILE. FILE has names and addresses as JSON.

The file is read for each question. Answers A for names in it, nothing for other types of them, and "no such name" for
all others.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path

A, INTERNET, TTL_S = 1, 1, 5  # CoreDNS lets answers live for 5 s
NO_SUCH_NAME = 3


def answer(question: bytes, names: dict[str, str]) -> bytes:
    """The reply to a message with one question."""
    labels, end = [], 12
    while size := question[end]:
        labels.append(question[end + 1 : end + 1 + size].decode())
        end += 1 + size
    kind, _ = struct.unpack_from(">HH", question, end + 1)
    address = names.get(".".join(labels).lower())
    record = b""
    if address is not None and kind == A:
        record = struct.pack(">HHHIH", 0xC00C, A, INTERNET, TTL_S, 4) + socket.inet_aton(address)
    flags = 0x8580 | (0 if address is not None else NO_SUCH_NAME)
    return question[:2] + struct.pack(">HHHHH", flags, 1, bool(record), 0, 0) + question[12 : end + 5] + record


def main(address: str, file: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        print("ready", flush=True)
        while True:
            question, asker = server.recvfrom(4096)
            server.sendto(answer(question, json.loads(Path(file).read_text())), asker)


if __name__ == "__main__":
    main(*sys.argv[1:])
