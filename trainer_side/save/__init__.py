"""Save: from `save()` to a filled staging area."""
