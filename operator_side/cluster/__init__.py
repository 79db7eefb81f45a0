"""`holdfast cluster up|status|down`: start all machines of a run or none, find them by tag, end them completely.

file     the outputs of Terraform                ladder   what to ask for when there is no capacity; pure
cloud    the EC2 calls, behind an interface      raising  up, which can be resumed; down, until nothing is left
fleet    the same machines as hosts of `holdfast run`
"""
