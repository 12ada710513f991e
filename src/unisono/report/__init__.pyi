from .render import write_report as write_report
