"""One real job for each store: killed, resumed, and compared bit for bit with an uninterrupted run."""
