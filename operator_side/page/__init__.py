"""The parts that the pages of `holdfast report` and `holdfast status --web` share.

    page.html   the frame of a page, and its tiles, tables and charts as Jinja macros
    page.css    light, dark, phone, paper; each colour has one meaning
    page.js     draws each chart that the page describes; a live page fetches itself repeatedly

Pure. Reasons in docs/design/015-tools-read-evidence.md.
"""
