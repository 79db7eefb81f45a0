"""`holdfast cluster up|status|down`: machines of a run on AWS: all or none, found by tag, ended without a rest.

file     what Terraform has made (its outputs)            ladder   what to ask for when there is no capacity; pure
cloud    the few EC2 calls, behind an interface           raising  up, resumable; down, until nothing is left
fleet    the same machines as hosts of `holdfast run`
"""
