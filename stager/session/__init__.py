"""Who may send what, and when: pure."""
