"""What both ends of a TCP connection between a training rank and its stager must agree on, without any socket."""
