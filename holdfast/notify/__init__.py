"""`--notify` of `holdfast run` and `holdfast stager`: sends people messages about a run.

    event ─► alert (pure) ─► notifier: a queue and a thread for each destination ─► webhook, alert_command

alert            the message for an event, if people need one
webhook          sends a POST in the format of the service behind the URL
alert_command    runs a command of the user
notifier         queues, retries, and a rate limit for each kind of message
log_watch        passes the events of a stager without `holdfast run` to a notifier
notify_options   the options, and the destinations that they name
"""
