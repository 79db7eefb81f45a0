"""The parts of which `holdfast report` and `holdfast status --web` make their pages.

    page.html   the frame of a page, and its tiles, tables and charts as Jinja macros
    page.css    light, dark, phone, paper; a colour has one meaning
    page.js     draws each chart that the page describes; a live page fetches itself again
    chart.py    what a chart shows; words.py: times, shares, money
    vendor/     Chart.js, as its authors publish it
         └──────► page.py: one file, under a policy that allows no other script, style or host

Pure. Reasons in docs/design/015-tools-read-evidence.md.
"""
