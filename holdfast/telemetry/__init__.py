"""Events, metrics, spans and the status of a running process.

events, event_files                                 write the event log; its files and their rotation
event_reading, event_follower                       read a whole event log; follow one as it grows
causes, event_text                                  why a step is skipped; sentences about notices and troubles
rows, status_state                                  each checkpoint with its phases; the facts for `holdfast status`
status_document, status_socket                      the answer to `holdfast status`, and the thread that sends it
metrics, metrics_page, metrics_server               metrics for Prometheus
spans, tracing                                      traces for OpenTelemetry
"""
