"""Both ends of a link that a test breaks: the stager sends a number now and then, and the rank sends it back."""

from __future__ import annotations

import logging
import sys
import time

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError
from holdfast.net.address import Address
from holdfast.net.handshake import JobStart
from stager.job_listener import JobListener, listen
from stager.reactor import Reactor
from stager.tcp import TcpTrainersPort
from trainer_side.ranks.tcp_stager_port import StagerTarget, connect_to_stager

MESSAGES, EVERY_SECONDS = 30, 1.0
_PORT = 29_000
_KEY = b"k" * 32
_SECONDS_MAX = 90.0


def _stager(host: str) -> None:
    reactor = Reactor()
    listener = JobListener(listen(Address(host, _PORT)), reactor, _KEY, ranks=1)
    while (hello := listener.next_job()) is None:
        reactor.run_once()
        time.sleep(0.001)
    port = TcpTrainersPort(reactor, hello, reconnect_seconds_max=30.0, start_seconds_max=60.0)
    listener.open_job(port)
    begun = time.monotonic()
    said = 0
    answers: list[bytes] = []
    while len(answers) < MESSAGES and time.monotonic() < begun + _SECONDS_MAX:
        if said < MESSAGES and time.monotonic() > begun + said * EVERY_SECONDS:
            port.send(0, str(said).encode())
            said += 1
        seen = port.poll()
        answers += [message for _, message in seen.messages]
        assert not seen.lost, seen.lost
        time.sleep(0.005)
    assert answers == [str(number).encode() for number in range(MESSAGES)], answers
    print(f"answers {MESSAGES} in order", flush=True)
    port.send(0, b"end")
    time.sleep(1.0)


def _rank(host: str) -> None:
    port = connect_to_stager(
        TrainerConfig(connections=1, reconnect_seconds_max=30.0),
        StagerTarget(f"{host}:{_PORT}", _KEY),
        rank=0,
        ranks=1,
        start=JobStart("test", b"1" * 16),
        seconds_max=60.0,
    )
    print("joined", flush=True)
    begun = time.monotonic()
    while time.monotonic() < begun + _SECONDS_MAX:
        for message in port.poll():
            if message == b"end":
                return
            port.send(message)
        time.sleep(0.005)
    raise SystemExit("the stager has not ended it")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        (_stager if sys.argv[1] == "stager" else _rank)(sys.argv[2])
    except HoldfastError as error:
        raise SystemExit(str(error)) from error
