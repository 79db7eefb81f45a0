"""The user's tools: `holdfast run`, `cluster`, `drill`, `doctor`, `report`, `status` and others.

commands/      one file for each command
supervise/     `holdfast run` and `holdfast rank`: restart a job after a preemption, stop it after a bug
cluster/       `holdfast cluster`: machines on AWS
script_lines   `holdfast init`: the lines for a script, and the lines that start it
drill/         `holdfast drill`: kills a script and checks how it resumes
doctor/        `holdfast doctor`: checks a machine before a run
report/        `holdfast report`: a page about a run
status/        `holdfast status`: a run while it is running
live/          `holdfast status --web`: its page
page/          the parts that both pages share
simulate/      `holdfast simulate` and `holdfast tune`
"""
