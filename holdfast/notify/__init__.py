"""`--notify` of `holdfast run` and `holdfast stager`: tells people what happens to a run.

    event ─► alert (pure) ─► notifier: a queue and a thread for each destination ─► webhook, alert_command

alert            which events people are told of, and in which words
webhook          one POST, in the form of the service behind the URL
alert_command    a command of the user
notifier         queues, retries, and few messages of one kind
log_watch        the events of a stager that no `holdfast run` supervises, on their way to a notifier
notify_options   the options, and the destinations that they name
"""
