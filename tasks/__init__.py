"""The core of Breadcrumb: one room per concern, imports point one way (see CONTRIBUTING.md)."""

from tasks import own

own.install()
