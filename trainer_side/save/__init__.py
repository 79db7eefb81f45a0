"""From `save()` to a filled staging area."""
