"""`--notify` of `holdfast run` and `holdfast stager`: sends people messages about a run.

    event ─► alert (pure) ─► notifier: a queue and a thread for each destination ─► webhook

alert            the message for an event, if people need one
webhook          the destinations: the service behind a URL, or a command of the user
notifier         queues, retries, a rate limit for each kind of message; follows the log where no supervisor runs
notify_options   the options, and the destinations that they name
"""
