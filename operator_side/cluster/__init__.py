"""`holdfast cluster up|status|down`: starts all machines of a run or none, finds them by tag, ends every one of them.

file     the outputs of Terraform                ladder   what to request if EC2 has no capacity; pure
ec2      the EC2 calls                           raising  up, which can be resumed; down, until nothing is left
fleet    the same machines as hosts of `holdfast run`
"""
