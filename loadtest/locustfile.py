"""Locust users that stream responses from a server; README.md in this folder explains the usage.

locust -f loadtest/locustfile.py --headless -u 32 -t 60s --csv out --html out.html
"""

from locust import events
from paged_loadtest.locust_roles import install
from paged_loadtest.locust_users import GrpcUser, HttpUser, OpenAIUser

__all__ = ["GrpcUser", "HttpUser", "OpenAIUser"]

install(events)
