"""Orders of events, each a text in scenarios/: what is given to the machine, and below it what it answers.

An event is a line with ">". Under it are the effects, then the phase. Most are orders that once went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tfps import errors
from tfps.errors import TfpsError
from tfps.protos import tfps_pb2 as pb
from tfps.recovery import machine
from tfps.recovery.machine import Effect, Event, Recovery

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def error(words: list[str]) -> TfpsError:
    """`PserverLostError b ended` is that error with the text "b ended"."""
    made: TfpsError = getattr(errors, words[0])(" ".join(words[1:]) or "why")
    return made


def event(line: str) -> Event:
    """What a line says."""
    name, *words = line.split()
    numbers = [int(word) for word in words if word.isdigit()]
    now_s = next((float(word[1:]) for word in words if word[0] == "@"), 0.0)
    texts = [word for word in words if word[0] != "@"]
    match name:
        case "failed":
            return machine.Failed(numbers[0], error(texts[1:]), "for" not in texts, now_s)
        case "decided":
            return machine.Decided(pb.Decision(generation=numbers[0], ranks=numbers[1:]))
        case "connected":
            return machine.Connected(numbers[0])
        case "restored":
            return machine.Restored(numbers[0], frozenset(numbers[1:]))
        case "missed":
            return machine.Missed(error(texts), now_s)
        case "answered":
            return machine.Answered(
                numbers[0], numbers[1], tuple(numbers[2:]), "again" in words, f"bucket {numbers[1]}"
            )
        case "caught-up":
            return machine.CaughtUp(*numbers)
        case "offered":
            return machine.Offered(words[0])
        case "settled":
            return machine.Settled(numbers[0], words[1], "known" in words)
        case "joined":
            return machine.Joined()
        case "broken":
            return machine.Broken(error(texts))
        case "closed":
            return machine.Closed()
        case "timed-out":
            return machine.TimedOut()
    raise ValueError(f"no event: {line}")


def said(effect: Effect) -> str:
    """A line for it."""
    match effect:
        case machine.Report(generation):
            return f"report {'with its own view' if generation is None else f'with view {generation}'}"
        case machine.Connect(session, decision):
            return f"connect {session} {'by asking to join' if decision is None else f'as view {decision.generation}'}"
        case machine.Give(session, bucket):
            return f"give {session} bucket {bucket}"
        case machine.Drop(session, _, tells):
            return f"drop {session}{', telling the others' if tells else ''}"
        case machine.Wait(_, waited_s, says):
            return f"wait, after {waited_s:g} s{', with a line in the log' if says else ''}"
        case machine.Settle(address):
            return f"settle {address}"
        case machine.Quit(session, why):
            return f"quit {session}: {why}"
        case machine.End(why):
            return f"end with {type(why).__name__}: {why}"
    return f"{type(effect).__name__.lower()} {effect.session}"


def played(lines: list[str]) -> Iterator[str]:
    """The scenario as it is, with what the machine answers to its events."""
    recovery = Recovery(60.0, joining="joining" in lines)
    for line in lines:
        if line.startswith(("#", "joining")) or not line:
            yield line
        elif line.startswith("> "):
            yield line
            for effect in recovery.step(event(line[2:])):
                yield f"  {said(effect)}"
                assert not isinstance(effect, machine.Drop) or recovery.next is None
            yield recovery.phase.value


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_follows_each_event(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert list(played(lines)) == lines
