"""Deliberate bugs in the code that reaches ranks over TCP: the simulation must detect each of them.

python -m tests.simulation --tcp --mutation payload_twice --first 0 --count 500
"""

# ruff: noqa: E501 - the strings are pieces of source

from __future__ import annotations

from tests.simulation.mutations import Mutation

__all__ = ["TCP_MUTATIONS"]

TCP_MUTATIONS = {
    name: Mutation(name, bug, ((module, old, new),), seeds_max)
    for name, bug, module, old, new, seeds_max in (
        # -- messages
        (
            "resumed_one_early",
            "after a cut a line begins one message before what the other end says that it has received",
            "holdfast.net.message_line",
            "        self._acknowledge(received)\n        self._sending = 0\n",
            "        self._acknowledge(max(self._acknowledged, received - 1))\n        self._sending = 0\n",
            200,
        ),
        (
            "forgotten_when_written",
            "a message that was written counts as received, whatever was cut since",
            "holdfast.net.message_line",
            "        self._sending = len(self._unacknowledged)\n        self._acknowledge(received)\n        self._sending = 0\n",
            "        self._acknowledge(max(self._acknowledged, received))\n",
            200,
        ),
        (
            "half_a_message_kept",
            "what came of a message before the cut stays in front of what comes after it",
            "holdfast.net.message_line",
            '        self._partial_record, self._large = b"", None\n',
            "        self._large = None\n",
            200,
        ),
        (
            "told_from_zero",
            "a rank that comes again says that it has received nothing",
            "trainer_side.ranks.tcp_stager_port",
            "                received=self._line.received,\n",
            "                received=0,\n",
            200,
        ),
        # -- payloads
        (
            "payload_twice",
            "a payload that comes again over another connection is taken again",
            "stager.tcp",
            "        if header.number in self._ranks[number].received_numbers:\n            return None\n",
            "",
            800,
        ),
        (
            "under_way_lost",
            "what had no receipt when its connection was cut is not sent again",
            "trainer_side.ranks.payload_sender",
            "                self._waiting.extendleft(reversed(self._in_flight.values()))\n",
            "",
            200,
        ),
        (
            "numbered_anew",
            "a payload that is sent again is taken for the one after it",
            "trainer_side.ranks.payload_sender",
            "            self._in_flight[header.number] = (header, payload)\n",
            "            self._in_flight[header.number] = (header._replace(number=header.number + 1), payload)\n",
            200,
        ),
        (
            "withdrawn_is_written",
            "a slot is written to after its place was withdrawn",
            "stager.tcp",
            "            target.wanted = False\n",
            "            pass\n",
            3000,
        ),
        # -- who is served
        (
            "late_admitted",
            "a start of a job that was replaced takes the place of the one that has replaced it",
            "stager.job_listener",
            "        elif ended_job is not None and hello.generation <= ended_job.generation:\n",
            "        elif False:\n",
            1500,
        ),
        (
            "resumed_at_another",
            "a stager takes a rank that another one has admitted, as if it were new",
            "stager.tcp",
            "        if hello.resuming and not rank.was_admitted:\n",
            "        if False:\n",
            800,
        ),
        (
            "cut_is_lost",
            "a rank whose connection is cut is given up at once",
            "stager.tcp",
            "            if now > rank.disconnected_at + self._reconnect_seconds_max:\n",
            "            if now > rank.disconnected_at:\n",
            200,
        ),
        (
            "old_connection_ends_the_new",
            "the end of a connection for payloads takes the one that has replaced it along",
            "stager.tcp",
            "            if self._ranks[number].payload_socks.get(channel) is sock:\n                del self._ranks[number].payload_socks[channel]\n",
            "            self._reactor.close(self._ranks[number].payload_socks.pop(channel, sock))\n            self._ranks[number].received_numbers = type(self._ranks[number].received_numbers)()\n",
            800,
        ),
        (
            "room_is_awaited_for_ever",
            "a connection is watched for room when all is sent",
            "stager.tcp",
            "            if data is None:\n                break\n",
            "            if data is None:\n                return\n",
            400,
        ),
    )
}
