"""The training rank's side of the connection to the stager.

The training thread queues commands; the link's own thread sends frames, handles messages and watches deadlines.

to_stager, no_stager             the interface for the rest of a rank; its implementation in a job without a stager
link                             the link and its thread
stager_group, ring_group         several stagers as one; their rings as one
share_transfer, held_shares      one checkpoint, split into shares for several stagers; shares whose stager is lost
last_transfers                   waits for the last checkpoints when a rank leaves
job_state                        this rank's number, the attempt, and why the stager is lost, if it is
outbox, outgoing                 all checkpoints in flight to the stager; one of them: credits in, frames out
inbox, stager_message            handles each message of one stager; messages that need no answer
open_requests                    pending requests: the agreement on a layout, bytes in the ring
greeting, rejoining              HELLO and WELCOME; reconnects after the stager is lost
poll_backoff                     how long the thread pauses between two polls
"""
