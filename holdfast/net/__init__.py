"""The protocol of a TCP connection between a training rank and its stager, without any socket."""
